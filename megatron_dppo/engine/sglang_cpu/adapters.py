"""SGLang's LoRA on a plain CPU: its ``torch_native`` backend asks for page-locked memory, which needs a device."""

from __future__ import annotations

import types
from typing import Any

import torch

PREPARED = "sglang.srt.lora.lora_manager.LoRAManager.init_state"
"""What a LoRA manager does first after it has chosen its backend, before it makes a layer."""


class PageableTorch(types.ModuleType):
    """``torch`` whose ``tensor`` and ``zeros`` make ordinary memory where page-locked memory is asked for."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        """``torch.tensor``."""
        return torch.tensor(*args, **kwargs)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        """``torch.zeros``."""
        return torch.zeros(*args, **kwargs)


def use_pageable_memory(*args: Any, **kwargs: Any) -> None:
    """Before LoRA's layers are made: give them, and their backend, ordinary memory."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    pageable: Any = PageableTorch()
    layers.torch = torch_backend.torch = pageable
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
