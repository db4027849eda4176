"""The evidence of a node's preflight: a run's needs, the messages of nodes in a folder, an interpreter's packages."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.cluster.planner.devices import DEVICES, Cluster
from megatron_dppo.cluster.planner.facts import facts_of
from megatron_dppo.cluster.planner.traffic import traffic
from megatron_dppo.cluster.preflight import inspection, table
from megatron_dppo.cluster.preflight.evidence import Meeting, Site, needs_of
from megatron_dppo.cluster.preflight.gpus import gpus_of_driver
from megatron_dppo.cluster.preflight.network import addresses, collect_network
from megatron_dppo.cluster.preflight.shared_folder import collect_shared_folder
from megatron_dppo.config.forwarded import MOMENT_DTYPES
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.system import toolkit as machine_toolkit
from tests.patience import run_patiently
from tests.slurm.recipes import write_config
from tests.small_config import small_config

GIB = 2**30
MODEL = Path(__file__).resolve().parents[3] / "examples" / "model_configs" / "qwen3-1.7b-base"
PARAMETERS = 1_720_574_976
"""Number of the model's parameters. Its embeddings are tied."""


def config_of(folder: Path, **sections) -> TrainConfig:
    return small_config(folder / "run", MODEL, **{"engine": {"device": "cpu"}, **sections})


def test_needs_follow_from_the_configuration(tmp_path):
    needs = needs_of(config_of(tmp_path), gpus=0, ports=[7])
    # Two checkpoints are kept while a third one is written. Each has weights and two moments of 4 bytes.
    assert needs.disk_bytes == GIB + 3 * PARAMETERS * 12
    assert needs.memory_bytes == GIB + 4 * PARAMETERS
    assert needs.shm_bytes == GIB // 4
    assert needs.open_files == 128 + 256
    assert needs.ports == (7,)
    assert needs.pythons == {"trainer": sys.executable, "engine": sys.executable}
    assert "sglang==0.5.23" in needs.requirements["engine"]
    assert needs.requirements["trainer"] == ("megatron-core==0.16.1",)


def test_the_planner_and_the_preflight_count_the_same_bytes(tmp_path):
    """The run trains whole weights or adapters, in float32 or in bfloat16, also with narrow moments or FP8 servers."""
    shape = load_model_shape(MODEL)
    lora = {"rank": 8, "update": "adapters", "target_modules": ["attention"]}
    narrow = {"use_precision_aware_optimizer": True, **dict.fromkeys(MOMENT_DTYPES, "bfloat16")}
    fp8 = {"device": "cpu", "quantization": "fp8"}
    for section in ({}, {"lora": lora}, {"megatron_optimizer": narrow}, {"engine": fp8}):
        for dtype in ("float32", "bfloat16"):
            model = {"hf_checkpoint": str(MODEL), "dtype": dtype}
            config = config_of(tmp_path, model=model, weight_sync={"strategy": "disk"}, **section)
            planned = traffic(facts_of(config, shape), Cluster(DEVICES["h100"], 1))
            needs = needs_of(config, gpus=8)
            assert needs.disk_bytes == GIB + 3 * planned.checkpoint
            assert needs.shm_bytes == GIB // 4 + planned.update


def test_a_model_that_cant_be_read_is_no_nodes_fault(tmp_path):
    missing = config_of(tmp_path, model={"hf_checkpoint": str(tmp_path), "dtype": "float32"})
    assert needs_of(missing, gpus=0).disk_bytes == GIB


def test_weights_that_go_through_dev_shm_must_fit_there(tmp_path):
    for directory in (None, "/dev/shm", "/dev/shm/weights"):
        through = config_of(tmp_path, weight_sync={"strategy": "disk", "directory": directory})
        assert needs_of(through, gpus=0).shm_bytes == GIB // 4 + 4 * PARAMETERS
    elsewhere = config_of(tmp_path, weight_sync={"strategy": "disk", "directory": "/scratch"})
    assert needs_of(elsewhere, gpus=0).shm_bytes == GIB // 4
    no_folder = config_of(tmp_path, weight_sync={"directory": "/dev/shm"})
    assert needs_of(no_folder, gpus=0).shm_bytes == GIB // 4


