"""The figures of ``findings.md``. A claim's figure shows what its tests compare, in the form of the paper's figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.arena.claims import (
    SETTINGS,
    Claim,
    Outcome,
    Record,
    Side,
    area,
    entropy,
    final,
    likely_prob_error,
    likely_ratio_error,
    loss_of_best,
    rare_prob_error,
    rare_ratio_error,
)
from examples.arena.lab import PROB_ERROR, RATIO_ERROR
from examples.arena.significance import Difference
from megatron_dppo.diagnostics.report import RUN_COLOURS, STYLE, centred_mean, finish
from megatron_dppo.metrics import table as names
from megatron_dppo.system.files import atomic_file

SMOOTHING = 2
UNDER: dict[str, Any] = {"linestyle": "-", "linewidth": 5, "alpha": 0.45}
"""Style of the first rule's line: wide and pale, because the line of another rule may cover it."""
OVER: tuple[dict[str, Any], ...] = tuple(
    {"linestyle": dashes, "linewidth": 2} for dashes in ("-", (0, (4, 1.5)), (0, (1.5, 1.5)))
)
"""Styles of the other rules' lines, in turn."""
UNITS = {
    names.REWARD: "reward",
    names.GAP: "mean |pi - mu|",
    names.ENTROPY: "entropy, nats",
    names.TEACHER_GAP: "log pi - log p_T, nats",
}
CURVES: dict[Outcome, tuple[str, ...]] = {
    final: (names.REWARD, names.GAP),
    loss_of_best: (names.REWARD, names.GAP),
    area: (names.REWARD,),
    entropy: (names.ENTROPY,),
}
"""Outcome -> metrics that are drawn against the step, with a row of panels for each."""
BY_PROBABILITY = {rare_ratio_error, likely_ratio_error, rare_prob_error, likely_prob_error}
BINS = ("< .01", ".01 to .1", ".1 to .5", ".5 to .9", "≥ .9")
"""Labels of the bins of ``lab.MU_BOUNDS``."""

Records = Mapping[str, Record]


def claim_figure(claim: Claim, records: Records) -> Figure:
    """Return the figure of a claim: errors by probability, final rewards of rules that should be alike, or curves."""
    sides = [(side.setting, side.rule) for side in claim.sides]
    outcome = claim.sides[0].outcome
    if outcome in BY_PROBABILITY:
        return probability_figure(sides, records, claim.seeds)
    if all(test.margin is not None for test in claim.tests):
        return ends_figure(sides, records, claim.seeds)
    return curves_figure(sides, CURVES[outcome], records, claim.seeds)


def curves_figure(
    of: Sequence[tuple[str, str]], metrics: Sequence[str], records: Records, seeds: Sequence[int]
) -> Figure:
    """Draw each metric of each (setting, rule): mean of the seeds, and the range from lowest to highest.

    The figure has a column of panels for each setting and a row for each metric.
    """
    rules = list(dict.fromkeys(rule for _, rule in of))
    by_setting = _by_setting(of)
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(5.6 * len(by_setting), 0.6 + 3.4 * len(metrics)), dpi=110, layout="constrained"
        )
        panels = figure.subplots(len(metrics), len(by_setting), squeeze=False)
        for row, metric in zip(panels, metrics, strict=True):
            for axes, (setting, of_setting) in zip(row, by_setting.items(), strict=True):
                for rule in of_setting:
                    index = rules.index(rule)
                    values = _curves(Side(setting, rule), metric, records, seeds)
                    steps = np.arange(1, values.shape[1] + 1)
                    colour = RUN_COLOURS[index % len(RUN_COLOURS)]
                    axes.fill_between(
                        steps, values.min(0), values.max(0), color=colour, alpha=0.1, linewidth=0
                    )
                    line = OVER[(index - 1) % len(OVER)] if index else UNDER
                    axes.plot(steps, values.mean(0), color=colour, label=rule, **line)
                finish(axes, _title(setting), UNITS[metric], [])
            _limit(row, metric, [SETTINGS[setting].task for setting in by_setting])
    return figure


