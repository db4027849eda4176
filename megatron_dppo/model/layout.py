"""Parallel layouts of trainer and engine, where a global rank stands in one (Megatron-Core's default order
tp-cp-ep-dp-pp), and their one validator: what Megatron-Core 0.16 can hold and train, and what SGLang can hold.

The trainer's checks yield faults and none raises, so that all that is wrong is told at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.shape import ModelShape


@dataclass(frozen=True)
class LayoutSizes:
    """Sizes as they are asked for, which need not fit each other or any model.

    ``virtual_pipeline``: model chunks in each pipeline stage. ``expert_tensor`` None: as ``tensor`` where
    ``expert`` is 1, else 1. ``sequence`` (sequence parallelism) None: where it is needed.
    """

    world_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    expert: int = 1
    expert_tensor: int | None = None
    sequence: bool | None = None

    @property
    def data(self) -> int:
        """Data-parallel ranks of the dense layers: what tensor and pipeline leave of the world."""
        return self.world_size // (self.tensor * self.pipeline)

    @property
    def expert_tensor_size(self) -> int:
        """``expert_tensor`` with its default filled in."""
        if self.expert_tensor is not None:
            return self.expert_tensor
        return self.tensor if self.expert == 1 else 1

    def sequence_parallel(self, shape: ModelShape) -> bool:
        """``sequence`` with its default filled in: on for a mixture of experts under tensor parallelism."""
        return self.tensor > 1 and shape.is_moe if self.sequence is None else self.sequence


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

    Raises LayoutError where they don't fit. Whether they fit a model is for ``model_faults`` to say.
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
        raise_faults(size_faults(self.sizes))

    @classmethod
    def of(cls, sizes: LayoutSizes) -> Layout:
        """The layout of a world of ``sizes``. Raises LayoutError, with all faults, where they don't fit."""
        raise_faults(size_faults(sizes))
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


@dataclass(frozen=True)
class EngineLayout:
    """Sizes of an SGLang server: ``--tp-size`` and ``--ep-size``. Experts' tensor parallelism is tensor / expert."""

    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.expert < 1 or self.tensor % self.expert:
            raise LayoutError(
                f"engine: tensor {self.tensor} is not a positive multiple of expert {self.expert}"
            )

    @property
    def expert_tensor(self) -> int:
        """Ranks that share one expert."""
        return self.tensor // self.expert

    def describe(self) -> str:
        """Short text, as ``TP8 EP4``."""
        return f"TP{self.tensor} EP{self.expert}"


def local_layers(shape: ModelShape, layout: Layout, pp_rank: int, chunk: int) -> range:
    """Global numbers of the layers in model chunk ``chunk`` of a stage: chunk-major, then stage, then contiguous."""
    each = shape.num_layers // (layout.pipeline * layout.chunks)
    first = (chunk * layout.pipeline + pp_rank) * each
    return range(first, first + each)


@dataclass(frozen=True)
class LayoutFault:
    """One thing that is wrong. ``key``: the field of LayoutSizes."""

    key: str
    value: str
    expected: str

    def text(self, prefix: str) -> str:
        """In a line; ``prefix``: what the reader knows the fields under, as ``parallel.``."""
        return f"{prefix}{self.key}: got {self.value}, expected {self.expected}"


Faults = Iterator[LayoutFault]
ShapeCheck = Callable[[LayoutSizes, ModelShape], Faults]


def size_faults(sizes: LayoutSizes) -> list[LayoutFault]:
    """What is wrong with the sizes whatever the model is."""
    small = list(_too_small(sizes))
    return small or list(_world(sizes))


def holding_faults(sizes: LayoutSizes, shape: ModelShape) -> list[LayoutFault]:
    """Why a model's parameters can't be cut this way; the sizes must fit each other."""
    return [p for check in _HOLDING_CHECKS for p in check(sizes, shape)]


def model_faults(sizes: LayoutSizes, shape: ModelShape) -> list[LayoutFault]:
    """Why Megatron-Core can't train a model this way, or not rightly; the sizes need not fit each other."""
    if list(_too_small(sizes)):
        return []
    return [p for check in _ALL_CHECKS for p in check(sizes, shape)]


def check_layout(sizes: LayoutSizes, shape: ModelShape, prefix: str = "layout.") -> None:
    """Raise LayoutError, with all faults, where the sizes don't fit each other or the model."""
    raise_faults([*size_faults(sizes), *model_faults(sizes, shape)], prefix)


def raise_faults(faults: Iterable[LayoutFault], prefix: str = "layout.") -> None:
    """Raise LayoutError where there is a fault; a line for each."""
    lines = [fault.text(prefix) for fault in faults]
    if lines:
        raise LayoutError("\n".join(lines))


def _too_small(sizes: LayoutSizes) -> Faults:
    for key in ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor"):
        size = getattr(sizes, key)
        if size is not None and size < 1:
            yield LayoutFault(key, str(size), "at least 1")


def _world(sizes: LayoutSizes) -> Faults:
    model = sizes.tensor * sizes.pipeline
    if sizes.world_size % model:
        product = f"{sizes.tensor} x {sizes.pipeline} = {model}"
        yield LayoutFault(
            "world_size", str(sizes.world_size), f"a multiple of tensor x pipeline = {product}"
        )
    experts = sizes.expert_tensor_size * sizes.expert * sizes.pipeline
    if sizes.world_size % experts:
        product = f"{sizes.expert_tensor_size} x {sizes.expert} x {sizes.pipeline} = {experts}"
        yield LayoutFault(
            "world_size",
            str(sizes.world_size),
            f"a multiple of expert_tensor x expert x pipeline = {product}",
        )
    if sizes.virtual_pipeline not in (None, 1) and sizes.pipeline == 1:
        yield LayoutFault(
            "virtual_pipeline",
            f"{sizes.virtual_pipeline} with pipeline 1",
            "null (there is nothing to interleave)",
        )
    if sizes.sequence and sizes.tensor == 1:
        yield LayoutFault("sequence", "true with tensor 1", "null, or tensor > 1")


