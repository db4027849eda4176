"""The rows of a family's table: Megatron's parameters, and the tensors of Hugging Face and SGLang that belong to them.

Names in a row are templates. ``{layer}`` is the layer's number: global in Hugging Face names, local to the pipeline
chunk in Megatron's names. ``{expert}`` is the expert's number: global, or local to the expert-parallel rank. Megatron's
names come from Megatron-Core 0.16's GPTModel with the Transformer Engine layer spec. SGLang's names come from release
0.5.23, with unquantised weights and the canonical (Triton or native) layout of experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megatron_dppo.model import splits
from megatron_dppo.model.shape import ModelShape

LayerSet = Callable[[ModelShape, int], bool]
"""Function of a model and the number of a layer. It returns whether the layer is in the set."""


def every_layer(shape: ModelShape, layer: int) -> bool:
    """The set of all layers."""
    return True


def routed_layers(shape: ModelShape, layer: int) -> bool:
    """The set of the layers whose MLP is a mixture of experts."""
    return shape.is_moe and layer not in shape.dense_layers


def dense_layers(shape: ModelShape, layer: int) -> bool:
    """The set of the layers whose MLP is dense."""
    return not routed_layers(shape, layer)


def delta_layers(shape: ModelShape, layer: int) -> bool:
    """The set of the layers with a delta net in place of attention."""
    return shape.delta is not None and (layer + 1) % shape.delta.attention_interval != 0


def attention_layers(shape: ModelShape, layer: int) -> bool:
    """The set of the layers with attention."""
    return not delta_layers(shape, layer)


CarriedTensors = Callable[[ModelShape, str], bool]
"""Function of a model and the name of a tensor that is not in the model's table. It returns whether checkpoints carry
the tensor along. A carried tensor is hashed and copied from checkpoint to checkpoint. It is not trained, and is not
sent to engines."""


def no_tensor(shape: ModelShape, name: str) -> bool:
    """Carry no tensor: a checkpoint with a tensor that is not in the table is refused."""
    return False


def later_layers(shape: ModelShape, name: str) -> bool:
    """Carry the tensors of layers after the model's last layer. These layers predict further tokens."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= shape.num_layers


def with_prefix(*prefixes: str) -> CarriedTensors:
    """Return a function that carries the tensors whose names begin with one of ``prefixes``."""

    def is_carried(shape: ModelShape, name: str) -> bool:
        return name.startswith(prefixes)

    return is_carried


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor: name template and symbolic dimensions (keys of ``ModelShape.sizes``).

    The trainer keeps and sends the tensor in ``dtype``; None: in the model's type. In checkpoint files the tensor may
    have ``file_dtype`` instead of the model's type.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str | None = None
    file_dtype: str | None = None


CONFIG_DTYPE = "config"
"""Placeholder for the type in config.json. A few of SGLang's modules have this type even if the engine's weights have
another type."""


@dataclass(frozen=True)
class EngineRow:
    """The row of an SGLang tensor: the Hugging Face tensors that it consists of, cut by ``split``.

    ``dtype`` is the tensor's own type, or CONFIG_DTYPE; None: the model's type. With ``adds_one`` the tensor holds
    1 + its source. A layer outside of ``layers`` does not have the row. Several rows may have the same source.
    """

    name: str
    split: splits.Split
    sources: tuple[Source, ...]
    dtype: str | None = None
    adds_one: bool = False
    layers: LayerSet = every_layer

    def dtype_in(self, shape: ModelShape) -> str | None:
        """Return the tensor's type in an engine of ``shape``; None: the type of the engine's weights."""
        if self.dtype == CONFIG_DTYPE:
            return shape.dtype
        return self.dtype


@dataclass(frozen=True)
class PackedExperts:
    """A tensor in checkpoint files that has matrices of all experts of a layer, expert after expert. Its shape is
    [experts, rows of an expert's ``matrices``, ...].

    Outside of these files each matrix is a separate tensor. ``matrices`` are the name templates of the matrices of one
    expert. With ``is_transposed`` an expert has a single matrix, and the packed tensor has this matrix transposed.
    """

    name: str
    matrices: tuple[str, ...]
    is_transposed: bool = False


