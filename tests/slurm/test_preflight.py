"""The preflight on real nodes, with real faults."""

from __future__ import annotations

import sys

import pytest

from megatron_dppo.cluster.preflight import bad_hosts, judge
from megatron_dppo.cluster.preflight.evidence import Finding, needs_of, read_evidence
from megatron_dppo.config import load_config
from tests.slurm.conftest import ROOT
from tests.slurm.recipes import write_config

pytestmark = pytest.mark.slurm
QUICK = ("--skip", "all_reduce")


def preflight(cluster, folder, *words, nodes=3) -> tuple[list[Finding], int]:
    """Run the preflight as one task on each of the first ``nodes`` nodes. Return the findings and srun's exit code."""
    config = write_config(folder)
    (folder / "run").mkdir()
    hosts = cluster.nodes[:nodes]
    done = cluster.client.run(
        *("srun", f"--nodes={nodes}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}"),
        *("--input=none", f"--chdir={ROOT}"),
        *(sys.executable, "-m", "megatron_dppo.cluster.preflight"),
        *(config, "--evidence", folder / "evidence", *words),
        check=False,
        timeout_s=180,
    )
    needs = needs_of(load_config(str(config), []), gpus=0)
    evidence = read_evidence(folder / "evidence", hosts)
    print(done.stdout, done.stderr, sep="\n")
    return judge(evidence, needs, hosts), done.returncode


def test_good_nodes_are_found_good(cluster, folder):
    findings, code = preflight(cluster, folder, *QUICK)
    assert findings == []
    assert code == 0
    evidence = read_evidence(folder / "evidence", cluster.nodes[:3])
    for host, report in evidence.items():
        assert report["host"]["name"] == host
        assert report["shared_folder"]["seen"] == cluster.nodes[:3]
        if cluster.isolated:
            others = set(cluster.nodes[:3]) - {host}
            assert report["network"]["reached"] == {other: ["eth0"] for other in others}
    assert sum(report["shared_folder"]["won"] for report in evidence.values()) == 1


def test_a_node_with_a_small_shm_is_named(cluster, folder, isolated):
    bad = isolated.nodes[1]
    isolated.run_on(bad, "mount", "-o", "remount,size=64M", "/dev/shm")
    try:
        findings, code = preflight(cluster, folder, *QUICK)
    finally:
        isolated.run_on(bad, "mount", "-o", "remount,size=50%", "/dev/shm")
    assert bad_hosts(findings) == [bad]
    assert list(map(str, findings)) == [
        f"{bad}: free space in /dev/shm: got 64 MiB, expected at least 256 MiB"
    ]
    assert code == 3


@pytest.mark.slow
def test_a_node_that_does_not_share_the_folder_is_named(cluster, folder, isolated):
    bad = isolated.nodes[2]
    (folder / "evidence").mkdir()
    isolated.run_on(bad, "mount", "-t", "tmpfs", "own", str(folder / "evidence"))
    try:
        findings, _ = preflight(cluster, folder, *QUICK, "--timeout", "2")
    finally:
        isolated.run_on(bad, "umount", str(folder / "evidence"))
    assert f"{bad}: evidence: got none, expected a file of the node's preflight task" in list(
        map(str, findings)
    )


@pytest.mark.slow
def test_a_node_whose_firewall_is_closed_is_named(cluster, folder, isolated):
    first, second, bad = isolated.nodes[:3]
    # The bad node's routes to the other nodes lead nowhere, so no answer comes back either.
    for other in (first, second):
        address = isolated.address(other)
        isolated.run_on(bad, "ip", "route", "add", "blackhole", f"{address}/32")
    try:
        findings, _ = preflight(cluster, folder, *QUICK)
    finally:
        for other in (first, second):
            isolated.run_on(bad, "ip", "route", "del", "blackhole", f"{isolated.address(other)}/32")
    assert bad_hosts(findings) == [bad]


@pytest.mark.slow
def test_the_all_reduce_crosses_nodes(cluster, folder):
    findings, code = preflight(cluster, folder, nodes=2)
    assert findings == []
    assert code == 0
    evidence = read_evidence(folder / "evidence", cluster.nodes[:2])
    results = [report["all_reduce"] for report in evidence.values()]
    assert all(e["backend"] == "gloo" and e["processes"] == 2 for e in results)
    assert all(e["all_gb_s"] > 0 for e in results)
