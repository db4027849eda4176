"""The entries of a config.json, validated when a family reads them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megatron_dppo.model.config_keys import HARMLESS, NEUTRAL
from megatron_dppo.model.shape import ITEM_BYTES, Llama3RopeScaling, RopeScaling, YarnRopeScaling

Entries = Mapping[str, Any]
"""Entries of a config.json: keys with values."""
MOST_LAYERS = 4096
"""A limit of a plausible model: the table has rows for each layer and expert, and too many rows would fill memory."""


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
