"""Verified adapters: the server answers each load with the SHA-256 of every tensor that it has loaded."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from megatron_dppo.engine.options import ADAPTER_DIGESTS, DIGESTS_VARIABLE
from megatron_dppo.engine.server import hooks

LOADED = "sglang.srt.lora.lora_manager.LoRAManager._load_lora_adapter"
"""SGLang's method that loads an adapter on a rank."""


def register() -> None:
    """Register the hook, if the process belongs to a server with ``--enable-lora``, before SGLang applies hooks.

    Not yet run on a GPU.
    """
    # SGLang itself checks adapters only in a route that unpickles the received bytes, which is not used here. This hook
    # hashes the tensors that the scheduler holds after it has read an adapter's folder and fused the matrices.
    if DIGESTS_VARIABLE in os.environ:
        hooks.register(LOADED, report_digests, "after")


def report_digests(result: Any, manager: Any, adapter: Any) -> Any:
    """Add the digests of a loaded adapter's tensors to the result; reject the load if ranks hold different tensors."""
    from sglang.srt.runtime_context import get_parallel

    digests = {}
    if result.success:
        digests = _digests(manager.loras[adapter.lora_id])
    parallel = get_parallel()
    if parallel.tp_size > 1:
        rank_results = parallel.tp_group.all_gather_object([result.success, digests])
        if any(rank_result != rank_results[0] for rank_result in rank_results):
            result.success = False
            reason = "the engine's ranks read different adapters"
            result.error_message = f"{result.error_message} {reason}"
    if result.success:
        result.loaded_adapters[ADAPTER_DIGESTS] = json.dumps(digests)
    return result


def _digests(adapter: Any) -> dict[str, str]:
    """Return the SHA-256 of each tensor, by its name in the adapter's folder. Fused matrices have the engine's name."""
    import torch

    digests: dict[str, str] = {}
    for layer in adapter.layers:
        for name, tensor in layer.weights.items():
            data = tensor.contiguous().view(torch.uint8).numpy()
            digests[name] = hashlib.sha256(data).hexdigest()
    return digests
