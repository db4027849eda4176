"""The page ``findings.md``: one table, and a figure for each claim, made only from the kept metrics of the runs."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

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
"""File with remarks on the results by claim, written after the runs."""
COMPARABLE = 3.0
"""Runs in the lab and in the real loop count as comparable if the ratio of their mismatches is at most this value."""
ROUNDING = 1e-6
"""Mismatches up to this value are float32's rounding errors."""


class Word(Enum):
    """The verdict on a claim whose runs are complete. Only the claim's primary test decides (claims.py)."""

    REPRODUCED = "reproduced"
    CONTRARY = "contrary"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Verdict:
    """The result of a claim.

    Attributes:
        word: the verdict; None if runs are missing or the claim has no tests.
        results: results of the claim's tests, the primary test first; empty without ``word``.
        adjusted: p of the primary test, adjusted by Holm over all claims.
        to_decide: number of pairs that would decide the primary test at the level that Holm requires of the next
            decision; None if it is above ``MOST_PAIRS``.
        seeds_run: number of seeds with all of the claim's runs.
    """

    word: Word | None = None
    results: tuple[ComparisonResult, ...] = ()
    adjusted: float = 1.0
    to_decide: int | None = None
    seeds_run: int = 0

    @property
    def counted(self) -> str:
        """The number of tests for each finding at 5%, such as ``6 of 8 as claimed, 1 contrary``."""
        findings = Counter(result.finding for result in self.results)
        text = f"{findings[Finding.AS_CLAIMED]} of {len(self.results)} as claimed"
        contrary = findings[Finding.CONTRARY]
        if contrary:
            text += f", {contrary} contrary"
        return text


def verdicts(claims: Sequence[Claim], records: Mapping[str, Record]) -> dict[str, Verdict]:
    """Return the verdict on each claim, by name.

    Holm's family are the primary tests of all ``claims``; a test with missing runs has a p of 1.
    """
    results = {claim.name: results_of(claim, records) for claim in claims}
    tested_names = [claim.name for claim in claims if claim.tests]
    primary_p = [results[name][0].p if results[name] else 1.0 for name in tested_names]
    adjusted = dict(zip(tested_names, holm(primary_p), strict=True))
    words: dict[str, Word] = {}
    for name, results_of_claim in results.items():
        if results_of_claim:
            words[name] = word_of(results_of_claim[0], adjusted[name])
    undecided_names = [name for name in tested_names if words.get(name) in (None, Word.UNDECIDED)]
    # Holm divides the level by the number of tests that are not decided yet.
    next_level = LEVEL / max(1, len(undecided_names))
    found = {}
    for claim in claims:
        seeds_run = sum(has_all_runs(claim, records, seed) for seed in claim.seeds)
        verdict = Verdict(seeds_run=seeds_run)
        results_of_claim = results[claim.name]
        if results_of_claim:
            primary = results_of_claim[0]
            verdict = Verdict(
                word=words[claim.name],
                results=results_of_claim,
                adjusted=adjusted[claim.name],
                to_decide=claim.tests[0].pairs_to_decide(
                    primary.difference.mean, primary.deviation, next_level
                ),
                seeds_run=seeds_run,
            )
        found[claim.name] = verdict
    return found


def results_of(claim: Claim, records: Mapping[str, Record]) -> tuple[ComparisonResult, ...]:
    """Return the results of the claim's tests; nothing if a run is missing, because a partial set is not evaluated."""
    if not all(has_all_runs(claim, records, seed) for seed in claim.seeds):
        return ()
    differences = [test.differences(records, claim.seeds) for test in claim.tests]
    return tuple(
        test.result(values)
        for test, values in zip(claim.tests, differences, strict=True)
        if values is not None
    )


def has_all_runs(claim: Claim, records: Mapping[str, Record], seed: int) -> bool:
    """Return whether all of the claim's runs with ``seed`` exist."""
    return all(side.key(seed) in records for side in claim.sides)


def word_of(primary: ComparisonResult, adjusted: float) -> Word:
    """Return the verdict by the ``adjusted`` p of the primary test and by the p of its sign-flip test."""
    if adjusted > LEVEL or primary.sign_flip_p > LEVEL:
        return Word.UNDECIDED
    return Word.REPRODUCED if primary.leans_to is Finding.AS_CLAIMED else Word.CONTRARY


