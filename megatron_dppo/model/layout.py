"""A trainer's parallel layout, and where a global rank stands in it (Megatron-Core's default order tp-cp-ep-dp-pp)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.layout_checks import LayoutSizes, raise_problems, size_problems
from megatron_dppo.model.shape import ModelShape


@dataclass(frozen=True)
class RankCoordinates:
    """A global rank's position. Attention sees (tp, cp, dp, pp); experts see (etp, ep, edp, pp)."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions that fit each other; ``data`` counts the replicas of the attention part.

    Raises LayoutError where they don't fit. Whether they fit a model is ``layout_checks``' to say.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "context"):
            if getattr(self, name) < 1:
                raise LayoutError(f"layout.{name}: got {getattr(self, name)}, expected at least 1")
        raise_problems(size_problems(self.sizes))

    @classmethod
    def of(cls, sizes: LayoutSizes) -> Layout:
        """The layout of a world of ``sizes``. Raises LayoutError, with all problems, where they don't fit."""
        raise_problems(size_problems(sizes))
        return cls(
            sizes.tensor,
            sizes.pipeline,
            sizes.virtual_pipeline,
            sizes.expert,
            sizes.expert_tensor_size,
            sizes.data,
        )

    @classmethod
    def smallest(
        cls,
        tensor: int = 1,
        pipeline: int = 1,
        virtual_pipeline: int | None = None,
        expert: int = 1,
        expert_tensor: int | None = None,
    ) -> Layout:
        """The layout of fewest ranks: as much data parallelism as the experts need and no more."""
        sizes = LayoutSizes(0, tensor, pipeline, virtual_pipeline, expert, expert_tensor)
        inner = expert * sizes.expert_tensor_size
        data = math.lcm(tensor, inner) // tensor if min(tensor, inner) > 0 else 1
        return cls(tensor, pipeline, virtual_pipeline, expert, sizes.expert_tensor_size, data)

    @property
    def sizes(self) -> LayoutSizes:
        """The same, as its checks take it."""
        return LayoutSizes(
            self.world_size,
            self.tensor,
            self.pipeline,
            self.virtual_pipeline,
            self.expert,
            self.expert_tensor,
        )

    @property
    def chunks(self) -> int:
        """Model chunks on each pipeline stage."""
        return 1 if self.virtual_pipeline is None else self.virtual_pipeline

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.stage_ranks * self.pipeline

    @property
    def expert_data(self) -> int:
        """Replicas of the expert part."""
        return self.stage_ranks // (self.expert * self.expert_tensor)

    def coordinates(self, rank: int) -> RankCoordinates:
        """Where global ``rank`` stands; raises LayoutError outside the world."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside a world of {self.world_size}")
        pp, inside = divmod(rank, self.stage_ranks)
        rest, tp = divmod(inside, self.tensor)
        dp, cp = divmod(rest, self.context)
        rest, etp = divmod(inside, self.expert_tensor)
        edp, ep = divmod(rest, self.expert)
        return RankCoordinates(rank, tp, cp, dp, pp, etp, ep, edp)

    def describe(self) -> str:
        """Short text: the sizes that are not 1, or "single"."""
        sizes = {
            "TP": self.tensor, "CP": self.context, "PP": self.pipeline, "VPP": self.chunks, "EP": self.expert,
            "ETP": self.expert_tensor, "DP": self.data,
        }  # fmt: skip
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "single"


def local_layers(shape: ModelShape, layout: Layout, pp_rank: int, chunk: int) -> range:
    """Global numbers of the layers in model chunk ``chunk`` of a stage: chunk-major, then stage, then contiguous."""
    each = shape.num_layers // (layout.pipeline * layout.chunks)
    first = (chunk * layout.pipeline + pp_rank) * each
    return range(first, first + each)
