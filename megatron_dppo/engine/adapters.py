"""The engine's own LoRA: adapters of the frozen model, loaded and dropped by name while it serves.

SGLang (0.5.23) reads them from a folder in PEFT's format that it sees under the same path. Its other route takes
tensors over HTTP and unpickles them, so it is not used. A request names the adapters that it wants; one that names
adapters that are not there is refused, never answered without them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from megatron_dppo.engine.adapter_digests import DIGESTS
from megatron_dppo.engine.errors import EngineAnswerError
from megatron_dppo.engine.weights import EngineWeights

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Matrix of the engine -> matrices of the checkpoint whose rows it holds one after another."""


async def load_adapter(engine: EngineWeights, name: str, folder: str) -> dict[str, str]:
    """Have the engine load ``folder`` as ``name``; SHA-256 by tensor of what it then holds.

    Raises EngineRequestError with the engine's reason where it refuses, EngineAnswerError where it can't tell the
    digests.
    """
    body = {"lora_name": name, "lora_path": folder}
    answer = await engine.move("/load_lora_adapter", body)
    loaded = answer.get("loaded_adapters") or {}
    if DIGESTS not in loaded:
        raise EngineAnswerError(
            f"{engine.url}/load_lora_adapter does not say the digests of what it loaded, expected a server that was "
            "started by megatron_dppo.engine.launch_server"
        )
    found: dict[str, str] = json.loads(loaded[DIGESTS])
    return found


async def drop_adapters(engine: EngineWeights, keep: str | None = None) -> None:
    """Have the engine drop all adapters but ``keep``."""
    for name in await adapters_held(engine):
        if name != keep:
            await engine.move("/unload_lora_adapter", {"lora_name": name})


async def adapters_held(engine: EngineWeights) -> Sequence[str]:
    """Names of the adapters that the engine has."""
    models = (await engine.client.get_json("/v1/models"))["data"]
    return [model["id"] for model in models if model["parent"] is not None]


def engine_place(module: str) -> tuple[str, int]:
    """The engine's module that holds the rows of the checkpoint's ``module``, and which of its parts they are."""
    parent, _, last = module.rpartition(".")
    for fused, members in FUSED.items():
        if last in members:
            return f"{parent}.{fused}", members.index(last)
    return module, 0
