"""A config.json's entries, checked as a family asks for them: what its file's ``read`` is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dppo.model.shape import ITEM_BYTES, Llama3RopeScaling, ModelShape


class ConfigFacts:
    """The entries of a config.json.

    An entry that is missing or wrong becomes a line of ``problems``, with the file and the key, and a
    stand-in is returned, so that one reading finds everything that is wrong.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, problems: list[str] | None = None
    ) -> None:
        self.values = values
        self.where = where
        self.problems: list[str] = [] if problems is None else problems

    def positive(self, *keys: str, default: int | None = None) -> int:
        """The first of ``keys`` that is set, a positive whole number."""
        value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            return self._wrong(keys, value, "a positive integer", 1)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive real number."""
        value = self._first((key,), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            return self._wrong((key,), value, "a positive number", 1.0)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self._first((key,), default)
        if not isinstance(value, bool):
            return self._wrong((key,), value, "true or false", default)
        return value

    def require(self, key: str, expected: Any, default: Any) -> None:
        """Refuse a model whose ``key`` is not ``expected``: no table describes it."""
        value = self._first((key,), default)
        if value != expected:
            self.problem(f"{key} is {value!r}; only {expected!r} is supported for this family")

    def dtype(self) -> str:
        """The weights' type; transformers writes ``dtype`` since version 5 and ``torch_dtype`` before."""
        value = str(self._first(("dtype", "torch_dtype"), "float32")).removeprefix("torch.")
        if value not in ITEM_BYTES:
            return self._wrong(("dtype",), value, f"one of {sorted(ITEM_BYTES)}", "float32")
        return value

    def rope(self) -> tuple[float, Llama3RopeScaling | None]:
        """``(theta, scaling)``; both transformers' spellings, before version 5 and since."""
        nested = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(nested, Mapping):
            self.problem(f"rope parameters are {nested!r}, expected a table")
            nested = {}
        facts = ConfigFacts({**self.values, **nested}, self.where, self.problems)
        theta = facts.number("rope_theta", 10000.0)
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "llama3":
            self.problem(f"rope type {kind!r} is not supported, expected 'default' or 'llama3'")
            return theta, None
        scaling = Llama3RopeScaling(
            factor=facts.number("factor"),
            low_freq_factor=facts.number("low_freq_factor"),
            high_freq_factor=facts.number("high_freq_factor"),
            original_max_positions=facts.positive("original_max_position_embeddings"),
        )
        return theta, scaling

    def problem(self, text: str) -> None:
        """Note what is wrong with the file."""
        self.problems.append(f"{self.where}: {text}")

    def _first(self, keys: tuple[str, ...], default: Any) -> Any:
        for key in keys:
            if self.values.get(key) is not None:
                return self.values[key]
        return default

    def _wrong(self, keys: tuple[str, ...], value: Any, expected: str, stand_in: Any) -> Any:
        if value is None:
            self.problem(f"{' or '.join(keys)} is missing, expected {expected}")
        else:
            self.problem(f"{keys[0]} is {value!r}, expected {expected}")
        return stand_in


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
        "head_dim": facts.positive("head_dim", default=head_dim_default or max(1, hidden // heads)),
        "ffn_hidden_size": facts.positive("intermediate_size"),
        "vocab_size": facts.positive("vocab_size"),
        "tied_embeddings": facts.flag("tie_word_embeddings", False),
        "norm_eps": facts.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": facts.positive("max_position_embeddings"),
        "dtype": facts.dtype(),
    }
    return ModelShape(**{**fields, **extra})
