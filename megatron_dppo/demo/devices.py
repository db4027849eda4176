"""What of the demo's recipe changes on GPUs: Transformer Engine and SGLang's CUDA server work in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_dppo.metrics import names
from megatron_dppo.metrics.normal_ranges import BY_METRIC, Dtype

GAP_BOUNDS: Mapping[Dtype, float] = {
    "float32": BY_METRIC[names.GAP_ON_POLICY].upper("float32"),
    "bfloat16": BY_METRIC[names.GAP_ON_POLICY].upper("bfloat16"),
}
"""Of mean |pi - mu| at equal weights."""
EXPORT_BOUNDS: Mapping[Dtype, float] = {"float32": 1e-4, "bfloat16": 1.0}
"""Nats, of the largest difference of one token's log-probability; bfloat16's is a guess until it is measured."""
_ONE_RANK = ("parallel.world_size=1", "parallel.expert=1")
_SHARED = ("sglang.base_gpu_id=0", "sglang.mem_fraction_static=0.3", "weight_sync.strategy=tensor")


def trainer_overrides(gpus: int) -> tuple[str, ...]:
    """For the warm start and the run: the recipe's two ranks where there are three GPUs or none. Not yet run on one."""
    if not gpus:
        return ()
    return ("model.dtype=bfloat16", *(() if gpus > 2 else _ONE_RANK))


def engine_overrides(gpus: int) -> tuple[str, ...]:
    """For the run: the server shares the only GPU, with weights by CUDA IPC, as NCCL takes a GPU once. Its Triton
    attention takes heads of 32."""
    if not gpus:
        return ()
    return ("sglang.attention_backend=triton", *(_SHARED if gpus == 1 else ()))
