"""Handles of shared memory, which SGLang's own unpickler opens, and the imports of the trainer."""

import sys

import torch
from torch.multiprocessing import reductions

from megatron_dppo.weights.shared_bytes import (
    MESSAGES,
    SharedBytes,
    named_by_uuid,
    shared_empty,
    shared_payloads,
)
from tests.patience import run_patiently


def test_sglang_opens_the_messages_of_each_rank():
    from sglang.srt.utils import MultiprocessingSerializer

    data = shared_empty(32, "cpu")
    data.copy_(torch.arange(32))
    first, last = SharedBytes("first", data[:24]), SharedBytes("last", data[24:])
    payloads = shared_payloads([[first, last], [], [last]])
    opened = [MultiprocessingSerializer.deserialize(payload)[MESSAGES] for payload in payloads]
    assert [[text for text, _ in messages] for messages in opened] == [
        ["first", "last"],
        [],
        ["last"],
    ]
    assert opened[0][0][1].tolist() == list(range(24))
    assert opened[0][1][1].tolist() == opened[2][0][1].tolist() == list(range(24, 32))
    data[3] = 99
    assert opened[0][0][1][3] == 99


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
import megatron_dppo.loop.run, megatron_dppo.supervised, megatron_dppo.weights.transaction
from megatron_dppo.weights.shared_bytes import SharedBytes, shared_empty, shared_payloads
shared_payloads([[SharedBytes("w", shared_empty(8, "cpu"))]])
"""


def test_the_trainer_runs_without_sglang():
    result = run_patiently([sys.executable, "-W", "ignore", "-c", WITHOUT_SGLANG])
    assert result.returncode == 0, result.stderr
