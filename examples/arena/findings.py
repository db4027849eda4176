"""``findings.md``: one table, and a figure for each claim, from what is kept of the runs and nothing else."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import numpy as np
import yaml

from examples.arena.claims import (
    CLAIMS,
    FURTHER_SEEDS,
    SECOND_HAND,
    SEEDS,
    SETTINGS,
    SHOWN,
    STEPS,
    SURVEYS,
    TV,
    Claim,
    Comparison,
    ComparisonResult,
    Finding,
    Record,
    Side,
    final,
    first_gap,
    loss_of_best,
)
from examples.arena.figures import claim_figure, curves_figure, save
from examples.arena.lab import Cell
from examples.arena.real_loop import SEED as REAL_SEED
from examples.arena.real_loop import real_key
from examples.arena.significance import LEVEL, MOST_PAIRS, Difference, holm
from megatron_dppo.algorithms.table import PRESETS
from megatron_dppo.metrics import table as names
from megatron_dppo.system.files import write_atomically

REASONS = Path(__file__).with_name("reasons.yaml")
"""What is believed of each result and why, written after the runs: by the claim's name."""
COMPARABLE, ROUNDING = 3.0, 1e-6


class Word(Enum):
    """What is found of a claim whose runs are all there: by its primary test alone (claims.py)."""

    REPRODUCED = "reproduced"
    CONTRARY = "contrary"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Verdict:
    """What the runs of a claim say.

    ``word``: None where runs are missing, or the claim can't be tested here. ``results``: of its tests, the primary one
    first; empty without ``word``. ``adjusted``: p of the primary test, by Holm over all claims; ``to_decide``: pairs of
    runs that would decide the primary test at the level that Holm asks of the next one to be decided (None: more than
    ``MOST_PAIRS``). ``seeds_run``: seeds of which all of the claim's runs are there.
    """

    word: Word | None = None
    results: tuple[ComparisonResult, ...] = ()
    adjusted: float = 1.0
    to_decide: int | None = None
    seeds_run: int = 0

    @property
    def counted(self) -> str:
        """``7 of 8 as claimed``, with those that say the contrary: each test at 5%, by itself."""
        findings = Counter(result.finding for result in self.results)
        text = f"{findings[Finding.AS_CLAIMED]} of {len(self.results)} as claimed"
        contrary = findings[Finding.CONTRARY]
        return f"{text}, {contrary} contrary" if contrary else text


def verdicts(claims: Sequence[Claim], records: Mapping[str, Record]) -> dict[str, Verdict]:
    """By the claim's name. Holm's family are the primary tests of all ``claims``, those not run yet with a p of 1."""
    results = {claim.name: results_of(claim, records) for claim in claims}
    tested = [claim.name for claim in claims if claim.tests]
    primary_p = [results[name][0].p if results[name] else 1.0 for name in tested]
    adjusted = dict(zip(tested, holm(primary_p), strict=True))
    words = {name: word_of(of[0], adjusted[name]) for name, of in results.items() if of}
    undecided = sum(words.get(name) in (None, Word.UNDECIDED) for name in tested)
    found = {}
    for claim in claims:
        of = results[claim.name]
        verdict = Verdict(seeds_run=sum(is_run(claim, records, seed) for seed in claim.seeds))
        if of:
            to_decide = claim.tests[0].pairs_to_decide(
                of[0].difference.mean, of[0].deviation, LEVEL / max(1, undecided)
            )
            verdict = replace(
                verdict,
                word=words[claim.name],
                results=of,
                adjusted=adjusted[claim.name],
                to_decide=to_decide,
            )
        found[claim.name] = verdict
    return found


def results_of(claim: Claim, records: Mapping[str, Record]) -> tuple[ComparisonResult, ...]:
    """Of the claim's tests; empty where a run of any seed is missing: a part of a registered set is not evaluated."""
    if not all(is_run(claim, records, seed) for seed in claim.seeds):
        return ()
    differences = [test.differences(records, claim.seeds) for test in claim.tests]
    return tuple(
        test.result(values)
        for test, values in zip(claim.tests, differences, strict=True)
        if values is not None
    )


def is_run(claim: Claim, records: Mapping[str, Record], seed: int) -> bool:
    """Whether all of the claim's runs with ``seed`` are there."""
    return all(side.key(seed) in records for side in claim.sides)


def word_of(primary: ComparisonResult, adjusted: float) -> Word:
    """By the primary test's p, ``adjusted`` by Holm, and the sign-flip test's."""
    if adjusted > LEVEL or primary.sign_flip_p > LEVEL:
        return Word.UNDECIDED
    return Word.REPRODUCED if primary.leans_to is Finding.AS_CLAIMED else Word.CONTRARY


