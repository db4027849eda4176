"""Build the Megatron-Core optimizer of this rank's model chunks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
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
    """Build Adam, with decoupled weight decay (none on norms and biases), and the schedule of its learning rate.

    The schedule begins with a warm-up of W = ``warmup_steps`` steps. In the warm-up the rate of step n = 1, 2, ... is
    lr n / W. After it the rate is min_lr + c (lr - min_lr), with c = 1 (constant), 1 - x (linear) or
    (1 + cos(pi x)) / 2 (cosine). x = (n - W) / (decay_steps - W) grows from 0 to 1, and then stays 1. The rate depends
    only on n, so a resumed run continues the schedule.

    Args:
        config: learning rates, schedule, betas, weight decay and clipping.
        chunks: this rank's model chunks in Megatron's DDP wrappers.
        dtype: dtype of the parameters.
        options: further fields of Megatron-Core's OptimizerConfig.
        distributed: whether to use the distributed optimizer.
    """
    # Keep a whole fp32 master of each weight, because checkpoints hold whole masters. Megatron-Core's default keeps
    # only the difference of the master from the bf16 weight.
    defaults: dict[str, Any] = {"store_param_remainders": False}
    if options.get("optimizer_cpu_offload"):
        # Megatron-Core's default offloads nothing.
        defaults["optimizer_offload_fraction"] = 1.0
    # An offloaded optimizer accepts only leaf tensors. Megatron-Core gives it slices of fp32 parameters. A slice is a
    # leaf tensor only if it is made with autograd turned off.
    with torch.no_grad(), _one_copy_of_parameters(distributed=distributed):
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
                **(defaults | dict(options)),
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
        # Megatron-Core requires a number of decay steps, also for a constant rate.
        lr_decay_steps=config.decay_steps or sys.maxsize,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


class _ParameterGroups(HybridDeviceOptimizer):
    """An offloaded optimizer that holds its groups and defaults, but copies no parameters to the host."""

    def _init_sub_optimizers(self) -> None:
        """Make no optimizer of a group."""

    def _register_load_state_dict_hooks(self) -> None:
        """Register no hooks: no state is loaded."""


@contextmanager
def _one_copy_of_parameters(*, distributed: bool) -> Iterator[None]:
    """Within the block, have Megatron-Core copy only the parameters to the host that this rank's optimizer steps.

    Megatron-Core makes an offloaded optimizer of all parameters of the rank. The distributed optimizer reads the
    groups and defaults of this optimizer, and replaces it by an optimizer of the rank's share of the parameters.
    Without this block, the host would hold copies of all parameters of every rank at the start.
    """
    original = megatron_optimizer.HybridDeviceOptimizer
    if distributed:
        megatron_optimizer.HybridDeviceOptimizer = _ParameterGroups
    try:
        yield
    finally:
        megatron_optimizer.HybridDeviceOptimizer = original
