"""Where a CPU engine puts the weights that it receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ReceivedBuckets:
    """SGLang's ``FlattenedTensorBucket.empty``, in the memory of the bucket before.

    A bucket is loaded by copies before the next one is asked for. Fresh memory of this size comes from
    the kernel page by page, which takes longer than the copy.
    """

    KEPT_BYTES = 64 << 20

    def __init__(self, empty: Callable[..., Any]) -> None:
        self._empty = empty
        self._kept = torch.empty(0, dtype=torch.uint8)

    def __call__(self, names: Any, dtypes: Any, shapes: Any, device: Any) -> Any:
        """As SGLang's, of which the untouched memory is dropped again."""
        bucket = self._empty(names, dtypes, shapes, device)
        size = bucket.flattened_tensor.numel()
        if size > self.KEPT_BYTES:
            return bucket
        if self._kept.numel() < size:
            self._kept = bucket.flattened_tensor
        bucket.flattened_tensor = self._kept[:size]
        return bucket
