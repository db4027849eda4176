"""Reuse memory for received buckets of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ReceivedBuckets:
    """SGLang's ``FlattenedTensorBucket.empty`` with reused memory for buckets up to ``LARGEST`` bytes."""

    LARGEST = 64 << 20

    def __init__(self, empty: Callable[..., Any]) -> None:
        self._empty = empty
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __call__(self, names: Any, dtypes: Any, shapes: Any, device: Any) -> Any:
        # SGLang has copied a bucket's tensors before it requests the next bucket, so the memory is free. Do not use new
        # memory: the operating system provides it page by page, which takes longer than the copies.
        bucket = self._empty(names, dtypes, shapes, device)
        size = bucket.flattened_tensor.numel()
        if size > self.LARGEST:
            return bucket
        if self._memory.numel() < size:
            self._memory = bucket.flattened_tensor
        bucket.flattened_tensor = self._memory[:size]
        return bucket
