"""``findings.md``: one table, and a figure for each claim, from what is kept of the runs and nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from examples.arena.claims import (
    CLAIMS,
    SEEDS,
    SETTINGS,
    SHOWN,
    SURVEYS,
    TV,
    Claim,
    Comparison,
    Difference,
    Finding,
    Record,
    Side,
    final,
    loss_of_best,
)
from examples.arena.figures import claim_figure, curves_figure, save
from examples.arena.real_loop import SEED as REAL_SEED
from examples.arena.real_loop import real_key
from megatron_dppo.metrics import table as names
from megatron_dppo.system.files import write_atomically

REASONS = Path(__file__).with_name("reasons.yaml")
"""What is believed of each result and why, written after the runs: by the claim's name."""
DECIDED = ("reproduced", "not reproduced")
COMPARABLE, ROUNDING = 3.0, 1e-6


def verdict(claim: Claim, records: Mapping[str, Record]) -> str:
    """One of ``DECIDED``, "out of reach here", or "not run yet" where a run is missing."""
    if claim.unreachable is not None:
        return "out of reach here"
    differences = [test.difference(records, claim.seeds) for test in claim.tests]
    if None in differences:
        return "not run yet"
    findings = [t.finding(d) for t, d in zip(claim.tests, differences, strict=True) if d]
    return "reproduced" if set(findings) == {Finding.AS_CLAIMED} else "not reproduced"


def write_findings(claims: Sequence[Claim], records: Mapping[str, Record], folder: Path) -> Path:
    """Write the page into ``folder`` and its figures into ``findings`` there; the page's path."""
    figures = folder / "findings"
    figures.mkdir(parents=True, exist_ok=True)
    for claim in claims:
        if verdict(claim, records) in DECIDED:
            save(claim_figure(claim, records), figures / f"{claim.name}.png")
    shown = [(setting, rule) for setting, rules in SHOWN.items() for rule in rules]
    if all(SETTINGS[s].cell(rule, seed).key in records for s, rule in shown for seed in SEEDS):
        save(curves_figure(shown, [names.REWARD], records, SEEDS), figures / "shown.png")
    page = folder / "findings.md"
    write_atomically(page, page_of(claims, records))
    return page


def page_of(claims: Sequence[Claim], records: Mapping[str, Record]) -> str:
    """``findings.md``."""
    reasons = yaml.safe_load(REASONS.read_text(encoding="utf-8"))
    lines = [
        "# Findings\n",
        "Claims of papers, and what becomes of them in a lab that two cores carry. Each claim of a paper, its tests "
        "and its runs were fixed in `examples/arena/claims.py` before the runs were made. What was registered after "
        "another was seen says so: it shares one side's runs with that, whose numbers made one ask; `prefix-order` "
        f"came into the repository together with most of its runs. {len(SEEDS)} seeds a cell, Student's 95% interval "
        "of the difference between pairs of one seed. A claim is reproduced where all of its tests are as claimed. "
        "Written by `make arena` from what is kept of every step of every run; the lab, its tasks and the pilots: "
        "`examples/arena/README.md`.\n",
        *in_real_loop_text(claims, records),
        "| claim | of | what is claimed | found | tests | real loop | what we make of it |",
        "|---|---|---|---|---|---|---|",
    ]
    for claim in claims:
        word = verdict(claim, records)
        name = f"[{claim.name}](#{claim.name})" if word in DECIDED else claim.name
        note = claim.unreachable or (reasons.get(claim.name, "") if word in DECIDED else "")
        lines.append(
            f"| {name} | {claim.source} | {claim.text} | **{word}** | {counted(claim, records)} "
            f"| {confirmed(claim, records)} | {_cell(note)} |"
        )
    lines += ["", *settings_table(records)]
    for claim in claims:
        if verdict(claim, records) in DECIDED:
            lines += [
                f"## {claim.name}\n",
                f"{claim.source}: {claim.text}.\n",
                f"![{claim.text}](findings/{claim.name}.png)\n",
                *tests_table(claim, records),
            ]
    return "\n".join([*lines, *all_rules(records)]) + "\n"


