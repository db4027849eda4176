"""A GPU that torch can't use is refused. Made-up driver files describe the machine's GPU."""

import logging

import pytest
import torch

from megatron_dppo.config.machine import this_machine
from megatron_dppo.launch.library_checks import gpu_faults
from megatron_dppo.system import gpus
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.platform import UnusableGpuError

VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\nGCC version: 12\n"
)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that gives the machine a GPU with a driver version (None: no driver), and torch a CUDA version."""

    def make(driver, built_for):
        (tmp_path / "nvidia0").touch()
        if driver is not None:
            (tmp_path / "version").write_text(VERSION.format(driver))
        monkeypatch.setattr(torch.version, "cuda", built_for)

    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    platform.current.cache_clear()
    yield make
    platform.current.cache_clear()


def test_a_machine_without_a_gpu_trains_on_cpus(machine):
    assert not gpus.has_visible_gpu()
    assert platform.gpu_fault() is None
    assert platform.current().distributed_backend == "gloo"


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 3),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,0", 2),
        ("0,-1,2", 1),
        ("0,,2", 1),
        ("0,1,2,3", 3),
    ],
)
def test_visible_gpus_are_those_of_the_driver_that_cuda_does_not_hide(
    tmp_path, monkeypatch, visible, count
):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.visible_gpus() == count
    assert gpus.has_visible_gpu() == (count > 0)
    assert this_machine().gpus == count


@pytest.mark.parametrize(
    ("driver", "built_for", "reason"),
    [
        ("570.86.15", "13.0", "(CUDA 13.0) can't use it: got driver 570.86.15, expected 580 or newer"),
        ("520.61", "12.8", "(CUDA 12.8) can't use it: got driver 520.61, expected 525 or newer"),
        ("580.65.06", "13.0", "got driver 580.65.06, expected one that answers: nvidia-smi says why"),
        ("900.1", "15.0", "got driver 900.1, expected one for CUDA 15.0"),
        (None, "13.0", "got driver of unknown version, expected 580 or newer"),
    ],
)  # fmt: skip
def test_a_gpu_that_torch_cant_use_is_refused(machine, monkeypatch, driver, built_for, reason):
    machine(driver, built_for)
    with pytest.raises(UnusableGpuError) as refusal:
        platform.current()
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert list(gpu_faults(None)) == [str(refusal.value)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert platform.current().distributed_backend == "gloo"
    assert list(gpu_faults(None)) == []


def test_a_torch_for_cpus_beside_a_gpu_is_refused_unless_the_servers_are_meant_to_be_on_cpus(
    machine, caplog
):
    machine("580.65.06", None)
    (problem,) = gpu_faults(None)
    assert "is built only for CPUs, expected the packages of tools/environment/gpu.txt" in problem
    assert list(gpu_faults("cpu")) == []
    with caplog.at_level(logging.WARNING):
        assert platform.current().distributed_backend == "gloo"
    assert f"training on CPUs: {problem}" in caplog.text
