"""What SGLang asks of a platform, answered for PyTorch on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Native PyTorch kernels only: no Triton, no graph capture, no pynccl."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """PyTorch's scaled dot product attention."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """SGLang's layers run their ``forward_native``."""
        return "native"

    def empty_cache(self) -> None:
        """Nothing: the base class collects garbage, 0.4 s at every flush and resume."""

    def init_backend(self) -> None:
        """Host-side caches (for the capture of routed experts) in plain memory."""
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory


def _plain_memory(dims: Any, dtype: torch.dtype, device: Any, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device=device)
