"""What SGLang asks of a platform, answered for PyTorch on a CPU."""

from __future__ import annotations

import sys
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from megatron_dppo.engine.sglang_cpu import batch_invariant
from megatron_dppo.engine.sglang_cpu.adapters import PREPARED, use_pageable_memory
from megatron_dppo.engine.sglang_cpu.received_buckets import ReceivedBuckets
from megatron_dppo.engine.sglang_cpu.seeded_sampling import FilteredSampling, multinomial_with_seed
from megatron_dppo.engine.tiled_hash import tiled_hash

ATTENTION = "torch_native"
SCHEDULER = "sglang.srt.managers.scheduler"
PAUSED_STEP = f"{SCHEDULER}.Scheduler._record_scheduler_state_for_paused_engine"


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Native PyTorch kernels only: no Triton, no graph capture, no pynccl."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Deterministic inference with the attention below too: it takes one sequence at a time."""
        from sglang.srt.arg_groups.choices import (
            DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            add_deterministic_attention_backend_choices,
        )

        if ATTENTION not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
            add_deterministic_attention_backend_choices([ATTENTION])

    def get_default_attention_backend(self) -> str:
        """PyTorch's scaled dot product attention."""
        return ATTENTION

    def get_dispatch_key_name(self) -> str:
        """SGLang's layers run their ``forward_native``."""
        return "native"

    def empty_cache(self) -> None:
        """Nothing: the base class collects garbage, 0.4 s at every flush and resume."""

    def init_backend(self) -> None:
        """Host-side caches (for the capture of routed experts) in plain memory; weight checksums by the
        GPU's hash, because a CPU's SHA-256 takes several times as long and can't be put together from
        parts; weights received into memory that is kept; a paused scheduler that sleeps, which else
        spins and takes a core from whoever updates its weights. What deterministic inference needs, in
        place of SGLang's Triton kernels and of sgl_kernel.
        """
        from sglang.srt import batch_invariant_ops
        from sglang.srt.layers import sampler
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
        from sglang.srt.utils import weight_checker
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory
        weight_checker._hash_tensor = tiled_hash
        FlattenedTensorBucket.empty = ReceivedBuckets(FlattenedTensorBucket.empty)
        batch_invariant_ops.enable_batch_invariant_mode = batch_invariant.enable
        sampler.multinomial_with_seed = multinomial_with_seed
        sampler.top_k_top_p_min_p_sampling_from_probs_torch = FilteredSampling(
            sampler.top_k_top_p_min_p_sampling_from_probs_torch
        )
        HookRegistry.register(PAUSED_STEP, sleep_when_paused, HookType.AFTER)
        HookRegistry.register(PREPARED, use_pageable_memory, HookType.BEFORE)
        if (
            SCHEDULER in sys.modules
        ):  # this is the scheduler's process, whose hooks are applied already
            HookRegistry.apply_hooks()


def _plain_memory(dims: Any, dtype: torch.dtype, device: Any, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device=device)


def sleep_when_paused(result: Any, scheduler: Any) -> None:
    """After a step of a paused scheduler's loop, do what an idle one does: wait for a request."""
    scheduler.maybe_sleep_on_idle()
