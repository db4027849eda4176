"""SGLang's platform interface for PyTorch on a CPU."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry

from megatron_dppo.cpu.engine import (
    attention_replicas,
    block_fp8_layers,
    forks,
    local_experts,
    matrix_products,
    pageable_memory,
    sampling,
    shared_expert,
    speculation,
)
from megatron_dppo.cpu.engine.replacements import ATTENTION, replace
from megatron_dppo.engine.server import hooks
from megatron_dppo.model.families import FAMILIES
from megatron_dppo.system.imports import import_target
from megatron_dppo.tensor_hash import tiled_hash

SCHEDULER = "sglang.srt.managers.scheduler"
TERMINATED = "sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler"
LOADING = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
_ATTENTION_WITH_SINKS = "intel_amx"
PAUSED_STEP = f"{SCHEDULER}.Scheduler._record_scheduler_state_for_paused_engine"


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Native PyTorch kernels only: no Triton, no graph capture, no pynccl."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Admit deterministic inference with PyTorch's attention, and have SGLang fork its processes."""
        from sglang.srt.arg_groups.choices import (
            DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            add_deterministic_attention_backend_choices,
        )

        # The attention kernel computes one sequence at a time, so that no row depends on another row.
        if ATTENTION not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
            add_deterministic_attention_backend_choices([ATTENTION])
        _admit_attention_with_sinks()
        forks.fork_processes()

    def get_default_attention_backend(self) -> str:
        return ATTENTION

    def get_dispatch_key_name(self) -> str:
        return "native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == speculation.NGRAM

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        """Return None, so that SGLang uses its own worker, and replace the CUDA kernels of n-gram speculation.

        SGLang calls this method before it makes its memory pools.
        """
        if algorithm == speculation.NGRAM:
            speculation.use_pytorch(replace)
        return None

    def get_speculative_cache_locs_fn(self) -> Any:
        return speculation.cache_locations

    def empty_cache(self) -> None:
        """Do nothing: the base class would collect garbage, which takes 0.4 s at every flush and resume."""

    def init_backend(self) -> None:
        """Replace functions of SGLang that need a device or sgl_kernel, or are slow on a CPU."""
        from sglang.kernels.ops.elementwise import elementwise
        from sglang.srt import batch_invariant_ops
        from sglang.srt.layers import sampler
        from sglang.srt.layers.moe import fused_moe_native
        from sglang.srt.layers.quantization import fp8, fp8_utils
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
        from sglang.srt.utils import weight_checker

        # The capture of routed experts requests page-locked memory, but this needs a device.
        ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory
        # SGLang's hash on a CPU, SHA-256, takes ten times as long, and cannot be summed from parts.
        replace(weight_checker, "_hash_tensor", tiled_hash)
        replace(batch_invariant_ops, "enable_batch_invariant_mode", matrix_products.enable)
        replace(elementwise, "fused_gate_sigmoid_mul_add", shared_expert.add_gated_shared_expert)
        experts = local_experts.LocalExperts(fused_moe_native.moe_forward_native)
        replace(fused_moe_native, "moe_forward_native", experts)
        replace(sampler, "multinomial_with_seed", sampling.multinomial_with_seed)
        filtered_sampling = sampling.FilteredSampling(
            sampler.top_k_top_p_min_p_sampling_from_probs_torch
        )
        replace(sampler, "top_k_top_p_min_p_sampling_from_probs_torch", filtered_sampling)
        replace(fp8_utils, "dispatch_w8a8_block_fp8_linear", block_fp8_layers.dispatch_linear)
        fp8.Fp8MoEMethod.apply = block_fp8_layers.apply_experts
        attention_replicas.use_plain_code()
        # Without this hook a paused scheduler polls in a busy loop, and takes a core from the process that updates its
        # weights.
        hooks.register(PAUSED_STEP, sleep_when_paused, "after")
        hooks.register(pageable_memory.PREPARED, pageable_memory.use_pageable_memory, "before")
        hooks.register(attention_replicas.SLEEPING, attention_replicas.sleep_briefly, "around")
        hooks.register(LOADING, prepare_models, "before")
        hooks.register(TERMINATED, end_when_drained, "after")
        # In the scheduler's process SGLang applied hooks before it initialised this platform. Apply the new hooks too.
        if SCHEDULER in sys.modules:
            HookRegistry.apply_hooks()


def _admit_attention_with_sinks() -> None:
    """Make SGLang accept PyTorch's attention for models with sinks.

    SGLang's check of such a server has a list of backends with sinks. PyTorch's attention is not in the list, so the
    check gets the name of a listed backend instead.
    """
    from sglang.srt.arg_groups import model_hook, overrides

    def backends(arguments: Any) -> tuple[str, ...]:
        names = overrides.attention_backends_of(arguments)
        return tuple(_ATTENTION_WITH_SINKS if name == ATTENTION else name for name in names)

    model_hook.attention_backends_of = backends


def _plain_memory(dims: Any, dtype: torch.dtype, device: Any, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device=device)


def prepare_models(runner: Any, *args: Any, **kwargs: Any) -> None:
    """Have the family of ``runner``'s model replace functions that need a device, before the model is loaded."""
    architectures = runner.model_config.hf_config.architectures or []
    for family in FAMILIES.values():
        if family.cpu_engine and family.architecture in architectures:
            import_target(family.cpu_engine)()


def sleep_when_paused(result: Any, scheduler: Any) -> None:
    """Wait for a request after a step of a paused scheduler's loop, like an idle scheduler."""
    scheduler.maybe_sleep_on_idle()


def end_when_drained(result: Any, handler: Any, *_: Any) -> None:
    """At SIGTERM, end at once if no request is left. SGLang itself looks for the signal only every five seconds.

    While requests are left, SGLang's watchdog counts them every five seconds.
    """
    from sglang.srt.managers.tokenizer_manager import print_exception_wrapper

    manager = handler.tokenizer_manager
    if not any(task.get_name() == TERMINATED for task in manager.asyncio_tasks):
        draining = print_exception_wrapper(manager.sigterm_watchdog)
        task = asyncio.get_running_loop().create_task(draining, name=TERMINATED)
        manager.asyncio_tasks.add(task)
