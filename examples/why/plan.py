"""The runs of ``make why``: which there are, how each is started, and whether it is finished."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from examples.tiny_moe.prepare import Material
from megatron_dppo.metrics.summary import SUMMARY_FILE
from megatron_dppo.system.files import write_atomically

CONFIG = Path(__file__).resolve().parent / "config.yaml"
COMMAND_FILE = "command.json"
"""What a run was started with, in its folder."""


class PlanError(ValueError):
    """A run that the plan doesn't have, or a folder that belongs to other conditions."""


@dataclass(frozen=True)
class Conditions:
    """What all runs have in common, and what they are compared by: the file config.yaml."""

    recipe: str
    material_seed: int
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    overrides: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path = CONFIG) -> Conditions:
        """From ``path``. TypeError where a key is missing or unknown."""
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        tree["algorithms"], tree["seeds"] = tuple(tree["algorithms"]), tuple(tree["seeds"])
        return cls(**tree)


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

    def arguments(self, conditions: Conditions, material: Material) -> list[str]:
        """Arguments of ``python -m megatron_dppo.train``: the recipe and its overrides."""
        own = {
            "run.directory": self.directory,
            "run.seed": self.seed,
            "algorithm.name": self.algorithm,
            "model.hf_checkpoint": material.warm_checkpoint,
            "data.train": material.train,
            "data.evaluation.held_out": material.held_out,
        }
        values = {**conditions.overrides, **own}
        return [conditions.recipe, *(f"{key}={value}" for key, value in values.items())]

    def claim(self, arguments: Sequence[str]) -> None:
        """Note ``arguments`` in the run's folder, which may hold a part of this same run.

        Raises PlanError where the folder holds a run that was started with other arguments.
        """
        path = self.directory / COMMAND_FILE
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before != list(arguments):
                differing = sorted(set(before) ^ set(arguments))
                raise PlanError(
                    f"{self.directory} holds a run of other conditions ({', '.join(differing)}): "
                    f"move it away, or choose another --directory"
                )
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(list(arguments), indent=1) + "\n")


def plan_runs(
    conditions: Conditions, root: Path, algorithm: str | None = None, seed: int | None = None
) -> list[PlannedRun]:
    """The runs to make, seed by seed, so that whatever is finished compares all algorithms.

    Args:
        conditions: Algorithms and seeds of the whole comparison.
        root: Folder that the runs' folders are in.
        algorithm: Only this one; None: all.
        seed: Only this one; None: all.

    Raises:
        PlanError: ``algorithm`` or ``seed`` is not among the conditions'.
    """
    for what, chosen, known in (
        ("algorithm", algorithm, conditions.algorithms),
        ("seed", seed, conditions.seeds),
    ):
        if chosen is not None and chosen not in known:
            names = ", ".join(str(name) for name in known)
            raise PlanError(f"{what} {chosen!r} is not compared here; expected one of {names}")
    return [
        PlannedRun(name, number, root)
        for number in conditions.seeds
        for name in conditions.algorithms
        if algorithm in (None, name) and seed in (None, number)
    ]


def train_command(arguments: Sequence[str]) -> list[str]:
    """The command that starts a run with ``arguments``."""
    return [sys.executable, "-m", "megatron_dppo.train", *arguments]
