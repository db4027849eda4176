"""Megatron-Core's optimizer and schedule; a step in two parts: gradient norm, then update."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_dppo.config.schema import OptimizerConfig


def build_optimizer(
    config: OptimizerConfig,
    chunks: list[DistributedDataParallel],
    dtype: torch.dtype,
    options: Mapping[str, Any],
    *,
    distributed: bool,
) -> tuple[ChainedOptimizer, OptimizerParamScheduler]:
    """Build Adam with decoupled weight decay (none on norms and biases) and its schedule.

    The learning rate of step n = 1, 2, ... is ``lr * n / W`` in a warm-up of W steps, then ``min_lr + c (lr - min_lr)``
    with c = 1 (constant), 1 - x (linear) or (1 + cos(pi x)) / 2 (cosine), x = (n - W) / (decay_steps - W) up to 1. It
    depends on n alone, so a resumed run goes on in it. ``options``: further fields of Megatron-Core's OptimizerConfig.
    """
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
            **options,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.decay_steps or sys.maxsize,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


@torch.no_grad()
def prepare_step(optimizer: ChainedOptimizer) -> float:
    """Copy the reduced gradients to the optimizer; returns the global L2 norm. Collective."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def apply_step(
    optimizer: ChainedOptimizer, scheduler: OptimizerParamScheduler, grad_norm: float
) -> float:
    """Clip the gradients, whose norm is ``grad_norm``, and update; returns the learning rate."""
    scheduler.step(increment=1)
    for part in optimizer.chained_optimizers:
        parameters = [] if part.is_stub_optimizer else part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm, decoupled)
    optimizer.step_with_ready_grads()
    return float(optimizer.param_groups[0]["lr"])


def complete_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather the weights that other replicas updated, where ``overlap_param_gather`` has put it off until a forward
    pass asks for them. Collective."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
