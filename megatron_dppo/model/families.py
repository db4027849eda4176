"""The supported model families, and the reader of a config.json.

A family has a function that reads its config.json, and a table of its parameters. To add a family, add a function at
the end.

Names in a row are templates. ``{layer}`` is the layer's number: global in Hugging Face names, local to the pipeline
chunk in Megatron's names. ``{expert}`` is the expert's number: global, or local to the expert-parallel rank. Megatron's
names come from Megatron-Core 0.16's GPTModel with the Transformer Engine layer spec. SGLang's names come from release
0.5.23, with unquantised weights and the canonical (Triton or native) layout of experts.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_dppo.model import splits
from megatron_dppo.model.config_keys import HARMLESS, NEUTRAL
from megatron_dppo.model.errors import ModelConfigError, UnsupportedModelError
from megatron_dppo.model.shape import (
    ITEM_BYTES,
    AttentionWindow,
    DeltaNet,
    LatentAttention,
    Llama3RopeScaling,
    ModelShape,
    RopeScaling,
    Router,
    YarnRopeScaling,
)


class ConfigFacts:
    """The entries of a config.json, validated when a family reads them.

    For a missing or wrong entry, a method adds a line with the file and the key to ``faults``, and returns a
    placeholder. So a single reading finds all errors. ``read`` collects the keys that were read.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self.faults: list[str] = []
        self.read: set[str] = set()

    def of_table(self, values: Mapping[str, Any]) -> ConfigFacts:
        """Return the facts of another table of the file. They share ``faults`` and ``read`` with ``self``."""
        table = ConfigFacts(values, self.where)
        table.faults = self.faults
        table.read = self.read
        return table

    def positive(self, *keys: str, default: int | None = None) -> int:
        """Read a positive whole number from the first of ``keys`` that is set."""
        value = self._first(keys, default)
        # In Python, bool is a subclass of int.
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            return self._wrong(keys, value, "a positive integer", 1)
        return value

    def count(self, key: str, default: int = 0) -> int:
        """Read 0 or a positive whole number."""
        value = self._first((key,), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            return self._wrong((key,), value, "0 or a positive integer", default)
        return value

    def numbers(self, key: str) -> tuple[int, ...]:
        """Read a list of whole numbers; empty without the key."""
        value = self._first((key,), [])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            return self._wrong((key,), value, "a list of integers", ())
        return tuple(value)

    def number(self, key: str, default: float | None = None) -> float:
        """Read a positive real number. NaN and Infinity are errors, although Python's JSON reader accepts them."""
        value = self._first((key,), default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            return self._wrong((key,), value, "a positive number", 1.0)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Read a truth value."""
        value = self._first((key,), default)
        if not isinstance(value, bool):
            return self._wrong((key,), value, "true or false", default)
        return value

    def require(self, key: str, expected: Any, default: Any) -> None:
        """Refuse a model whose ``key`` is not ``expected``, because no table describes it."""
        value = self._first((key,), default)
        if value != expected:
            self.fault(f"{key} is {value!r}; only {expected!r} is supported for this family")

    def require_each(self, key: str, expected: Any) -> None:
        """Refuse a model if it has the list ``key`` with a value other than ``expected``."""
        values = self._first((key,), [])
        if not isinstance(values, list):
            values = [values]
        for value in values:
            if value != expected:
                self.fault(f"{key} has {value!r}; only {expected!r} is supported for this family")
                return

    def dtype(self) -> str:
        """Read the type of the weights."""
        # transformers writes ``dtype`` since version 5 and ``torch_dtype`` before.
        value = str(self._first(("dtype", "torch_dtype"), "float32")).removeprefix("torch.")
        if value not in ITEM_BYTES:
            return self._wrong(("dtype",), value, f"one of {sorted(ITEM_BYTES)}", "float32")
        return value

    def rope(
        self,
        rotary_fraction: float = 1,
        *,
        theta_default: float = 1e4,
        accepts_yarn: bool = False,
        accepts_untruncated_yarn: bool = False,
    ) -> tuple[float, RopeScaling | None]:
        """Read ``(theta, scaling)``. Only ``rotary_fraction`` is accepted as partial_rotary_factor."""
        # transformers 5 writes ``rope_parameters``, with theta in it; earlier versions wrote ``rope_scaling``. If a
        # file has both tables, transformers and SGLang read only ``rope_scaling``.
        self.read |= {"rope_scaling", "rope_parameters"}
        key = "rope_parameters"
        if self.values.get("rope_scaling"):
            key = "rope_scaling"
        nested = self.values.get(key) or {}
        if not isinstance(nested, Mapping):
            self.fault(f"{key} is {nested!r}, expected a table")
            nested = {}
        by_layer_type = [name for name, value in nested.items() if isinstance(value, Mapping)]
        if by_layer_type:
            self.fault(f"{key}.{by_layer_type[0]} is a table, expected one for all layers")
        # The engine reads partial_rotary_factor outside of the table, transformers in the table.
        for table in (self.values, nested):
            self.of_table(table).require("partial_rotary_factor", rotary_fraction, rotary_fraction)
        facts = self.of_table({**self.values, **nested})
        theta = facts.number("rope_theta", theta_default)
        self.read |= {"rope_type", "type"}
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind == "yarn" and accepts_yarn:
            return theta, facts.yarn(accepts_untruncated=accepts_untruncated_yarn)
        accepted = ["default", "yarn" if accepts_yarn else "llama3"]
        if kind not in accepted:
            self.fault(
                f"{key}: rope type {kind!r} is not supported, expected {' or '.join(map(repr, accepted))}"
            )
            return theta, None
        # The only kind left is llama3.
        scaling = Llama3RopeScaling(
            factor=facts.number("factor"),
            low_freq_factor=facts.number("low_freq_factor"),
            high_freq_factor=facts.number("high_freq_factor"),
            original_max_positions=facts.positive(
                "original_max_position_embeddings", "max_position_embeddings"
            ),
        )
        return theta, scaling

    def yarn(self, *, accepts_untruncated: bool = False) -> YarnRopeScaling:
        """Read YaRN's scaling. If ``mscale`` and ``mscale_all_dim`` are missing, their values are 1 and 0."""
        self.require("attention_factor", None, None)
        if not accepts_untruncated:
            self.require("truncate", True, True)
        coefficients = 1.0, 0.0
        if self._first(("mscale", "mscale_all_dim"), None) is not None:
            # Both must be set: with one of them transformers, Megatron-Core and SGLang compute different factors.
            coefficients = self.number("mscale"), self.number("mscale_all_dim")
        return YarnRopeScaling(
            self.number("factor"),
            self.positive("original_max_position_embeddings"),
            self.number("beta_fast", 32.0),
            self.number("beta_slow", 1.0),
            *coefficients,
            truncate=self.flag("truncate", True),
        )

    def ignore(self, *keys: str) -> None:
        """Note that ``keys`` are handled elsewhere, or that models of this family do not read them."""
        self.read |= set(keys)

    def require_neutral(self) -> None:
        """Refuse a model if a key that no reader has read changes its arithmetic."""
        for key, neutral in NEUTRAL.items():
            value = self.values.get(key)
            if key not in self.read and value is not None and value not in neutral:
                self.fault(
                    f"{key} is {value!r}, expected {' or '.join(map(repr, neutral)) or 'none'}: models of this family "
                    "are trained without it"
                )

    def unknown(self) -> dict[str, Any]:
        """Return the keys, with their values, that no reader has read and that ``config_keys`` does not list."""
        known = self.read | NEUTRAL.keys() | HARMLESS
        found = {key: value for key, value in self.values.items() if key not in known}
        for table in ("rope_scaling", "rope_parameters"):
            nested = self.values.get(table)
            if isinstance(nested, Mapping):
                inner = {key: value for key, value in nested.items() if key not in known}
                found |= {f"{table}.{key}": value for key, value in inner.items()}
        return found

    def fault(self, text: str) -> None:
        """Add ``text`` to the faults of the file."""
        self.faults.append(f"{self.where}: {text}")

    def _first(self, keys: tuple[str, ...], default: Any) -> Any:
        self.read |= set(keys)
        for key in keys:
            if self.values.get(key) is not None:
                return self.values[key]
        return default

    def _wrong(self, keys: tuple[str, ...], value: Any, expected: str, placeholder: Any) -> Any:
        """Add a fault about ``value`` of ``keys``, and return the placeholder."""
        if value is None:
            self.fault(f"{' or '.join(keys)} is missing, expected {expected}")
        else:
            self.fault(f"{keys[0]} is {value!r}, expected {expected}")
        return placeholder


def read_decoder_shape(
    facts: ConfigFacts,
    family: str,
    *,
    head_dim_default: int | None = None,
    key_value_heads_default: int | None = None,
    theta_default: float = 1e4,
    rotary_fraction: float = 1,
    accepts_untruncated_yarn: bool = False,
    **extra: Any,
) -> ModelShape:
    """Read the entries that have the same names in all supported families.

    Args:
        facts: the file's entries.
        family: the ``model_type``.
        head_dim_default: transformers' default if the file has no ``head_dim``; None: hidden size / heads.
        key_value_heads_default: transformers' default if the file has no ``num_key_value_heads``; None: as many as
            ``num_attention_heads``.
        theta_default: transformers' default if the file has no ``rope_theta``.
        rotary_fraction: the part of each head that the family rotates.
        accepts_untruncated_yarn: whether the family's models may have YaRN, with ``truncate`` true or false.
        extra: fields of ModelShape to add or to replace.
    """
    facts.require("hidden_act", "silu", "silu")
    facts.require("use_sliding_window", False, False)
    if "delta" not in extra and "window" not in extra:
        facts.require_each("layer_types", "full_attention")
    heads = facts.positive("num_attention_heads")
    # transformers uses its default only if the key is absent. The value null means ``heads``.
    groups_default = heads
    if key_value_heads_default is not None and "num_key_value_heads" not in facts.values:
        groups_default = key_value_heads_default
    hidden = facts.positive("hidden_size")
    theta, scaling = facts.rope(
        rotary_fraction,
        theta_default=theta_default,
        accepts_yarn="latent" in extra or accepts_untruncated_yarn,
        accepts_untruncated_yarn=accepts_untruncated_yarn,
    )
    fields: dict[str, Any] = {
        "family": family,
        "num_layers": facts.positive("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": facts.positive("num_key_value_heads", default=groups_default),
        "head_dim": extra.get("head_dim")
        or facts.positive("head_dim", default=head_dim_default or max(1, hidden // heads)),
        "ffn_hidden_size": extra.get("ffn_hidden_size") or facts.positive("intermediate_size"),
        "vocab_size": facts.positive("vocab_size"),
        "tied_embeddings": facts.flag("tie_word_embeddings", False),
        "norm_eps": facts.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": facts.positive("max_position_embeddings"),
        "dtype": facts.dtype(),
        "rotary_fraction": rotary_fraction,
    }
    return ModelShape(**{**fields, **extra})


def read_dense_layers(facts: ConfigFacts) -> tuple[int, ...]:
    """Read which layers of a mixture of experts have a dense MLP.

    These are the first ``first_k_dense_replace`` layers, the layers in ``mlp_only_layers``, and the layers whose
    number, counted from 1, is no multiple of ``decoder_sparse_step``. This function is for added families whose SGLang
    model reads the same keys. No family of this file calls it.
    """
    first_layers = facts.count("first_k_dense_replace")
    listed_layers = facts.numbers("mlp_only_layers")
    step = facts.positive("decoder_sparse_step", default=1)
    dense_layers = []
    for layer in range(min(facts.positive("num_hidden_layers"), _MOST_LAYERS)):
        if layer < first_layers or layer in listed_layers or (layer + 1) % step:
            dense_layers.append(layer)
    return tuple(dense_layers)


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


def norm(megatron: str, hf: str, dim: str = "hidden") -> Rule:
    """Return the rule of a norm's weight. Every rank holds the whole weight."""
    return layer_rule(megatron, splits.replicated, (hf, (dim,)))


def gemma_norm(megatron: str, hf: str, dim: str = "hidden") -> Rule:
    """Return the rule of a GemmaRMSNorm's weight; SGLang keeps 1 + weight in a second tensor."""
    rule = norm(megatron, hf, dim)
    (row,) = rule.in_engine
    name = row.name.removesuffix("weight") + "gemma_weight"
    return replace(rule, engine=(row, replace(row, name=name, adds_one=True)))


def qkv(kind: str, *dims: str) -> Rule:
    """Return the rule of queries, keys and values. Megatron and SGLang both fuse them into one parameter.

    ``kind`` is weight or bias; ``dims`` names a weight's input dimension.
    """
    return layer_rule(
        f"self_attention.linear_qkv.{kind}",
        splits.query_groups,
        (f"self_attn.q_proj.{kind}", ("query", *dims)),
        (f"self_attn.k_proj.{kind}", ("kv", *dims)),
        (f"self_attn.v_proj.{kind}", ("kv", *dims)),
        engine=(f"self_attn.qkv_proj.{kind}", splits.stacked_heads),
    )


def moe_router(
    block: str = "mlp", engine_dtype: str | None = None, *, engine_block: str | None = None
) -> tuple[Rule, ...]:
    """Return two rules of a layer with experts: the norm before the experts, and the router.

    Args:
        block: the family's name of the module that has the router. The router's name in this module is ``gate``.
        engine_dtype: the type of SGLang's router if it is not the model's type.
        engine_block: SGLang's name of the module. None: ``block``.
    """
    return (
        norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        layer_rule(
            "mlp.router.weight",
            splits.replicated,
            (f"{block}.gate.weight", ("experts", "hidden")),
            engine=(f"{engine_block or block}.gate.weight", splits.replicated),
            engine_dtype=engine_dtype,
        ),
    )


def router_bias(name: str = "mlp.gate.e_score_correction_bias") -> Rule:
    """Return the rule of the bias that is added to a router's scores for the choice of experts only.

    ``name`` is the bias's name in the family's checkpoints. The bias is a buffer in Megatron-Core, is float32 in
    trainer and engine, and is not trained.
    """
    return layer_rule(
        "mlp.router.expert_bias",
        splits.replicated,
        (name, ("experts",)),
        dtype="float32",
        engine_dtype="float32",
    )


def expert_mlp(
    block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, ...]:
    """Return the rules of one expert's gated MLP, with the family's names in checkpoints. SGLang stacks all experts."""
    experts = f"{block}.experts."
    return (
        layer_rule(
            "mlp.experts.linear_fc1.weight{expert}",
            splits.column_parallel,
            (experts + f"{{expert}}.{gate}.weight", ("expert_ffn", "hidden")),
            (experts + f"{{expert}}.{up}.weight", ("expert_ffn", "hidden")),
            engine=(experts + "w13_weight[{expert}]", splits.column_parallel),
        ),
        layer_rule(
            "mlp.experts.linear_fc2.weight{expert}",
            splits.row_parallel,
            (experts + f"{{expert}}.{down}.weight", ("hidden", "expert_ffn")),
            engine=(experts + "w2_weight[{expert}]", splits.row_parallel),
        ),
    )


def packed_experts_of(experts: Iterable[Rule], *names: str) -> tuple[PackedExperts, ...]:
    """Return one packed tensor for each rule in ``experts``. ``names`` are the packed tensors' names without prefix."""
    packed = []
    for rule, name in zip(experts, names, strict=True):
        matrices = tuple(source.name for source in rule.sources)
        packed.append(PackedExperts(matrices[0].partition("{expert}")[0] + name, matrices))
    return tuple(packed)


def shared_expert(block: str = "mlp.shared_expert") -> tuple[Rule, ...]:
    """Return the rules of a shared expert, a gated MLP for every token. ``block`` is its name in the family."""
    return (
        layer_rule(
            "mlp.shared_experts.linear_fc1.weight",
            splits.column_parallel,
            (f"{block}.gate_proj.weight", ("shared_ffn", "hidden")),
            (f"{block}.up_proj.weight", ("shared_ffn", "hidden")),
            engine=(f"{block}.gate_up_proj.weight", splits.column_parallel),
        ),
        layer_rule(
            "mlp.shared_experts.linear_fc2.weight",
            splits.row_parallel,
            (f"{block}.down_proj.weight", ("hidden", "shared_ffn")),
        ),
    )


SHARED_EXPERT_GATE = layer_rule(
    "mlp.shared_experts.gate_weight",
    splits.replicated,
    ("mlp.shared_expert_gate.weight", ("one", "hidden")),
)
QKV_BIAS = qkv("bias")
QK_NORM = (
    norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head"),
    norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head"),
)
ALL_HEADS_NORM = (
    layer_rule(
        "self_attention.q_layernorm.weight",
        splits.column_parallel,
        ("self_attn.q_norm.weight", ("query",)),
    ),
    layer_rule(
        "self_attention.k_layernorm.weight",
        splits.column_parallel,
        ("self_attn.k_norm.weight", ("kv",)),
    ),
)
"""Norms that span the heads of all tensor-parallel ranks. Each rank has the weights of the heads that it holds."""
ATTENTION = (
    norm("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    qkv("weight", "hidden"),
    layer_rule(
        "self_attention.linear_proj.weight",
        splits.row_parallel,
        ("self_attn.o_proj.weight", ("hidden", "query")),
    ),
)
DENSE_MLP = (
    norm("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    layer_rule(
        "mlp.linear_fc1.weight",
        splits.column_parallel,
        ("mlp.gate_proj.weight", ("ffn", "hidden")),
        ("mlp.up_proj.weight", ("ffn", "hidden")),
        engine=("mlp.gate_up_proj.weight", splits.column_parallel),
    ),
    layer_rule(
        "mlp.linear_fc2.weight", splits.row_parallel, ("mlp.down_proj.weight", ("hidden", "ffn"))
    ),
)
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


ReadShape = Callable[[ConfigFacts], ModelShape]
EngineKeys = Callable[[ModelShape], Mapping[str, Any]]
"""Function of a model. It returns the keys of config.json that SGLang's model reads without a default, with values."""


def no_keys(shape: ModelShape) -> Mapping[str, Any]:
    """No keys."""
    return {}


@dataclass(frozen=True)
class Family:
    """A model family: how to read its config.json, and its table in model order.

    Attributes:
        model_type: the family's name in config.json.
        architecture: the model's class in transformers and SGLang.
        read: reads a ModelShape from the file's entries; reports entries that the table does not describe as faults.
        layer: the rows of a layer, before its experts.
        expert: the rows of each expert in a layer with experts.
        engine: SGLang's tensors in a layer that combine the sources of several rows of ``layer``, or hold only a part
            of a row's sources. If all sources of a row are in these tensors, the tensors of the row's ``in_engine``
            are left out.
        carries: the tensors of published checkpoints that are only copied: not trained, and not sent to engines.
        megatron: fields of Megatron's TransformerConfig that cannot be derived from the shape and the table.
        engine_keeps_output: whether SGLang's model has an output matrix beside the embedding even if both are tied.
        most_engine_ranks: the most tensor-parallel ranks on which SGLang's model computes the right values; None: no
            limit.
        attention_replicas: whether SGLang's model supports attention replicas. If not, the model divides attention
            among all ranks.
        output_per_replica: whether SGLang's model can divide the output matrix among the ranks of an attention replica
            (``enable_dp_lm_head``).
        engine_keys: keys of config.json that SGLang's model reads without a default. transformers 5 does not save all
            of these keys.
        packed: the tensors that have all experts of a layer in files. Checkpoints are written with packed tensors.
            Files with a separate tensor for each matrix are read, too.
        text_table: in a model with further parts, the table of config.json that has the language model's entries.
        outer_engine_keys: keys outside of ``text_table`` that SGLang's model needs and that files lack.
        engine_options: options that SGLang's servers need for this family.
        needs_direct_placement: whether SGLang's own loader reads experts only from packed tensors. Updates send single
            matrices, so the server must place them without this loader.
        engine_has_config_dtype: whether SGLang's model makes linears in the type of config.json even if the server has
            another type. Then both types must be equal.
    """

    model_type: str
    architecture: str
    read: ReadShape
    layer: tuple[Rule, ...]
    expert: tuple[Rule, ...] = ()
    engine: tuple[EngineRow, ...] = ()
    carries: CarriedTensors = no_tensor
    megatron: Mapping[str, Any] = field(default_factory=dict)
    engine_keeps_output: bool = False
    most_engine_ranks: int | None = None
    attention_replicas: bool = False
    output_per_replica: bool = True
    engine_keys: EngineKeys = no_keys
    packed: tuple[PackedExperts, ...] = ()
    text_table: str | None = None
    outer_engine_keys: Mapping[str, Any] = field(default_factory=dict)
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    needs_direct_placement: bool = False
    engine_has_config_dtype: bool = False
    embedding: Rule = EMBEDDING
    final_norm: Rule = FINAL_NORM
    output: Rule = OUTPUT

    def rules_of(self, shape: ModelShape, layer: int) -> list[Rule]:
        """Return the rows of ``layer`` before its experts."""
        return [rule for rule in self.layer if rule.layers(shape, layer)]

    def engine_rows_of(self, shape: ModelShape, layer: int) -> list[EngineRow]:
        """Return SGLang's tensors in ``layer``, without its experts."""
        rows = [row for row in self.engine if row.layers(shape, layer)]
        sources_in_rows: set[Source] = set()
        for row in rows:
            sources_in_rows.update(row.sources)
        implied_rows: list[EngineRow] = []
        for rule in self.rules_of(shape, layer):
            if not sources_in_rows.issuperset(rule.sources):
                implied_rows += rule.in_engine
        return implied_rows + rows

    def engine_expert_rows_of(self, shape: ModelShape, layer: int) -> list[EngineRow]:
        """Return SGLang's tensors of each expert of ``layer``; none if the layer is dense."""
        rows: list[EngineRow] = []
        for rule in self.expert_rules_of(shape, layer):
            rows += rule.in_engine
        return rows

    def expert_rules_of(self, shape: ModelShape, layer: int) -> tuple[Rule, ...]:
        """Return the rows of each expert of ``layer``; none if the layer is dense."""
        if routed_layers(shape, layer):
            return self.expert
        return ()

    @property
    def vocabulary_tensors(self) -> tuple[str, str]:
        """Hugging Face names of the embedding and of the output layer."""
        return self.embedding.sources[0].name, self.output.sources[0].name


FAMILIES: dict[str, Family] = {}
"""All families, by the ``model_type`` in config.json."""


def family_of(shape: ModelShape) -> Family:
    """Return the family of ``shape``."""
    return FAMILIES[shape.family]


def has_layer_parameter(shape: ModelShape, name: str) -> bool:
    """Return whether a layer of the model has Megatron's parameter ``name``.

    An example of a name: ``self_attention.linear_qkv.bias``.
    """
    rules = [rule for rule in family_of(shape).layer if rule.megatron == MEGATRON_LAYER + name]
    return any(_count_layers(rule, shape) for rule in rules)


def _count_layers(rule: Rule, shape: ModelShape) -> int:
    """Count the layers that have the row ``rule``."""
    return sum(rule.layers(shape, layer) for layer in range(shape.num_layers))


@cache
def layers_are_alike(shape: ModelShape) -> bool:
    """Return whether all layers of the model have the same parameters, so that a checkpoint can stack them."""
    family = family_of(shape)
    rules = (*family.layer, *in_layers(routed_layers, *family.expert))
    return all(_count_layers(rule, shape) in (0, shape.num_layers) for rule in rules)


def engine_layer_counts(shape: ModelShape) -> list[tuple[EngineRow, int]]:
    """Return each of SGLang's tensors in layers, without experts, with the number of layers that have it."""
    counts = Counter[EngineRow]()
    for layer in range(shape.num_layers):
        counts.update(family_of(shape).engine_rows_of(shape, layer))
    return list(counts.items())


def layer_counts(shape: ModelShape, layers: Iterable[int]) -> list[tuple[Rule, int]]:
    """Return each row of ``layers`` before their experts, with the number of these layers that have it."""
    counts = Counter[Rule]()
    for layer in layers:
        counts.update(family_of(shape).rules_of(shape, layer))
    return list(counts.items())


def load_model_shape(hf_dir: str | Path, *, quantized: bool = False) -> ModelShape:
    """Read ``hf_dir/config.json`` (or a config file itself).

    ``quantized``: whether the caller can read weights of 8 and 4 bits. If not, a quantised model is refused.

    Raises:
        ModelConfigError: The file is missing or is not JSON.
        UnsupportedModelError: The family is not supported, or no table describes some entries. The error has all
            faults.
    """
    facts, shape = _read(hf_dir)
    _refuse_quantization(facts, reads_quantized=quantized)
    if not facts.faults:
        # Compare values with each other only if each value is valid: a placeholder would cause a second, wrong fault.
        _check_relations(shape, facts)
    if facts.faults:
        raise UnsupportedModelError(facts.faults)
    return shape


def unknown_key_warnings(hf_dir: str | Path) -> list[str]:
    """Return a warning for each key of ``hf_dir/config.json`` that may change the model but is not known here.

    Raises the errors of ``load_model_shape`` if the file does not exist, or the family is not supported.
    """
    facts, _ = _read(hf_dir)
    return [
        f"{facts.where} has the key {key} with the value {value!r}, which is neither read nor known to be harmless: if "
        "it changes the model's arithmetic, another model is trained"
        for key, value in facts.unknown().items()
    ]


def missing_engine_keys(hf_dir: str | Path) -> dict[str, Any]:
    """Return the keys that SGLang's model reads and that ``hf_dir/config.json`` lacks, with the model's values.

    transformers 5 does not save a key if transformers' own model supports only one value of the key. Raises the errors
    of ``load_model_shape``.
    """
    facts, shape = _read(hf_dir)
    family = family_of(shape)
    outer_keys = family.outer_engine_keys
    missing = {key: value for key, value in outer_keys.items() if facts.values.get(key) is None}
    keys = family.engine_keys(shape)
    missing_in_table = {key: value for key, value in keys.items() if facts.values.get(key) is None}
    if missing_in_table and family.text_table is not None:
        return {**missing, family.text_table: missing_in_table}
    return {**missing, **missing_in_table}


def packed_experts(hf_dir: Path) -> tuple[PackedExperts, ...]:
    """Return the packed tensors of a folder's family; none without a config.json of a known family."""
    try:
        values = _read_json(hf_dir / "config.json")
    except ModelConfigError:
        return ()
    if not isinstance(values, dict):
        return ()
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        return ()
    return family.packed


def _read(hf_dir: str | Path) -> tuple[ConfigFacts, ModelShape]:
    path = Path(hf_dir)
    if path.is_dir():
        path = path / "config.json"
    values = _read_json(path)
    model_type = None
    if isinstance(values, dict):
        model_type = values.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise UnsupportedModelError(
            [f"{path}: model_type {model_type!r}; supported families: {sorted(FAMILIES)}"]
        )
    facts = ConfigFacts(language_model_values(values), str(path))
    if family.text_table is not None:
        _check_text_table(facts, family, values.get(family.text_table))
    facts.require("architectures", [family.architecture], [family.architecture])
    facts.ignore("quantization_config")
    shape = family.read(facts)
    facts.require_neutral()
    return facts, shape


def _check_text_table(facts: ConfigFacts, family: Family, table: Any) -> None:
    if not isinstance(table, Mapping):
        facts.fault(f"{family.text_table} is {table!r}, expected a table")
        return
    expected = f"{family.model_type}_text"
    if table.get("model_type", expected) != expected:
        facts.fault(
            f"{family.text_table}.model_type is {table['model_type']!r}, expected {expected!r}"
        )


_OUTER_KEYS = ("architectures", "model_type", "tie_word_embeddings")
"""Keys that are read outside of the language model's table, also in a config.json with this table."""


def language_model_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entries of a config.json. If the language model's entries are in a table, they replace the table."""
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None or family.text_table is None:
        return values
    table = values.get(family.text_table)
    if not isinstance(table, Mapping):
        return values
    outer_values = {key: value for key, value in values.items() if key != family.text_table}
    values_of_outer_keys = {key: values[key] for key in _OUTER_KEYS if key in values}
    return {**outer_values, **table, **values_of_outer_keys}


def with_language_model_values(
    values: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a config.json with ``changes`` to the entries of its language model, inside or outside of the table."""
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None or family.text_table is None:
        return {**values, **changes}
    table = values.get(family.text_table)
    if not isinstance(table, Mapping):
        return {**values, **changes}
    outer_values = dict(values)
    table_values = dict(table)
    for key, value in changes.items():
        # Change an entry where the file has it, so that no second value contradicts the new value.
        is_only_outside = key in outer_values and key not in table_values
        if key in _OUTER_KEYS or is_only_outside:
            outer_values[key] = value
        else:
            table_values[key] = value
    return {**outer_values, family.text_table: table_values}


_READ_METHODS = ("fp8", "mxfp4")
"""The ``quant_method`` in config.json of weights that the converter reads."""


def _refuse_quantization(facts: ConfigFacts, *, reads_quantized: bool) -> None:
    scheme = facts.values.get("quantization_config")
    if scheme is None:
        return
    if not isinstance(scheme, Mapping):
        facts.fault(f"quantization_config is {scheme!r}, expected a table")
        return
    method = scheme.get("quant_method")
    if method not in _READ_METHODS:
        way_out = "use the model's unquantised release"
    elif reads_quantized:
        return
    else:
        way_out = (
            "`megatron-dppo convert hf-to-megatron --dtype bfloat16` reads such weights with their scales, and "
            "`convert megatron-to-hf` makes an unquantised folder of the result"
        )
    facts.fault(
        f"quantization_config says {method!r}, expected none: weights are trained and served unquantised; {way_out}"
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(
            f"{path}: no such file; expected a Hugging Face config.json"
        ) from None
    # json raises ValueError also for an integer of more digits than Python converts.
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path}: not a readable JSON file ({error})") from error


_MOST_LAYERS = 4096
_MOST_EXPERTS = 4096
"""Limits of a plausible model: the table has rows for each layer and expert, and too many rows would fill memory."""


def _check_relations(shape: ModelShape, facts: ConfigFacts) -> None:
    if shape.num_layers > _MOST_LAYERS:
        facts.fault(f"num_hidden_layers is {shape.num_layers}, expected at most {_MOST_LAYERS}")
    if shape.num_experts > _MOST_EXPERTS:
        facts.fault(f"num_experts is {shape.num_experts}, expected at most {_MOST_EXPERTS}")
    if shape.is_moe and not shape.moe_layers:
        facts.fault(
            f"all {shape.num_layers} layers are dense, expected at least one layer with experts"
        )
    heads = shape.num_attention_heads
    groups = shape.num_query_groups
    if heads % groups:
        facts.fault(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
        )
    if shape.experts_per_token > shape.num_experts:
        facts.fault(
            f"num_experts_per_tok is {shape.experts_per_token}, expected at most the {shape.num_experts} experts"
        )
    if shape.experts_per_token == 1 and shape.norm_topk_prob:
        facts.fault(
            "num_experts_per_tok is 1, expected at least 2: the model divides the weights of a token's experts by "
            "their sum, and Megatron-Core does not divide the weight of a single expert"
        )


def declares(model_type: str, architecture: str, **fields: Any) -> Callable[[ReadShape], ReadShape]:
    """Return a decorator that puts a family into FAMILIES, with the decorated function as its ``read``.

    ``fields``: the other fields of Family.
    """

    def add(read: ReadShape) -> ReadShape:
        FAMILIES[model_type] = Family(model_type, architecture, read, **fields)
        return read

    return add


@declares("llama", "LlamaForCausalLM", layer=(*ATTENTION, *DENSE_MLP))
def read_llama(facts: ConfigFacts) -> ModelShape:
    """Llama 2 and 3 (OctoThinker is Llama 3.2): no biases; ``llama3`` rotary scaling."""
    facts.require("attention_bias", False, False)
    facts.require("sliding_window", None, None)
    return read_decoder_shape(facts, "llama")


@declares("qwen2", "Qwen2ForCausalLM", layer=(*ATTENTION, QKV_BIAS, *DENSE_MLP))
def read_qwen2(facts: ConfigFacts) -> ModelShape:
    """Qwen2 and Qwen2.5 dense (DeepSeek-R1-Distill-Qwen): biases on Q, K and V only."""
    facts.ignore("attention_bias")
    return read_decoder_shape(facts, "qwen2", key_value_heads_default=32)


@declares(
    "qwen3", "Qwen3ForCausalLM", layer=(*ATTENTION, *QK_NORM, *DENSE_MLP), attention_replicas=True
)
def read_qwen3(facts: ConfigFacts) -> ModelShape:
    """Qwen3 dense (Qwen3-8B, Qwen3-1.7B): qk-norm, no biases."""
    facts.require("attention_bias", False, False)
    return read_decoder_shape(facts, "qwen3", head_dim_default=128, key_value_heads_default=32)


@declares(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    layer=(*ATTENTION, *QK_NORM, *moe_router()),
    expert=expert_mlp(),
    megatron={"moe_router_score_function": "softmax"},
    engine_keeps_output=True,
    attention_replicas=True,
)
def read_qwen3_moe(facts: ConfigFacts) -> ModelShape:
    """Qwen3-MoE (Qwen3-30B-A3B and kin): qk-norm, every layer's MLP routed, no shared expert."""
    facts.require("attention_bias", False, False)
    return read_decoder_shape(
        facts,
        "qwen3_moe",
        key_value_heads_default=4,
        num_experts=facts.positive("num_experts", "num_local_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=facts.positive("moe_intermediate_size"),
        norm_topk_prob=facts.flag("norm_topk_prob", False),
    )


@declares(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    layer=(*ATTENTION, QKV_BIAS, *moe_router(), *shared_expert(), SHARED_EXPERT_GATE),
    expert=expert_mlp(),
    megatron={"moe_router_score_function": "softmax"},
    engine_keeps_output=True,
    attention_replicas=True,
)
def read_qwen2_moe(facts: ConfigFacts) -> ModelShape:
    """Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): biases on Q, K and V, a gated shared expert in every layer."""
    facts.require("qkv_bias", True, True)
    facts.ignore("attention_bias")
    return read_decoder_shape(
        facts,
        "qwen2_moe",
        key_value_heads_default=16,
        num_experts=facts.positive("num_experts", "num_local_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=facts.positive("moe_intermediate_size"),
        norm_topk_prob=facts.flag("norm_topk_prob", False),
        shared_ffn_hidden_size=facts.positive("shared_expert_intermediate_size"),
        gates_shared_expert=True,
    )


@declares(
    "olmoe",
    "OlmoeForCausalLM",
    layer=(*ATTENTION, *ALL_HEADS_NORM, *moe_router()),
    expert=expert_mlp(),
    megatron={"moe_router_score_function": "softmax"},
    engine_keeps_output=True,
    # SGLang's model norms the heads of one rank with the weights of all heads.
    most_engine_ranks=1,
)
def read_olmoe(facts: ConfigFacts) -> ModelShape:
    """OLMoE (OLMoE-1B-7B): queries and keys normed over all heads; refuses values that SGLang's model does not read."""
    facts.require("attention_bias", False, False)
    facts.require("sliding_window", None, None)
    facts.require("norm_topk_prob", False, False)
    facts.require("rms_norm_eps", 1e-5, 1e-5)
    shape = read_decoder_shape(
        facts,
        "olmoe",
        num_experts=facts.positive("num_experts", "num_local_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=facts.positive("intermediate_size"),
        norm_topk_prob=False,
        norm_eps=1e-5,
        norms_all_heads=True,
    )
    heads = shape.num_attention_heads
    facts.require("num_key_value_heads", heads, heads)
    derived_head_dim = shape.hidden_size // heads
    facts.require("head_dim", derived_head_dim, derived_head_dim)
    return shape


def _norms_heads(shape: ModelShape, layer: int) -> bool:
    return shape.norms_heads


def _has_query_latent(shape: ModelShape, layer: int) -> bool:
    return shape.latent is not None and shape.latent.query_rank is not None


def _has_no_query_latent(shape: ModelShape, layer: int) -> bool:
    return not _has_query_latent(shape, layer)


def dense_then_moe(engine_dtype: str | None = None) -> tuple[Rule, ...]:
    """Return the rules of the MLP in dense layers, and of the router and the shared experts in layers with experts.

    The router uses sigmoids and has a bias. ``engine_dtype`` is the type of SGLang's router if it is not the model's
    type.
    """
    router = moe_router(engine_dtype=engine_dtype)
    moe = (*router, router_bias(), *shared_expert("mlp.shared_experts"))
    return (*in_layers(dense_layers, *DENSE_MLP), *in_layers(routed_layers, *moe))


def read_sigmoid_router(facts: ConfigFacts, default: Router) -> Router:
    """Read a router of DeepSeek-V3's kind. ``default`` has transformers' values of missing keys."""
    facts.require("scoring_func", "sigmoid", "sigmoid")
    facts.require("topk_method", "noaux_tc", "noaux_tc")
    facts.require("norm_topk_prob", True, True)
    groups = facts.positive("n_group", default=default.groups)
    chosen_groups = facts.positive("topk_group", default=default.chosen_groups)
    experts_per_token = facts.positive("num_experts_per_tok")
    if groups == chosen_groups:
        # A choice of all groups has no effect.
        groups = chosen_groups = 1
    if groups > 1 and experts_per_token != 2 * chosen_groups:
        facts.fault(
            f"topk_group is {chosen_groups} with num_experts_per_tok {experts_per_token}, expected half of it: "
            "Megatron-Core's score of a group is the sum of its highest num_experts_per_tok / topk_group scores, but "
            "the model's score of a group is the sum of the group's highest 2 scores"
        )
    experts = facts.positive("n_routed_experts", "num_local_experts")
    if experts % groups:
        facts.fault(f"n_group is {groups}, expected a divisor of the {experts} experts")
    scale = facts.number("routed_scaling_factor", default.scale)
    return Router("sigmoid", True, groups, chosen_groups, scale)


def read_first_layers(facts: ConfigFacts, default: int) -> tuple[int, ...]:
    """Return the numbers of the first layers, whose MLP is dense.

    ``default`` is transformers' number of first layers if the file does not have the key.
    """
    count = facts.count("first_k_dense_replace", default)
    layers = facts.positive("num_hidden_layers")
    if count >= layers:
        facts.fault(f"first_k_dense_replace is {count}, expected less than the {layers} layers")
        return ()
    return tuple(range(min(count, _MOST_LAYERS)))


def read_dense_then_moe(
    facts: ConfigFacts, family: str, router: Router, **extra: Any
) -> ModelShape:
    """Read a model with the rows of ``dense_then_moe``; ``router``: as for ``read_sigmoid_router``."""
    facts.require("moe_layer_freq", 1, 1)
    # Further layers predict more tokens. Checkpoints carry their tensors.
    facts.ignore("num_nextn_predict_layers", "num_mtp_layers")
    width = facts.positive("moe_intermediate_size")
    return read_decoder_shape(
        facts,
        family,
        num_experts=facts.positive("n_routed_experts", "num_local_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=width,
        shared_ffn_hidden_size=facts.positive("n_shared_experts", default=1) * width,
        router=read_sigmoid_router(facts, router),
        **extra,
    )


@declares(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    layer=(
        *ATTENTION,
        QKV_BIAS,
        *in_layers(_norms_heads, *QK_NORM),
        *dense_then_moe(engine_dtype="float32"),
    ),
    expert=expert_mlp(),
    carries=later_layers,
    attention_replicas=True,
)
def read_glm4_moe(facts: ConfigFacts) -> ModelShape:
    """GLM-4.5, 4.6 and 4.7: biases on Q, K and V, half of each head rotated, in some models norms of heads."""
    # A missing key means False in transformers, so it is refused.
    facts.require("attention_bias", True, False)
    return read_dense_then_moe(
        facts,
        "glm4_moe",
        Router("sigmoid", has_bias=True),
        key_value_heads_default=8,
        rotary_fraction=0.5,
        norms_heads=facts.flag("use_qk_norm", False),
        dense_layers=read_first_layers(facts, 1),
        norm_eps=facts.number("rms_norm_eps", 1e-5),
    )


def latent_rule(megatron: str, split: splits.Split, hf: str, *dims: str) -> Rule:
    """Return a row of latent attention, from names without the prefix of the layer's attention."""
    return layer_rule(f"self_attention.{megatron}", split, (f"self_attn.{hf}", dims))


_QUERY = latent_rule(
    "linear_q_proj.weight", splits.column_parallel, "q_proj.weight", "query", "hidden"
)
_QUERY_LATENT = (
    latent_rule("linear_q_down_proj.weight", splits.replicated, "q_a_proj.weight", "query_rank", "hidden"),
    latent_rule("linear_q_up_proj.layer_norm_weight", splits.replicated, "q_a_layernorm.weight", "query_rank"),
    latent_rule("linear_q_up_proj.weight", splits.column_parallel, "q_b_proj.weight", "query", "query_rank"),
)  # fmt: skip
LATENT_ATTENTION = (
    norm("input_layernorm.weight", "input_layernorm.weight"),
    *in_layers(_has_no_query_latent, _QUERY),
    *in_layers(_has_query_latent, *_QUERY_LATENT),
    latent_rule("linear_kv_down_proj.weight", splits.replicated, "kv_a_proj_with_mqa.weight", "kv_latent", "hidden"),
    latent_rule("linear_kv_up_proj.layer_norm_weight", splits.replicated, "kv_a_layernorm.weight", "kv_rank"),
    latent_rule("linear_kv_up_proj.weight", splits.column_parallel, "kv_b_proj.weight", "kv_heads", "kv_rank"),
    latent_rule("linear_proj.weight", splits.row_parallel, "o_proj.weight", "hidden", "attention"),
)  # fmt: skip


LATENTS_IN_ENGINE = engine_row(
    "self_attn.fused_qkv_a_proj_with_mqa.weight",
    splits.replicated,
    ("self_attn.q_a_proj.weight", ("query_rank", "hidden")),
    ("self_attn.kv_a_proj_with_mqa.weight", ("kv_latent", "hidden")),
    layers=_has_query_latent,
)
"""SGLang's matrix that computes both latents at once."""


def read_latent_moe(
    facts: ConfigFacts, family: str, router: Router, query_rank: int, **extra: Any
) -> ModelShape:
    """Read a model with LATENT_ATTENTION.

    Args:
        facts: the file's entries.
        family: the ``model_type``.
        router: as for ``read_sigmoid_router``.
        query_rank: transformers' value if q_lora_rank is missing.
        extra: fields of ModelShape to add or to replace.
    """
    facts.require("attention_bias", False, False)
    facts.require("rope_interleave", True, True)
    # transformers writes the size of the rotated part as head_dim.
    facts.ignore("head_dim", "qk_head_dim", "q_lora_rank")
    has_query_latent = facts.values.get("q_lora_rank", query_rank) is not None
    latent = LatentAttention(
        facts.positive("q_lora_rank", default=query_rank) if has_query_latent else None,
        facts.positive("kv_lora_rank"),
        facts.positive("qk_nope_head_dim"),
        facts.positive("qk_rope_head_dim"),
        facts.positive("v_head_dim"),
    )
    heads = facts.positive("num_attention_heads")
    facts.require("num_key_value_heads", heads, heads)
    size = latent.head_size
    return read_dense_then_moe(facts, family, router, latent=latent, head_dim=size, **extra)


def _deepseek_engine_keys(shape: ModelShape) -> Mapping[str, Any]:
    return {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


@declares(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    layer=(*LATENT_ATTENTION, *dense_then_moe()),
    engine=(LATENTS_IN_ENGINE,),
    expert=expert_mlp(),
    carries=later_layers,
    engine_keys=_deepseek_engine_keys,
    attention_replicas=True,
)
def read_deepseek_v3(facts: ConfigFacts) -> ModelShape:
    """DeepSeek-V3 and R1, Moonlight: latent attention, in some models with a latent of queries and YaRN."""
    # Only SGLang reads this key.
    facts.require("router_fp32", False, False)
    first_layers = read_first_layers(facts, 3)
    router = Router("sigmoid", has_bias=True, groups=8, chosen_groups=4, scale=2.5)
    return read_latent_moe(facts, "deepseek_v3", router, 1536, dense_layers=first_layers)


def _leading_dense_layers(facts: ConfigFacts) -> int:
    """Count the dense layers before the first layer with experts; one if ``mlp_layer_types`` is missing."""
    layers = min(facts.positive("num_hidden_layers"), _MOST_LAYERS)
    kinds = facts.values.get("mlp_layer_types")
    # ``require`` below reports a value that is no list.
    if not kinds or not isinstance(kinds, list):
        kinds = ["dense"]
    count = 0
    # At least the last layer must have experts.
    while count < min(layers - 1, len(kinds)) and kinds[count] == "dense":
        count += 1
    expected = ["dense"] * count + ["sparse"] * (layers - count)
    facts.require("mlp_layer_types", expected, expected)
    return count


def _agreed_dense_layers(facts: ConfigFacts) -> tuple[int, ...]:
    """Return the numbers of the first layers, whose MLP is dense.

    transformers reads ``mlp_layer_types``, SGLang reads ``first_k_dense_replace``: both must agree.
    """
    first_layers = _leading_dense_layers(facts)
    facts.require("first_k_dense_replace", first_layers, first_layers)
    return tuple(range(first_layers))


def _glm_lite_engine_keys(shape: ModelShape) -> Mapping[str, Any]:
    return {"first_k_dense_replace": len(shape.dense_layers)}


@declares(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    layer=(*LATENT_ATTENTION, *dense_then_moe(engine_dtype="float32")),
    engine=(LATENTS_IN_ENGINE,),
    expert=expert_mlp(),
    carries=later_layers,
    engine_keys=_glm_lite_engine_keys,
    attention_replicas=True,
)
def read_glm4_moe_lite(facts: ConfigFacts) -> ModelShape:
    """GLM-4.7-Flash: latent attention, also of queries."""
    return read_latent_moe(
        facts,
        "glm4_moe_lite",
        Router("sigmoid", has_bias=True, scale=1.8),
        768,
        dense_layers=_agreed_dense_layers(facts),
        norm_eps=facts.number("rms_norm_eps", 1e-5),
    )


def _minimax_engine_keys(shape: ModelShape) -> Mapping[str, Any]:
    return {
        "rotary_dim": round(shape.rotary_fraction * shape.head_dim),
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


@declares(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    layer=(
        *ATTENTION,
        *ALL_HEADS_NORM,
        *moe_router("block_sparse_moe", engine_dtype="float32"),
        router_bias("block_sparse_moe.e_score_correction_bias"),
    ),
    expert=expert_mlp("block_sparse_moe", gate="w1", up="w3", down="w2"),
    carries=later_layers,
    engine_keys=_minimax_engine_keys,
    attention_replicas=True,
    # SGLang's model divides its output matrix among all ranks, even with enable_dp_lm_head.
    output_per_replica=False,
)
def read_minimax_m2(facts: ConfigFacts) -> ModelShape:
    """MiniMax-M2: norms of all heads, a part of each head rotated, a router of sigmoids with a bias."""
    facts.require("scoring_func", "sigmoid", "sigmoid")
    facts.require("use_qk_norm", True, True)
    facts.require("qk_norm_type", "per_layer", "per_layer")
    facts.require("use_routing_bias", True, True)
    facts.require("shared_intermediate_size", 0, 0)
    facts.require_each("attn_type_list", 1)
    # Further layers predict more tokens. Checkpoints carry their tensors.
    facts.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    head_dim = facts.positive("head_dim", default=128)
    rotary_dim = facts.positive("rotary_dim", default=_rotary_size(facts, head_dim))
    return read_decoder_shape(
        facts,
        "minimax_m2",
        key_value_heads_default=8,
        theta_default=5e6,
        rotary_fraction=rotary_dim / head_dim,
        head_dim=head_dim,
        num_experts=facts.positive("num_local_experts", "num_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=facts.positive("intermediate_size"),
        router=Router("sigmoid", has_bias=True),
        norms_all_heads=True,
    )


def _rotary_size(facts: ConfigFacts, head_dim: int, default: float = 1) -> int:
    """Return the size of a head's rotated part, by ``partial_rotary_factor`` of the file or of its table of rotary
    parameters.

    ``default`` is the factor that transformers assumes if neither has the key. A factor that is no share of a head
    is ignored here; ``ConfigFacts.rope`` reports it.
    """
    tables = (facts.values, facts.values.get("rope_parameters"), facts.values.get("rope_scaling"))
    for table in tables:
        factor = table.get("partial_rotary_factor") if isinstance(table, Mapping) else None
        if isinstance(factor, int | float) and 0 < factor <= 1:
            return round(factor * head_dim)
    return round(default * head_dim)


def _delta_rule(
    megatron: str,
    split: splits.Split,
    hf: str,
    *dims: str,
    dtype: str | None = None,
    engine_dtype: str | None = None,
) -> Rule:
    """Return a row of a delta net with one source. The names lack the prefixes ``self_attention.`` and
    ``linear_attn.``."""
    return layer_rule(
        f"self_attention.{megatron}",
        split,
        (f"linear_attn.{hf}", dims),
        dtype=dtype,
        engine_dtype=engine_dtype,
    )


def _in_files(dtype: str, rule: Rule) -> Rule:
    """Return ``rule`` with sources that may have the type ``dtype`` in files."""
    sources = tuple(replace(source, file_dtype=dtype) for source in rule.sources)
    return replace(rule, sources=sources)


DELTA_NET = (
    gemma_norm("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
    _delta_rule("conv1d.weight", splits.delta_sections, "conv1d.weight", "delta_qkv", "one", "delta_kernel"),
    _delta_rule("dt_bias", splits.column_parallel, "dt_bias", "delta_heads"),
    # Some checkpoints have A_log and the output norm in fp32, and all other tensors in bfloat16. For the output norm,
    # ``dtype`` allows fp32 in files, too.
    _in_files(
        "float32", _delta_rule("A_log", splits.column_parallel, "A_log", "delta_heads", engine_dtype="float32")
    ),
    _delta_rule(
        "out_norm.weight", splits.replicated, "norm.weight", "delta_head", dtype="float32", engine_dtype=CONFIG_DTYPE
    ),
    _delta_rule("out_proj.weight", splits.row_parallel, "out_proj.weight", "hidden", "delta_values"),
)  # fmt: skip
"""The rules of a delta net, except the input matrices: families divide these differently."""


def _gated_attention(engine_block: str) -> tuple[Rule, ...]:
    """Return the rules of attention with a gate. In SGLang's names, ``engine_block`` replaces ``self_attn.``."""
    query_norm = gemma_norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head")
    key_norm = gemma_norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head")
    rules = (
        layer_rule(
            "self_attention.linear_qkv.weight",
            splits.gated_query_groups,
            ("self_attn.q_proj.weight", ("gated_query", "hidden")),
            ("self_attn.k_proj.weight", ("kv", "hidden")),
            ("self_attn.v_proj.weight", ("kv", "hidden")),
            engine=("self_attn.qkv_proj.weight", splits.stacked_heads),
        ),
        layer_rule(
            "self_attention.linear_proj.weight",
            splits.row_parallel,
            ("self_attn.o_proj.weight", ("hidden", "query")),
        ),
        query_norm,
        key_norm,
    )
    input_norm = gemma_norm("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    return (input_norm, *(_renamed_in_engine(rule, "self_attn.", engine_block) for rule in rules))


def _renamed_in_engine(rule: Rule, old: str, new: str) -> Rule:
    rows = tuple(replace(row, name=row.name.replace(old, new)) for row in rule.in_engine)
    return replace(rule, engine=rows)


_FUSED_INPUTS = (
    ("linear_attn.in_proj_qkvz.weight", ("delta_qkvz", "hidden")),
    ("linear_attn.in_proj_ba.weight", ("delta_ba", "hidden")),
)
DELTA_INPUTS_BY_HEAD = replace(
    layer_rule("self_attention.in_proj.weight", splits.delta_inputs_by_head, *_FUSED_INPUTS),
    engine=tuple(engine_row(source[0], splits.column_parallel, source) for source in _FUSED_INPUTS),
)
"""The input matrices of a delta net if checkpoints and SGLang order their rows by key head."""
HYBRID_MOE = (
    # These two rules replace the two rules of ``moe_router``: another norm, and the same router.
    gemma_norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    moe_router()[1],
    *shared_expert(),
    SHARED_EXPERT_GATE,
)
"""The rules of a softmax router and a gated shared expert, after a norm that multiplies by 1 + its weight."""
GEMMA_FINAL_NORM = replace(
    FINAL_NORM,
    engine=(
        *FINAL_NORM.in_engine,
        replace(FINAL_NORM.in_engine[0], name="model.norm.gemma_weight", adds_one=True),
    ),
)


def read_hybrid_moe(facts: ConfigFacts, family: str, **extra: Any) -> ModelShape:
    """Read a model with delta nets, gated attention in every n-th layer, and experts and a gated shared expert in all
    layers."""
    facts.require("attention_bias", False, False)
    facts.require("attn_output_gate", True, True)
    facts.require("output_gate_type", "swish", "swish")
    facts.require("mamba_ssm_dtype", "float32", "float32")
    facts.ignore("intermediate_size")
    interval = facts.positive("full_attention_interval", default=_attention_interval(facts))
    layers = min(facts.positive("num_hidden_layers"), _MOST_LAYERS)
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    facts.require("layer_types", kinds, kinds)
    delta = DeltaNet(
        interval,
        facts.positive("linear_num_key_heads"),
        facts.positive("linear_num_value_heads"),
        facts.positive("linear_key_head_dim"),
        facts.positive("linear_value_head_dim"),
        facts.positive("linear_conv_kernel_dim"),
    )
    if delta.value_heads % delta.key_heads:
        facts.fault(
            f"linear_num_value_heads is {delta.value_heads}, expected a multiple of the {delta.key_heads} key heads"
        )
    head_dim = facts.positive("head_dim", default=256)
    shared_width = facts.positive("shared_expert_intermediate_size")
    return read_decoder_shape(
        facts,
        family,
        key_value_heads_default=2,
        # No layer has a dense MLP of this width.
        ffn_hidden_size=shared_width,
        rotary_fraction=_rotary_size(facts, head_dim, default=0.25) / head_dim,
        head_dim=head_dim,
        num_experts=facts.positive("num_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=facts.positive("moe_intermediate_size"),
        norm_topk_prob=facts.flag("norm_topk_prob", True),
        shared_ffn_hidden_size=shared_width,
        gates_shared_expert=True,
        delta=delta,
        gates_attention=True,
        norms_add_one=True,
        **extra,
    )


def _attention_interval(facts: ConfigFacts) -> int:
    """Return the interval of the layers with attention, from the list of layer types: transformers 5 saves only this
    list."""
    kinds = facts.values.get("layer_types")
    if isinstance(kinds, list) and "full_attention" in kinds:
        return kinds.index("full_attention") + 1
    return 4


def _hybrid_engine_keys(shape: ModelShape) -> Mapping[str, Any]:
    interval = 0 if shape.delta is None else shape.delta.attention_interval
    return {
        "full_attention_interval": interval,
        "partial_rotary_factor": shape.rotary_fraction,
        "rope_theta": shape.rope_theta,
    }


@declares(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    layer=(
        *in_layers(attention_layers, *_gated_attention("")),
        *in_layers(delta_layers, *DELTA_NET, DELTA_INPUTS_BY_HEAD),
        *HYBRID_MOE,
    ),
    expert=expert_mlp(),
    final_norm=GEMMA_FINAL_NORM,
    carries=with_prefix("mtp."),
    megatron={"moe_router_score_function": "softmax"},
    engine_keys=_hybrid_engine_keys,
    attention_replicas=True,
)
def read_qwen3_next(facts: ConfigFacts) -> ModelShape:
    """Qwen3-Next: gated delta nets, gated attention in every fourth layer, norms that multiply by 1 + their weight."""
    return read_hybrid_moe(facts, "qwen3_next")


def _hy_engine_keys(shape: ModelShape) -> Mapping[str, Any]:
    return {"first_k_dense_replace": len(shape.dense_layers), "qk_norm": True, "route_norm": True}


@declares(
    "hy_v3",
    "HYV3ForCausalLM",
    layer=(
        *ATTENTION,
        *QK_NORM,
        *in_layers(dense_layers, *DENSE_MLP),
        *in_layers(routed_layers, *moe_router("mlp.router", "float32", engine_block="mlp")),
        *in_layers(routed_layers, router_bias("mlp.expert_bias"), *shared_expert("mlp.shared_mlp")),
    ),
    expert=expert_mlp(),
    carries=later_layers,
    engine_keys=_hy_engine_keys,
)
def read_hy_v3(facts: ConfigFacts) -> ModelShape:
    """Hy3: norms of heads, a router of sigmoids with a bias, dense first layers, a shared expert."""
    for key in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        facts.require(key, True, True)
    facts.require("attention_bias", False, False)
    # Checkpoints carry the tensors of further layers. The other keys are types of intermediate results.
    facts.ignore("num_nextn_predict_layers", "enable_moe_fp32_combine", "enable_lm_head_fp32")
    facts.ignore("enable_attention_fp32_softmax")
    width = facts.positive("moe_intermediate_size")
    facts.require("expert_hidden_dim", width, width)
    return read_decoder_shape(
        facts,
        "hy_v3",
        head_dim_default=128,
        key_value_heads_default=8,
        theta_default=11_158_840,
        num_experts=facts.positive("num_experts", "num_local_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=width,
        shared_ffn_hidden_size=facts.positive("num_shared_experts", default=1) * width,
        dense_layers=_agreed_dense_layers(facts),
        router=Router("sigmoid", has_bias=True, scale=facts.number("router_scaling_factor", 2.826)),
        norm_eps=facts.number("rms_norm_eps", 1e-5),
    )


_INPUTS = (
    ("linear_attn.in_proj_qkv.weight", ("delta_qkv", "hidden")),
    ("linear_attn.in_proj_z.weight", ("delta_values", "hidden")),
    ("linear_attn.in_proj_b.weight", ("delta_heads", "hidden")),
    ("linear_attn.in_proj_a.weight", ("delta_heads", "hidden")),
)
DELTA_INPUTS = replace(
    layer_rule("self_attention.in_proj.weight", splits.delta_sections, *_INPUTS),
    engine=(
        engine_row("linear_attn.in_proj_qkvz.weight", splits.delta_sections, *_INPUTS[:2]),
        engine_row("linear_attn.in_proj_ba.weight", splits.column_parallel, *_INPUTS[2:]),
    ),
)
"""The input matrices of a delta net if checkpoints and SGLang order their rows by kind: queries, keys, values, the
values' gates, and the two numbers of each value head."""


def _of_server_type(rule: Rule) -> Rule:
    """Return ``rule``. SGLang's tensors of CONFIG_DTYPE have the type of the server's weights instead."""
    rows = []
    for row in rule.in_engine:
        is_of_config = row.dtype == CONFIG_DTYPE
        rows.append(replace(row, dtype=None) if is_of_config else row)
    return replace(rule, engine=tuple(rows))


_HYBRID_LAYER = (
    *in_layers(attention_layers, *_gated_attention("")),
    *in_layers(delta_layers, *map(_of_server_type, DELTA_NET), DELTA_INPUTS),
    *HYBRID_MOE,
)


def _hybrid_text_keys(shape: ModelShape) -> Mapping[str, Any]:
    keys = dict(_hybrid_engine_keys(shape))
    # SGLang reads rope_theta in the table of rotary parameters.
    del keys["rope_theta"]
    return keys


@declares(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    layer=_HYBRID_LAYER,
    expert=expert_mlp(),
    final_norm=GEMMA_FINAL_NORM,
    carries=with_prefix("mtp."),
    megatron={"moe_router_score_function": "softmax"},
    engine_keys=_hybrid_text_keys,
    engine_options={"disable_shared_experts_fusion": True},
)
def read_qwen3_5_moe_text(facts: ConfigFacts) -> ModelShape:
    """Qwen3.5's language model without the vision tower: Qwen3-Next with other input matrices of delta nets."""
    return _read_qwen3_5(facts, "qwen3_5_moe_text")


def _read_qwen3_5(facts: ConfigFacts, family: str) -> ModelShape:
    # The router always renormalises.
    facts.require("norm_topk_prob", True, True)
    # Checkpoints carry the layer that predicts further tokens.
    facts.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    # These keys divide the rotary dimensions among three axes. A token of text has the same position on all axes.
    facts.ignore("mrope_section", "mrope_interleaved")
    return read_hybrid_moe(facts, family)


def in_language_model(*rules: Rule) -> tuple[Rule, ...]:
    """Return ``rules`` with the source names of a language model that is a part of a larger model.

    SGLang's names stay as they are.
    """
    renamed_rules = []
    for rule in rules:
        rows = []
        for row in rule.in_engine:
            rows.append(replace(row, sources=_in_language_model(row.sources)))
        sources = _in_language_model(rule.sources)
        renamed_rules.append(replace(rule, sources=sources, engine=tuple(rows)))
    return tuple(renamed_rules)


def _in_language_model(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    renamed_sources = []
    for source in sources:
        name = re.sub(r"^model\.", "model.language_model.", source.name)
        renamed_sources.append(replace(source, name=name))
    return tuple(renamed_sources)


_LANGUAGE_MODEL_EXPERT = in_language_model(*expert_mlp())


@declares(
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    layer=in_language_model(*_HYBRID_LAYER),
    expert=_LANGUAGE_MODEL_EXPERT,
    embedding=in_language_model(EMBEDDING)[0],
    final_norm=in_language_model(GEMMA_FINAL_NORM)[0],
    packed=packed_experts_of(_LANGUAGE_MODEL_EXPERT, "gate_up_proj", "down_proj"),
    carries=with_prefix("mtp.", "model.visual."),
    megatron={"moe_router_score_function": "softmax"},
    text_table="text_config",
    engine_keys=_hybrid_text_keys,
    # Servers receive no images, and the vision tower is not sent to them, so SGLang must not build the tower.
    outer_engine_keys={"language_model_only": True},
    engine_options={"disable_shared_experts_fusion": True},
)
def read_qwen3_5_moe(facts: ConfigFacts) -> ModelShape:
    """Qwen3.5 (Qwen3.5-35B-A3B): a language model, and a vision tower that checkpoints carry along."""
    facts.ignore("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    facts.ignore("vision_config", "language_model_only")
    return _read_qwen3_5(facts, "qwen3_5_moe")


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotary parameters that transformers assumes for a gpt-oss without a table of them."""


def _gpt_oss_packed(name: str, *, transposed: bool) -> PackedExperts:
    """Return the packed tensor ``name`` of a gpt-oss file.

    Packed weights are transposed (``gate_up_proj``), packed biases are not (``gate_up_proj_bias``).
    """
    kind = "weight" if transposed else "bias"
    matrix = f"{HF_LAYER}mlp.experts.{{expert}}.{name.removesuffix('_bias')}.{kind}"
    return PackedExperts(f"{HF_LAYER}mlp.experts.{name}", (matrix,), transposed)


GPT_OSS_EXPERT = (
    layer_rule(
        "mlp.experts.linear_fc1.weight{expert}",
        splits.gates_then_ups,
        ("mlp.experts.{expert}.gate_up_proj.weight", ("expert_gate_up", "hidden")),
        engine=("mlp.experts.w13_weight[{expert}]", splits.column_parallel),
    ),
    layer_rule(
        "mlp.experts.linear_fc1.bias{expert}",
        splits.gates_then_ups,
        ("mlp.experts.{expert}.gate_up_proj.bias", ("expert_gate_up",)),
        engine=("mlp.experts.w13_weight_bias[{expert}]", splits.column_parallel),
        engine_dtype="float32",
    ),
    layer_rule(
        "mlp.experts.linear_fc2.weight{expert}",
        splits.row_parallel,
        ("mlp.experts.{expert}.down_proj.weight", ("hidden", "expert_ffn")),
        engine=("mlp.experts.w2_weight[{expert}]", splits.row_parallel),
    ),
    layer_rule(
        "mlp.experts.linear_fc2.bias{expert}",
        splits.replicated,
        ("mlp.experts.{expert}.down_proj.bias", ("hidden",)),
        engine=("mlp.experts.w2_weight_bias[{expert}]", splits.on_first_rank),
        engine_dtype="float32",
    ),
)
"""An expert of gpt-oss: the rows of its first matrix are gates and ups in turn, also in SGLang."""
GPT_OSS_LAYER = (
    *ATTENTION,
    QKV_BIAS,
    layer_rule(
        "self_attention.linear_proj.bias", splits.replicated, ("self_attn.o_proj.bias", ("hidden",))
    ),
    layer_rule(
        "self_attention.core_attention.softmax_offset",
        splits.column_parallel,
        ("self_attn.sinks", ("heads",)),
    ),
    norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    layer_rule(
        "mlp.router.weight", splits.replicated, ("mlp.router.weight", ("experts", "hidden"))
    ),
    layer_rule("mlp.router.bias", splits.replicated, ("mlp.router.bias", ("experts",))),
)


@declares(
    "gpt_oss",
    "GptOssForCausalLM",
    layer=GPT_OSS_LAYER,
    expert=GPT_OSS_EXPERT,
    packed=(
        _gpt_oss_packed("gate_up_proj", transposed=True),
        _gpt_oss_packed("gate_up_proj_bias", transposed=False),
        _gpt_oss_packed("down_proj", transposed=True),
        _gpt_oss_packed("down_proj_bias", transposed=False),
    ),
    engine_keeps_output=True,
    needs_direct_placement=True,
    engine_has_config_dtype=True,
)
def read_gpt_oss(facts: ConfigFacts) -> ModelShape:
    """gpt-oss (gpt-oss-20b, gpt-oss-120b): attention with sinks, windows in every other layer, biases everywhere."""
    facts.require("attention_bias", True, True)
    facts.require("swiglu_alpha", 1.702, 1.702)
    facts.require("hidden_act_alpha", 1.702, 1.702)
    experts_per_token = facts.positive("num_experts_per_tok", default=4)
    # The model's first code has two other names: ``experts_per_token``, and ``initial_context_length`` for
    # ``original_max_position_embeddings``.
    facts.require("experts_per_token", experts_per_token, experts_per_token)
    facts.ignore("initial_context_length")
    if facts.values.get("rope_parameters") is None and not facts.values.get("rope_scaling"):
        facts = facts.of_table({**facts.values, "rope_parameters": _GPT_OSS_ROPE})
    width = facts.positive("intermediate_size")
    return read_decoder_shape(
        facts,
        "gpt_oss",
        head_dim_default=64,
        key_value_heads_default=8,
        theta_default=150_000,
        accepts_untruncated_yarn=True,
        num_experts=facts.positive("num_local_experts", "num_experts"),
        experts_per_token=experts_per_token,
        ffn_hidden_size=width,
        moe_ffn_hidden_size=width,
        norm_topk_prob=True,
        norm_eps=facts.number("rms_norm_eps", 1e-5),
        window=_read_window(facts),
        has_sinks=True,
        has_biases=True,
        glu_limit=facts.number("swiglu_limit", 7.0),
    )


def _read_window(facts: ConfigFacts) -> AttentionWindow:
    """Read the size of windows, and the layers that attend to a window only. ``layer_types`` has each layer's kind.
    Without ``layer_types`` every other layer has a window, from the first layer on."""
    kinds = facts.values.get("layer_types")
    layers = min(facts.positive("num_hidden_layers"), _MOST_LAYERS)
    if kinds is None:
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    facts.ignore("layer_types")
    known_kinds = ("sliding_attention", "full_attention")
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in known_kinds for kind in kinds)
    ):
        facts.fault(
            f"layer_types is {kinds!r}, expected one of {known_kinds} for each of {layers} layers"
        )
        kinds = []
    windows = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    return AttentionWindow(facts.positive("sliding_window", default=128), windows)