def write_findings(claims: Sequence[Claim], records: Mapping[str, Record], folder: Path) -> Path:
    """Write the page into ``folder`` and its figures into ``folder / "findings"``; return the page's path."""
    figures = folder / "findings"
    figures.mkdir(parents=True, exist_ok=True)
    found = verdicts(claims, records)
    for claim in claims:
        if found[claim.name].word is not None:
            save(claim_figure(claim, records), figures / f"{claim.name}.png")
    shown: list[tuple[str, str]] = []
    for setting, rules in SHOWN.items():
        shown += [(setting, rule) for rule in rules]
    run_counts = [len(_runs_by_seed(setting, rule, records)) for setting, rule in shown]
    if min(run_counts) == len(SEEDS):
        save(curves_figure(shown, [names.REWARD], records, SEEDS), figures / "shown.png")
    write_atomically(figures / "tests.csv", tests_csv(claims, found, records))
    write_atomically(figures / "rules.csv", rules_csv(records))
    write_atomically(figures / "settings.csv", settings_csv(records))
    page = folder / "findings.md"
    write_atomically(page, page_of(claims, records))
    return page


SCREEN = """\
# Findings

Which claims about DPPO and its rivals hold? Each claim below was tested by pairs of runs with the same seeds, in a \
lab of models with about a million parameters, whose runs take {steps} steps on a CPU. The lab says nothing of what \
needs longer runs or larger models. **Undecided** means that the runs are too few to tell; it is no evidence against \
the claim.
"""


HOW = """\
## How a claim is tested

- Each claim, its tests and its runs were fixed in `examples/arena/claims.py` before the runs were made. "After X" \
names a claim that was seen before this one was registered: it shares one side's runs with that claim. `prefix-order` \
came into the repository together with most of its runs.
- A test compares two rules on the same seeds, {seeds} unless the claim says otherwise. The first test of a claim is \
its primary test, which alone decides. The claim is reproduced, or the contrary is found, where Student's test of \
the pairs, adjusted by Holm for the {family} primary tests of this page, and the exact sign-flip test of the same \
pairs are both at most 5%. This rule was fixed after the claims of ten seeds were seen, and before the seeds of the \
claims `...-again` were run.
- A claim and its repetition (`...-again`) count as one claim, with the repetition's verdict. That verdict is about \
the one pair of rules that the repetition names.
- "Difference" and "p, Holm" are the primary test's. "Tests" counts all tests of the claim at 5%, each by itself. \
"Seeds to decide" would decide the primary test after Holm in 4 of 5 cases, if the mean and the spread seen here \
were the true ones.
- † marks a rule whose paper was read second-hand or in part: the verdict is of the formula in \
[algorithms.md](../algorithms.md), not of the paper.

`make arena` writes this page and its tables from what is kept of every step of every run:

- [tests.csv](findings/tests.csv): every test with both p values, and the difference of one pair in the real loop;
- [rules.csv](findings/rules.csv): the final reward of every rule in each setting;
- [settings.csv](findings/settings.csv): task, mismatch and learning rate of each setting, such as `drift` or `coarse`;
- `examples/arena/README.md` describes the lab; [fp8.md](findings/fp8.md) has rules under FP8 rollouts,
  [distillation.md](findings/distillation.md) a teacher with and without a mask.
"""

CLAIM_TABLE = (
    "| claim | of | what is claimed | found | difference, 95% interval | p, Holm | tests | seeds to decide |",
    "|---|---|---|---|---|---|---|---|",
)


def page_of(claims: Sequence[Claim], records: Mapping[str, Record]) -> str:
    """Return the text of ``findings.md``: answers first, then the claims, then the method and the runs."""
    found = verdicts(claims, records)
    reasons = yaml.safe_load(REASONS.read_text(encoding="utf-8"))
    family = sum(bool(claim.tests) for claim in claims)
    lines = [
        SCREEN.format(steps=STEPS.partition("=")[2]),
        *counts_text(found, claims),
        *answers_text(reasons[ANSWERS], claims, found),
        "## Claims\n",
        *CLAIM_TABLE,
        *(claim_row(claim, found[claim.name]) for claim in claims),
        "",
        HOW.format(seeds=len(SEEDS), family=family),
        *old_readings_text(records),
        *in_real_loop_text(claims, records),
        "## Results\n",
    ]
    for claim in claims:
        if found[claim.name].word is not None:
            lines.append(f"### {claim.name}\n")
            if claim.name in reasons:
                lines.append(f"{reasons[claim.name]}\n")
            lines.append(f"![{claim.name}](findings/{claim.name}.png)\n")
    return "\n".join(lines).rstrip() + "\n"


ANSWERS = "answers"
"""Key of the file of reasons: sentences for the first screen, with the claims and the verdict that they rely on."""


