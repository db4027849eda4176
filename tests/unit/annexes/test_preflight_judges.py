"""The preflight's judges: they get the evidence of some nodes and name the nodes at fault. No node is started."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dppo.cluster.preflight import (
    CHECKS,
    EVERYWHERE,
    Finding,
    Needs,
    all_reduce,
    bad_hosts,
    judge,
)
from megatron_dppo.cluster.preflight.all_reduce import judge_all_reduce
from megatron_dppo.cluster.preflight.evidence import (
    EvidenceError,
    outlier_findings,
    read_evidence,
    too_little,
    write_evidence,
)
from megatron_dppo.cluster.preflight.gpus import judge_gpus, parse
from megatron_dppo.cluster.preflight.machine import judge_host, judge_pythons
from megatron_dppo.cluster.preflight.network import judge_network, reachable_interface
from megatron_dppo.cluster.preflight.shared_folder import judge_shared_folder

GIB = 2**30
NEEDS = Needs(
    gpus=2,
    run_directory=Path("/run"),
    disk_bytes=10 * GIB,
    temporary_bytes=GIB,
    shm_bytes=GIB,
    memory_bytes=4 * GIB,
    open_files=384,
    ports=(),
    pythons={},
    requirements={},
)


def summaries(findings) -> list[tuple[str, str, str]]:
    """Return the host, the subject and the actual value of each finding."""
    return [(finding.host, finding.subject, finding.actual) for finding in findings]


def test_a_bound_is_met_at_equality():
    assert summaries(too_little("x", {"a": 5, "b": 4}, 5, "files")) == [("b", "x", "4 files")]


def test_bytes_are_told_in_the_unit_that_reads_better():
    [finding] = too_little("disk", {"a": 64 << 20}, 3 * GIB // 2, "GiB")
    assert finding.actual == "64 MiB"
    assert finding.expected.endswith("1.5 GiB")


def test_the_odd_one_is_named_with_what_the_others_have():
    [finding] = outlier_findings("driver", {"a": "570", "b": "550", "c": "570"})
    assert summaries([finding]) == [("b", "driver", "550")]
    assert finding.expected.startswith("570, ")
    assert str(finding) == f"b: driver: got 550, expected {finding.expected}"


def test_of_two_values_as_frequent_the_first_hosts_is_expected():
    [finding] = outlier_findings("driver", {"b": "550", "a": "570"})
    assert finding.host == "b"
    assert finding.expected.startswith("570, ")


def gpu(**values):
    healthy = {"name": "H100", "driver": "570", "used_mib": 4, "uncorrected_errors": 0, "mig": None}
    return healthy | values


def test_nodes_with_few_or_other_gpus_are_named():
    evidence = {
        "a": {"gpus": [gpu(), gpu()]},
        "b": {"gpus": [gpu()]},
        "c": {"gpus": [gpu(name="A100"), gpu(name="A100")]},
        "d": {"gpus": []},
    }
    assert summaries(judge_gpus(evidence, NEEDS)) == [
        ("b", "GPUs", "1"),
        ("d", "GPUs", "0"),
        ("c", "kind of GPU", "A100"),
    ]
    assert list(judge_gpus(evidence, replace(NEEDS, gpus=0))) == []


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"used_mib": 1024}, []),
        ({"used_mib": 1025}, [("a", "GPU 1: memory in use", "1025 MiB")]),
        ({"uncorrected_errors": 2}, [("a", "GPU 1: uncorrected memory errors", "2")]),
        ({"mig": "Enabled"}, [("a", "GPU 1: MIG", "enabled")]),
        ({"used_mib": None, "uncorrected_errors": None}, []),
    ],
)
def test_a_gpu_in_use_or_ill_is_named(values, told):
    assert summaries(judge_gpus({"a": {"gpus": [gpu(), gpu(**values)]}}, NEEDS)) == told


def test_lines_of_nvidia_smi_become_gpus():
    [parsed_gpu] = parse("NVIDIA H200, GPU-1, 570.86.15, 143771, 4, [N/A], 0\n")
    assert parsed_gpu == {
        "name": "NVIDIA H200",
        "uuid": "GPU-1",
        "driver": "570.86.15",
        "memory_mib": 143771,
        "used_mib": 4,
        "mig": None,
        "uncorrected_errors": 0,
    }


def python(nccl="2.29.7", **packages):
    packages = {"torch": "2.13.0", **packages}
    return {
        "nccl": nccl,
        "packages": packages,
        "missing_for_triton": [],
        "transformer_engine": None,
    }


def roles(trainer, engine):
    return {"trainer": trainer, "engine": engine}


PINS = replace(NEEDS, requirements={"trainer": (), "engine": ("sglang==0.5.23",)})


def test_a_package_that_misses_its_pin_is_named():
    good = python(sglang="0.5.23")
    evidence = {
        "a": roles(python(), good),
        "b": roles(python(), python(sglang="0.5.22")),
        "c": roles(python(), python(sglang=None)),
        "d": roles(python(), good),
    }
    assert summaries(judge_pythons(evidence, PINS))[:2] == [
        ("b", "engine's sglang", "0.5.22"),
        ("c", "engine's sglang", "not installed"),
    ]


def test_an_nccl_that_differs_on_one_node_names_the_node():
    good = python(sglang="0.5.23")
    odd = python(nccl="2.30.7", sglang="0.5.23")
    evidence = {"a": roles(good, good), "b": roles(good, odd), "c": roles(good, good)}
    assert summaries(judge_pythons(evidence, PINS)) == 2 * [("b", "engine's NCCL", "2.30.7")]


def test_an_nccl_that_differs_everywhere_is_no_nodes_fault():
    good, other = python(sglang="0.5.23"), python(nccl="2.30.7", sglang="0.5.23")
    findings = list(judge_pythons({"a": roles(good, other), "b": roles(good, other)}, PINS))
    assert {finding.host for finding in findings} == {EVERYWHERE}


def test_nodes_with_and_without_apexs_kernel_are_not_mixed():
    kernels = {"a": "apex's", "b": "apex's", "c": "not built"}
    evidence = {
        h: {"trainer": python() | {"fused_weight_gradients": k}} for h, k in kernels.items()
    }
    needs = replace(NEEDS, requirements={"trainer": ()})
    assert summaries(judge_pythons(evidence, needs)) == [
        ("c", "kernels for weight gradients", "not built")
    ]


def test_an_incomplete_transformer_engine_is_named_for_each_role():
    incomplete = python() | {"transformer_engine": "no transformer_engine_torch*.so"}
    evidence = {"a": roles(python(), incomplete), "b": roles(incomplete, python())}
    needs = replace(NEEDS, requirements={"trainer": (), "engine": ()})
    assert summaries(judge_pythons(evidence, needs)) == [
        ("a", "engine's Transformer Engine", "no transformer_engine_torch*.so"),
        ("b", "trainer's Transformer Engine", "no transformer_engine_torch*.so"),
    ]


def test_triton_needs_a_compiler_and_pythons_headers():
    without_compiler = python() | {
        "missing_for_triton": ["gcc, clang or CC", "/usr/include/Python.h"]
    }
    evidence = {"a": {"trainer": python()}, "b": {"trainer": without_compiler}}
    needs = replace(NEEDS, requirements={"trainer": ()})
    [finding] = judge_pythons(evidence, needs)
    assert finding.host == "b"
    assert "/usr/include/Python.h" in finding.subject
    assert list(judge_pythons(evidence, replace(needs, gpus=0))) == []


def test_another_cudnn_than_torchs_is_named_where_there_are_gpus():
    def with_cudnn(version, wheel):
        cudnn = {"library": "/opt/cudnn/lib/libcudnn.so.9", "version": version, "wheel": wheel}
        return {"trainer": python() | {"cudnn": cudnn}}

    evidence = {
        "a": with_cudnn("9.24.0", "9.24.0"),
        "b": with_cudnn("9.10.2", "9.24.0"),
        "c": with_cudnn("9.10.2", None),  # torch itself uses the system's cuDNN
        "d": with_cudnn(None, None),
    }
    needs = replace(NEEDS, requirements={"trainer": ()})
    (finding,) = judge_pythons(evidence, needs)
    assert (finding.host, finding.subject) == ("b", "trainer's cuDNN")
    assert "9.10.2 in /opt/cudnn/lib/libcudnn.so.9" in str(finding)
    assert list(judge_pythons(evidence, replace(needs, gpus=0))) == []


def test_machines_without_nccl_agree():
    none = python(nccl=None, sglang="0.5.23")
    assert list(judge_pythons({"a": roles(none, none), "b": roles(none, none)}, PINS)) == []


def canary(seen, replaced=None, won=False):
    return {"seen": seen, "replaced": seen if replaced is None else replaced, "won": won}


def test_the_node_that_shares_no_folder_is_named_alone():
    evidence = {"a": canary("ab", won=True), "b": canary("ab"), "c": canary("c")}
    [finding] = judge_shared_folder(evidence, NEEDS)
    assert finding.host == "c"
    assert finding.subject.startswith("/run: ")
    assert "2 of 2" in finding.actual


def test_a_node_that_keeps_old_files_is_named():
    evidence = {"a": canary("abc", won=True), "b": canary("abc", replaced="b"), "c": canary("abc")}
    assert [f.host for f in judge_shared_folder(evidence, NEEDS)] == ["b"]


@pytest.mark.parametrize(("winners", "got"), [("", "nobody"), ("ab", "a, b")])
def test_exclusive_creation_has_one_winner(winners, got):
    evidence = {host: canary("ab", won=host in winners) for host in "ab"}
    [finding] = judge_shared_folder(evidence, NEEDS)
    assert (finding.host, finding.actual, finding.expected) == (EVERYWHERE, got, "one node")


def connections(host, others):
    return {"interfaces": {"eth0": f"10.0.0.{host}"}, "reached": {o: ["eth0"] for o in others}}


def test_the_node_behind_all_broken_connections_is_named_alone():
    evidence = {
        "a": connections("a", "bd"),
        "b": connections("b", "ad"),
        "c": connections("c", ""),
        "d": connections("d", "abc"),  # it reaches c, which does not reach it
    }
    [finding] = judge_network(evidence, NEEDS)
    assert (finding.host, finding.subject) == ("c", "network")
    assert "3 of 3" in finding.actual


def test_of_two_nodes_that_miss_each_other_the_later_is_named():
    evidence = {"a": connections("a", ""), "b": connections("b", "")}
    assert [finding.host for finding in judge_network(evidence, NEEDS)] == ["b"]


def test_the_interface_that_most_others_reach_is_taken():
    both = {"interfaces": {"docker0": "172.17.0.1", "ib0": "10.0.0.1"}, "reached": {}}
    others = {"reached": {"a": ["ib0"]}, "interfaces": {}}
    assert reachable_interface({"a": both, "b": others}, "a") == "ib0"
    assert reachable_interface({"a": both}, "a") == "docker0"


def test_an_own_name_that_leads_to_the_loopback_alone_is_found_where_there_are_others():
    there = {"host_name": "a", "resolves_to": ["127.0.1.1", "10.0.0.1"]}
    loop = {"host_name": "b", "resolves_to": ["127.0.1.1"]}
    assert [f.host for f in judge_host({"a": there, "b": loop}, NEEDS)] == ["b"]
    assert list(judge_host({"b": loop}, NEEDS)) == []


def test_an_all_reduce_that_fails_everywhere_is_no_nodes_fault():
    failed = {"failed": "process 0 does not end"}
    assert [f.host for f in judge_all_reduce({"a": failed, "b": failed}, NEEDS)] == [EVERYWHERE]
    assert [f.host for f in judge_all_reduce({"a": failed, "b": {}}, NEEDS)] == ["a"]


def test_a_node_with_less_than_half_of_the_median_bandwidth_is_named():
    speeds = {"a": 400.0, "b": 200.0, "c": 199.0, "d": 401.0, "e": 400.0}
    evidence = {host: {"node_gb_s": speed} for host, speed in speeds.items()}
    [finding] = judge_all_reduce(evidence, NEEDS)
    assert (finding.host, finding.actual) == ("c", "199.0 GB/s")
    assert finding.expected.endswith("400.0 GB/s")


def test_missing_evidence_and_errors_are_findings_of_their_node():
    evidence = {"a": {"gpus": {"error": "nvidia-smi does not answer within 30 s"}}}
    findings = judge(evidence, NEEDS, ["a", "b"])
    assert summaries(findings) == [
        ("a", "gpus", evidence["a"]["gpus"]["error"]),
        ("b", "evidence", "none"),
    ]
    assert bad_hosts(findings) == ["a", "b"]


def test_a_finding_of_no_node_excludes_none():
    assert bad_hosts([Finding(EVERYWHERE, "x", "1", "2")]) == []


def test_evidence_is_read_as_it_was_written_and_a_damaged_file_is_named(tmp_path):
    write_evidence(tmp_path, "a", {"memory": {"total": 1}})
    assert read_evidence(tmp_path, ["a", "b"]) == {"a": {"memory": {"total": 1}}}
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(EvidenceError, match=r"b\.json: .*list"):
        read_evidence(tmp_path, ["a", "b"])
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(EvidenceError, match=r"b\.json: .*JSON"):
        read_evidence(tmp_path, ["b"])


def test_the_docs_list_every_check_in_its_order():
    page = (Path(__file__).resolve().parents[3] / "docs" / "preflight.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(CHECKS)


@pytest.mark.parametrize(
    ("commands", "failed"),
    [(("true", "true"), None), (("true", "false"), 1), (("true", "sleep"), 1)],
)
def test_the_processes_of_an_all_reduce_are_judged_once_more_when_the_time_is_up(
    monkeypatch, commands, failed
):
    monkeypatch.setattr(all_reduce, "_ALL_REDUCE_S", 0.0)
    processes = [subprocess.Popen([command, "60"]) for command in commands]
    for command, process in zip(commands, processes, strict=True):
        if command != "sleep":
            process.wait()
    try:
        assert all_reduce._first_failure(processes) == failed
    finally:
        for process in processes:
            process.kill()
            process.wait()