def _limit(row: Sequence[Axes], metric: str, tasks: Sequence[str]) -> None:
    """Limit the vertical axes of a metric's panels.

    Rewards reach from 0 to 1, gaps from 0 to the largest value of all panels of a task. Entropies are not limited.
    """
    if metric == names.REWARD:
        for axes in row:
            axes.set_ylim(0, 1)
    elif metric == names.GAP:
        tops = dict.fromkeys(tasks, 0.0)
        for axes, task in zip(row, tasks, strict=True):
            tops[task] = max(tops[task], axes.get_ylim()[1])
        for axes, task in zip(row, tasks, strict=True):
            axes.set_ylim(0, tops[task])


def _curves(side: Side, metric: str, records: Records, seeds: Sequence[int]) -> np.ndarray:
    """Return the metric's values [seeds, steps], averaged over neighbouring steps."""
    curves = []
    for seed in seeds:
        values = list(records[side.key(seed)][metric])
        curves.append(centred_mean(values, SMOOTHING))
    return np.array(curves)


def ends_figure(of: Sequence[tuple[str, str]], records: Records, seeds: Sequence[int]) -> Figure:
    """Draw, for each (setting, rule), the final reward of each seed, and the mean reward with its 95% interval."""
    by_setting = _by_setting(of)
    with matplotlib.rc_context(STYLE):
        rows = max(len(rules) for rules in by_setting.values())
        figure = Figure(
            figsize=(5.6 * len(by_setting), 1.2 + 0.5 * rows), dpi=110, layout="constrained"
        )
        is_of_one_task = len({SETTINGS[setting].task for setting in by_setting}) == 1
        panels = figure.subplots(1, len(by_setting), squeeze=False, sharex=is_of_one_task)[0]
        for axes, (setting, rules) in zip(panels, by_setting.items(), strict=True):
            for row, rule in enumerate(rules):
                ends = [final(records[Side(setting, rule).key(seed)]) for seed in seeds]
                mean = Difference.of(ends)
                colour = RUN_COLOURS[row % len(RUN_COLOURS)]
                axes.plot(ends, [row] * len(ends), "|", color=colour, alpha=0.5, markersize=9)
                axes.plot([mean.low, mean.high], [row, row], color=colour, linewidth=2)
                axes.plot(mean.mean, row, "o", color=colour, markersize=6)
            finish(axes, _title(setting), "", [])
            axes.set_yticks(range(len(rules)), rules)
            axes.set_ylim(len(rules) - 0.5, -0.5)
            axes.set_xlabel("final reward: seeds, mean, 95% interval")
    return figure


def probability_figure(
    of: Sequence[tuple[str, str]], records: Records, seeds: Sequence[int]
) -> Figure:
    """Draw |pi / mu - 1| and |pi - mu| against mu: mean of the seeds, and the range from lowest to highest."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.2, 4.2), dpi=110, layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, metric, unit in zip(
            panels, (RATIO_ERROR, PROB_ERROR), ("|pi / mu - 1|", "|pi - mu|"), strict=True
        ):
            for colour, (setting, rule) in zip(RUN_COLOURS, dict.fromkeys(of), strict=False):
                rows = [records[Side(setting, rule).key(seed)][metric] for seed in seeds]
                values = np.ma.masked_invalid(np.array(rows))
                label = f"{_title(setting)}, {rule}"
                axes.fill_between(
                    BINS, values.min(0), values.max(0), color=colour, alpha=0.12, linewidth=0
                )
                axes.plot(BINS, values.mean(0), "-o", color=colour, linewidth=2, label=label)
            finish(axes, f"mean {unit} of sampled tokens", unit, [])
            axes.set_xticks(range(len(BINS)), BINS)
            axes.set_xlabel("mu")
            axes.set_yscale("log")
    return figure


def _by_setting(of: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the rules of each setting, each once."""
    rules: dict[str, list[str]] = {}
    for setting, rule in dict.fromkeys(of):
        rules.setdefault(setting, []).append(rule)
    return rules


def _title(setting: str) -> str:
    return f"{setting}: {SETTINGS[setting].task}, {SETTINGS[setting].mismatch}"


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PNG, with one legend for all panels that have labels."""
    by_label: dict[str, Artist] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        by_label |= dict(zip(labels, handles, strict=True))
    with matplotlib.rc_context(STYLE):
        if by_label:
            figure.legend(
                [*by_label.values()], [*by_label], loc="outside lower center", ncols=3, frameon=False,
                handlelength=3.2,
            )  # fmt: skip
        with atomic_file(path) as file:
            FigureCanvasAgg(figure).print_png(file)