def answers_text(
    answers: Sequence[Mapping[str, Any]], claims: Sequence[Claim], found: Mapping[str, Verdict]
) -> list[str]:
    """Return the answers whose claims all have the verdict that the answer relies on.

    An answer has a link to each of its claims, or to the claim's repetition, which has the verdict.
    """
    words = distinct_words(found, claims)
    deciding_names = {claim.repeats: claim.name for claim in claims if found[claim.name].word}
    lines = []
    for answer in answers:
        if all(words.get(name) is Word(answer["verdict"]) for name in answer["claims"]):
            links = ", ".join(
                f"[{name}](#{deciding_names.get(name, name)})" for name in answer["claims"]
            )
            lines.append(f"- {answer['text']} {answer['verdict'].capitalize()}: {links}.")
    return [*lines, ""] if lines else []


def claim_row(claim: Claim, verdict: Verdict, *, is_linked: bool = True) -> str:
    """Return the claim's row of the first table."""
    cells = [claim.name, source_of(claim), claim.text]
    if claim.unreachable is not None:
        cells += [f"out of reach here: {claim.unreachable}", "", "", "", ""]
    elif verdict.word is None:
        count = f"registered, {verdict.seeds_run} of {len(claim.seeds)} seeds run"
        cells += [count, "", "", "", ""]
    else:
        if is_linked:
            cells[0] = f"[{claim.name}](#{claim.name})"
        difference = verdict.results[0].difference
        cells += [
            verdict.word.value,
            f"{difference.mean:+.3f}, {_interval(difference)}",
            p_text(verdict.adjusted),
            verdict.counted,
            count_text(verdict.to_decide) if verdict.word is Word.UNDECIDED else "",
        ]
    return f"| {' | '.join(map(_cell, cells))} |"


def source_of(claim: Claim) -> str:
    """Return the claim's source, with a mark if a rule's paper was not read completely."""
    is_second_hand = any(name_of(side.rule) in SECOND_HAND for side in claim.sides)
    source = re.sub("^registered after (.*) was seen$", r"after \1", claim.source)
    return f"{source} †" if is_second_hand else source


def counts_text(found: Mapping[str, Verdict], claims: Sequence[Claim]) -> list[str]:
    """Return a line with the number of claims for each verdict."""
    words = Counter(distinct_words(found, claims).values())
    texts = [f"{words[word]} {word.value}" for word in Word if words[word]]
    if words[None]:
        texts.append(f"{words[None]} registered with runs missing")
    return [f"Of {sum(words.values())} claims: {', '.join(texts)}.\n"]


def distinct_words(found: Mapping[str, Verdict], claims: Sequence[Claim]) -> dict[str, Word | None]:
    """Return the verdict on each distinct claim, by name. The verdict of a repetition replaces that of its claim."""
    words: dict[str, Word | None] = {}
    for claim in claims:
        word = found[claim.name].word
        if claim.tests and (claim.repeats is None or word is not None):
            words[claim.repeats or claim.name] = word
    return words


def old_readings_text(records: Mapping[str, Record]) -> list[str]:
    """Return a line about the runs that are left out, because their rule has changed since they were made."""
    current_keys: set[str] = set()
    for cell in cells_by_setting():
        current_keys |= {cell.key, real_key(cell)}
    registered_runs = {without_reading(key) for key in current_keys}
    old_runs: Counter[str] = Counter()
    for key in records:
        if key not in current_keys and without_reading(key) in registered_runs:
            old_runs[_rule_of(key)] += 1
    if not old_runs:
        return []
    counts = ", ".join(f"`{rule}` ({count} runs)" for rule, count in sorted(old_runs.items()))
    return [f"Left out, as the rule has changed since they were run: {counts}.\n"]


def without_reading(key: str) -> str:
    """Return a ``Cell.key`` without the rule's reading."""
    return re.sub("@[^/]*", "", key)


def _rule_of(key: str) -> str:
    """Return the algorithm in a key of ``Cell.key`` or ``real_key``."""
    rule = key.removeprefix("real/").split("/")[2]
    # One name may begin with another name, so look for the longest.
    return max((name for name in PRESETS if rule.startswith(name)), key=len, default=rule)


def cells_by_setting() -> list[Cell]:
    """Return each run of a claim or a survey, with every registered seed."""
    cells = []
    for setting, rules in rules_by_setting().items():
        for rule, seed in itertools.product(rules, (*SEEDS, *FURTHER_SEEDS)):
            cells.append(SETTINGS[setting].cell(rule, seed))
    return cells


