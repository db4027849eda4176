"""Checksums of an engine's own bytes.

SGLang's checksum of a quantised weight is the checksum of the dequantised weight in bfloat16, and scales have no
checksum. Different pairs of weight and scales can have equal checksums, and the trainer would have to repeat SGLang's
arithmetic. Servers that ``engine.launch_server`` starts report the checksum of each tensor as it is in memory.
"""

from __future__ import annotations

from typing import Any

from megatron_dppo.engine.server import hooks

_QUANTIZED_WEIGHTS = "sglang.srt.utils.weight_checker._build_quantized_set"


def register() -> None:
    """Register the hook, in each process of a server, before SGLang applies its plugins' hooks."""
    hooks.register(_QUANTIZED_WEIGHTS, no_quantized_weights, "replace")


def no_quantized_weights(model: Any) -> dict[str, Any]:
    """Return no weight, so that SGLang hashes every tensor of ``model`` as it is."""
    return {}
