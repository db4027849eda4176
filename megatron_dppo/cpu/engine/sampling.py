"""Sampling with one seed for each request: SGLang's own draws, without sgl_kernel and without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WORD_MASK = np.uint64(0xFFFFFFFF)
"""The lowest 32 bits."""


_LARGEST_HASH = float(2**32 - 1)


def multinomial_with_seed(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Draw a column of each row with the probabilities exp(``logprobs``), by the Gumbel trick: the column with the
    largest sum of log-probability and noise -log(-log(u)), with u from 0 to 1.

    The noise of a row depends only on its seed (int64 ``[n]``) and its position in its sequence (``[n]``), and equals
    the noise of SGLang's function of this name on a GPU. ``logprobs`` ``[n, m]`` need not be normalised; the result is
    int64 ``[n, 1]``.
    """
    hashes = murmur_hash32(seed.numpy(), positions.numpy(), logprobs.shape[1])
    noise = torch.from_numpy(hashes.astype(np.float64) / _LARGEST_HASH)
    # Clamp log(u): u = 0 would give the noise -inf, and u = 1 would give the noise inf.
    noise.log_().clamp_(min=torch.finfo(noise.dtype).min, max=-(2.0**-32)).neg_()
    noise.log_().neg_()
    return torch.argmax(noise.add_(logprobs.double()), dim=1, keepdim=True)


class FilteredSampling:
    """Replacement of SGLang's ``top_k_top_p_min_p_sampling_from_probs_torch``.

    A sample with a seed depends only on its own row. ``unseeded`` is SGLang's function, for calls without seeds, and
    for calls that need min-p or return the filtered probabilities too.
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
            arguments = (
                probs,
                top_ks,
                top_ps,
                min_ps,
                need_min_p_sampling,
                sampling_seed,
                positions,
            )
            return self._unseeded(*arguments, **options)
        # If one request of a batch has a filter (a greedy request has top-k 1), SGLang sorts all rows of the batch, and
        # samples a place in the sorted order of every row. The noise then belongs to places instead of tokens, so that
        # the tokens of a request depend on the other requests. So this method filters in sorted order, but samples in
        # the order of the vocabulary.
        log_probs = filtered(probs, top_ks, top_ps).log()
        return multinomial_with_seed(log_probs, sampling_seed, positions).view(-1).to(torch.int32)


def filtered(probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Set to 0 the elements of ``probs`` ``[n, m]`` that top-k and top-p exclude, without renormalising.

    A row keeps a token if it is among the ``top_ks`` most likely tokens, and if all more likely tokens have together at
    most the probability ``top_ps``. A ``top_ps`` of 1 excludes nothing.
    """
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    ranks = torch.arange(probs.shape[-1])
    passes = (mass_before <= top_ps.view(-1, 1)) | (top_ps.view(-1, 1) >= 1)
    passes &= ranks < top_ks.view(-1, 1)
    return probs * torch.zeros_like(passes).scatter(1, ids, passes)


def murmur_hash32(seeds: np.ndarray, positions: np.ndarray, columns: int) -> np.ndarray:
    """MurmurHash3 (32 bits) of the 16 bytes seed, position, column: uint32 ``[n, columns]``.

    ``seeds``: int64 ``[n]``; their bits are read as uint64. ``positions``: integers ``[n]``.
    """
    wide = seeds.astype(np.int64).view(np.uint64)
    state = np.zeros(len(wide), np.uint32)
    low_word = wide & _WORD_MASK
    high_word = wide >> np.uint64(32)
    position_word = positions.astype(np.uint64) & _WORD_MASK
    for word in (low_word, high_word, position_word):
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
