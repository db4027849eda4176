"""SGLang platform plugin ``torch_cpu``: the real server on plain CPU PyTorch.

No sgl_kernel, no flashinfer, no Triton launch. SGLang calls ``activate`` through the entry-point
group ``sglang.srt.platforms`` in every process, before it imports a model. The platform interface
is SGLang's own and moves between releases, so the project pins SGLang exactly. Below: functions in place of SGLang's
own, which ``platform`` puts there; this file loads no sglang.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLATFORM_NAME = "torch_cpu"
_PLATFORM_CLASS = "megatron_dppo.engine.sglang_cpu.platform.TorchCpuPlatform"
_TORCHVISION_MODULES = (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def activate() -> str | None:
    """Dotted name of the platform class, or None where a GPU is present and the plugin was not asked for.

    ``SGLANG_PLATFORM=torch_cpu`` asks for it; without that it never shadows an accelerator.
    """
    if torch.cuda.is_available() and os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    _make_torchvision_importable()
    # SGLang's compiled helpers, those of a vocabulary over several ranks for one, would have torch compile
    # C++ at the first request: that takes Python's headers, and a minute on a busy machine.
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
    """SGLang imports torchvision unconditionally, for image models only, and PyPI has no CPU build of it."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.utils import import_utils

    # Cached: transformers keeps knowing that it is absent.
    import_utils.is_torchvision_available()
    for name in _TORCHVISION_MODULES:
        sys.modules[name] = _InertModule(name)


# --- matrix products whose rows don't depend on how many others are computed with them

# A library chooses its kernel by the shape of the whole product, so a token's logits change in their last bits
# with the requests that happen to be decoded beside it. Blocks of one shape all get one kernel.
ROWS = 16
"""Rows of a block; more waste work on small batches, fewer make large ones slower."""

_overrides: list[torch.library.Library] = []


def blocked_mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of ``[M, K]`` and ``[K, N]``, in blocks of ``ROWS`` rows, the last one filled up with zeros."""
    rows, inner = a.shape
    missing = -rows % ROWS
    if missing:
        a = torch.cat([a, a.new_zeros(missing, inner)])
    # aten::mm.out, which enable() leaves as it is.
    out = a.new_empty(rows + missing, b.shape[1])
    for start in range(0, rows, ROWS):
        torch.mm(a[start : start + ROWS], b, out=out[start : start + ROWS])
    return out[:rows]


def blocked_addmm(
    bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """beta bias + alpha a @ b, by ``blocked_mm``."""
    product = blocked_mm(a, b)
    return (product if alpha == 1 else alpha * product) + (bias if beta == 1 else beta * bias)


def enable() -> None:
    """Have every matrix product of this process on a CPU be a blocked one. Harmless twice."""
    if _overrides:
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", blocked_mm, "CPU")
    library.impl("addmm", blocked_addmm, "CPU")
    # Keep the library object: its overrides end with it.
    _overrides.append(library)


# --- sampling with one seed for each request: SGLang's own draws, without sgl_kernel and without a compiler

_WORD = np.uint64(0xFFFFFFFF)
_LARGEST = float(2**32 - 1)


def multinomial_with_seed(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Draw a column of each row with the probabilities exp(``logprobs``), by the Gumbel trick.

    The noise of a row follows from its seed (int64 ``[n]``) and its position in its sequence (``[n]``) alone, and
    is that of SGLang's function of this name on a GPU. ``logprobs`` ``[n, m]`` need not be normalised; the result
    is int64 ``[n, 1]``.
    """
    hashes = murmur_hash32(seed.numpy(), positions.numpy(), logprobs.shape[1])
    noise = torch.from_numpy(hashes.astype(np.float64) / _LARGEST)
    # A hash of 0 would be a noise of -inf, the largest one of inf.
    noise.log_().clamp_(min=torch.finfo(noise.dtype).min, max=-(2.0**-32)).neg_()
    noise.log_().neg_()
    return torch.argmax(noise.add_(logprobs.double()), dim=1, keepdim=True)


