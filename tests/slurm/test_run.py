"""The real trainer and SGLang over four nodes of a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import steps_of
from tests.slurm.runs import SlurmRun
from tools.slurm_cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slurm_slow, pytest.mark.timeout(1500)]


def test_near_its_time_limit_it_saves_starts_again_and_finishes(
    cluster: Cluster, folder: Path
) -> None:
    """USR1 is what Slurm sends before the limit."""
    run = SlurmRun(cluster, folder, "run.steps=3", "checkpoint.every=3").submit()
    run.wait(lambda: 1 in steps_of(run.directory))
    cluster.client.run("scancel", "--batch", "--signal=USR1", run.job)
    assert run.wait_for_end()["JobState"] == "COMPLETED", run.log
    assert steps_of(run.directory) == [0, 1, 2, 3]
    first, second = run.attempts()
    assert (first["why"], first["requeued"]) == ("time", True)
    assert first["saved"] in (1, 2)
    assert (second["why"], second["first_saved"], second["saved"]) == ("done", first["saved"], 3)
