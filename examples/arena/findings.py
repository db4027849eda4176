"""``findings.md``: one table, and a figure for each claim, from what is kept of the runs and nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.arena.claims import (
    CLAIMS,
    SEEDS,
    SETTINGS,
    SHOWN,
    SURVEYS,
    Claim,
    Comparison,
    Difference,
    Finding,
    Record,
    final,
    loss_of_best,
)
from examples.arena.real_loop import SEED as REAL_SEED
from examples.arena.real_loop import real_key
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.report import RUN_COLOURS, STYLE, centred_mean, finish
from megatron_dppo.system.files import atomic_file, write_atomically

REASONS = Path(__file__).with_name("reasons.yaml")
"""What is believed of each result and why, written after the runs: by the claim's name."""
SMOOTHING = 2
DECIDED = ("reproduced", "not reproduced")


def verdict(claim: Claim, records: Mapping[str, Record], seeds: Sequence[int]) -> str:
    """One of ``DECIDED``, "out of reach here", or "not run yet" where a run is missing."""
    if claim.unreachable is not None:
        return "out of reach here"
    differences = [test.difference(records, seeds) for test in claim.tests]
    if None in differences:
        return "not run yet"
    findings = [t.finding(d) for t, d in zip(claim.tests, differences, strict=True) if d]
    return "reproduced" if set(findings) == {Finding.AS_CLAIMED} else "not reproduced"


def write_findings(
    claims: Sequence[Claim], records: Mapping[str, Record], seeds: Sequence[int], folder: Path
) -> Path:
    """Write the page into ``folder`` and its figures into ``findings`` there; the page's path."""
    figures = folder / "findings"
    figures.mkdir(parents=True, exist_ok=True)
    reasons = yaml.safe_load(REASONS.read_text(encoding="utf-8"))
    lines = [
        "# Findings\n",
        "Claims of papers, and what becomes of them in a lab that two cores carry. Each claim, its tests and its runs "
        f"were fixed in `examples/arena/claims.py` before the runs were made; {len(seeds)} seeds a cell, Student's 95% "
        "interval of the difference between pairs of one seed. A claim is reproduced where all of its tests are as "
        "claimed. Written by `make arena` from what is kept of every step of every run; the lab, its tasks and the "
        "pilots: `examples/arena/README.md`.\n",
        "Each of the claims' runs was made once in the real loop too (`examples/arena/real_loop.py`): in how many of "
        "the tests it is on the side on which the lab's mean is, is told beside the verdict. One run is no test.\n",
        "| claim | of | what is claimed | found | tests | real loop | what we make of it |",
        "|---|---|---|---|---|---|---|",
    ]
    for claim in claims:
        word = verdict(claim, records, seeds)
        name = f"[{claim.name}](#{claim.name})" if word in DECIDED else claim.name
        note = reasons.get(claim.name) or claim.unreachable or ""
        lines.append(
            f"| {name} | {claim.source} | {claim.text} | **{word}** | {counted(claim, records, seeds)} "
            f"| {confirmed(claim, records, seeds)} | {note} |"
        )
    lines += ["", *settings_table(records)]
    for claim in claims:
        if verdict(claim, records, seeds) in DECIDED:
            draw_claim(claim, records, seeds, figures / f"{claim.name}.png")
            lines += [
                f"## {claim.name}\n",
                f"{claim.source}: {claim.text}.\n",
                f"![{claim.text}](findings/{claim.name}.png)\n",
                *tests_table(claim, records, seeds),
            ]
    shown = [(setting, rule) for setting, rules in SHOWN.items() for rule in rules]
    if all(SETTINGS[s].cell(rule, seed).key in records for s, rule in shown for seed in seeds):
        draw_rewards(shown, records, seeds, figures / "shown.png")
    lines += all_rules(records, seeds)
    page = folder / "findings.md"
    write_atomically(page, "\n".join(lines) + "\n")
    return page


def counted(claim: Claim, records: Mapping[str, Record], seeds: Sequence[int]) -> str:
    """``7 as claimed, 1 open``; empty where nothing is decided."""
    differences = [(test, test.difference(records, seeds)) for test in claim.tests]
    findings = Counter(test.finding(d) for test, d in differences if d is not None)
    return ", ".join(f"{findings[f]} {f.value}" for f in Finding if findings[f])


def in_real_loop(test: Comparison, records: Mapping[str, Record]) -> float | None:
    """The difference of the two runs in the real loop; None where one is missing."""
    sides = [
        (side, real_key(SETTINGS[side.setting].cell(side.rule, REAL_SEED)))
        for side in (test.first, test.second)
    ]
    if not all(key in records for _, key in sides):
        return None
    first, second = (side.outcome(records[key]) for side, key in sides)
    return first - second


def confirmed(claim: Claim, records: Mapping[str, Record], seeds: Sequence[int]) -> str:
    """``5 of 6``: tests in which the real loop's difference is on the side of the lab's mean; empty without any."""
    sides = [
        test.is_on_side(real) == test.is_on_side(lab.mean)
        for test in claim.tests
        if (real := in_real_loop(test, records)) is not None
        and (lab := test.difference(records, seeds)) is not None
    ]
    return f"{sum(sides)} of {len(sides)}" if sides else ""


def first_gaps(record: Record) -> list[float]:
    """mean |pi - mu| of each step's first mini-batch, at equal weights or not."""
    stale = record.get(names.GAP_STALE, [math.nan] * len(record[names.GAP_ON_POLICY]))
    return [
        x if math.isnan(old) else old
        for x, old in zip(record[names.GAP_ON_POLICY], stale, strict=True)
    ]