def _layers(sizes: LayoutSizes, shape: ModelShape) -> Faults:
    chunks = sizes.virtual_pipeline or 1
    if shape.num_layers % (sizes.pipeline * chunks):
        virtual = f" x virtual_pipeline = {sizes.pipeline} x {chunks}" if chunks > 1 else ""
        yield _divisor("pipeline", f"{sizes.pipeline}{virtual}", f"{shape.num_layers} layers")


def _heads(sizes: LayoutSizes, shape: ModelShape) -> Faults:
    """Fewer key-value heads than ranks are held in parts, gathered in every forward pass."""
    tensor, heads, groups = sizes.tensor, shape.num_attention_heads, shape.num_query_groups
    if heads % tensor:
        yield _divisor("tensor", str(tensor), f"{heads} attention heads")
    if groups % tensor and tensor % groups:
        yield LayoutFault(
            "tensor",
            str(tensor),
            f"a divisor or a multiple of the model's {groups} key-value heads",
        )
    rows = (heads + 2 * groups) * shape.head_dim
    if tensor % groups == 0 and rows % tensor:
        yield _divisor("tensor", str(tensor), f"{rows} rows of queries, keys and values")


def _dense_mlp(sizes: LayoutSizes, shape: ModelShape) -> Faults:
    if not shape.is_moe and shape.ffn_hidden_size % sizes.tensor:
        yield _divisor("tensor", str(sizes.tensor), f"MLP size {shape.ffn_hidden_size}")


def _experts(sizes: LayoutSizes, shape: ModelShape) -> Faults:
    if not shape.is_moe:
        return
    if shape.num_experts % sizes.expert:
        yield _divisor("expert", str(sizes.expert), f"{shape.num_experts} experts")
    expert_tensor = sizes.expert_tensor_size
    if shape.moe_ffn_hidden_size % expert_tensor:
        yield LayoutFault(
            "expert_tensor",
            str(expert_tensor),
            f"a divisor of the experts' MLP size {shape.moe_ffn_hidden_size}",
        )


def _dense_has_no_experts(sizes: LayoutSizes, shape: ModelShape) -> Faults:
    if not shape.is_moe and sizes.expert > 1:
        yield LayoutFault("expert", str(sizes.expert), f"1: {shape.family} is a dense model")


def _expert_tensor_alone(sizes: LayoutSizes, shape: ModelShape) -> Faults:
    expert_tensor = sizes.expert_tensor_size
    if shape.is_moe and sizes.expert == 1 and expert_tensor != sizes.tensor:
        yield LayoutFault(
            "expert_tensor",
            f"{expert_tensor} with expert 1 and tensor {sizes.tensor}",
            f"{sizes.tensor}: Megatron-Core 0.16.1 does not synchronise the experts' gradients in "
            "this layout and trains wrongly without an error",
        )


def _mixture_needs_sequence(sizes: LayoutSizes, shape: ModelShape) -> Faults:
    if shape.is_moe and sizes.tensor > 1 and sizes.sequence is False:
        yield LayoutFault(
            "sequence",
            f"false with tensor {sizes.tensor}",
            "true or null: Megatron-Core trains a mixture of experts under tensor parallelism only "
            "with sequence parallelism",
        )


def _dense_expert_tensor(sizes: LayoutSizes, shape: ModelShape) -> Faults:
    if not shape.is_moe and sizes.expert_tensor not in (None, 1, sizes.tensor):
        yield LayoutFault(
            "expert_tensor",
            str(sizes.expert_tensor),
            f"null: {shape.family} is a dense model",
        )


def _divisor(key: str, value: str, dividend: str) -> LayoutFault:
    return LayoutFault(key, value, f"a divisor of the model's {dividend}")


_HOLDING_CHECKS: tuple[ShapeCheck, ...] = (
    _layers,
    _heads,
    _dense_mlp,
    _experts,
    _dense_has_no_experts,
)
_ALL_CHECKS: tuple[ShapeCheck, ...] = (
    *_HOLDING_CHECKS,
    _expert_tensor_alone,
    _mixture_needs_sequence,
    _dense_expert_tensor,
)


def check_engine_layout(shape: ModelShape, engine: EngineLayout) -> None:
    """Raise LayoutError where the engine cannot hold ``shape``."""
    groups, tensor = shape.num_query_groups, engine.tensor
    checks = [
        (shape.num_attention_heads % tensor == 0, f"{shape.num_attention_heads} attention heads into tensor {tensor}"),
        (groups % tensor == 0 or tensor % groups == 0, f"{groups} key/value heads into tensor {tensor}"),
    ]  # fmt: skip
    if shape.is_moe:
        width = shape.moe_ffn_hidden_size
        checks += [
            (shape.num_experts % engine.expert == 0, f"{shape.num_experts} experts into expert {engine.expert}"),
            (width % engine.expert_tensor == 0, f"expert width {width} into {engine.expert_tensor} ranks"),
        ]  # fmt: skip
    else:
        checks += [
            (
                shape.ffn_hidden_size % tensor == 0,
                f"MLP width {shape.ffn_hidden_size} into tensor {tensor}",
            ),
            (engine.expert == 1, f"a dense model into expert {engine.expert}"),
        ]
    wrong = [text for divides, text in checks if not divides]
    if wrong:
        raise LayoutError(f"the engine's layout does not divide the model: {'; '.join(wrong)}")