@dataclass(frozen=True)
class Rule:
    """The row of a Megatron parameter: the Hugging Face tensors that it consists of, cut by ``split``.

    ``engine`` are SGLang's tensors of the same sources. None: SGLang has one tensor, with the Hugging Face name and
    Megatron's cut, except that it pads a vocabulary differently. A layer outside of ``layers`` does not have the row.
    """

    megatron: str
    split: splits.Split
    sources: tuple[Source, ...]
    engine: tuple[EngineRow, ...] | None = None
    layers: LayerSet = every_layer

    @property
    def tensor_parallel(self) -> bool:
        """Whether ranks of a tensor-parallel group hold different parts."""
        return self.split is not splits.replicated

    @property
    def in_engine(self) -> tuple[EngineRow, ...]:
        """SGLang's tensors of the same sources."""
        if self.engine is not None:
            return self.engine
        split = self.split
        if split is splits.vocabulary:
            split = splits.engine_vocabulary
        return (EngineRow(self.sources[0].name, split, self.sources),)


MEGATRON_LAYER = "decoder.layers.{layer}."


HF_LAYER = "model.layers.{layer}."


def layer_rule(
    megatron: str,
    split: splits.Split,
    *sources: tuple[str, tuple[str, ...]],
    engine: tuple[str, splits.Split] | None = None,
    dtype: str | None = None,
    engine_dtype: str | None = None,
) -> Rule:
    """Return a layer's rule from names without the layer's prefix.

    ``engine`` is SGLang's name and cut if they differ from the trainer's. ``dtype`` is the type of the trainer's
    tensor. The tensor in files has this type, or the model's. ``engine_dtype`` is the type of SGLang's tensor. None:
    the model's type.
    """
    layer_sources = tuple(Source(HF_LAYER + name, dims, dtype, dtype) for name, dims in sources)
    rule = Rule(MEGATRON_LAYER + megatron, split, layer_sources)
    if engine is None and engine_dtype is None:
        return rule
    name, engine_split = engine or (sources[0][0], split)
    row = EngineRow(HF_LAYER + name, engine_split, layer_sources, engine_dtype)
    return replace(rule, engine=(row,))


def engine_row(
    name: str,
    split: splits.Split,
    *sources: tuple[str, tuple[str, ...]],
    dtype: str | None = None,
    layers: LayerSet = every_layer,
) -> EngineRow:
    """Return the row of an SGLang tensor in a layer, from names without the layer's prefix."""
    layer_sources = tuple(Source(HF_LAYER + source, dims) for source, dims in sources)
    return EngineRow(HF_LAYER + name, split, layer_sources, dtype, layers=layers)


def in_layers(layers: LayerSet, *rules: Rule) -> tuple[Rule, ...]:
    """Return the ``rules``, limited to ``layers``."""
    return tuple(replace(rule, layers=layers) for rule in rules)


def packed_experts_of(experts: Iterable[Rule], *names: str) -> tuple[PackedExperts, ...]:
    """Return one packed tensor for each rule in ``experts``. ``names`` are the packed tensors' names without prefix."""
    packed = []
    for rule, name in zip(experts, names, strict=True):
        matrices = tuple(source.name for source in rule.sources)
        packed.append(PackedExperts(matrices[0].partition("{expert}")[0] + name, matrices))
    return tuple(packed)


EMBEDDING = Rule(
    "embedding.word_embeddings.weight",
    splits.vocabulary,
    (Source("model.embed_tokens.weight", ("vocab", "hidden")),),
)


FINAL_NORM = Rule(
    "decoder.final_layernorm.weight", splits.replicated, (Source("model.norm.weight", ("hidden",)),)
)


OUTPUT = Rule(
    "output_layer.weight", splits.vocabulary, (Source("lm_head.weight", ("vocab", "hidden")),)
)
