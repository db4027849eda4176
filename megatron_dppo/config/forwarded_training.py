"""The ``megatron_ddp:`` and ``megatron_optimizer:`` tables: which of their keys other sections set, or
nothing may.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dppo.config.forwarded import ForwardedTable
from megatron_dppo.config.schema import PolicyConfig

_SUMS = "gradients are plain sums: the loss was divided by a global count"
_FSDP = "weights are gathered from whole parameters of their ranks"
_LATE = "weights are read between steps, before the forward pass that would gather them"

DDP = ForwardedTable(
    "megatron_ddp",
    {"use_distributed_optimizer": "optimizer.distributed"},
    {
        "average_in_collective": _SUMS,
        "align_param_gather": _LATE,
        "fp8_param_gather": _LATE,
        "reuse_grad_buf_for_mxfp8_param_ag": _LATE,
        "num_distributed_optimizer_instances": "checkpoints know one instance",
        **dict.fromkeys(
            (
                "use_megatron_fsdp",
                "use_custom_fsdp",
                "data_parallel_sharding_strategy",
                "outer_dp_sharding_strategy",
                "suggested_communication_unit_size",
                "preserve_fp32_weights",
                "keep_fp8_transpose_cache",
                "fsdp_double_buffer",
                "fsdp_manual_registration",
            ),
            _FSDP,
        ),
    },
)
"""Fields of megatron.core's DistributedDataParallelConfig."""

_OTHER = "the optimizer is Adam"
_SCALE = "bfloat16 needs no loss scale"
_LOW = (
    "Adam's state is fp32 in checkpoints; a scaled moment of TransformerEngine's FusedAdam is rounded anew when it "
    "is restored (docs/checkpoints.md)"
)
_OFFLOADED = (
    "checkpoints restore Adam's state where it lies; HybridDeviceOptimizer steps on copies of its own "
    "(docs/checkpoints.md)"
)
OPTIMIZER = ForwardedTable(
    "megatron_optimizer",
    {
        "lr": "optimizer.lr",
        "min_lr": "optimizer.min_lr",
        "weight_decay": "optimizer.weight_decay",
        "adam_beta1": "optimizer.beta1",
        "adam_beta2": "optimizer.beta2",
        "adam_eps": "optimizer.eps",
        "clip_grad": "optimizer.clip_grad",
        "use_distributed_optimizer": "optimizer.distributed",
        "overlap_param_gather": "megatron_ddp.overlap_param_gather",
        "bf16": "model.dtype",
        "fp16": "model.dtype",
        "params_dtype": "model.dtype",
    },
    {
        "optimizer": _OTHER,
        "decoupled_weight_decay": "weight decay is decoupled",
        **dict.fromkeys(("decoupled_lr", "decoupled_min_lr"), "all weights have one rate"),
        **dict.fromkeys(
            (
                "loss_scale",
                "initial_loss_scale",
                "min_loss_scale",
                "loss_scale_window",
                "hysteresis",
            ),
            _SCALE,
        ),
        **dict.fromkeys(
            (
                "sgd_momentum",
                "muon_momentum",
                "muon_split_qkv",
                "muon_use_nesterov",
                "muon_scale_mode",
                "muon_fp32_matmul_prec",
                "muon_num_ns_steps",
                "muon_tp_mode",
                "muon_extra_scale_factor",
            ),
            _OTHER,
        ),
        **dict.fromkeys(
            (
                "overlap_param_gather_with_optimizer_step",
                "reuse_grad_buf_for_mxfp8_param_ag",
            ),
            _LATE,
        ),
        **dict.fromkeys(
            (
                "use_precision_aware_optimizer",
                "store_param_remainders",
                "main_grads_dtype",
                "main_params_dtype",
                "exp_avg_dtype",
                "exp_avg_sq_dtype",
            ),
            _LOW,
        ),
        **dict.fromkeys(
            (
                "optimizer_cpu_offload",
                "optimizer_offload_fraction",
                "use_torch_optimizer_for_cpu_offload",
                "overlap_cpu_optimizer_d2h_h2d",
                "pin_cpu_grads",
                "pin_cpu_params",
            ),
            _OFFLOADED,
        ),
        "timers": "a Python function, which YAML can't hold",
    },
)
"""Fields of megatron.core's OptimizerConfig."""


def training_problems(config: PolicyConfig) -> Iterator[str]:
    """What is wrong with both tables, as far as our own sections tell."""
    yield from DDP.problems(config.megatron_ddp)
    if config.megatron_ddp.get("overlap_param_gather") and not config.distributed_optimizer:
        yield (
            "megatron_ddp.overlap_param_gather: got true, expected optimizer.distributed: true with it: without "
            "it every replica has all weights, and nothing is gathered"
        )
    yield from OPTIMIZER.problems(config.megatron_optimizer)
