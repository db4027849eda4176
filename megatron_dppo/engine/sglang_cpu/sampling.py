"""Sampling with one seed for each request: SGLang's own draws, without sgl_kernel and without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
    """Replacement of SGLang's ``top_k_top_p_min_p_sampling_from_probs_torch``.

    A sample with a seed depends on its own row alone. ``unseeded`` is SGLang's function, for calls without seeds, and
    for calls that need min-p or more results than the tokens.
    """

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
        # SGLang sorts the rows and samples a rank. One request with a filter in the batch (a greedy one has top-k 1)
        # thus makes it sample every row by rank, which gives the other requests different tokens. So this method
        # filters in sorted order, but samples in the order of the vocabulary.
        log_probs = filtered(probs, top_ks, top_ps).log()
        return multinomial_with_seed(log_probs, sampling_seed, positions).view(-1).to(torch.int32)


def filtered(probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Set to 0 the elements of ``probs`` ``[n, m]`` that top-k and top-p exclude, without renormalising.

    Each row keeps its ``top_ks`` most likely tokens, of these the ones before which the mass is at most ``top_ps``. A
    ``top_ps`` of 1 excludes nothing.
    """
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    ranks = torch.arange(probs.shape[-1])
    passes = (mass_before <= top_ps.view(-1, 1)) | (top_ps.view(-1, 1) >= 1)
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
    """Mix four more bytes into ``state``, modulo 2^32."""
    word = _rotated(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(state ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))
