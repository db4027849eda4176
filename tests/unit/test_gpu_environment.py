"""Variables of CUDA, NCCL and torch's allocator: which a rank sets, which it leaves as they are, which it rejects."""

from contextlib import nullcontext

import pytest

from megatron_dppo.config.errors import ConfigError
from megatron_dppo.config.machine import Machine, allocator_faults, expandable_segments
from megatron_dppo.launch import rank_start
from megatron_dppo.trainer.platform import set_missing_variables


def test_what_is_missing_is_set():
    environment = {"HOME": "/h"}
    lines = set_missing_variables(environment)
    assert environment == {
        "HOME": "/h",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
    }
    assert lines == ["CUDA_DEVICE_MAX_CONNECTIONS=1", "NCCL_CUMEM_ENABLE=0", "NCCL_NVLS_ENABLE=0"]


def test_what_the_user_set_stays_and_is_said():
    environment = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    lines = set_missing_variables(environment)
    assert environment["NCCL_CUMEM_ENABLE"] == "1"
    assert lines[1].startswith("NCCL_CUMEM_ENABLE=1, as you set it; 0 is usual: SGLang sets it so")
    assert lines[2] == "NCCL_NVLS_ENABLE=0"


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"},
            "PYTORCH_ALLOC_CONF",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
    ],
)
def test_expandable_segments_are_refused_where_memory_is_shared(environment, found):
    assert expandable_segments(environment) == found
    for strategy in ("tensor", "distributed"):
        problems = list(allocator_faults(strategy, environment))
        assert len(problems) == (found is not None and strategy == "tensor")
        assert all(line.startswith(f"{found}: got ") for line in problems)


@pytest.mark.parametrize(
    ("strategy", "given", "found"),
    [
        ("distributed", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("tensor", {}, {}),
        ("distributed", {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
        ("distributed", {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}),
    ],
)
def test_a_rank_on_a_gpu_allocates_expandable_segments_unless_told_otherwise(
    monkeypatch, strategy, given, found
):
    for gpus in (0, 1):
        environment = dict(given)
        machine = Machine(cores=1, gpus=gpus, memory_bytes=1, open_files=1)
        monkeypatch.setattr(rank_start, "this_machine", lambda machine=machine: machine)
        monkeypatch.setattr(rank_start.os, "environ", environment)
        rank_start.prepare_environment(strategy, {})
        assert environment == (found if gpus else given)


def test_a_rank_refuses_what_its_container_set(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    for gpus, refused in ((0, False), (1, True)):
        machine = Machine(cores=1, gpus=gpus, memory_bytes=1, open_files=1)
        monkeypatch.setattr(rank_start, "this_machine", lambda machine=machine: machine)
        with pytest.raises(ConfigError) if refused else nullcontext():
            rank_start.prepare_environment("tensor", {})