def settings_table(records: Mapping[str, Record]) -> list[str]:
    """The settings, each with the mismatch that its runs measured."""
    lines = [
        "| setting | task | mismatch | mean \\|pi - mu\\| of a step's first mini-batch | changes | why |",
        "|---|---|---|---|---|---|",
    ]
    for name, setting in SETTINGS.items():
        keys = [setting.cell(r, s).key for r in rules_by_setting()[name] for s in SEEDS]
        gaps = [np.mean(first_gaps(records[key])) for key in keys if key in records]
        measured = f"{np.mean(gaps):.1e}" if gaps else "not run"
        changes = ", ".join(f"`{c}`" for c in setting.changes)
        lines.append(
            f"| {name} | {setting.task} | {setting.mismatch} | {measured} | {changes} | {setting.reason} |"
        )
    return [*lines, ""]


def tests_table(claim: Claim, records: Mapping[str, Record], seeds: Sequence[int]) -> list[str]:
    rows = [
        "| difference | mean | 95% interval | claimed | finding | real loop, one run each |",
        "|---|---|---|---|---|---|",
    ]
    for test in claim.tests:
        d = test.difference(records, seeds)
        assert d is not None
        claimed = "above 0" if test.margin is None else f"within {test.margin:g} of 0"
        real = in_real_loop(test, records)
        rows.append(
            f"| {test.first} less {test.second} | {d.mean:+.3f} "
            f"| {_interval(d)} | {claimed} | {test.finding(d).value} | {'' if real is None else f'{real:+.3f}'} |"
        )
    return [*rows, ""]


def all_rules(records: Mapping[str, Record], seeds: Sequence[int]) -> list[str]:
    """Every rule side by side, in each setting in which it has all its runs."""
    rows = []
    for setting, rules in rules_by_setting().items():
        for rule in rules:
            runs = [
                records[key]
                for s in seeds
                if (key := SETTINGS[setting].cell(rule, s).key) in records
            ]
            if len(runs) == len(seeds):
                ends = [final(r) for r in runs]
                rows.append(
                    (setting, -float(np.mean(ends)), rule, ends, [loss_of_best(r) for r in runs])
                )
    lines = [
        f"| {setting} | {rule} | {-mean:.3f} | {min(ends):.3f} to {max(ends):.3f} | {np.mean(lost):.3f} |"
        for setting, mean, rule, ends, lost in sorted(rows)
    ]
    if not lines:
        return []
    return [
        "## All rules side by side\n",
        "| setting | rule | final reward, mean of the seeds | lowest to highest | lost of the best |",
        "|---|---|---|---|---|",
        *lines,
    ]


def rules_by_setting() -> dict[str, list[str]]:
    """The rules of the claims and the others, by setting."""
    rules: dict[str, dict[str, None]] = {name: {} for name in SETTINGS}
    for side in (side for claim in CLAIMS for side in claim.sides):
        rules[side.setting][side.rule] = None
    for survey in SURVEYS:
        for setting in survey.settings:
            rules[setting] |= dict.fromkeys(survey.rules)
    return {name: list(of) for name, of in rules.items()}


def draw_claim(
    claim: Claim, records: Mapping[str, Record], seeds: Sequence[int], path: Path
) -> Path:
    """Reward of every rule that the claim names, in each setting."""
    return draw_rewards([(side.setting, side.rule) for side in claim.sides], records, seeds, path)


def draw_rewards(
    of: Sequence[tuple[str, str]], records: Mapping[str, Record], seeds: Sequence[int], path: Path
) -> Path:
    """Reward of each (setting, rule), a panel for each setting: mean of the seeds, and lowest to highest."""
    runs_of = dict.fromkeys(of)
    settings = list(dict.fromkeys(setting for setting, _ in runs_of))
    rules = list(dict.fromkeys(rule for _, rule in runs_of))
    colours = dict(zip(rules, RUN_COLOURS * 3, strict=False))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6 * len(settings), 4.2), dpi=110)
        figure.set_layout_engine("constrained")
        for axes, setting in zip(
            figure.subplots(1, len(settings), squeeze=False).flat, settings, strict=True
        ):
            for rule in (rule for where, rule in runs_of if where == setting):
                runs = [records[SETTINGS[setting].cell(rule, seed).key] for seed in seeds]
                _draw(axes, runs, colours[rule], rule)
            axes.set_ylim(0, 1)
            finish(
                axes,
                f"{setting}: {SETTINGS[setting].task}, {SETTINGS[setting].mismatch}",
                "reward",
                [],
            )
        handles, labels = [], []
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                if label not in labels:
                    handles.append(handle)
                    labels.append(label)
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        with atomic_file(path) as file:
            FigureCanvasAgg(figure).print_png(file)
    return path


def _draw(axes: Axes, runs: Sequence[Record], colour: str, label: str) -> None:
    rewards = np.array([centred_mean(list(r[names.REWARD]), SMOOTHING) for r in runs])
    steps = np.arange(1, rewards.shape[1] + 1)
    axes.fill_between(steps, rewards.min(0), rewards.max(0), color=colour, alpha=0.12, linewidth=0)
    axes.plot(steps, rewards.mean(0), color=colour, linewidth=1.8, label=label)


def _interval(d: Difference) -> str:
    return f"{d.low:+.3f} to {d.high:+.3f}"
