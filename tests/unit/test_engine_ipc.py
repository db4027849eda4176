"""Handles of shared memory, which SGLang's own unpickler opens, and the imports of the trainer."""

import subprocess
import sys

import torch
from torch.multiprocessing import reductions

from megatron_dppo.engine.shared_buckets import (
    WireHeader,
    named_by_uuid,
    shared_empty,
    shared_payloads,
)


def test_sglang_opens_a_bucket():
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([7.0, 8.0])}
    data = shared_empty(8 * 4, "cpu")
    data.copy_(torch.cat([w.flatten() for w in weights.values()]).view(torch.uint8))
    header = WireHeader(tuple(weights), ("float32",) * 2, ((2, 3), (2,)), 32)
    payloads = shared_payloads(header, data, ranks=2)
    assert len(payloads) == 2
    for payload in payloads:
        bucket = MultiprocessingSerializer.deserialize(payload)
        # WeightUpdater._update_weights_from_flattened_bucket reads a bucket in this way.
        entries = [
            FlattenedTensorMetadata(m.name, m.shape, m.dtype, m.start_idx, m.end_idx, m.numel)
            for m in bucket["metadata"]
        ]
        opened_bucket = FlattenedTensorBucket(
            flattened_tensor=bucket["flattened_tensor"], metadata=entries
        )
        for name, tensor in opened_bucket.reconstruct_tensors():
            assert torch.equal(tensor, weights[name])
            assert tensor.shape == weights[name].shape


def test_a_cuda_device_is_named_by_its_uuid():
    arguments = ("Tensor", (4,), (1,), 0, "Storage", torch.float32, 1, b"handle", 16, 0)
    cuda_reduction = reductions.rebuild_cuda_tensor, arguments
    rebuild, named_arguments = named_by_uuid(*cuda_reduction, "GPU-{}".format)
    assert rebuild is reductions.rebuild_cuda_tensor
    assert named_arguments == (*arguments[:6], "GPU-1", *arguments[7:])
    cpu_reduction = reductions.rebuild_tensor, ("Tensor", "Storage", ())
    assert named_by_uuid(*cpu_reduction, "GPU-{}".format) == cpu_reduction


def test_sglang_reads_the_uuid_where_we_write_it():
    from sglang.srt.utils import patch_torch

    assert patch_torch._REDUCE_TENSOR_ARG_DEVICE_INDEX == 6
    assert list(reductions.rebuild_cuda_tensor.__code__.co_varnames[:8]) == [
        "tensor_cls",
        "tensor_size",
        "tensor_stride",
        "tensor_offset",
        "storage_cls",
        "dtype",
        "storage_device",
        "storage_handle",
    ]


WITHOUT_SGLANG = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("sglang", "smg"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Missing())
import torch
import megatron_dppo.loop.run, megatron_dppo.supervised, megatron_dppo.weight_sync.transaction
from megatron_dppo.engine.shared_buckets import WireHeader, shared_empty, shared_payloads
shared_payloads(WireHeader(("w",), ("float32",), ((2,),), 8), shared_empty(8, "cpu"), 1)
"""


def test_the_trainer_runs_without_sglang():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_SGLANG],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