def in_real_loop_text(claims: Sequence[Claim], records: Mapping[str, Record]) -> list[str]:
    """Return a paragraph about the claims' runs in the real loop: their number, and what they show."""
    keys: set[str] = set()
    for claim in claims:
        for side in claim.sides:
            keys.add(real_key(SETTINGS[side.setting].cell(side.rule, REAL_SEED)))
    count = sum(key in records for key in keys)
    return [
        f"Of the {len(keys)} runs that the claims compare, {count} were made once in the real loop too "
        "(`examples/arena/real_loop.py`), with one seed, which decides nothing: pairs of one seed spread as much as "
        "most differences. They show that the lab's mismatch is that of a real engine (`settings.csv`; a ratio above "
        f"{COMPARABLE:g} is marked).\n"
    ]


def in_real_loop(test: Comparison, records: Mapping[str, Record]) -> float | None:
    """Return the difference of the test's two runs in the real loop; None if one is missing."""
    outcomes = []
    for side in (test.first, test.second):
        key = real_key(SETTINGS[side.setting].cell(side.rule, REAL_SEED))
        if key not in records:
            return None
        outcomes.append(side.outcome(records[key]))
    return outcomes[0] - outcomes[1]


def count_text(count: int | None) -> str:
    """Return a number of seeds as text; None is above ``MOST_PAIRS``."""
    return f"> {MOST_PAIRS:,}" if count is None else str(count)


def p_text(p: float) -> str:
    """Return a p value as text with two digits."""
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def whole_gap(record: Record) -> float:
    """Return the mean |pi - mu| of all mini-batches."""
    return float(np.mean(record[names.GAP]))


def gaps_of(setting: str, records: Mapping[str, Record]) -> tuple[list[float], list[float]]:
    """Return the mean ``first_gap`` and ``whole_gap`` of the setting's runs: in the lab, and in the real loop.

    A list is empty if there are no runs.
    """
    lab_runs: list[Record] = []
    real_runs: list[Record] = []
    for rule, seed in itertools.product(rules_by_setting()[setting], SEEDS):
        cell = SETTINGS[setting].cell(rule, seed)
        if cell.key in records:
            lab_runs.append(records[cell.key])
        if real_key(cell) in records:
            real_runs.append(records[real_key(cell)])
    return _mean_gaps(lab_runs), _mean_gaps(real_runs)


def _mean_gaps(runs: Sequence[Record]) -> list[float]:
    if not runs:
        return []
    return [float(np.mean([gap(run) for run in runs])) for gap in (first_gap, whole_gap)]


def is_comparable(setting: str, records: Mapping[str, Record]) -> bool:
    """Return whether the mismatches in the real loop and in the lab are near each other; True if one is unknown."""
    lab_gaps, real_gaps = gaps_of(setting, records)
    # A list without gaps has no pairs.
    return not any(_is_far(lab, real) for lab, real in zip(lab_gaps, real_gaps, strict=False))


SETTING_COLUMNS = (
    "setting", "task", "mismatch", "lab, first", "lab, all", "real loop, first", "real loop, all", "changes", "why",
)  # fmt: skip
"""The gaps are mean |pi - mu| of a step's first mini-batch, which the step has not yet moved, and of all four."""


def settings_csv(records: Mapping[str, Record]) -> str:
    """Return a CSV file of the settings, with the mismatch of their runs in the lab and in the real loop."""
    rows: list[Sequence[str]] = [SETTING_COLUMNS]
    for name, rules in rules_by_setting().items():
        if not rules:
            continue
        setting = SETTINGS[name]
        lab_gaps, real_gaps = gaps_of(name, records)
        columns = [*_gap_texts(lab_gaps), *_gap_texts(real_gaps)]
        if not is_comparable(name, records):
            columns[3] += ", not comparable"
        changes = " ".join(setting.changes)
        rows.append([name, setting.task, setting.mismatch, *columns, changes, setting.reason])
    return _csv(rows)


def _gap_texts(gaps: Sequence[float]) -> list[str]:
    if not gaps:
        return ["not run", ""]
    return ["not kept" if math.isnan(gap) else f"{gap:.1e}" for gap in gaps]


def _is_far(lab: float, real: float) -> bool:
    """Return whether the gaps differ by more than ``COMPARABLE`` times, and not only by rounding errors."""
    low, high = sorted((lab, real))
    return high > ROUNDING and high > COMPARABLE * low


def _cell(text: str) -> str:
    """Return ``text`` for a cell of a Markdown table."""
    return text.replace("|", r"\|")


TEST_COLUMNS = (
    "claim", "difference", "mean", "95% interval", "spread of pairs", "claimed", "p, Student", "p, sign flips",
    "finding at 5%", "seeds to decide at 5%", "real loop, one pair",
)  # fmt: skip