class FilteredSampling:
    """SGLang's ``top_k_top_p_min_p_sampling_from_probs_torch``, where a draw with a seed follows from its own row
    alone. ``unseeded``: SGLang's, for what has no seed or asks for more than the tokens."""

    def __init__(self, unseeded: Callable[..., Any]) -> None:
        self._unseeded = unseeded

    def __call__(
        self,
        probs: Tensor,
        top_ks: Tensor,
        top_ps: Tensor,
        min_ps: Tensor,
        need_min_p_sampling: bool,
        sampling_seed: Tensor | None,
        positions: Tensor,
        **options: Any,
    ) -> Any:
        if sampling_seed is None or need_min_p_sampling or options.get("return_filtered_probs"):
            fixed = (probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions)
            return self._unseeded(*fixed, **options)
        # SGLang sorts the rows and draws a rank, so one request with a filter (a greedy one has top-k 1) in a batch
        # has every row drawn by rank: other tokens than the same requests get without it. So the filter is found
        # in sorted order, and the token drawn in the vocabulary's.
        log_probs = filtered(probs, top_ks, top_ps).log()
        return multinomial_with_seed(log_probs, sampling_seed, positions).view(-1).to(torch.int32)


def filtered(probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """``probs`` ``[n, m]`` with 0 for what is not among a row's ``top_ks`` likeliest, or comes after those
    that hold more than ``top_ps`` of the mass; not renormalised. A ``top_ps`` of 1 filters nothing."""
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    ranks = torch.arange(probs.shape[-1])
    passes = (before <= top_ps.view(-1, 1)) | (top_ps.view(-1, 1) >= 1)
    passes &= ranks < top_ks.view(-1, 1)
    return probs * torch.zeros_like(passes).scatter(1, ids, passes)


def murmur_hash32(seeds: np.ndarray, positions: np.ndarray, columns: int) -> np.ndarray:
    """MurmurHash3 (32 bits) of the 16 bytes seed, position, column: uint32 ``[n, columns]``.

    ``seeds`` int64 ``[n]``, of which negative ones count as uint64; ``positions`` integers ``[n]``.
    """
    wide = seeds.astype(np.int64).view(np.uint64)
    state = np.zeros(len(wide), np.uint32)
    for word in (wide & _WORD, wide >> np.uint64(32), positions.astype(np.uint64) & _WORD):
        state = _mixed(state, word.astype(np.uint32))
    hashes = _mixed(state[:, None], np.arange(columns, dtype=np.uint32)[None])
    # MurmurHash3 ends with the input's length, in bytes.
    hashes ^= np.uint32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashes ^= hashes >> np.uint32(shift)
        hashes *= np.uint32(factor)
    return hashes ^ (hashes >> np.uint32(16))


def _mixed(state: np.ndarray, word: np.ndarray) -> np.ndarray:
    """``state`` after four more bytes; arithmetic modulo 2^32."""
    word = _rotated(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(state ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


# --- where received weights are put


class ReceivedBuckets:
    """SGLang's ``FlattenedTensorBucket.empty``, in the memory of the bucket before, of up to ``LARGEST`` bytes."""

    LARGEST = 64 << 20

    def __init__(self, empty: Callable[..., Any]) -> None:
        self._empty = empty
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __call__(self, names: Any, dtypes: Any, shapes: Any, device: Any) -> Any:
        # A bucket is loaded by copies before the next one is asked for. Fresh memory of this size comes from the
        # kernel page by page, which takes longer than the copy.
        bucket = self._empty(names, dtypes, shapes, device)
        size = bucket.flattened_tensor.numel()
        if size > self.LARGEST:
            return bucket
        if self._memory.numel() < size:
            self._memory = bucket.flattened_tensor
        bucket.flattened_tensor = self._memory[:size]
        return bucket


# --- LoRA: SGLang's ``torch_native`` backend asks for page-locked memory, which needs a device

PREPARED = "sglang.srt.lora.lora_manager.LoRAManager.init_state"
"""The first method that a LoRA manager calls after it has chosen its backend, before it makes a layer."""


class PageableTorch(types.ModuleType):
    """``torch`` whose ``tensor`` and ``zeros`` make ordinary memory where page-locked memory is asked for."""

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
    """Let LoRA's layers and their backend allocate pageable memory; called before the layers are made."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    pageable: Any = PageableTorch()
    layers.torch = torch_backend.torch = pageable
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
