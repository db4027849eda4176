"""Sampling with one seed for each request on a CPU: SGLang's own draws, without sgl_kernel and without
a compiler.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_WORD = np.uint64(0xFFFFFFFF)
_LARGEST = float(2**32 - 1)


def multinomial_with_seed(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Draw a column of each row with the probabilities exp(``logprobs``), by the Gumbel trick.

    The noise of a row follows from its seed and its position alone, and is the same as that of
    SGLang's function of this name on a GPU.

    Args:
        logprobs: natural logarithms ``[n, m]``; they need not be normalised.
        seed: int64 ``[n]``, of each row's request.
        positions: integers ``[n]``: where in its sequence the row's token will stand.

    Returns:
        int64 ``[n, 1]``.
    """
    hashes = murmur_hash32(seed.numpy(), positions.numpy(), logprobs.shape[1])
    noise = torch.from_numpy(hashes.astype(np.float64) / _LARGEST)
    # A hash of 0 would be a noise of -inf, the largest one of inf.
    noise.log_().clamp_(min=torch.finfo(noise.dtype).min, max=-(2.0**-32)).neg_()
    noise.log_().neg_()
    return torch.argmax(noise.add_(logprobs.double()), dim=1, keepdim=True)


def murmur_hash32(seeds: np.ndarray, positions: np.ndarray, columns: int) -> np.ndarray:
    """MurmurHash3 (32 bits) of the 16 bytes seed, position, column: uint32 ``[n, columns]``.

    ``seeds`` int64 ``[n]``, of which negative ones count as uint64; ``positions`` integers ``[n]``.
    """
    wide = seeds.astype(np.int64).view(np.uint64)
    words = (wide & _WORD, wide >> np.uint64(32), positions.astype(np.uint64) & _WORD)
    state = np.zeros(len(wide), np.uint32)
    for word in words:
        state = _mixed(state, word.astype(np.uint32))
    hashes = _mixed(state[:, None], np.arange(columns, dtype=np.uint32)[None])
    hashes ^= np.uint32(16)  # bytes
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
