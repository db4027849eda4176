"""The planner's figures for the set-ups of published runs, and the ratios to the published figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from examples.recipes.verdicts import MODELS
from megatron_dppo.cluster.known_models import read_model
from megatron_dppo.cluster.planner.devices import DEVICES, Cluster
from megatron_dppo.cluster.planner.facts import facts_of
from megatron_dppo.cluster.planner.run_plan import RunPlan, plan_run
from megatron_dppo.cluster.planner.step_time import model_flops_utilisation
from megatron_dppo.config import load_config

HERE = Path(__file__).resolve().parent
RUNS = HERE / "published_runs.yaml"
BASE = MODELS.parent / "recipes" / "scaling.yaml"
OWN_MODELS = HERE / "models"
UNITS = {"seconds": "s", "tflops": "TFLOP/s a GPU"}


@dataclass(frozen=True)
class PublishedRun:
    """A published run. ``measured``: the published figure, in ``unit``. ``ours``: the figure of ``plan``."""

    name: str
    source: str
    unit: str
    measured: float
    ours: float
    plan: RunPlan

    @property
    def ratio(self) -> float:
        return self.ours / self.measured


def published_runs(path: Path = RUNS) -> list[PublishedRun]:
    """Return every run of the file with a plan by the planner's present assumptions."""
    return [_plan_entry(run) for run in yaml.safe_load(path.read_text(encoding="utf-8"))["runs"]]


def _plan_entry(run: Mapping[str, Any]) -> PublishedRun:
    ((unit, measured),) = run["published"].items()
    plan = plan_of(run)
    return PublishedRun(
        name=run["name"],
        source=run["source"],
        unit=UNITS[unit],
        measured=measured,
        ours=_FIGURES[unit](plan),
        plan=plan,
    )


def plan_of(run: Mapping[str, Any]) -> RunPlan:
    """Return the plan of an entry of the file."""
    # The published runs broadcast whole tensors to their servers. ``disk`` has the same formula.
    overrides = {**run["overrides"], **run.get("schedule", {})}
    words = ["weight_sync.strategy=disk", *_words(overrides)]
    config = load_config(BASE, words)
    name = config.model.hf_checkpoint
    models = OWN_MODELS if (OWN_MODELS / name).is_dir() else MODELS
    facts = facts_of(config, read_model(name, models).shape, **run["lengths"])
    return plan_run(facts, Cluster(DEVICES["h100"], run["nodes"]))


def _words(overrides: Mapping[str, Any]) -> Iterator[str]:
    for key, value in overrides.items():
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
        yield f"{key}={text.removesuffix('...').strip()}"


def _seconds(plan: RunPlan) -> float:
    assert plan.seconds is not None
    return plan.seconds.total


def _tflops(plan: RunPlan) -> float:
    assert plan.seconds is not None
    peak = plan.cluster.device.flops / 1e12
    return model_flops_utilisation(plan.facts, plan.seconds, plan.cluster) * peak


_FIGURES = {"seconds": _seconds, "tflops": _tflops}


def rows(runs: list[PublishedRun]) -> list[list[str]]:
    """Return the rows of the table, the heading first."""
    head = ["run", "published", "planner", "ratio"]
    return [head, ["---"] * len(head), *map(_row, runs)]


def _row(run: PublishedRun) -> list[str]:
    figures = [f"{value:,.3g} {run.unit}" for value in (run.measured, run.ours)]
    return [f"[{run.name}]({run.source})", *figures, f"{run.ratio:.2f}"]
