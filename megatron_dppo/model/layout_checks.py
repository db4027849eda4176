"""The one validator of parallel layouts: what Megatron-Core 0.16 can hold and train, for configuration, conversion
and trainer alike.

Every check yields problems and none raises, so that all that is wrong is told at once.
"""

from __future__ import annotations

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
class LayoutProblem:
    """One thing that is wrong. ``key``: the field of LayoutSizes."""

    key: str
    got: str
    expected: str

    def text(self, prefix: str) -> str:
        """In a line; ``prefix``: what the reader knows the fields under, as ``parallel.``."""
        return f"{prefix}{self.key}: got {self.got}, expected {self.expected}"


Problems = Iterator[LayoutProblem]
ShapeCheck = Callable[[LayoutSizes, ModelShape], Problems]


def size_problems(sizes: LayoutSizes) -> list[LayoutProblem]:
    """What is wrong with the sizes whatever the model is."""
    small = list(_too_small(sizes))
    return small or list(_world(sizes))


def holding_problems(sizes: LayoutSizes, shape: ModelShape) -> list[LayoutProblem]:
    """Why a model's parameters can't be cut this way; the sizes must fit each other."""
    return [p for check in _HOLDING_CHECKS for p in check(sizes, shape)]


def model_problems(sizes: LayoutSizes, shape: ModelShape) -> list[LayoutProblem]:
    """Why Megatron-Core can't train a model this way, or not rightly; the sizes need not fit each other."""
    if list(_too_small(sizes)):
        return []
    return [p for check in _ALL_CHECKS for p in check(sizes, shape)]


def check_layout(sizes: LayoutSizes, shape: ModelShape, prefix: str = "layout.") -> None:
    """Raise LayoutError, with all problems, where the sizes don't fit each other or the model."""
    raise_problems([*size_problems(sizes), *model_problems(sizes, shape)], prefix)


def raise_problems(problems: Iterable[LayoutProblem], prefix: str = "layout.") -> None:
    """Raise LayoutError where there is a problem; a line for each."""
    lines = [problem.text(prefix) for problem in problems]
    if lines:
        raise LayoutError("\n".join(lines))


def _too_small(sizes: LayoutSizes) -> Problems:
    for key in ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor"):
        size = getattr(sizes, key)
        if size is not None and size < 1:
            yield LayoutProblem(key, str(size), "at least 1")


def _world(sizes: LayoutSizes) -> Problems:
    model = sizes.tensor * sizes.pipeline
    if sizes.world_size % model:
        product = f"{sizes.tensor} x {sizes.pipeline} = {model}"
        yield LayoutProblem(
            "world_size", str(sizes.world_size), f"a multiple of tensor x pipeline = {product}"
        )
    experts = sizes.expert_tensor_size * sizes.expert * sizes.pipeline
    if sizes.world_size % experts:
        product = f"{sizes.expert_tensor_size} x {sizes.expert} x {sizes.pipeline} = {experts}"
        yield LayoutProblem(
            "world_size",
            str(sizes.world_size),
            f"a multiple of expert_tensor x expert x pipeline = {product}",
        )
    if sizes.virtual_pipeline not in (None, 1) and sizes.pipeline == 1:
        yield LayoutProblem(
            "virtual_pipeline",
            f"{sizes.virtual_pipeline} with pipeline 1",
            "null (there is nothing to interleave)",
        )
    if sizes.sequence and sizes.tensor == 1:
        yield LayoutProblem("sequence", "true with tensor 1", "null, or tensor > 1")


def _layers(sizes: LayoutSizes, shape: ModelShape) -> Problems:
    chunks = sizes.virtual_pipeline or 1
    if shape.num_layers % (sizes.pipeline * chunks):
        virtual = f" x virtual_pipeline = {sizes.pipeline} x {chunks}" if chunks > 1 else ""
        yield _divisor("pipeline", f"{sizes.pipeline}{virtual}", f"{shape.num_layers} layers")


def _heads(sizes: LayoutSizes, shape: ModelShape) -> Problems:
    """Fewer key-value heads than ranks are held in parts, gathered in every forward pass."""
    tensor, heads, groups = sizes.tensor, shape.num_attention_heads, shape.num_query_groups
    if heads % tensor:
        yield _divisor("tensor", str(tensor), f"{heads} attention heads")
    if groups % tensor and tensor % groups:
        yield LayoutProblem(
            "tensor",
            str(tensor),
            f"a divisor or a multiple of the model's {groups} key-value heads",
        )
    rows = (heads + 2 * groups) * shape.head_dim
    if tensor % groups == 0 and rows % tensor:
        yield _divisor("tensor", str(tensor), f"{rows} rows of queries, keys and values")


def _dense_mlp(sizes: LayoutSizes, shape: ModelShape) -> Problems:
    if not shape.is_moe and shape.ffn_hidden_size % sizes.tensor:
        yield _divisor("tensor", str(sizes.tensor), f"MLP size {shape.ffn_hidden_size}")


def _experts(sizes: LayoutSizes, shape: ModelShape) -> Problems:
    if not shape.is_moe:
        return
    if shape.num_experts % sizes.expert:
        yield _divisor("expert", str(sizes.expert), f"{shape.num_experts} experts")
    expert_tensor = sizes.expert_tensor_size
    if shape.moe_ffn_hidden_size % expert_tensor:
        yield LayoutProblem(
            "expert_tensor",
            str(expert_tensor),
            f"a divisor of the experts' MLP size {shape.moe_ffn_hidden_size}",
        )


def _dense_has_no_experts(sizes: LayoutSizes, shape: ModelShape) -> Problems:
    if not shape.is_moe and sizes.expert > 1:
        yield LayoutProblem("expert", str(sizes.expert), f"1: {shape.family} is a dense model")


def _expert_tensor_alone(sizes: LayoutSizes, shape: ModelShape) -> Problems:
    expert_tensor = sizes.expert_tensor_size
    if shape.is_moe and sizes.expert == 1 and expert_tensor != sizes.tensor:
        yield LayoutProblem(
            "expert_tensor",
            f"{expert_tensor} with expert 1 and tensor {sizes.tensor}",
            f"{sizes.tensor}: Megatron-Core 0.16.1 does not synchronise the experts' gradients in "
            "this layout and trains wrongly without an error",
        )


def _mixture_needs_sequence(sizes: LayoutSizes, shape: ModelShape) -> Problems:
    if shape.is_moe and sizes.tensor > 1 and sizes.sequence is False:
        yield LayoutProblem(
            "sequence",
            f"false with tensor {sizes.tensor}",
            "true or null: Megatron-Core trains a mixture of experts under tensor parallelism only "
            "with sequence parallelism",
        )


def _dense_expert_tensor(sizes: LayoutSizes, shape: ModelShape) -> Problems:
    if not shape.is_moe and sizes.expert_tensor not in (None, 1, sizes.tensor):
        yield LayoutProblem(
            "expert_tensor",
            str(sizes.expert_tensor),
            f"null: {shape.family} is a dense model",
        )


def _divisor(key: str, got: str, what: str) -> LayoutProblem:
    return LayoutProblem(key, got, f"a divisor of the model's {what}")


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
