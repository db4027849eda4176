"""The layout of a rehearsal: the recipe's layout with fewer layers, or a layout of the same kind on fewer ranks."""

from __future__ import annotations

from dataclasses import asdict, replace

from megatron_dppo.config.schema import ParallelConfig
from megatron_dppo.model.layout import LayoutSizes, size_faults


def small_stages(parallel: ParallelConfig) -> dict[str, int | None]:
    """Return the tiny model's layers in the first and the last stage, by the key of ``parallel``.

    If the recipe sets a number for a stage, the stage has one layer in each model chunk.
    """
    layers_by_key = {
        "first_stage_layers": parallel.first_stage_layers,
        "last_stage_layers": parallel.last_stage_layers,
    }
    for key, layers in layers_by_key.items():
        if layers is not None:
            layers_by_key[key] = parallel.virtual_pipeline or 1
    return layers_by_key


def smaller_layout(parallel: ParallelConfig, ranks: int) -> ParallelConfig:
    """Shrink the layout to at most ``ranks`` ranks: first its replicas, then context, tensor and pipeline parallelism.

    The expert-parallel size shrinks until it fits the remaining ranks.
    """
    sizes = parallel.sizes
    while sizes.world_size > ranks:
        sizes = _with_fewer_ranks(sizes)
    return parallel.model_copy(update=asdict(sizes))


def _with_fewer_ranks(sizes: LayoutSizes) -> LayoutSizes:
    """Return a valid layout with fewer ranks.

    The first of the data, context, tensor and pipeline sizes that is above 1 is divided by its smallest prime factor.
    """
    for name in ("data", "context", "tensor", "pipeline"):
        size = getattr(sizes, name)
        if size == 1:
            continue
        factor = _smallest_factor(size)
        smaller = replace(sizes, world_size=sizes.world_size // factor)
        # ``data`` is no field: it follows from ``world_size``.
        if name != "data":
            smaller = replace(smaller, **{name: size // factor})
        if smaller.pipeline == 1:
            smaller = replace(
                smaller, virtual_pipeline=None, first_stage_layers=None, last_stage_layers=None
            )
        if smaller.tensor == 1:
            smaller = replace(smaller, sequence=None)
        return _with_fitting_experts(smaller)
    return sizes


def _with_fitting_experts(sizes: LayoutSizes) -> LayoutSizes:
    """Shrink the expert-parallel size until the layout is valid."""
    while size_faults(sizes) and sizes.expert > 1:
        sizes = replace(sizes, expert=sizes.expert // _smallest_factor(sizes.expert))
    if sizes.expert == 1:
        # Megatron-Core cuts experts like the dense layers if there is no expert parallelism.
        sizes = replace(sizes, expert_tensor=None)
    return sizes


def _smallest_factor(size: int) -> int:
    factor = 2
    while size % factor:
        factor += 1
    return factor
