"""SGLang's side of verified adapters: every load is answered with the SHA-256 of each tensor that was loaded.

SGLang's own check of adapters belongs to a route that unpickles. This one hashes what the scheduler holds after it
has read a folder and fused its matrices. Nothing happens in a server that was not started by
``engine.launch_server`` with ``--enable-lora``. Seen to work on a CPU with one and two ranks, whose digests must agree.
Not yet run on a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

VARIABLE = "MEGATRON_DPPO_ADAPTER_DIGESTS"
"""In the environment of the processes of a server that has LoRA enabled."""
DIGESTS = "sha256"
"""Name among the loaded adapters of an answer under which the digests stand, as JSON."""
LOADED = "sglang.srt.lora.lora_manager.LoRAManager._load_lora_adapter"


def register() -> None:
    """In each process of a server, before SGLang applies its plugins' hooks."""
    if os.environ.get(VARIABLE) is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(LOADED, report_digests, HookType.AFTER)


def report_digests(result: Any, manager: Any, adapter: Any) -> Any:
    """After a load: add the digests of the adapter's tensors, or refuse it where ranks hold different ones."""
    from sglang.srt.runtime_context import get_parallel

    own = _digests(manager.loras[adapter.lora_id]) if result.success else {}
    parallel = get_parallel()
    if parallel.tp_size > 1:
        everyone = parallel.tp_group.all_gather_object([result.success, own])
        if any(other != everyone[0] for other in everyone):
            result.success = False
            result.error_message = (
                f"{result.error_message} the engine's ranks read different adapters"
            )
    if result.success:
        result.loaded_adapters[DIGESTS] = json.dumps(own)
    return result


def _digests(loaded: Any) -> dict[str, str]:
    """By the name of the tensor in its folder, with the engine's name for fused matrices."""
    import torch

    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
        for layer in loaded.layers
        for name, tensor in layer.weights.items()
    }
