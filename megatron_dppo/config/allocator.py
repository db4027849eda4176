"""What the environment has torch's allocator of GPU memory do, as far as a run depends on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

from megatron_dppo.config.schema import PolicyConfig, TrainConfig

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_problems(config: TrainConfig, environment: Mapping[str, str]) -> Iterator[str]:
    """Expandable segments, which CUDA IPC does not hand to SGLang, with ``weight_sync.strategy`` tensor."""
    found = expandable_segments(environment)
    if found is not None and config.weight_sync.strategy == "tensor":
        yield (
            f"{found}: got {environment[found]!r} with weight_sync.strategy tensor, expected no "
            "expandable_segments: an engine can't open such memory by a CUDA IPC handle"
        )


def set_allocator(config: PolicyConfig, environment: MutableMapping[str, str]) -> None:
    """Have a trainer rank's torch allocate expandable segments, where nobody chose and no engine opens its memory.

    The planner's share of memory that can't be used is one with them. Before torch is imported.
    """
    shared = isinstance(config, TrainConfig) and config.weight_sync.strategy == "tensor"
    if not shared and not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def expandable_segments(environment: Mapping[str, str]) -> str | None:
    """The variable that has torch allocate expandable segments; None where none does."""
    for name in ALLOCATOR_VARIABLES:
        words = environment.get(name, "").lower().replace(" ", "").split(",")
        if "expandable_segments:true" in words:
            return name
    return None
