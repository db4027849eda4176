"""A step over four nodes computes the same numbers as on one machine, although its servers have their own Python
environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import TrainingRun, steps_of
from tests.slurm.runs import SlurmRun, trainer_metrics
from tests.slurm.second_environment import make_second_environment
from tools.slurm_cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def has_megatron(python: Path | str) -> bool:
    """Whether the trainer could run with this interpreter."""
    done = subprocess.run([python, "-c", "import megatron.core"], capture_output=True, check=False)
    return done.returncode == 0


def test_submitted_and_done_with_the_same_numbers_as_without_slurm(
    cluster: Cluster, folder: Path
) -> None:
    """Two ranks on this machine train again on the rollouts that the job saved."""
    python = make_second_environment(folder / "engine_environment")
    assert (has_megatron(python), has_megatron(sys.executable)) == (False, True)
    overrides = ("run.steps=2", f"engine.python={python}")
    run = SlurmRun(cluster, folder, *overrides, servers=2).submit()
    assert run.wait_for_end()["JobState"] == "COMPLETED", run.log
    assert steps_of(run.directory) == [0, 1, 2]
    [attempt] = run.attempts()
    assert (attempt["why"], attempt["saved"], attempt["hosts"]) == ("done", 2, cluster.nodes)
    for server in ("engine0", "engine1", "router"):
        log = (run.directory / "logs" / f"{server}-1.log").read_text()
        assert log.startswith(f"--- {python} -m ")
    replayed = (
        f"run.directory={folder / 'here'}",
        f"rollout.replay_from={run.directory / 'rollouts'}",
        "checkpoint.export_hf=false",
        "checkpoint.verify_export=false",
    )
    with TrainingRun(run.directory / "config.yaml", *replayed) as here:
        here.finish()
    for step in (1, 2):
        slurm_metrics = trainer_metrics(run.directory, step)
        assert len(slurm_metrics) > 20
        # A sum of fp32 has another order if a rank has another number of threads.
        assert slurm_metrics == pytest.approx(
            trainer_metrics(here.directory, step), rel=1e-6, abs=1e-9
        )
