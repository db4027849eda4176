"""The facts of a decoder-only model that fix its tensors' shapes and its arithmetic, read from a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dppo.model.errors import UnsupportedModelError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency scaling (``rope_type: llama3``); positions in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelShape:
    """One model. ``num_experts`` 0: dense.

    ``dtype``: the type that config.json names for the weights, "float32", "bfloat16" or "float16".
    ``norm_topk_prob``: the router's top-k probabilities are renormalised to sum to 1.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    max_position_embeddings: int
    dtype: str
    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    norm_topk_prob: bool = True

    @property
    def is_moe(self) -> bool:
        """Whether every layer's MLP is a mixture of experts."""
        return self.num_experts > 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers, from 0, whose MLP is a mixture of experts."""
        return tuple(range(self.num_layers)) if self.is_moe else ()

    def sizes(self) -> dict[str, int]:
        """Elements of each symbolic dimension that a family's table uses."""
        return {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "head": self.head_dim,
            "query": self.num_attention_heads * self.head_dim,
            "kv": self.num_query_groups * self.head_dim,
            "ffn": self.ffn_hidden_size,
            "experts": self.num_experts,
            "expert_ffn": self.moe_ffn_hidden_size,
        }


class ConfigFacts:
    """A config.json whose entries are checked as they are asked for; errors name the key and the file."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def positive(self, *keys: str, default: int | None = None) -> int:
        """The first of ``keys`` that is set, a positive whole number."""
        value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise UnsupportedModelError(
                f"{self.where}: {keys[0]} is {value!r}, expected a positive integer"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive real number."""
        value = self._first((key,), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UnsupportedModelError(
                f"{self.where}: {key} is {value!r}, expected a positive number"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self._first((key,), default)
        if not isinstance(value, bool):
            raise UnsupportedModelError(f"{self.where}: {key} is {value!r}, expected true or false")
        return value

    def require(self, key: str, expected: Any, default: Any) -> None:
        """Refuse a model whose ``key`` is not ``expected``: the map does not describe it."""
        value = self.values.get(key, default)
        value = default if value is None else value
        if value != expected:
            raise UnsupportedModelError(
                f"{self.where}: {key} is {value!r}; only {expected!r} is supported for this family"
            )

    def dtype(self) -> str:
        """The weights' type; transformers writes ``dtype`` since version 5 and ``torch_dtype`` before."""
        value = str(self._first(("dtype", "torch_dtype"), "float32")).removeprefix("torch.")
        if value not in ITEM_BYTES:
            raise UnsupportedModelError(
                f"{self.where}: dtype is {value!r}, expected one of {sorted(ITEM_BYTES)}"
            )
        return value

    def rope(self) -> tuple[float, Llama3RopeScaling | None]:
        """``(theta, scaling)``; both transformers' spellings, before version 5 and since."""
        nested = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        facts = ConfigFacts({**self.values, **nested}, self.where)
        theta = facts.number("rope_theta", 10000.0)
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "llama3":
            raise UnsupportedModelError(
                f"{self.where}: rope type {kind!r} is not supported, expected 'default' or 'llama3'"
            )
        scaling = Llama3RopeScaling(
            factor=facts.number("factor"),
            low_freq_factor=facts.number("low_freq_factor"),
            high_freq_factor=facts.number("high_freq_factor"),
            original_max_positions=facts.positive("original_max_position_embeddings"),
        )
        return theta, scaling

    def _first(self, keys: tuple[str, ...], default: Any) -> Any:
        for key in keys:
            if self.values.get(key) is not None:
                return self.values[key]
        if default is None:
            raise UnsupportedModelError(f"{self.where}: {' or '.join(keys)} is missing")
        return default


def read_decoder_shape(
    facts: ConfigFacts, family: str, *, head_dim_default: int | None = None, **extra: Any
) -> ModelShape:
    """What all supported families spell alike; ``extra`` adds or replaces fields of ModelShape."""
    facts.require("hidden_act", "silu", "silu")
    facts.require("use_sliding_window", False, False)
    heads = facts.positive("num_attention_heads")
    hidden = facts.positive("hidden_size")
    theta, scaling = facts.rope()
    fields: dict[str, Any] = {
        "family": family,
        "num_layers": facts.positive("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": facts.positive("num_key_value_heads", default=heads),
        "head_dim": facts.positive("head_dim", default=head_dim_default or hidden // heads),
        "ffn_hidden_size": facts.positive("intermediate_size"),
        "vocab_size": facts.positive("vocab_size"),
        "tied_embeddings": facts.flag("tie_word_embeddings", False),
        "norm_eps": facts.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": facts.positive("max_position_embeddings"),
        "dtype": facts.dtype(),
    }
    shape = ModelShape(**{**fields, **extra})
    if heads % shape.num_query_groups:
        raise UnsupportedModelError(
            f"{facts.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{shape.num_query_groups}"
        )
    return shape