def test_the_engine_has_its_own_python_or_none(tmp_path):
    own = needs_of(config_of(tmp_path, engine={"device": "cpu", "python": "/e/python"}), gpus=0)
    assert own.pythons["engine"] == "/e/python"
    none = needs_of(config_of(tmp_path, engine={"device": "cpu", "servers": 0}), gpus=0)
    assert set(none.pythons) == set(none.requirements) == {"trainer"}


def meetings(folder: Path, hosts: str, timeout_s: float = 10.0) -> list[Meeting]:
    return [Meeting(folder, host, len(hosts), timeout_s) for host in hosts]


def test_nodes_hear_each_other_and_one_is_first(tmp_path):
    a, b = meetings(tmp_path, "ab")
    a.write("topic", {"x": 1})
    b.write("topic", {"x": 2})
    assert a.wait_for_all("topic") == b.wait_for_all("topic") == {"a": {"x": 1}, "b": {"x": 2}}
    assert [a.is_first("flag"), b.is_first("flag"), a.is_first("flag")] == [True, False, False]


def test_a_node_that_says_nothing_is_not_waited_for_forever(tmp_path):
    a, _ = meetings(tmp_path, "ab", timeout_s=0.0)
    a.write("topic", {})
    assert a.wait_for_all("topic") == {"a": {}}
    assert a.wait_for_all("another") == {}


def test_a_file_in_the_making_is_not_heard(tmp_path):
    a, _ = meetings(tmp_path, "ab", timeout_s=0.0)
    a.write("topic", {})
    (tmp_path / "meeting" / "topic" / ".b.1").write_text("{")
    assert list(a.wait_for_all("topic")) == ["a"]


def collect_on_three_nodes(folder: Path, collect, tmp_path: Path) -> list[dict]:
    """Return the evidence of three nodes that collect at the same time."""
    needs = needs_of(config_of(tmp_path), gpus=0)
    sites = [Site(needs, meeting, {}) for meeting in meetings(folder, "abc")]
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(collect, sites))


def test_three_nodes_of_one_folder_see_each_other(tmp_path):
    evidence = collect_on_three_nodes(tmp_path / "shared", collect_shared_folder, tmp_path)
    assert all(node["seen"] == node["replaced"] == ["a", "b", "c"] for node in evidence)
    assert sum(node["won"] for node in evidence) == 1


def test_three_nodes_of_one_machine_reach_each_other(tmp_path):
    evidence = collect_on_three_nodes(tmp_path / "shared", collect_network, tmp_path)
    own = sorted(addresses())
    for host, node in zip("abc", evidence, strict=True):
        assert sorted(node["reached"]) == sorted(set("abc") - {host})
        assert all(sorted(names) == own for names in node["reached"].values())


