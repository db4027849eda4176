"""A trainer's parallel layout, and where a global rank stands in it (Megatron-Core's default order tp-cp-ep-dp-pp)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dppo.model.errors import LayoutError
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
    """Sizes of the parallel dimensions; ``data`` counts the replicas of the attention part.

    Raises LayoutError where a size is not positive, experts don't divide a stage's ranks, or model chunks
    (``virtual_pipeline``) come without a pipeline.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert", "expert_tensor", "data", "context", "chunks"):
            if getattr(self, name) < 1:
                raise LayoutError(f"layout: {name} is {getattr(self, name)}, expected at least 1")
        if self.virtual_pipeline is not None and self.virtual_pipeline > 1 and self.pipeline == 1:
            raise LayoutError(
                f"layout: virtual_pipeline {self.virtual_pipeline} needs pipeline > 1"
            )
        if self.stage_ranks % (self.expert * self.expert_tensor):
            raise LayoutError(
                f"layout: a pipeline stage has {self.stage_ranks} ranks (tensor {self.tensor} x context {self.context}"
                f" x data {self.data}), not divisible by expert {self.expert} x expert_tensor {self.expert_tensor}"
            )

    @classmethod
    def smallest(
        cls,
        tensor: int = 1,
        pipeline: int = 1,
        virtual_pipeline: int | None = None,
        expert: int = 1,
        expert_tensor: int = 1,
    ) -> Layout:
        """The layout of fewest ranks: as much data parallelism as the experts need and no more."""
        for name, size in (
            ("tensor", tensor),
            ("expert", expert),
            ("expert_tensor", expert_tensor),
        ):
            if size < 1:
                raise LayoutError(f"layout: {name} is {size}, expected at least 1")
        data = math.lcm(tensor, expert * expert_tensor) // tensor
        return cls(tensor, pipeline, virtual_pipeline, expert, expert_tensor, data)

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


def check_layout(shape: ModelShape, layout: Layout) -> None:
    """Raise LayoutError where ``layout`` cannot hold ``shape``; all reasons in one message."""
    groups, tensor = shape.num_query_groups, layout.tensor
    checks = [
        (shape.num_layers % (layout.pipeline * layout.chunks) == 0,
         f"{shape.num_layers} layers into pipeline {layout.pipeline} x {layout.chunks} model chunks"),
        (shape.num_attention_heads % tensor == 0, f"{shape.num_attention_heads} attention heads into tensor {tensor}"),
        (groups % tensor == 0 or tensor % groups == 0, f"{groups} query groups into tensor {tensor}"),
    ]  # fmt: skip
    if shape.is_moe:
        checks += [
            (shape.num_experts % layout.expert == 0, f"{shape.num_experts} experts into expert {layout.expert}"),
            (shape.moe_ffn_hidden_size % layout.expert_tensor == 0,
             f"expert width {shape.moe_ffn_hidden_size} into expert_tensor {layout.expert_tensor}"),
        ]  # fmt: skip
    else:
        checks += [
            (
                shape.ffn_hidden_size % tensor == 0,
                f"MLP width {shape.ffn_hidden_size} into tensor {tensor}",
            ),
            (layout.expert == 1, f"a dense model into expert {layout.expert}"),
        ]
    wrong = [text for divides, text in checks if not divides]
    if wrong:
        raise LayoutError(f"the layout does not divide the model: {'; '.join(wrong)}")


def local_layers(shape: ModelShape, layout: Layout, pp_rank: int, chunk: int) -> range:
    """Global numbers of the layers in model chunk ``chunk`` of a stage: chunk-major, then stage, then contiguous."""
    each = shape.num_layers // (layout.pipeline * layout.chunks)
    first = (chunk * layout.pipeline + pp_rank) * each
    return range(first, first + each)