def write_findings(claims: Sequence[Claim], records: Mapping[str, Record], folder: Path) -> Path:
    """Write the page into ``folder`` and its figures into ``findings`` there; the page's path."""
    figures = folder / "findings"
    figures.mkdir(parents=True, exist_ok=True)
    found = verdicts(claims, records)
    for claim in claims:
        if found[claim.name].word is not None:
            save(claim_figure(claim, records), figures / f"{claim.name}.png")
    shown = [(setting, rule) for setting, rules in SHOWN.items() for rule in rules]
    if all(SETTINGS[s].cell(rule, seed).key in records for s, rule in shown for seed in SEEDS):
        save(curves_figure(shown, [names.REWARD], records, SEEDS), figures / "shown.png")
    page = folder / "findings.md"
    write_atomically(page, page_of(claims, records))
    return page


HOW = """\
Claims of papers, and what becomes of them in a lab that two cores carry. Each claim, its tests and its runs were \
fixed in `examples/arena/claims.py` before the runs were made. A claim that was registered after another one was \
seen says so: it shares one side's runs with that claim. `prefix-order` came into the repository together with most \
of its runs.

A test compares two rules on the same seeds, {seeds} unless the claim says otherwise. The first test of a claim is \
its primary test, which alone decides. The claim is **reproduced**, or the **contrary** is found, where Student's \
test of the pairs, adjusted by Holm for the {family} primary tests of this page, and the exact sign-flip test of the \
same pairs are both at most 5%. Else it is **undecided**: the runs are too few to tell, which is no evidence against \
the claim. This rule was fixed after the claims of ten seeds were seen, and before the further seeds of the claims \
`...-again` were run.

"p, Holm" is the primary test's. "Tests" counts all tests of the claim at 5%, each by itself. "Seeds to decide" are \
those with which the primary test would be decided after Holm, in 4 of 5 cases, if the mean and the spread seen here \
were the true ones. A claim that is marked † is about a rule whose paper was read second-hand or in part: its \
verdict is of the formula in [algorithms.md](../algorithms.md), not of the paper.

The lab has models of about a million parameters and runs of {steps} steps. It says nothing of what needs longer \
runs or larger models. `make arena` writes this page from what is kept of every step of every run; the lab, its \
tasks and the pilots: `examples/arena/README.md`. Rules under FP8 rollouts have a page of their own: \
[fp8.md](findings/fp8.md).
"""


