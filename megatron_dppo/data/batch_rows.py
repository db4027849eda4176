"""The arrays of a saved batch, in memory or in a file: rows of them, without the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import safe_open


class BatchRows(Protocol):
    """Where rows are read from."""

    def names(self) -> Collection[str]:
        """Of the arrays."""

    def size(self, name: str) -> int:
        """Rows of an array. Raises KeyError where there is none."""

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        """Rows ``begin`` to ``end``."""


class RowsInMemory:
    """Of ``arrays``; what is read are views."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def names(self) -> Collection[str]:
        """Of the arrays."""
        return self._arrays.keys()

    def size(self, name: str) -> int:
        """Rows of an array."""
        return len(self._arrays[name])

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        """A view of rows ``begin`` to ``end``."""
        return self._arrays[name][begin:end]


class RowsInFile:
    """Of a safetensors file, which is mapped; what is read are copies, and nothing else takes memory.

    Raises FileNotFoundError, and SafetensorError where the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="numpy")
        self._slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118

    def names(self) -> Collection[str]:
        """Of the arrays."""
        return self._slices.keys()

    def size(self, name: str) -> int:
        """Rows of an array."""
        return int(self._slices[name].get_shape()[0])

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        """A copy of rows ``begin`` to ``end``."""
        if not self.size(name):  # which safetensors takes no slice of
            return np.asarray(self._file.get_tensor(name))
        if begin == end:
            begin = end = 0
        return np.asarray(self._slices[name][begin:end])
