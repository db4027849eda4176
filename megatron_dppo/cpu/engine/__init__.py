"""SGLang platform plugin ``torch_cpu``: the real server on plain CPU PyTorch.

The platform needs no sgl_kernel and no flashinfer, and launches no Triton kernel. SGLang calls ``activate`` through the
entry-point group ``sglang.srt.platforms`` in every process, before it imports a model. The platform interface is
SGLang's own and changes between releases, so the project pins SGLang exactly. The other files of this package have
replacements of SGLang's functions, and ``platform`` installs the replacements. This file loads no sglang.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types

import torch

PLATFORM_NAME = "torch_cpu"
_PLATFORM_CLASS = "megatron_dppo.cpu.engine.platform.TorchCpuPlatform"
_TORCHVISION_MODULES = (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def activate() -> str | None:
    """Return the dotted name of the platform class; None on a machine with a GPU.

    ``SGLANG_PLATFORM=torch_cpu`` selects the platform on a machine with a GPU too.
    """
    if torch.cuda.is_available() and os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    _make_torchvision_importable()
    # Disable torch.compile. SGLang compiles some functions, such as the function that masks the token ids of other
    # ranks. At the first request, these functions would compile C++. This needs Python's headers and takes up to a
    # minute.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return _PLATFORM_CLASS


class _InertModule(types.ModuleType):
    """A module whose every attribute is another inert module."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> types.ModuleType:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        return sys.modules.setdefault(full_name, _InertModule(full_name))


def _make_torchvision_importable() -> None:
    """Replace torchvision by inert modules if it is missing: SGLang imports it, but only image models use it."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.utils import import_utils

    # Call this function while torchvision is missing: transformers caches the result, and later will not take the inert
    # modules for torchvision.
    import_utils.is_torchvision_available()
    for name in _TORCHVISION_MODULES:
        sys.modules[name] = _InertModule(name)