def page_of(claims: Sequence[Claim], records: Mapping[str, Record]) -> str:
    """``findings.md``."""
    found = verdicts(claims, records)
    reasons = yaml.safe_load(REASONS.read_text(encoding="utf-8"))
    family = sum(bool(claim.tests) for claim in claims)
    steps = STEPS.partition("=")[2]
    lines = [
        "# Findings\n",
        HOW.format(seeds=len(SEEDS), family=family, steps=steps),
        *counts_text(found, claims),
        *old_readings_text(records),
        "| claim | of | what is claimed | found | p, Holm | tests | seeds to decide | what we make of it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [claim_row(claim, found[claim.name], reasons.get(claim.name, "")) for claim in claims]
    lines += ["", *in_real_loop_text(claims, records), *settings_table(records)]
    for claim in claims:
        if found[claim.name].word is not None:
            lines += [
                f"## {claim.name}\n",
                f"{claim.source}: {claim.text}.\n",
                f"![{claim.text}](findings/{claim.name}.png)\n",
                *tests_table(claim, found[claim.name], records),
            ]
    return "\n".join([*lines, *all_rules(records)]) + "\n"


def claim_row(claim: Claim, verdict: Verdict, reason: str) -> str:
    """The claim's row of the first table."""
    cells = [claim.name, source_of(claim), claim.text]
    if claim.unreachable is not None:
        cells += ["out of reach here", "", "", "", claim.unreachable]
    elif verdict.word is None:
        count = f"registered, {verdict.seeds_run} of {len(claim.seeds)} seeds run"
        cells += [count, "", "", "", ""]
    else:
        cells[0] = f"[{claim.name}](#{claim.name})"
        is_open = verdict.word is Word.UNDECIDED
        to_decide = count_text(verdict.to_decide) if is_open else ""
        cells += [verdict.word.value, p_text(verdict.adjusted), verdict.counted, to_decide, reason]
    return f"| {' | '.join(map(_cell, cells))} |"


def source_of(claim: Claim) -> str:
    """The claim's source, marked where a rule's paper was not read."""
    is_second_hand = any(name_of(side.rule) in SECOND_HAND for side in claim.sides)
    return f"{claim.source} †" if is_second_hand else claim.source


def counts_text(found: Mapping[str, Verdict], claims: Sequence[Claim]) -> list[str]:
    """How many claims have each word."""
    words = Counter(found[claim.name].word for claim in claims if claim.tests)
    texts = [f"{words[word]} {word.value}" for word in Word if words[word]]
    if words[None]:
        texts.append(f"{words[None]} registered with runs missing")
    return [f"Of {sum(words.values())} claims: {', '.join(texts)}.\n"]


def old_readings_text(records: Mapping[str, Record]) -> list[str]:
    """Which rules' runs were of another reading of the rule than the present one, and so are left out."""
    current = {key for cell in cells_by_setting() for key in (cell.key, real_key(cell))}
    rules = {without_reading(key) for key in current}
    old = Counter(
        _rule_of(key) for key in records if key not in current and without_reading(key) in rules
    )
    if not old:
        return []
    counts = ", ".join(f"`{rule}` ({count} runs)" for rule, count in sorted(old.items()))
    return [f"Left out, as the rule has changed since they were run: {counts}.\n"]


def without_reading(key: str) -> str:
    """``Cell.key`` without the rule's reading."""
    return re.sub("@[^/]*", "", key)


def _rule_of(key: str) -> str:
    """The algorithm of ``Cell.key`` or of ``real_key``."""
    rule = key.removeprefix("real/").split("/")[2]
    return next(name for name in sorted(PRESETS, key=len, reverse=True) if rule.startswith(name))


def cells_by_setting() -> list[Cell]:
    """Each run of a claim or a survey, with every registered seed."""
    return [
        SETTINGS[setting].cell(rule, seed)
        for setting, rules in rules_by_setting().items()
        for rule in rules
        for seed in (*SEEDS, *FURTHER_SEEDS)
    ]


def in_real_loop_text(claims: Sequence[Claim], records: Mapping[str, Record]) -> list[str]:
    """How many of the claims' runs were made there too, and what that can tell."""
    sides = {(side.setting, side.rule) for claim in claims for side in claim.sides}
    keys = [real_key(SETTINGS[s].cell(rule, REAL_SEED)) for s, rule in sides]
    count = sum(key in records for key in keys)
    return [
        f"Of the {len(keys)} runs that the claims compare, {count} were made once in the real loop too "
        "(`examples/arena/real_loop.py`), with one seed. Their difference stands in the last column of each claim's "
        "table. It decides nothing: beside it is the spread between pairs of one seed, which is as large as most "
        "differences. It shows that the lab's mismatch and reward are those of a real engine (the table below).\n"
    ]


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


def count_text(count: int | None) -> str:
    """A number of seeds."""
    return f"> {MOST_PAIRS:,}" if count is None else str(count)


def p_text(p: float) -> str:
    """Two digits, and no more zeros than are needed."""
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


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
    for name, rules in rules_by_setting().items():
        if not rules:
            continue
        setting = SETTINGS[name]
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


def tests_table(claim: Claim, verdict: Verdict, records: Mapping[str, Record]) -> list[str]:
    """Each test of the claim, the primary one first: p two-sided, of the side that the mean leans to."""
    rows = [
        "| difference | mean | 95% interval | spread of pairs | claimed | p, Student | p, sign flips | finding at 5% "
        "| seeds to decide at 5% | real loop, one pair |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for test, result in zip(claim.tests, verdict.results, strict=True):
        d = result.difference
        to_decide = ""
        if result.finding is Finding.OPEN:
            to_decide = count_text(test.pairs_to_decide(d.mean, result.deviation))
        real = in_real_loop(test, records)
        cells = [
            f"{test.first} less {test.second}",
            f"{d.mean:+.3f}",
            _interval(d),
            f"{result.deviation:.3f}",
            "above 0" if test.margin is None else f"within {test.margin:g} of 0",
            p_text(result.p),
            p_text(result.sign_flip_p),
            result.finding.value,
            to_decide,
            "" if real is None else f"{real:+.3f}",
        ]
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
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
                f"| {setting} | {marked(rule)} | {len(ends)} | {_average(ends):.3f} | {min(ends.values()):.3f} to "
                f"{max(ends.values()):.3f} | {_average(lost):.3f} | {_beside(ends, ends_of.get(TV, {}))} |"
            )
    if not lines:
        return []
    return [
        "## All rules side by side\n",
        f"Less {TV}: of the seeds that both have, with the 95% interval of a single test, not adjusted for the number "
        "of rows. † The rule's paper was read second-hand or in part: what was read, "
        "[algorithms.md](../algorithms.md).\n",
        *(f"`{name}`: {s.caution}.\n" for name, s in sorted(SETTINGS.items()) if s.caution),
        f"| setting | rule | seeds | final reward, their mean | lowest to highest | lost of the best | less {TV} |",
        "|---|---|---|---|---|---|---|",
        *lines,
    ]


def marked(rule: str) -> str:
    """``rule``, with a sign where its paper was not read."""
    return f"{rule} †" if name_of(rule) in SECOND_HAND else rule


def name_of(rule: str) -> str:
    """The algorithm of a rule with options."""
    return rule.split(maxsplit=1)[0]


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
