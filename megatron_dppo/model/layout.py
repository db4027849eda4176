"""The parallel layout of the trainer, and its validation.

Ranks are in Megatron-Core's default order tp-cp-ep-dp-pp. The validation accepts the layouts that Megatron-Core 0.16
can hold and train. The checks yield faults instead of raising errors, so that one error lists all faults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.shape import ModelShape


@dataclass(frozen=True)
class LayoutSizes:
    """Configured sizes. They may contradict each other or the model: ``check_layout`` reports such errors.

    Attributes:
        world_size: Number of ranks.
        tensor: Tensor-parallel ranks.
        pipeline: Pipeline stages.
        virtual_pipeline: Model chunks in each pipeline stage.
        expert: Expert-parallel ranks.
        expert_tensor: Tensor-parallel ranks of experts. None: ``tensor`` if ``expert`` is 1, else 1.
        sequence: Whether to use sequence parallelism. None: only if the model needs it (``sequence_parallel``).
        context: Ranks that share the tokens of each sequence.
        first_stage_layers: Layers of the first pipeline stage, all its chunks together. None: an equal share.
        last_stage_layers: Layers of the last pipeline stage, all its chunks together. None: an equal share.
    """

    world_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    expert: int = 1
    expert_tensor: int | None = None
    sequence: bool | None = None
    context: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @property
    def data(self) -> int:
        """Data-parallel ranks of the dense layers: world size / (tensor * context * pipeline)."""
        return self.world_size // (self.tensor * self.context * self.pipeline)

    @property
    def given_stages(self) -> tuple[int, ...]:
        """Layers of the stages whose number of layers is configured."""
        sizes = (self.first_stage_layers, self.last_stage_layers)
        return tuple(size for size in sizes if size is not None)

    @property
    def expert_tensor_size(self) -> int:
        """``expert_tensor``, or its default."""
        if self.expert_tensor is not None:
            return self.expert_tensor
        return self.tensor if self.expert == 1 else 1

    def sequence_parallel(self, shape: ModelShape) -> bool:
        """Return ``sequence``, or its default: True for a mixture of experts under tensor parallelism."""
        if self.sequence is None:
            return self.tensor > 1 and shape.is_moe
        return self.sequence


@dataclass(frozen=True)
class RankCoordinates:
    """A global rank's position. Parameters outside of experts are divided by (tp, cp, dp, pp), parameters of experts by
    (etp, ep, edp, pp)."""

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
    """Sizes of the parallel dimensions. ``data`` is the number of data-parallel ranks of the dense layers.

    Raises LayoutError if the sizes do not fit each other. ``model_faults`` checks whether they fit a model.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    context: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("data", "context"):
            if getattr(self, name) < 1:
                raise LayoutError(f"layout.{name}: got {getattr(self, name)}, expected at least 1")
        raise_faults(size_faults(self.sizes))

    @classmethod
    def of(cls, sizes: LayoutSizes) -> Layout:
        """Build the layout of ``sizes``. Raises LayoutError with all faults if they do not fit."""
        raise_faults(size_faults(sizes))
        return cls(
            sizes.tensor,
            sizes.pipeline,
            sizes.virtual_pipeline,
            sizes.expert,
            sizes.expert_tensor_size,
            sizes.data,
            sizes.context,
            sizes.first_stage_layers,
            sizes.last_stage_layers,
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
        """Return the layout with the fewest ranks: the least data parallelism that the experts need."""
        # Only ``expert_tensor_size`` is read from these sizes, so the world size 0 has no effect.
        sizes = LayoutSizes(0, tensor, pipeline, virtual_pipeline, expert, expert_tensor)
        expert_ranks = expert * sizes.expert_tensor_size
        # The ranks of a stage, tensor * data, must be a multiple of ``expert_ranks``. For sizes below 1 there is no
        # such number, and the constructor raises an error.
        data = 1
        if min(tensor, expert_ranks) > 0:
            data = math.lcm(tensor, expert_ranks) // tensor
        return cls(tensor, pipeline, virtual_pipeline, expert, sizes.expert_tensor_size, data)

    @property
    def sizes(self) -> LayoutSizes:
        """The sizes of the layout, in the form that the checks read."""
        return LayoutSizes(
            self.world_size,
            self.tensor,
            self.pipeline,
            self.virtual_pipeline,
            self.expert,
            self.expert_tensor,
            context=self.context,
            first_stage_layers=self.first_stage_layers,
            last_stage_layers=self.last_stage_layers,
        )

    @property
    def chunks(self) -> int:
        """Model chunks on each pipeline stage."""
        if self.virtual_pipeline is None:
            return 1
        return self.virtual_pipeline

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
        """Data-parallel ranks of the experts."""
        return self.stage_ranks // (self.expert * self.expert_tensor)

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return the coordinates of global ``rank``. Raises LayoutError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside a world of {self.world_size}")
        pp, stage_rank = divmod(rank, self.stage_ranks)
        dense_rank, tp = divmod(stage_rank, self.tensor)
        dp, cp = divmod(dense_rank, self.context)
        expert_rank, etp = divmod(stage_rank, self.expert_tensor)
        edp, ep = divmod(expert_rank, self.expert)
        return RankCoordinates(rank, tp, cp, dp, pp, etp, ep, edp)

    def stage_layers(self, num_layers: int, stage: int) -> int:
        """Return the number of layers on pipeline stage ``stage`` of a model with ``num_layers`` layers."""
        if stage == 0 and self.first_stage_layers is not None:
            return self.first_stage_layers
        if stage == self.pipeline - 1 and self.last_stage_layers is not None:
            return self.last_stage_layers
        given_stages = self.sizes.given_stages
        return (num_layers - sum(given_stages)) // (self.pipeline - len(given_stages))

    def most_stage_layers(self, num_layers: int) -> int:
        """Return the number of layers on the largest pipeline stage of a model with ``num_layers`` layers."""
        return max(self.stage_layers(num_layers, stage) for stage in range(self.pipeline))

    def describe(self) -> str:
        """Return a short text: the sizes that are not 1, or "single"."""
        sizes = {
            "TP": self.tensor,
            "CP": self.context,
            "PP": self.pipeline,
            "VPP": self.chunks,
            "EP": self.expert,
            "ETP": self.expert_tensor,
            "DP": self.data,
        }
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "single"


def local_layers(shape: ModelShape, layout: Layout, pp_rank: int, chunk: int) -> range:
    """Return the global numbers of the layers in model chunk ``chunk`` of stage ``pp_rank``.

    The layers are divided among the first chunks of all stages in turn, then among the second chunks, and so on.
    """
    chunk_sizes = []
    for stage in range(layout.pipeline):
        chunk_sizes.append(layout.stage_layers(shape.num_layers, stage) // layout.chunks)
    start = chunk * sum(chunk_sizes) + sum(chunk_sizes[:pp_rank])
    return range(start, start + chunk_sizes[pp_rank])


def layers_of_stage(shape: ModelShape, layout: Layout, stage: int) -> list[int]:
    """Return the global numbers of the layers in all model chunks of pipeline stage ``stage``."""
    layers: list[int] = []
    for chunk in range(layout.chunks):
        layers += local_layers(shape, layout, stage, chunk)
    return layers


@dataclass(frozen=True)
class LayoutFault:
    """One error in a layout. ``key`` is the field of LayoutSizes, or SGLang's option."""

    key: str
    value: object
    expected: str

    def text(self, prefix: str) -> str:
        """Return the fault as one line. ``prefix`` is written before the key, for example ``parallel.``."""
        return f"{prefix}{self.key}: got {self.value}, expected {self.expected}"


def size_faults(sizes: LayoutSizes) -> list[LayoutFault]:
    """Return the faults of the sizes for any model."""
    return list(_too_small(sizes)) or list(_world_faults(sizes))


def holding_faults(sizes: LayoutSizes, shape: ModelShape) -> list[LayoutFault]:
    """Return the reasons why the model's parameters cannot be divided by ``sizes``. The sizes must fit each other."""
    faults = [*_stage_faults(sizes, shape.num_layers), *_attention_faults(sizes, shape)]
    if len(shape.moe_layers) < shape.num_layers:
        faults += _dense_faults(sizes, shape)
    if shape.is_moe:
        faults += _expert_faults(sizes, shape)
    return faults


def model_faults(sizes: LayoutSizes, shape: ModelShape) -> list[LayoutFault]:
    """Return the reasons why Megatron-Core cannot train the model correctly with ``sizes``. The sizes need not fit each
    other."""
    if any(_too_small(sizes)):
        return []
    return [*holding_faults(sizes, shape), *_training_faults(sizes, shape)]


def largest_all_to_all_context(tensor: int, shape: ModelShape) -> int:
    """Return the largest ``context`` whose ranks can exchange heads for tokens.

    The result is the greatest common divisor of a rank's query heads and its key-value heads. Every divisor of the
    result is possible too.
    """
    return math.gcd(shape.num_attention_heads // tensor, max(1, shape.num_query_groups // tensor))


def check_layout(sizes: LayoutSizes, shape: ModelShape, prefix: str = "layout.") -> None:
    """Raise LayoutError with all faults if the sizes do not fit each other or the model."""
    raise_faults([*size_faults(sizes), *model_faults(sizes, shape)], prefix)


def raise_faults(faults: Iterable[LayoutFault], prefix: str = "layout.") -> None:
    """Raise LayoutError if there are ``faults``. The message has a line for each fault."""
    lines = [fault.text(prefix) for fault in faults]
    if lines:
        raise LayoutError("\n".join(lines))


_STAGE_KEYS = ("first_stage_layers", "last_stage_layers")


def _too_small(sizes: LayoutSizes) -> Iterator[LayoutFault]:
    for key in (
        "tensor",
        "pipeline",
        "virtual_pipeline",
        "expert",
        "expert_tensor",
        "context",
        *_STAGE_KEYS,
    ):
        size = getattr(sizes, key)
        if size is not None and size < 1:
            yield LayoutFault(key, size, "at least 1")


def _world_faults(sizes: LayoutSizes) -> Iterator[LayoutFault]:
    world = sizes.world_size
    tensor = sizes.tensor
    pipeline = sizes.pipeline
    factors = {"tensor": tensor, "context": sizes.context, "pipeline": pipeline}
    if sizes.context == 1:
        del factors["context"]
    replica_ranks = math.prod(factors.values())
    if world % replica_ranks:
        names = " x ".join(factors)
        values = " x ".join(map(str, factors.values()))
        expectation = f"a multiple of {names} = {values} = {replica_ranks}"
        yield LayoutFault("world_size", world, expectation)
    expert_replica_ranks = sizes.expert_tensor_size * sizes.expert * pipeline
    if world % expert_replica_ranks:
        product = (
            f"{sizes.expert_tensor_size} x {sizes.expert} x {pipeline} = {expert_replica_ranks}"
        )
        expectation = f"a multiple of expert_tensor x expert x pipeline = {product}"
        yield LayoutFault("world_size", world, expectation)
    if sizes.virtual_pipeline not in (None, 1) and pipeline == 1:
        value = f"{sizes.virtual_pipeline} with pipeline 1"
        yield LayoutFault("virtual_pipeline", value, "null (there is nothing to interleave)")
    if pipeline == 1:
        for key in _STAGE_KEYS:
            if getattr(sizes, key) is not None:
                value = f"{getattr(sizes, key)} with pipeline 1"
                yield LayoutFault(key, value, "null (there is only one stage)")
    if sizes.sequence and tensor == 1:
        yield LayoutFault("sequence", "true with tensor 1", "null, or tensor > 1")


def _attention_faults(sizes: LayoutSizes, shape: ModelShape) -> Iterator[LayoutFault]:
    tensor = sizes.tensor
    heads = shape.num_attention_heads
    groups = shape.num_query_groups
    if heads % tensor:
        yield _divisor("tensor", tensor, f"{heads} attention heads")
    # With fewer key-value heads than ranks, each rank holds a part of a head, and Megatron-Core gathers the parts in
    # every forward pass.
    if groups % tensor and tensor % groups:
        expectation = f"a divisor or a multiple of the model's {groups} key-value heads"
        yield LayoutFault("tensor", tensor, expectation)
    if shape.norms_all_heads and groups % tensor:
        # A rank would have to norm a part of a head, because Megatron-Core gathers the parts only later.
        yield _divisor("tensor", tensor, f"{groups} key-value heads, which are normed together")
    if shape.gates_attention and groups % tensor:
        # After gathering the parts of a head, Megatron-Core does not divide the gate among the ranks again.
        yield _divisor("tensor", tensor, f"{groups} key-value heads, as its attention has a gate")
    if shape.delta is not None and shape.delta.key_heads % tensor:
        yield _divisor("tensor", tensor, f"{shape.delta.key_heads} key heads of delta nets")
    # If the ranks are a multiple of the key-value heads, they cut the fused matrix by rows, not by heads.
    rows = (heads + 2 * groups) * shape.head_dim
    if tensor % groups == 0 and rows % tensor:
        yield _divisor("tensor", tensor, f"{rows} rows of queries, keys and values")


def _stage_faults(sizes: LayoutSizes, num_layers: int) -> Iterator[LayoutFault]:
    chunks = sizes.virtual_pipeline or 1
    given_stages = sizes.given_stages
    if not given_stages:
        if num_layers % (sizes.pipeline * chunks):
            virtual = ""
            if chunks > 1:
                virtual = f" x virtual_pipeline = {sizes.pipeline} x {chunks}"
            yield _divisor("pipeline", f"{sizes.pipeline}{virtual}", f"{num_layers} layers")
        return
    for key in _STAGE_KEYS:
        size = getattr(sizes, key)
        if size is not None and size % chunks:
            yield LayoutFault(key, size, f"a multiple of virtual_pipeline = {chunks}")
    if sizes.pipeline == 1:
        # With one stage, ``size_faults`` rejects the keys.
        return
    other_stages = sizes.pipeline - len(given_stages)
    other_layers = num_layers - sum(given_stages)
    # If both keys are set, report the last key: the first key may be right.
    first_key, last_key = _STAGE_KEYS
    key = first_key if sizes.last_stage_layers is None else last_key
    if other_stages == 0 and other_layers != 0:
        expectation = f"{num_layers - given_stages[0]}, the rest of the model's {num_layers} layers"
        yield LayoutFault(key, given_stages[-1], expectation)
    if other_stages > 0 and (other_layers < 1 or other_layers % (other_stages * chunks)):
        expectation = (
            f"a number that leaves a positive multiple of {other_stages * chunks} of the model's {num_layers} layers "
            f"for {other_stages} other stages, not {other_layers}"
        )
        yield LayoutFault(key, given_stages[-1], expectation)


def _dense_faults(sizes: LayoutSizes, shape: ModelShape) -> Iterator[LayoutFault]:
    if shape.ffn_hidden_size % sizes.tensor:
        yield _divisor("tensor", sizes.tensor, f"MLP size {shape.ffn_hidden_size}")
    if sizes.expert > 1 and not shape.is_moe:
        yield LayoutFault("expert", sizes.expert, f"1: {shape.family} is a dense model")


def _expert_faults(sizes: LayoutSizes, shape: ModelShape) -> Iterator[LayoutFault]:
    if shape.num_experts % sizes.expert:
        yield _divisor("expert", sizes.expert, f"{shape.num_experts} experts")
    width = shape.moe_ffn_hidden_size
    if width % sizes.expert_tensor_size:
        expectation = f"a divisor of the experts' MLP size {width}"
        yield LayoutFault("expert_tensor", sizes.expert_tensor_size, expectation)
    if shape.shared_ffn_hidden_size % sizes.tensor:
        yield _divisor(
            "tensor", sizes.tensor, f"shared expert's MLP size {shape.shared_ffn_hidden_size}"
        )


def _training_faults(sizes: LayoutSizes, shape: ModelShape) -> Iterator[LayoutFault]:
    tensor, expert_tensor = sizes.tensor, sizes.expert_tensor_size
    if shape.has_biases and expert_tensor > 1:
        expectation = "1: Megatron-Core does not divide an expert with biases among ranks"
        yield LayoutFault("expert_tensor", sizes.expert_tensor, expectation)
    if shape.delta is not None and sizes.context > 1:
        expectation = "1: Megatron-Core's delta nets do not divide a sequence among ranks"
        yield LayoutFault("context", sizes.context, expectation)
    if not shape.is_moe:
        if sizes.expert_tensor not in (None, 1, tensor):
            expectation = f"null: {shape.family} is a dense model"
            yield LayoutFault("expert_tensor", sizes.expert_tensor, expectation)
        return
    if sizes.expert == 1 and expert_tensor != tensor:
        yield LayoutFault(
            "expert_tensor",
            f"{expert_tensor} with expert 1 and tensor {tensor}",
            f"{tensor}: Megatron-Core 0.16.1 does not synchronise the experts' gradients in this layout and trains "
            "wrongly without an error",
        )
    if tensor > 1 and sizes.sequence is False:
        yield LayoutFault(
            "sequence",
            f"false with tensor {tensor}",
            "true or null: Megatron-Core trains a mixture of experts under tensor parallelism only with sequence "
            "parallelism",
        )


def _divisor(key: str, value: object, dividend: str) -> LayoutFault:
    return LayoutFault(key, value, f"a divisor of the model's {dividend}")
