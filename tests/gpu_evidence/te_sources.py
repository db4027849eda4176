"""Transformer Engine's real Python layer without its compiled extension."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.gpu_evidence import inert

CUDNN = 92400
"""The version that gpu.txt pins: 9.24.0."""
FOLDER = Path(sys.prefix) / "gpu_sources"


def te_sources() -> Path:
    """Return the folder of transformer_engine: in an environment for GPUs the installed packages, otherwise the folder
    into which the set-up put the version of gpu.txt."""
    installed = importlib.util.find_spec("transformer_engine")
    if installed is not None and installed.origin is not None:
        return Path(installed.origin).parents[1]
    if not (FOLDER / "transformer_engine").is_dir():
        raise FileNotFoundError(
            f"{FOLDER}: Transformer Engine's Python sources are missing: make setup"
        )
    return FOLDER


class _Name(type):
    """The type of the names of an extension. An attribute is such a name, too, and always the same object."""

    def __getattr__(cls, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Name(f"{cls.__name__}.{name}", (), {})
        setattr(cls, name, value)
        return value

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} was called, which is compiled")


def import_te() -> None:
    """Import transformer_engine.pytorch with an extension that has only names. ``te_sources()`` is on ``sys.path``."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it then looks for no libraries
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformer_engine import common
    compiled = {"get_cudnn_version": staticmethod(lambda: CUDNN)}
    sys.modules["transformer_engine_torch"] = _Name("transformer_engine_torch", (), compiled)  # type: ignore[assignment]
    inert.provide("onnx", "onnxscript")  # used only for exports to ONNX
    common.load_framework_extension = lambda framework: None


@contextmanager
def as_on_gpus(device: str) -> Iterator[None]:
    """Let Megatron-Core build what it builds on GPUs: Transformer Engine's layers, with the options for CUDA.

    The process must be fresh. Tensors are on ``device``, and gloo sends them from there.
    """
    sys.path.insert(0, str(te_sources()))
    import_te()

    import torch

    from megatron_dppo.trainer import platform

    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    answers: dict[str, Any] = {
        "is_available": True,
        "current_device": torch.device(device),
        "set_device": None,
        "get_device_capability": (gpu.major, gpu.minor),
        "get_device_properties": gpu,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    cuda = replace(platform._cuda(), device=torch.device(device), distributed_backend="gloo")
    platform.current = lambda: cuda  # type: ignore[assignment]
    with inert.CudaMeans(device):
        from megatron.core.extensions.transformer_engine import TELinear
        from megatron.core.transformer import multi_latent_attention

        # Without a GPU, Megatron-Core's latent attention expects layers of torch modules.
        multi_latent_attention.TELinear = TELinear
        yield
