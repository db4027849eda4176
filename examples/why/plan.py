"""The runs of ``make why``: which there are, how each is started, and whether it is finished."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.config import load_config
from megatron_dppo.metrics.summary import CONFIG_FILE, SUMMARY_FILE

CONFIG = "examples/why/config.yaml"
ALGORITHMS = ("pg-is", "pg-tis", "grpo-clip-higher", "dppo-binary-tv")
SEEDS = (1, 2, 3)
"""Of the order of the data and of the sampling."""
MATERIAL_SEED = 1
"""Of the warm start that every run begins from."""


class PlanError(ValueError):
    """A run that the plan doesn't have, or a folder with a run of other conditions."""


@dataclass(frozen=True)
class PlannedRun:
    """One run: an algorithm and a seed, in a folder of its own under ``root``."""

    algorithm: str
    seed: int
    root: Path

    @property
    def directory(self) -> Path:
        """Folder of the run."""
        return self.root / f"{self.algorithm}-seed-{self.seed}"

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end; its summary is written last."""
        return (self.directory / SUMMARY_FILE).is_file()

    @property
    def overrides(self) -> list[str]:
        """What tells this run from the others: ``key.path=value`` of the recipe's values."""
        return [
            f"run.directory={self.directory}",
            f"run.seed={self.seed}",
            f"algorithm.name={self.algorithm}",
        ]

    @property
    def command(self) -> list[str]:
        """The command that makes the run, or goes on with it."""
        return [sys.executable, "-m", "megatron_dppo.train", CONFIG, *self.overrides]

    def refuse_other_conditions(self) -> None:
        """Raise PlanError where the folder holds a run whose configuration is not this one's."""
        left = self.directory / CONFIG_FILE
        if not left.is_file():
            return
        before = load_config(left).model_dump()
        now = load_config(CONFIG, self.overrides).model_dump()
        differing = [
            f"{section}.{key}"
            for section, table in now.items()
            for key in table
            if before[section].get(key) != table[key]
        ]
        if differing:
            raise PlanError(
                f"{self.directory} holds a run of other conditions ({', '.join(differing)} differ): "
                f"move it away, or choose another --directory"
            )


def plan_runs(
    root: Path, algorithm: str | None = None, seed: int | None = None
) -> list[PlannedRun]:
    """The runs to make, seed by seed, so that whatever is finished compares all algorithms.

    Args:
        root: Folder that the runs' folders are in.
        algorithm: Only this one; None: all.
        seed: Only this one; None: all.

    Raises:
        PlanError: ``algorithm`` or ``seed`` is not compared here.
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise PlanError(f"algorithm {algorithm!r}: expected one of {', '.join(ALGORITHMS)}")
    if seed is not None and seed not in SEEDS:
        raise PlanError(f"seed {seed}: expected one of {', '.join(map(str, SEEDS))}")
    return [
        PlannedRun(name, number, root)
        for number in SEEDS
        for name in ALGORITHMS
        if algorithm in (None, name) and seed in (None, number)
    ]
