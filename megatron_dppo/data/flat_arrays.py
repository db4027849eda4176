"""Ragged rows as one flat array and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike


def flat(rows: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    """One array of all rows, also of none at all."""
    return np.concatenate([np.empty(0, dtype), *rows]).astype(dtype, copy=False)


def split(rows: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """``rows`` in pieces of ``counts``. Raises ValueError unless that is all of them."""
    if int(counts.sum()) != len(rows):
        raise ValueError(f"{len(rows)} rows, expected {int(counts.sum())}")
    return np.split(rows, np.cumsum(counts)[:-1]) if len(counts) else []
