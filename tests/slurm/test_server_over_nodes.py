"""A real SGLang server whose two ranks run on two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import records_of, steps_of
from tests.slurm.runs import SlurmRun
from tools.slurm_cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_it_generates_and_takes_verified_weights(cluster: Cluster, folder: Path) -> None:
    """Each update compares both ranks' hashes of weights, and log-probabilities, with the trainer's."""
    run = SlurmRun(cluster, folder, "run.steps=1", "sglang.tp_size=2").submit()
    assert run.wait_for_end()["JobState"] == "COMPLETED", run.log
    assert steps_of(run.directory) == [0, 1]
    assert f"{cluster.nodes[3]}  engine0" in run.log
    assert len(records_of(run.directory)) == 2
    log = (run.directory / "logs" / "engine0-1.log").read_text()
    assert {line[:3] for line in log.splitlines() if " TP" in line} == {"0: ", "1: "}