def test_gpus_are_told_by_the_driver_where_nvidia_smi_is_missing(tmp_path):
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    )
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
        (tmp_path / "gpus" / name / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    assert gpus_of_driver(tmp_path) == [{"name": "NVIDIA H200", "driver": "570.86.15"}] * 2
    assert gpus_of_driver(tmp_path / "none") == []


def test_an_interpreter_tells_its_packages_without_this_package_or_torch():
    command = [sys.executable, "-S", inspection.__file__, "torch", "not-there"]
    isolated = json.loads(subprocess.check_output(command))
    assert isolated["packages"] == {"torch": None, "not-there": None}
    command.remove("-S")
    with_site = json.loads(subprocess.check_output(command))
    assert with_site["packages"]["torch"].startswith("2.")
    assert with_site["packages"]["not-there"] is None


def test_what_triton_compiles_with_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection.sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    header = tmp_path / "include" / "Python.h"
    assert inspection.missing_for_triton() == ["gcc, clang or CC", str(header)]
    header.parent.mkdir()
    header.touch()
    monkeypatch.setenv("CC", "icx")
    assert inspection.missing_for_triton() == []


def test_the_number_of_nccl_is_its_version(monkeypatch):
    class Library:
        @staticmethod
        def ncclGetVersion(pointer):  # noqa: N802  NCCL's own name
            pointer._obj.value = 22907

    monkeypatch.setattr(inspection, "nccl_library", lambda: "libnccl.so.2")
    monkeypatch.setattr(inspection.ctypes, "CDLL", lambda path: Library())
    assert inspection.nccl_version() == "2.29.7"


def test_the_table_has_a_dash_for_what_was_not_collected():
    evidence: Any = {"host": {"name": "a"}, "memory": {"available": 3 * GIB, "shm_free": GIB // 2}}
    lines = table({"a": evidence}, []).splitlines()
    assert lines[1].split() == ["a", "none", "3.0", "GiB", "0.5", "GiB", "-", "-", "-", "ok"]


def test_this_machine_alone_gets_a_table(tmp_path):
    config = write_config(tmp_path)
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-m", "megatron_dppo.cluster.preflight", str(config)]
    result = run_patiently(command)
    assert result.returncode == 0, result.stdout + result.stderr
    header, line = result.stdout.splitlines()
    assert header.split()[0] == "node"
    assert line.split()[-1] == "ok"
    [verdict] = (tmp_path / "run" / "preflight").glob("local-*/verdict.json")
    assert '"bad_hosts": []' in verdict.read_text()


@pytest.fixture
def cudnn_tree(tmp_path, monkeypatch):
    """The folders of a toolkit and of a module with a cuDNN of their own, beside the wheel's cuDNN."""
    files = {
        "toolkit": ("lib64/libcudnn.so.9", "lib64/stubs/libcudnn.so"),
        "module": ("targets/x86_64-linux/lib/libcudnn.so", "targets/x86_64-linux/lib/libcudnn.so.9"),
        "site": ("nvidia/cudnn/lib/libcudnn.so.9", "nvidia/cudnn/lib/libcudnn_ops.so.9"),
    }  # fmt: skip
    for folder, names in files.items():
        for name in names:
            file = tmp_path / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    monkeypatch.setattr(inspection, "_USUAL_HOME", str(tmp_path / "usual"))
    monkeypatch.setattr(inspection.ctypes.util, "find_library", lambda name: f"lib{name}.so.8")
    return tmp_path


def test_cudnn_is_looked_for_where_transformer_engine_looks(cudnn_tree, monkeypatch):
    module, toolkit = (str(cudnn_tree / name) for name in ("module", "toolkit"))
    monkeypatch.setattr(sys, "path", [])
    find = inspection.cudnn_library
    assert find({"CUDNN_HOME": module, "CUDA_HOME": toolkit}).startswith(module)
    assert find({"CUDA_HOME": toolkit}) == f"{toolkit}/lib64/libcudnn.so.9"
    assert find({"CUDA_PATH": toolkit, "CUDNN_PATH": "/nowhere"}).startswith(toolkit)
    assert find({}) == "libcudnn.so.8"


def test_a_rank_names_the_wheels_cudnn_and_the_check_knows_it(cudnn_tree, monkeypatch):
    module, toolkit = (str(cudnn_tree / name) for name in ("module", "toolkit"))
    monkeypatch.setattr(sys, "path", [str(cudnn_tree / "site")])
    wheel = str(cudnn_tree / "site" / "nvidia" / "cudnn")
    environment = {"CUDA_HOME": toolkit}
    assert inspection.cudnn_library(environment).startswith(wheel)
    assert machine_toolkit.offer_cudnn(environment) == [f"CUDNN_HOME={wheel}"]
    assert environment["CUDNN_HOME"] == wheel
    assert inspection.cudnn_library(environment).startswith(wheel)
    for variable in ("CUDNN_HOME", "CUDNN_PATH"):
        environment = {variable: module}
        assert machine_toolkit.offer_cudnn(environment) == []
        assert environment == {variable: module}
        assert inspection.cudnn_library(environment).startswith(module)


def test_cudnn_says_its_own_version(monkeypatch):
    for number, version in ((92400, "9.24.0"), (91002, "9.10.2"), (8907, "8.9.7")):
        library = SimpleNamespace(cudnnGetVersion=lambda number=number: number)
        monkeypatch.setattr(inspection.ctypes, "CDLL", lambda path, library=library: library)
        assert inspection.cudnn_version("libcudnn.so.9") == version
    monkeypatch.undo()
    assert inspection.cudnn_version("/nowhere/libcudnn.so").startswith("unknown: ")