def tests_csv(
    claims: Sequence[Claim], found: Mapping[str, Verdict], records: Mapping[str, Record]
) -> str:
    """Return a CSV file of all tests, a claim's primary test first, with the p values of ``ComparisonResult``."""
    rows: list[Sequence[str]] = [TEST_COLUMNS]
    for claim in claims:
        # A claim whose runs are not complete has no results.
        for test, result in zip(claim.tests, found[claim.name].results, strict=False):
            rows.append([claim.name, *_test_cells(test, result, records)])
    return _csv(rows)


def _test_cells(
    test: Comparison, result: ComparisonResult, records: Mapping[str, Record]
) -> list[str]:
    difference = result.difference
    to_decide = ""
    if result.finding is Finding.OPEN:
        to_decide = count_text(test.pairs_to_decide(difference.mean, result.deviation))
    real = in_real_loop(test, records)
    return [
        f"{test.first} less {test.second}",
        f"{difference.mean:+.3f}",
        _interval(difference),
        f"{result.deviation:.3f}",
        "above 0" if test.margin is None else f"within {test.margin:g} of 0",
        p_text(result.p),
        p_text(result.sign_flip_p),
        result.finding.value,
        to_decide,
        "" if real is None else f"{real:+.3f}",
    ]


def _csv(rows: Sequence[Sequence[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


RULE_COLUMNS = (
    "setting", "rule", "seeds", "final reward, their mean", "lowest to highest", "lost of the best", f"less {TV}",
    "caution",
)  # fmt: skip


def rules_csv(records: Mapping[str, Record]) -> str:
    """Return a CSV file of every rule in each setting, by final reward."""
    rows: list[Sequence[str]] = [RULE_COLUMNS]
    for setting in sorted(rules_by_setting()):
        for cells in rule_rows(setting, records):
            rows.append([setting, *cells, SETTINGS[setting].caution])
    return _csv(rows)


def rule_rows(setting: str, records: Mapping[str, Record]) -> list[list[str]]:
    """Return a row of ``RULE_COLUMNS`` for each rule of the setting, from "rule" to the difference."""
    finals: dict[str, dict[int, float]] = {}
    losses: dict[str, dict[int, float]] = {}
    for rule in rules_by_setting()[setting]:
        runs = _runs_by_seed(setting, rule, records)
        if runs:
            finals[rule] = {seed: final(run) for seed, run in runs.items()}
            losses[rule] = {seed: loss_of_best(run) for seed, run in runs.items()}
    averages = {rule: _average(rewards) for rule, rewards in finals.items()}
    rows = []
    for rule in sorted(averages, key=averages.__getitem__, reverse=True):
        rewards = finals[rule]
        rows.append(
            [
                marked(rule),
                str(len(rewards)),
                f"{averages[rule]:.3f}",
                f"{min(rewards.values()):.3f} to {max(rewards.values()):.3f}",
                f"{_average(losses[rule]):.3f}",
                _difference_text(rewards, finals.get(TV, {})),
            ]
        )
    return rows


def marked(rule: str) -> str:
    """Return ``rule``, with a mark if its paper was not read completely."""
    return f"{rule} †" if name_of(rule) in SECOND_HAND else rule


def name_of(rule: str) -> str:
    """Return the algorithm of a rule with options."""
    return rule.split(maxsplit=1)[0]


def _average(values: Mapping[int, float]) -> float:
    return float(np.mean(list(values.values())))


def _difference_text(rewards: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """Return the mean difference of two rules over the seeds that both have, with its interval."""
    differences = []
    for seed, reward in rewards.items():
        if seed in reference:
            differences.append(reward - reference[seed])
    # ``reference`` is also a row of the table: do not compare it with itself.
    if len(differences) < 2 or rewards == reference:
        return ""
    difference = Difference.of(differences)
    return f"{difference.mean:+.3f} ({_interval(difference)})"


def _runs_by_seed(setting: str, rule: str, records: Mapping[str, Record]) -> dict[int, Record]:
    runs = {}
    for seed in SEEDS:
        key = Side(setting, rule).key(seed)
        if key in records:
            runs[seed] = records[key]
    return runs


def rules_by_setting() -> dict[str, list[str]]:
    """Return the rules of the claims and the surveys, by setting, each once."""
    rules: dict[str, dict[str, None]] = {name: {} for name in SETTINGS}
    for claim in CLAIMS:
        for side in claim.sides:
            rules[side.setting][side.rule] = None
    for survey in SURVEYS:
        for setting in survey.settings:
            rules[setting] |= dict.fromkeys(survey.rules)
    return {setting: list(rules_of_setting) for setting, rules_of_setting in rules.items()}


def _interval(difference: Difference) -> str:
    return f"{difference.low:+.3f} to {difference.high:+.3f}"
