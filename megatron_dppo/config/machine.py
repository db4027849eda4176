"""A machine's resources, and the environment variables that its ranks need."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_dppo.config.errors import given
from megatron_dppo.config.forwarded import SGLANG, OptionFact, is_blockwise
from megatron_dppo.config.schema import EngineConfig
from megatron_dppo.system.gpus import has_hopper, has_visible_gpu, visible_gpus

Device = Literal["cpu", "cuda"]
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def engine_device(engine: EngineConfig) -> Device:
    """Return ``engine.device``. If it is not set, return cuda if this process sees a GPU of the NVIDIA driver."""
    if engine.device is not None:
        return engine.device
    return "cuda" if has_visible_gpu() else "cpu"


def allocator_faults(strategy: str | None, environment: Mapping[str, str]) -> Iterator[str]:
    """Report expandable segments if ``weight_sync.strategy`` is tensor: CUDA IPC can't share them with SGLang."""
    variable = expandable_segments(environment)
    if variable is not None and strategy == "tensor":
        yield (
            f"{variable}: got {environment[variable]!r} with weight_sync.strategy tensor, expected no "
            "expandable_segments: an engine can't open such memory by a CUDA IPC handle"
        )


def set_allocator(strategy: str | None, environment: MutableMapping[str, str]) -> None:
    """Make a trainer rank's torch allocate expandable segments, unless the user has set one of ``ALLOCATOR_VARIABLES``
    or the weight strategy excludes expandable segments.

    Call it before torch is imported. ``strategy`` is ``weight_sync.strategy``, None without engines. The planner's
    estimate of unusable memory assumes expandable segments.
    """
    if strategy != "tensor" and not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def set_precision(megatron: Mapping[str, Any], environment: MutableMapping[str, str]) -> None:
    """Set environment variables that the ``megatron:`` table needs. Variables that the user has set keep their values.

    Call it before torch is imported. On Hopper, block FP8 gets fp32 scales, because the engine's block FP8 has fp32
    scales; Transformer Engine's default is powers of two. ``deterministic_mode`` needs Transformer Engine's
    deterministic attention. The variables were not yet tested on a GPU.
    """
    if is_blockwise(megatron) and has_hopper():
        environment.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    if megatron.get("deterministic_mode"):
        environment.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def expandable_segments(environment: Mapping[str, str]) -> str | None:
    """Return the name of the variable that makes torch allocate expandable segments; None without such a variable."""
    for name in ALLOCATOR_VARIABLES:
        settings = environment.get(name, "").lower().replace(" ", "").split(",")
        if "expandable_segments:true" in settings:
            return name
    return None


@dataclass(frozen=True)
class Machine:
    """Resources of a machine for a run. ``open_files``: limit of one process; ``memory_bytes``: memory of the host."""

    cores: int
    gpus: int
    memory_bytes: int
    open_files: int


def this_machine() -> Machine:
    """Return the resources of the machine that this process runs on, as far as the process may use them."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        gpus=visible_gpus(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def has_server_sizes(sglang: Mapping[str, Any]) -> bool:
    """Whether every size of a server in the ``sglang:`` table is a number, or left to SGLang."""
    return not any(server_size_faults(sglang))


def server_size_faults(sglang: Mapping[str, Any]) -> Iterator[str]:
    """Report sizes of a server in the ``sglang:`` table that are no numbers. A missing size is left to SGLang."""
    for key in SGLANG.options_with(OptionFact.NUMBER):
        size = sglang.get(key)
        is_share = key == "mem_fraction_static"
        has_fraction = isinstance(size, float)
        is_number = isinstance(size, int | float) and math.isfinite(size)
        if has_fraction and not is_share:
            is_number = False
        if size is not None and (isinstance(size, bool) or not is_number):
            kind = "a number" if is_share else "a whole number"
            yield f"sglang.{key}: got {given(size)}, expected {kind}"
