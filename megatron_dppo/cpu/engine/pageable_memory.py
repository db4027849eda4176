"""Pageable memory for LoRA: SGLang's torch_native backend allocates page-locked memory, but this needs a device."""

from __future__ import annotations

import types
from typing import Any

import torch

PREPARED = "sglang.srt.lora.lora_manager.LoRAManager.init_state"
"""SGLang's method that a LoRA manager calls after it has chosen its backend and before it makes layers."""


class PageableTorch(types.ModuleType):
    """A stand-in for ``torch`` whose ``tensor`` and ``zeros`` ignore ``pin_memory``."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def use_pageable_memory(*args: Any, **kwargs: Any) -> None:
    """Make LoRA's layers and their backend allocate pageable memory. Call it before the layers are made."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    pageable: Any = PageableTorch()
    layers.torch = pageable
    torch_backend.torch = pageable
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
