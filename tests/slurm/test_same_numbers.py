"""A step over four nodes, whose servers have a Python environment of their own, computes what it computes on
one machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import TrainingRun, steps_of
from tests.slurm.runs import SlurmRun, computed
from tests.slurm.second_environment import make_second_environment
from tools.slurm_cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def has_megatron(python: Path | str) -> bool:
    """Whether the trainer could run there."""
    done = subprocess.run([python, "-c", "import megatron.core"], capture_output=True, check=False)
    return done.returncode == 0


def test_submitted_and_done_with_the_same_numbers_as_without_slurm(
    cluster: Cluster, folder: Path
) -> None:
    """The job's rollouts, which it saved, are trained on again by two ranks of this machine."""
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
        there = computed(run.directory, step)
        assert len(there) > 20
        # Sums of fp32 in another order, where a rank has another number of threads.
        assert there == pytest.approx(computed(here.directory, step), rel=1e-6, abs=1e-9)
