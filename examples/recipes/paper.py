"""Read examples/paper.yaml: the paper's numbers, and the runs and panels of each of its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron_dppo.config import TrainConfig

RECIPES = Path(__file__).resolve().parent
PAPER = RECIPES.parent / "paper.yaml"


@cache
def paper() -> Mapping[str, Any]:
    """Return the whole file."""
    document: Mapping[str, Any] = yaml.safe_load(PAPER.read_text(encoding="utf-8"))
    return document


def experiments() -> Mapping[str, Any]:
    """Return the experiments by name."""
    found: Mapping[str, Any] = paper()["experiments"]
    return found


def figures() -> Mapping[str, Any]:
    """Return the figures and tables by their name in the paper."""
    found: Mapping[str, Any] = paper()["figures"]
    return found


def steps_of(figure: str, experiment: str) -> int:
    """Return the last step of a figure's axis for one of its experiments.

    Raises KeyError if neither the figure nor the experiment has the number.
    """
    steps = figures()[figure].get("steps")
    if steps is not None:
        return int(steps)
    for table in experiments()[experiment]["published"]:
        if "run.steps" in table["values"]:
            return int(table["values"]["run.steps"])
    raise KeyError(f"{figure}: no steps of {experiment} in {PAPER}")


@dataclass(frozen=True)
class Run:
    """A run that a figure needs.

    Attributes:
        experiment: Name of its experiment.
        recipe: Name of the experiment's recipe.
        label: Label of its curve.
        words: Overrides of the recipe.
    """

    experiment: str
    recipe: str
    label: str
    words: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The recipe's file."""
        return RECIPES / f"{self.recipe}.yaml"

    @property
    def command(self) -> str:
        """The command that makes the run."""
        return " ".join(
            ["megatron-dppo train", f"examples/recipes/{self.recipe}.yaml", *self.words]
        )


def runs_of(figure: str) -> Iterator[Run]:
    """Yield the runs of a figure: every curve of every experiment that has a recipe."""
    row = figures()[figure]
    for experiment in row["experiments"]:
        recipe = experiments()[experiment]["recipe"]
        if recipe is None:
            continue
        for label, words in row.get("runs", {}).items():
            yield Run(experiment, recipe, label, tuple(words))


def _optimizer_steps(config: TrainConfig) -> int:
    return config.rollout.prompts_per_step // config.training.prompts_per_mini_batch


FURTHER_VALUES: Mapping[str, Callable[[TrainConfig], Any]] = {
    "model": lambda config: Path(config.model.hf_checkpoint).name,
    "reward_model": lambda config: Path(config.reward.options["tokenizer"]).name,
    "optimizer_steps": _optimizer_steps,
    "episodes": lambda config: config.rollout.prompts_per_step * config.rollout.group_size,
}
"""Names of published values that are no key of the configuration -> the value: the checkpoint's name,
the reward model's name, the optimiser steps of a rollout batch, and its responses."""


def value_of(config: TrainConfig, key: str) -> Any:
    """Return the configuration's value of a published key. Raises AttributeError for an unknown key."""
    if key in FURTHER_VALUES:
        return FURTHER_VALUES[key](config)
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def tables_of(experiment: str, kinds: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield source and values of each table of an experiment. ``kinds``: some of published, scripts, presets."""
    for kind in kinds:
        for table in experiments()[experiment].get(kind, ()):
            yield table["source"], table["values"]
