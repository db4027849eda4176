"""An engine reuses the memory of received buckets of weights, up to a size."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_dppo.engine.sglang_cpu.received_buckets import ReceivedBuckets


def new_bucket(names: list[str], dtypes: list[str], shapes: list[list[int]], device: str) -> object:
    size = sum(torch.Size(dims).numel() for dims in shapes)
    return SimpleNamespace(
        flattened_tensor=torch.empty(size, dtype=torch.uint8, device=device), metadata=names
    )


def test_the_memory_of_the_bucket_before_is_used_again(monkeypatch) -> None:
    monkeypatch.setattr(ReceivedBuckets, "LARGEST", 100)
    make_bucket = ReceivedBuckets(new_bucket)
    sizes = [40, 90, 60, 101, 90]
    buckets = [make_bucket(["a"], ["uint8"], [[size]], "cpu") for size in sizes]
    assert [b.flattened_tensor.numel() for b in buckets] == sizes
    places = [b.flattened_tensor.data_ptr() for b in buckets]
    # 40 bytes are too few for the next bucket, and memory of 101 bytes is not kept.
    assert places[1] == places[2] == places[4]
    assert len(set(places)) == 3