def in_real_loop_text(claims: Sequence[Claim], records: Mapping[str, Record]) -> list[str]:
    """How many of the claims' runs were made there too."""
    sides = {(side.setting, side.rule) for claim in claims for side in claim.sides}
    keys = [real_key(SETTINGS[s].cell(rule, REAL_SEED)) for s, rule in sides]
    count = sum(key in records for key in keys)
    return [
        f"Of the {len(keys)} runs that the claims compare, each with its seeds, {count} were made once in the real "
        "loop too (`examples/arena/real_loop.py`): in how many of the tests of what is above it is on the side of the "
        "lab's mean, is told beside the verdict. One run is no test.\n"
    ]


def counted(claim: Claim, records: Mapping[str, Record]) -> str:
    """``7 as claimed, 1 open``; ``14 of 20 runs`` where some are missing."""
    keys = [side.key(seed) in records for side in claim.sides for seed in claim.seeds]
    if not all(keys):
        return f"{sum(keys)} of {len(keys)} runs"
    differences = [(test, test.difference(records, claim.seeds)) for test in claim.tests]
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


def confirmed(claim: Claim, records: Mapping[str, Record]) -> str:
    """``5 of 6``: tests of what is above in which the real loop's difference is on the side of the lab's mean; those of
    settings in which its mismatch is another by themselves. Of tests of a margin the largest difference. Empty without
    any."""
    sides: dict[bool, list[bool]] = {True: [], False: []}
    apart: dict[bool, list[float]] = {True: [], False: []}
    for test in claim.tests:
        real, lab = in_real_loop(test, records), test.difference(records, claim.seeds)
        # A bin of mu without a token has no mean.
        if real is None or lab is None or math.isnan(real):
            continue
        settings = {test.first.setting, test.second.setting}
        is_near = all(is_comparable(setting, records) for setting in settings)
        if test.margin is not None:
            apart[is_near].append(abs(real))
        else:
            sides[is_near].append((real > 0) == (lab.mean > 0))
    texts = []
    for is_near, suffix in ((True, ""), (False, ", of another mismatch")):
        if found := sides[is_near]:
            texts.append(f"{sum(found)} of {len(found)}{suffix}")
        if differences := apart[is_near]:
            texts.append(f"up to {max(differences):.2f} apart{suffix}")
    return "; ".join(texts)


def first_gap(record: Record) -> float:
    """mean |pi - mu| of the steps' first mini-batches, at equal weights or not; NaN where some were not kept."""
    fresh = record[names.GAP_ON_POLICY]
    stale = record.get(names.GAP_STALE, [math.nan] * len(fresh))
    return float(np.mean([x if math.isnan(y) else y for x, y in zip(fresh, stale, strict=True)]))


def whole_gap(record: Record) -> float:
    """mean |pi - mu| of all of the steps' mini-batches."""
    return float(np.mean(record[names.GAP]))


def gaps_of(setting: str, records: Mapping[str, Record]) -> tuple[list[float], list[float]]:
    """``first_gap`` and ``whole_gap``, means over the runs in the lab, and in the real loop; empty without any."""
    cells = [SETTINGS[setting].cell(r, s) for r in rules_by_setting()[setting] for s in SEEDS]
    lab = [records[c.key] for c in cells if c.key in records]
    real = [records[real_key(c)] for c in cells if real_key(c) in records]
    of_lab, of_real = (
        [float(np.mean([gap(run) for run in runs])) for gap in (first_gap, whole_gap) if runs]
        for runs in (lab, real)
    )
    return of_lab, of_real


def is_comparable(setting: str, records: Mapping[str, Record]) -> bool:
    """Whether the real loop's mismatch is near the lab's, as far as both are known."""
    return not any(map(_far, *gaps_of(setting, records)))


