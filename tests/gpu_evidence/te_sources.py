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
"""As gpu.txt pins it: 9.24.0."""
FOLDER = Path(sys.prefix) / "gpu_sources"


def te_sources() -> Path:
    """The folder in which transformer_engine lies: where the set-up put it, of gpu.txt's version; in an environment
    for GPUs, among the packages."""
    installed = importlib.util.find_spec("transformer_engine")
    if installed is not None and installed.origin is not None:
        return Path(installed.origin).parents[1]
    if not (FOLDER / "transformer_engine").is_dir():
        raise FileNotFoundError(
            f"{FOLDER}: Transformer Engine's Python sources are missing: make setup"
        )
    return FOLDER


class _Name(type):
    """The type of what an extension exports: attributes are others, each itself alone; nothing can be called."""

    def __getattr__(cls, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Name(f"{cls.__name__}.{name}", (), {})
        setattr(cls, name, value)
        return value

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} was called, which is compiled")


def import_te() -> None:
    """Import transformer_engine.pytorch over an extension of names alone. ``te_sources()`` is on ``sys.path``."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its libraries are not looked for
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformer_engine import common
    compiled = {"get_cudnn_version": staticmethod(lambda: CUDNN)}
    sys.modules["transformer_engine_torch"] = _Name("transformer_engine_torch", (), compiled)  # type: ignore[assignment]
    inert.provide("onnx", "onnxscript")  # for exports to ONNX alone
    common.load_framework_extension = lambda framework: None


@contextmanager
def as_on_gpus(device: str) -> Iterator[None]:
    """A fresh process whose Megatron-Core builds what it builds on GPUs, of Transformer Engine's layers and with the
    options for CUDA; on ``device``, where its tensors lie and from where gloo sends them."""
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

        # Where there is no GPU, latent attention is prepared for layers of torch modules.
        multi_latent_attention.TELinear = TELinear
        yield
