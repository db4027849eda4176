"""State of all random generators of a rank as plain JSON: capture and restore."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random as megatron_random


def rng_state() -> dict[str, Any]:
    """States of Python's, numpy's, torch's and the device's generators, and of Megatron's streams."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    streams = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": [version, list(words), gauss],
        "numpy": {**legacy, "state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}},
        "torch": _text(torch.get_rng_state()),
        "device": _text(megatron_random._get_cuda_rng_state()),
        "streams": {name: _text(state) for name, state in streams.items()},
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Inverse of :func:`rng_state`: every generator continues bit for bit from ``state``."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    legacy = state["numpy"]
    words32 = np.array(legacy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**legacy, "state": {**legacy["state"], "key": words32}})
    # Without CUDA the device's generator is torch's CPU generator.
    megatron_random._set_cuda_rng_state(_tensor(state["device"]))
    torch.set_rng_state(_tensor(state["torch"]))
    streams = {name: _tensor(text) for name, text in state["streams"].items()}
    tensor_parallel.get_cuda_rng_tracker().set_states(streams)


def _text(state: torch.Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone()
