"""The real trainer and SGLang over nodes of a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.metrics.table import FREQUENCY_EVIDENCE
from tests.integration.runs import TrainingRun, steps_of
from tests.slurm.runs import SlurmRun, trainer_metrics
from tools.slurm_cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1500)]
STEPS = 16


def test_near_its_time_limit_it_saves_starts_again_and_finishes_with_the_same_result(
    cluster: Cluster, folder: Path
) -> None:
    """The result equals that of an uninterrupted run without Slurm. Slurm sends USR1 before the limit."""
    overrides = (f"run.steps={STEPS}", f"checkpoint.every={STEPS}", "engine.deterministic=true")
    run = SlurmRun(cluster, folder, *overrides, environment={"OMP_NUM_THREADS": "1"}).submit()
    run.wait(lambda: 1 in steps_of(run.directory))
    cluster.client.run("scancel", "--batch", "--signal=USR1", run.job)
    assert run.wait_for_end()["JobState"] == "COMPLETED", run.log
    assert steps_of(run.directory) == list(range(STEPS + 1))
    first, second = run.attempts()
    assert (first["why"], first["requeued"]) == ("time", True)
    assert 1 <= first["saved"] < STEPS
    ended = (second["why"], second["first_saved"], second["saved"])
    assert ended == ("done", first["saved"], STEPS)
    with TrainingRun(run.directory / "config.yaml", f"run.directory={folder / 'here'}") as here:
        here.finish()
    for step in range(1, STEPS + 1):
        slurm_metrics = trainer_metrics(run.directory, step)
        local_metrics = trainer_metrics(here.directory, step)
        # The evidence counts the tokens since the last start of the ranks, so the second attempt begins it anew.
        for metrics in (slurm_metrics, local_metrics):
            metrics.pop(FREQUENCY_EVIDENCE)
        assert len(slurm_metrics) > 20
        assert slurm_metrics == pytest.approx(local_metrics, rel=1e-6, abs=1e-9)
