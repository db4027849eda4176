"""``submit --rehearse`` on a real Slurm: a recipe's tiny model on the nodes, and its verdict on the user's terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import write_material
from tests.patience import run_patiently
from tests.slurm.conftest import ROOT
from tools.slurm_cluster import Cluster

pytestmark = pytest.mark.slurm
SITE = ("--set=gpus_per_node=0", "--set=processes_per_node=2", "--set=preflight=false")


def rehearse(cluster: Cluster, config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Submit a rehearsal as from a terminal, and wait for its end."""
    command = [sys.executable, "-m", "megatron_dppo.cluster.slurm", "submit", str(config)]
    return run_patiently(
        [*command, "--rehearse", *SITE, *words],
        cwd=ROOT,
        env={**cluster.environment, "PYTHONPATH": str(ROOT), "HOME": os.environ.get("HOME", "/")},
    )


def test_a_file_that_the_nodes_do_not_see_is_named_with_the_node_and_the_key(
    isolated: Cluster, folder: Path, tmp_path: Path
) -> None:
    """The data lie below /tmp of this machine. No node sees them, because each node has its own /tmp."""
    config = write_material(folder)
    data = tmp_path / "train.jsonl"
    data.write_text((folder / "train.jsonl").read_text())
    done = rehearse(isolated, config, f"data.train={data}", f"run.directory={folder}/run")
    assert done.returncode == 1, done.stdout + done.stderr
    for node in isolated.nodes[:2]:
        assert f"node {node}: data.train: got '{data}'" in done.stdout
    assert not (folder / "run-rehearsal" / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_recipe_is_rehearsed_on_four_nodes(cluster: Cluster, folder: Path) -> None:
    """Four ranks run on two nodes. Each of two servers has two devices, so each has its own node."""
    config = write_material(folder)
    words = ["parallel={world_size: 4, tensor: 2, expert: 2}", "rollout.router_replay=true"]
    words += ["engine.servers=2", "sglang.tp_size=2"]
    done = rehearse(cluster, config, *words)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    rehearsal = folder / "run-rehearsal"
    result = json.loads((rehearsal / "rehearsal.json").read_text())
    assert result["passed"]
    assert result["ranks"] == 4
    assert [row for row in result["findings"] if row["holds"] is False] == []
    assert f"megatron-dppo slurm submit {config}" in done.stdout
    attempts = [json.loads(path.read_text()) for path in (rehearsal / "run/attempts").iterdir()]
    assert {tuple(attempt["hosts"]) for attempt in attempts} == {tuple(cluster.nodes)}
    assert len(list((rehearsal / "run" / "logs").glob("node?.out"))) == 2
    assert not (folder / "run").exists()
