"""The memory that received weights are written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
