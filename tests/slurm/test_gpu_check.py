"""The GPU check as a job: one command on the login node, one JSON of all nodes."""

from __future__ import annotations

import json
import sys

import pytest

from tests.messages import mentions
from tests.slurm.conftest import ROOT

pytestmark = pytest.mark.slurm
PLANTED = "tests.unit.annexes.planted_parts"


def gpu_check(cluster, folder, *words):
    """Run ``gpu-check`` on two nodes without GPUs, and return the finished command."""
    site = folder / "site.yaml"
    site.write_text("gpus_per_node: 0\n")
    return cluster.client.run(
        *(sys.executable, "-m", "megatron_dppo.diagnostics.gpu_check", "--nodes=2", "--site", site),
        *("--directory", folder / "check", *words),
        check=False,
        folder=ROOT,
        timeout_s=240,
    )


def test_every_nodes_results_come_back_in_one_file(cluster, folder):
    done = gpu_check(cluster, folder, "--parts", PLANTED, "--only", "good,wrong")
    print(done.stdout, done.stderr, sep="\n")
    assert done.returncode == 1
    report = json.loads((folder / "check" / "gpu_check.json").read_text())
    assert sorted(report["nodes"]) == sorted(cluster.nodes)[:2]
    for name, result in report["nodes"].items():
        assert [part["verdict"] for part in result["parts"]] == ["good", "bad"]
        assert (folder / "check" / name / "good" / "curve.png").exists()
        assert mentions(done.stdout, f"{name}: exit code 1", "wrong: wrong")