def settings_table(records: Mapping[str, Record]) -> list[str]:
    """The settings, each with the mismatch that its runs measured, in the lab and in the real loop."""
    lines = [
        "Mean \\|pi - mu\\| of a step's first mini-batch, which the step has not yet moved, and of all four: in the "
        "lab, of all runs; then in the real loop, of its runs. A verdict is of the lab's mismatch: where the real "
        f"loop's is more than {COMPARABLE:g} times off, its runs tell little of it.\n",
        "| setting | task | mismatch | lab, first | lab, all | real loop, first | real loop, all | changes | why |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, setting in SETTINGS.items():
        columns = [
            text
            for gaps in gaps_of(name, records)
            for text in (
                ["not kept" if math.isnan(x) else f"{x:.1e}" for x in gaps] or ["not run", ""]
            )
        ]
        if not is_comparable(name, records):
            columns[3] += ", not comparable"
        changes = ", ".join(f"`{c}`" for c in setting.changes)
        lines.append(
            f"| {name} | {setting.task} | {setting.mismatch} | {' | '.join(columns)} | {changes} | {setting.reason} |"
        )
    return [*lines, ""]


def _far(lab: float, real: float) -> bool:
    """Whether they differ by more than ``COMPARABLE`` times; not where both are a float32's rounding."""
    low, high = sorted((lab, real))
    return high > ROUNDING and high > COMPARABLE * low


def _cell(text: str) -> str:
    """In a table of Markdown."""
    return text.replace("|", r"\|")


def tests_table(claim: Claim, records: Mapping[str, Record]) -> list[str]:
    rows = [
        "| difference | mean | 95% interval | claimed | finding | real loop, one run each |",
        "|---|---|---|---|---|---|",
    ]
    for test in claim.tests:
        d = test.difference(records, claim.seeds)
        assert d is not None
        claimed = "above 0" if test.margin is None else f"within {test.margin:g} of 0"
        real = in_real_loop(test, records)
        difference = _cell(f"{test.first} less {test.second}")
        rows.append(
            f"| {difference} | {d.mean:+.3f} "
            f"| {_interval(d)} | {claimed} | {test.finding(d).value} | {'' if real is None else f'{real:+.3f}'} |"
        )
    return [*rows, ""]


def all_rules(records: Mapping[str, Record]) -> list[str]:
    """Every rule side by side, in each setting, of the seeds that it has."""
    lines = []
    for setting, rules in sorted(rules_by_setting().items()):
        runs_of = {
            rule: {s: records[key] for s in SEEDS if (key := Side(setting, rule).key(s)) in records}
            for rule in rules
        }
        ends_of = {r: {s: final(run) for s, run in runs.items()} for r, runs in runs_of.items()}
        ranked = sorted((r for r in rules if ends_of[r]), key=lambda r: -_average(ends_of[r]))
        for rule in ranked:
            ends = ends_of[rule]
            lost = {s: loss_of_best(run) for s, run in runs_of[rule].items()}
            lines.append(
                f"| {setting} | {rule} | {len(ends)} | {_average(ends):.3f} | {min(ends.values()):.3f} to "
                f"{max(ends.values()):.3f} | {_average(lost):.3f} | {_beside(ends, ends_of.get(TV, {}))} |"
            )
    if not lines:
        return []
    return [
        "## All rules side by side\n",
        f"Less {TV}: of the seeds that both have, with the 95% interval.\n",
        f"| setting | rule | seeds | final reward, their mean | lowest to highest | lost of the best | less {TV} |",
        "|---|---|---|---|---|---|---|",
        *lines,
    ]


def _average(values: Mapping[int, float]) -> float:
    return float(np.mean(list(values.values())))


def _beside(ends: Mapping[int, float], others: Mapping[int, float]) -> str:
    differences = [end - others[seed] for seed, end in ends.items() if seed in others]
    if len(differences) < 2 or ends == others:
        return ""
    d = Difference.of(differences)
    return f"{d.mean:+.3f} ({_interval(d)})"


def rules_by_setting() -> dict[str, list[str]]:
    """The rules of the claims and the others, by setting."""
    rules: dict[str, dict[str, None]] = {name: {} for name in SETTINGS}
    for side in (side for claim in CLAIMS for side in claim.sides):
        rules[side.setting][side.rule] = None
    for survey in SURVEYS:
        for setting in survey.settings:
            rules[setting] |= dict.fromkeys(survey.rules)
    return {name: list(of) for name, of in rules.items()}


def _interval(d: Difference) -> str:
    return f"{d.low:+.3f} to {d.high:+.3f}"
