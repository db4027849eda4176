"""A step over four nodes computes what it computes on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import TrainingRun, records_of, steps_of
from tests.slurm.runs import SlurmRun
from tools.slurm_cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slurm_slow]
COMPUTED = ("loss/", "mask/", "mismatch/", "optimizer/", "policy/", "r3/", "reward/")
"""Metrics of the trainer's arithmetic; the others are times, and sizes of what is on the machine."""


def computed(directory: Path, step: int) -> dict[str, float | None]:
    [record] = [r for r in records_of(directory) if r["step"] == step]
    return {name: value for name, value in record.items() if name.startswith(COMPUTED)}


def test_submitted_and_done_with_the_same_numbers_as_without_slurm(
    cluster: Cluster, folder: Path
) -> None:
    """The job's rollouts, which it saved, are trained on again by two ranks of this machine."""
    run = SlurmRun(cluster, folder, "run.steps=2", servers=2).submit()
    assert run.wait_for_end()["JobState"] == "COMPLETED", run.log
    assert steps_of(run.directory) == [0, 1, 2]
    [attempt] = run.attempts()
    assert (attempt["why"], attempt["saved"], attempt["hosts"]) == ("done", 2, cluster.nodes)
    overrides = (
        f"run.directory={folder / 'here'}",
        f"rollout.replay_from={run.directory / 'rollouts'}",
        "checkpoint.export_hf=false",
        "checkpoint.verify_export=false",
    )
    with TrainingRun(run.directory / "config.yaml", *overrides) as here:
        here.finish()
    for step in (1, 2):
        there = computed(run.directory, step)
        assert len(there) > 20
        # Sums of fp32 in another order, where a rank has another number of threads.
        assert there == pytest.approx(computed(here.directory, step), rel=1e-6, abs=1e-9)
