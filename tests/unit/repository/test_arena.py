"""``make arena``: claims and their statistics, tasks, stored results of runs, and the pages of findings."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from matplotlib.image import imread

from examples.arena import distillation, figures, findings, fp8, readings, real_loop, speed, tasks
from examples.arena.claims import (
    CLAIMS,
    OTHERS,
    SEEDS,
    SETTINGS,
    TV,
    Claim,
    Comparison,
    Finding,
    Setting,
    Side,
    area,
    entropy,
    final,
    likely_prob_error,
    loss_of_best,
    rare_ratio_error,
)
from examples.arena.lab import MU_BOUNDS, PROB_ERROR, RATIO_ERROR
from examples.arena.mismatches import MISMATCHES, int4
from examples.arena.run import cells_of, read_results, real_cells, survey_cells
from examples.arena.significance import Difference, holm, pairs_to_decide, sign_flip_p, student_p
from megatron_dppo.algorithms.table import PRESETS, algorithm_facts
from megatron_dppo.data.problems import PromptForm, load_problems, load_tokenizer
from megatron_dppo.diagnostics.doctor.rounding import bfloat16, float8
from megatron_dppo.metrics import table as names

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "evidence"


def make_record(rewards, entropies=None):
    return {
        names.REWARD: rewards,
        names.ENTROPY: entropies or [1.0] * len(rewards),
        names.GAP: [0.03] * len(rewards),
        names.GAP_ON_POLICY: [0.001, *[math.nan] * (len(rewards) - 1)],
        names.GAP_STALE: [math.nan, *[0.005] * (len(rewards) - 1)],
        RATIO_ERROR: [0.3, 0.1, 0.05, math.nan, 0.01],
        PROB_ERROR: [0.001, 0.01, 0.02, math.nan, 0.04],
    }


# --- outcomes and their statistics, by hand


def test_outcomes():
    record = make_record(
        [0.0] * 4 + [1.0] * 10 + [0.25, 0.75, 0.5, 0.5, 0.5, 0.5], [2.0] * 19 + [math.nan]
    )
    # The last 5 of 20 are 0.75, and 4 times 0.5.
    assert final(record) == 0.55
    assert area(record) == 0.65
    assert loss_of_best(record) == pytest.approx(1.0 - final(record))
    assert entropy(record) == 2.0
    assert rare_ratio_error(record) == pytest.approx(0.2)
    assert likely_prob_error(record) == pytest.approx(0.04)


def test_students_test_and_its_interval():
    d = Difference.of([1.0, 2.0, 3.0])
    # 4.302653 * 1 / sqrt(3)
    assert (d.mean, d.low, d.high) == pytest.approx((2.0, 2 - 2.484138, 2 + 2.484138))
    # t = 2 sqrt(3); with two degrees of freedom p = (1 - t / sqrt(t^2 + 2)) / 2.
    assert student_p([1.0, 2.0, 3.0]) == pytest.approx((1 - math.sqrt(12 / 14)) / 2)
    assert student_p([-1.0, -2.0, -3.0]) == pytest.approx((1 + math.sqrt(12 / 14)) / 2)
    assert (student_p([0.5, 0.5]), student_p([0.0, 0.0])) == (0.0, 1.0)
    for test in (Difference.of, student_p, sign_flip_p):
        with pytest.raises(ValueError, match="1 seeds"):
            test([1.0])


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1.0, 2.0, 3.0], 1 / 8),  # only its own signs have a sum of 6
        ([3.0, -1.0, 2.0], 2 / 8),  # sums of 6 and of 4
        ([1.0, 1.0, -1.0], 4 / 8),  # 3, and three times 1
        ([-1.0, -2.0], 1.0),
        ([0.0, 0.0], 1.0),
        ([0.25] * 35, 2.0**-35),
        ([0.25] * 34 + [-0.25], 36 * 2.0**-35),
    ],
)
def test_the_sign_flip_test_is_exact(differences, p):
    assert sign_flip_p(differences) == pytest.approx(p, rel=1e-9)


def test_the_sign_flip_test_counts_every_choice_of_signs():
    differences = np.random.default_rng(3).normal(0.02, 0.05, 9).round(5)
    signs = np.array(list(itertools.product((1, -1), repeat=9)))
    sums = (signs * np.abs(differences)).sum(1)
    expected = (sums >= differences.sum() - 1e-9).mean()
    assert sign_flip_p(differences) == pytest.approx(expected)


def test_holm():
    # 4 * .005; 3 * .01; 2 * .03; and .04, which may not be less than the value for .03.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_number_of_pairs_that_decide():
    # Tables of the paired t test at 5% and a power of 80%: 10 at an effect of 1, 34 at .5, 199 at .2.
    assert [pairs_to_decide([effect], 1.0) for effect in (1.0, 0.5, 0.2)] == [10, 34, 199]
    assert pairs_to_decide([0.001], 1.0) is None
    assert pairs_to_decide([0.5], 1.0, level=0.05 / 20) > 60
    # A claim with a margin must show two bounds. They take more pairs than one, and fewer than at twice the spread.
    pairs_for_both = pairs_to_decide([0.05, 0.05], 0.1)
    assert pairs_to_decide([0.05], 0.1) < pairs_for_both < pairs_to_decide([0.05], 0.2)
    with_margin = Comparison(Side("drift", TV), Side("drift", "kpop"), 0.05)
    without_margin = replace(with_margin, margin=None)
    assert without_margin.pairs_to_decide(-0.02, 0.04) == 34
    assert with_margin.pairs_to_decide(0.01, 0.08) == pairs_to_decide([0.04, 0.06], 0.08)
    assert with_margin.pairs_to_decide(-0.09, 0.04) == 10  # 0.04 beyond the margin


@pytest.mark.parametrize(
    ("mean", "margin", "expected"),
    [
        (0.05, None, Finding.AS_CLAIMED),
        (-0.05, None, Finding.CONTRARY),
        (0.02, None, Finding.OPEN),
        (0.0, 0.05, Finding.AS_CLAIMED),
        (0.02, 0.05, Finding.OPEN),
        (-0.1, 0.05, Finding.CONTRARY),
        (0.1, 0.05, Finding.CONTRARY),
    ],
)
def test_a_finding_needs_the_whole_interval(mean, margin, expected):
    test = Comparison(Side("drift", "pg-is"), Side("drift", "ppo"), margin)
    # The interval is the mean +-0.0329: 2.2622 * 0.046 / sqrt(10).
    values = mean + np.array([0.04364, -0.04364] * 5)
    result = test.result(values.tolist())
    d = result.difference
    assert d.high - d.low == pytest.approx(2 * 0.0329, rel=1e-3)
    assert result.finding is expected
    if margin is None:
        is_shown = d.low > 0 or d.high < 0
    else:
        is_shown = (-margin < d.low and d.high < margin) or d.low > margin or d.high < -margin
    assert (result.p <= 0.05) == is_shown


def test_p_is_two_sided_and_of_the_nearer_side():
    comparison = Comparison(Side("drift", "pg-is"), Side("drift", "ppo"))
    for sign, side in ((1, Finding.AS_CLAIMED), (-1, Finding.CONTRARY)):
        result = comparison.result([sign * x for x in (1.0, 2.0, 3.0)])
        assert result.leans_to is side
        assert result.p == pytest.approx(1 - math.sqrt(12 / 14))
        assert result.sign_flip_p == 2 / 8
    # The margin is 0.05, and the upper bound is nearer: at distances of 0.04 and 0.02, the largest of four sums.
    within = Comparison(Side("drift", "pg-is"), Side("drift", "ppo"), 0.05).result([0.01, 0.03])
    assert within.sign_flip_p == 2 / 4


def records_of(rewards_by_rule, seeds=(1, 2, 3)):
    return {
        Side("drift", rule).key(seed): make_record([value + 0.01 * seed] * 8)
        for rule, value in rewards_by_rule.items()
        for seed in seeds
    }


def comparison_of(first, second):
    return Comparison(Side("drift", first), Side("drift", second))


def make_claim(*tests, name="c", seeds=(1, 2, 3)):
    return Claim(name, "s", "t", tests, seeds=seeds)


SIX = tuple(range(1, 7))


def test_the_primary_test_decides_a_claim():
    records = records_of({"ppo": 0.5, "gspo": 0.3, "kpop": 0.6}, SIX)
    # Both runs of a seed contain 0.01 * seed, so their differences have no spread.
    assert comparison_of("ppo", "gspo").differences(records, SIX) == pytest.approx([0.2] * 6)
    words = {
        findings.Word.REPRODUCED: (comparison_of("ppo", "gspo"), comparison_of("ppo", "kpop")),
        findings.Word.CONTRARY: (comparison_of("ppo", "kpop"), comparison_of("ppo", "gspo")),
    }
    for word, tests in words.items():
        verdict = findings.verdicts([make_claim(*tests, seeds=SIX)], records)["c"]
        assert verdict.word is word
        assert verdict.counted == "1 of 2 as claimed, 1 contrary"
    assert findings.verdicts([Claim("c", "s", "t", unreachable="x")], {})["c"].word is None


def test_too_few_pairs_of_any_size_leave_a_claim_undecided():
    # Five equal signs have a sign-flip p of 2 / 2^5, above 5%, whatever Student's test says. Six have 2 / 2^6.
    records = records_of({"ppo": 0.5, "gspo": 0.3}, SIX)
    for seeds, word in ((SIX[:5], findings.Word.UNDECIDED), (SIX, findings.Word.REPRODUCED)):
        verdict = findings.verdicts(
            [make_claim(comparison_of("ppo", "gspo"), seeds=seeds)], records
        )["c"]
        assert verdict.word is word
        assert verdict.results[0].p < 1e-4


def test_a_decision_is_adjusted_for_the_number_of_claims():
    values = dict(zip(range(1, 11), [0.1, 0.02] * 5, strict=True))
    records = {
        Side("drift", rule).key(seed): make_record([value] * 8)
        for seed, spread in values.items()
        for rule, value in (("ppo", 0.5 + spread), ("gspo", 0.5))
    }
    seeds = tuple(values)
    claim = make_claim(comparison_of("ppo", "gspo"), seeds=seeds)
    # Claims that have not run yet count with p = 1.
    unrun_claims = [
        make_claim(comparison_of("ppo", "sapo"), name=f"n{i}", seeds=seeds) for i in range(60)
    ]
    alone = findings.verdicts([claim], records)["c"]
    among = findings.verdicts([claim, *unrun_claims], records)["c"]
    assert alone.word is findings.Word.REPRODUCED
    assert alone.adjusted == alone.results[0].p == pytest.approx(0.0016, rel=0.1)
    assert among.adjusted == pytest.approx(61 * alone.adjusted)
    assert among.word is findings.Word.UNDECIDED


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_an_answer_is_left_out_when_its_claim_has_another_verdict():
    claims = [make_claim(comparison_of("kpop", "gspo"), seeds=SIX)]
    again = replace(claims[0], name="c-again", repeats="c")
    records = records_of({"kpop": 0.5, "gspo": 0.3}, SIX)
    answers = [
        {"text": text, "verdict": verdict, "claims": ["c"]}
        for text, verdict in (("It is.", "reproduced"), ("It is not.", "contrary"))
    ]
    found = findings.verdicts(claims, records)
    assert findings.answers_text(answers, claims, found) == ["- It is. Reproduced: [c](#c).", ""]
    assert findings.answers_text(answers[1:], claims, found) == []
    found = findings.verdicts([*claims, again], records)
    assert findings.answers_text(answers, [*claims, again], found)[0].endswith("[c](#c-again).")
    assert findings.answers_text(answers, [], {}) == []


def test_a_part_of_a_registered_set_is_not_evaluated(tmp_path):
    claim = make_claim(comparison_of("kpop", "gspo"))
    records = records_of({"kpop": 0.5, "gspo": 0.3}, (1, 2))
    records |= records_of({"kpop": 0.9}, (3,))
    verdict = findings.verdicts([claim], records)["c"]
    assert (verdict.word, verdict.results, verdict.seeds_run) == (None, (), 2)
    page = findings.write_findings([claim], records, tmp_path).read_text()
    assert "| c | s † | t | registered, 2 of 3 seeds run |  |  |  |  |" in page
    assert "### c\n" not in page
    assert read_csv(tmp_path / "findings" / "tests.csv") == [list(findings.TEST_COLUMNS)]
    assert not (tmp_path / "findings" / "c.png").exists()


def test_the_page_has_words_figures_and_every_rule(tmp_path):
    seeds = SIX
    records = records_of({"kpop": 0.5, "gspo": 0.3}, seeds)
    claims = [make_claim(comparison_of("gspo", "kpop"), comparison_of("kpop", "gspo"), seeds=seeds)]
    page = findings.write_findings(claims, records, tmp_path).read_text()
    # The dagger marks kpop as a rule whose paper was read second-hand.
    assert (
        "| [c](#c) | s † | t | contrary | -0.200, -0.200 to -0.200 | < 0.0001 | 1 of 2 as claimed, 1 contrary |  |"
        in page
    )
    assert "Of 1 claims: 1 contrary." in page
    assert "### c\n\n![c](findings/c.png)\n" in page
    assert read_csv(tmp_path / "findings" / "tests.csv")[2] == [
        *("c", "final, kpop (drift) less final, gspo (drift)", "+0.200", "+0.200 to +0.200", "0.000"),
        *("above 0", "< 0.0001", "0.031", "as claimed", "", ""),
    ]  # fmt: skip
    rules = read_csv(tmp_path / "findings" / "rules.csv")
    assert rules[1] == ["drift", "kpop †", "6", "0.535", "0.510 to 0.560", "-0.107", "", ""]
    assert rules[2][:4] == ["drift", "gspo", "6", "0.335"]
    assert len(rules) == 3
    # (0.001 + 7 * 0.005) / 8
    settings = {row[0]: row[1:7] for row in read_csv(tmp_path / "findings" / "settings.csv")}
    assert settings["drift"] == ["moe", "stale-8", "4.5e-03", "3.0e-02", "not run", ""]
    assert settings["exact"] == ["rare", "none", "not run", "", "not run", ""]
    assert imread(tmp_path / "findings" / "c.png").std() > 0.01


def test_what_another_reading_of_a_rule_ran_is_left_out(monkeypatch):
    side = Side("drift", "kpop")
    records = records_of({"kpop": 0.5, "gspo": 0.3}, SIX)
    records[real_loop.real_key(SETTINGS["drift"].cell("kpop", 1))] = make_record([0.5] * 8)
    claim = make_claim(comparison_of("kpop", "gspo"), seeds=SIX)
    key = side.key(1)
    assert findings.old_readings_text(records) == []
    assert findings.verdicts([claim], records)["c"].word is not None
    number = {"kl_threshold": 0.2}
    monkeypatch.setitem(PRESETS, "kpop", replace(PRESETS["kpop"], stability=number))
    readings._reading.cache_clear()
    try:
        assert side.key(1) != key
        assert findings.without_reading(side.key(1)) == findings.without_reading(key)
        assert findings.verdicts([claim], records)["c"].word is None
        (text,) = findings.old_readings_text(records)
        assert "`kpop` (7 runs)" in text
        assert "gspo" not in text
        assert "kpop" not in findings.rules_csv(records)
        assert "gspo" in findings.rules_csv(records)
        # With the earlier threshold given explicitly, the rule still has its old reading.
        assert readings.reading_of("kpop", ["algorithm.options.kl_threshold=0.1"]) in key
    finally:
        readings._reading.cache_clear()


def test_a_reading_keeps_its_name_where_a_processor_rounds_otherwise():
    stored = readings._stored()[readings.reading_of("score-centering")]
    for seed in (98, 99):
        noisy = readings.flat_gradients("score-centering", (), noise=seed)
        assert readings.is_same_reading(noisy, stored)
    values = readings.flat_gradients("score-centering", ())
    place = int(np.abs(np.nan_to_num(stored)).argmax())
    values[place] *= 1.001
    assert not readings.is_same_reading(values, stored)
    assert not readings.is_same_reading(values[1:], stored)


def test_rules_of_few_seeds_stand_beside_dppo_of_the_same_seeds():
    records = records_of({"gspo": 0.3}, (2, 3)) | records_of({TV: 0.5}, (1, 2, 3))
    dppo, gspo = findings.rule_rows("drift", records)
    assert gspo == ["gspo", "2", "0.325", "0.320 to 0.330", "-0.065", "-0.200 (-0.200 to -0.200)"]
    assert (dppo[0], *dppo[-2:]) == (TV, "-0.104", "")


def test_a_claim_after_another_names_it():
    assert findings.source_of(make_claim(comparison_of("ppo", "gspo"))) == "s"
    later = replace(
        make_claim(comparison_of("ppo", "kpop")), source="registered after pdm was seen"
    )
    assert findings.source_of(later) == "after pdm †"


def test_the_real_loops_mismatch_stands_beside_the_labs():
    cell = SETTINGS["coarse"].cell(TV, 1)

    def row(stale_in_lab, stale_in_real_loop, whole):
        lab = make_record([0.5] * 8) | {names.GAP_STALE: [math.nan, *[stale_in_lab] * 7]}
        real = make_record([0.5] * 8) | {names.GAP: [whole] * 8}
        if stale_in_real_loop is None:
            del real[names.GAP_STALE]
        else:
            real[names.GAP_STALE] = [math.nan, *[stale_in_real_loop] * 7]
        table = findings.settings_csv({cell.key: lab, real_loop.real_key(cell): real})
        (cells,) = [cells for cells in csv.reader(table.splitlines()) if cells[0] == "coarse"]
        return cells[3:7]

    # The lab's gap over all mini-batches is 0.03. Its gap over the first mini-batches is (0.001 + 7 * x) / 8.
    assert row(0.001, 0.0032, 0.03) == ["1.0e-03", "3.0e-02", "2.9e-03", "3.0e-02"]
    assert row(0.001, 0.0033, 0.03)[2:] == ["3.0e-03", "3.0e-02, not comparable"]
    assert row(0.0033, 0.001, 0.03)[3] == "3.0e-02, not comparable"
    assert row(0.001, None, 0.0101) == ["1.0e-03", "3.0e-02", "not kept", "1.0e-02"]
    assert row(0.001, None, 0.0099)[2:] == ["not kept", "9.9e-03, not comparable"]


@pytest.mark.parametrize("at_equal_weights", [1e-9, 1e-7])
def test_gaps_that_are_roundings_are_alike(at_equal_weights):
    assert not findings._is_far(1e-8, at_equal_weights)
    assert findings._is_far(1e-8, 2e-6)


def test_the_kept_page_and_its_figures_are_those_of_the_kept_runs():
    records = read_results(DOCS / "findings" / "results.jsonl.gz")
    assert (DOCS / "findings.md").read_text() == findings.page_of(CLAIMS, records)
    found = findings.verdicts(CLAIMS, records)
    tests = findings.tests_csv(CLAIMS, found, records)
    assert (DOCS / "findings" / "tests.csv").read_text() == tests
    assert (DOCS / "findings" / "rules.csv").read_text() == findings.rules_csv(records)
    assert (DOCS / "findings" / "settings.csv").read_text() == findings.settings_csv(records)
    decided = {name for name, verdict in found.items() if verdict.word is not None}
    figure_names = {path.stem for path in (DOCS / "findings").glob("*.png")}
    assert figure_names == decided | {"shown", "fp8", "distillation"}
    reasons = yaml.safe_load(findings.REASONS.read_text(encoding="utf-8"))
    answers = reasons.pop(findings.ANSWERS)
    assert decided <= reasons.keys() <= {claim.name for claim in CLAIMS}
    # Every answer relies on the verdict that its claims have.
    page = (DOCS / "findings.md").read_text()
    assert [answer["text"] for answer in answers if answer["text"] not in page] == []
    assert len(answers) == 10
    # Every row of a table has as many cells as its head.
    lines = (DOCS / "findings.md").read_text().splitlines()
    for is_row, table in itertools.groupby(lines, key=lambda line: line.startswith("|")):
        assert not is_row or len({len(re.findall(r"(?<!\\)\|", row)) for row in table}) == 1


@pytest.mark.parametrize("study", [fp8.STUDY, distillation.STUDY])
def test_the_kept_page_of_a_study_is_that_of_its_kept_runs(study):
    records = read_results(DOCS / "findings" / f"{study.name}.jsonl.gz")
    assert (DOCS / "findings" / f"{study.name}.md").read_text() == study.page_of(records)
    assert (DOCS / "findings" / f"{study.name}_tests.csv").read_text() == study.tests_of(records)


# --- figures


def make_curve(value):
    return make_record([value] * 8) | {
        names.GAP: [0.01 * value] * 8,
        names.ENTROPY: [3 * value] * 8,
    }


def panels_of(claim, records):
    return figures.claim_figure(replace(claim, seeds=(1, 2)), records).axes


def records_in(setting, value_by_rule, seeds=(1, 2)):
    return {
        Side(setting, rule).key(seed): make_curve(value + 0.1 * seed)
        for rule, value in value_by_rule.items()
        for seed in seeds
    }


@pytest.mark.parametrize(
    ("outcome", "units", "ends"),
    [
        (final, ["reward", "mean |pi - mu|"], [0.35, 0.0035]),
        (loss_of_best, ["reward", "mean |pi - mu|"], [0.35, 0.0035]),
        (area, ["reward"], [0.35]),
        (entropy, ["entropy, nats"], [1.05]),
    ],
)
def test_a_claims_figure_draws_what_its_tests_compare(outcome, units, ends):
    sides = Side("drift", "kpop", outcome), Side("drift", "gspo", outcome)
    records = records_in("drift", {"kpop": 0.2, "gspo": 0.4})
    claim = Claim("c", "s", "t", (Comparison(*sides),))
    panels = panels_of(claim, records)
    assert [axes.get_ylabel() for axes in panels] == units
    # kpop's seeds are 0.2 + 0.1 and 0.2 + 0.2.
    assert [axes.lines[0].get_ydata()[-1] for axes in panels] == pytest.approx(ends)
    assert [line.get_label() for line in panels[0].lines] == ["kpop", "gspo"]


def test_a_line_on_another_leaves_it_to_be_seen():
    records = records_in("drift", {"kpop": 0.2, "gspo": 0.2, TV: 0.2})
    tests = tuple(Comparison(Side("drift", "kpop"), Side("drift", r)) for r in ("gspo", TV))
    panels = panels_of(Claim("c", "s", "t", tests), records)
    widths = [line.get_linewidth() for line in panels[0].lines]
    assert widths[0] > 2 * max(widths[1:])
    assert [line.is_dashed() for line in panels[0].lines] == [False, False, True]


def test_panels_of_one_task_have_one_scale_of_gaps():
    records = (
        records_in("flips", {TV: 0.6})
        | records_in("replayed", {TV: 0.2})
        | records_in("coarse", {TV: 0.1})
    )
    tests = tuple(Comparison(Side("flips", TV), Side(s, TV)) for s in ("replayed", "coarse"))
    panels = panels_of(Claim("c", "s", "t", tests), records)
    tops = [axes.get_ylim()[1] for axes in panels[3:]]
    assert tops[0] == tops[1] > 0.008  # the highest seed's
    assert tops[2] < 0.004


def test_rules_that_should_do_alike_are_drawn_by_their_ends():
    records = records_in("drift", {TV: 0.2, "kpop": 0.4})
    claim = Claim("c", "s", "t", (Comparison(Side("drift", TV), Side("drift", "kpop"), 0.05),))
    (axes,) = panels_of(claim, records)
    assert [text.get_text() for text in axes.get_yticklabels()] == [TV, "kpop"]
    seeds, interval, mean = axes.lines[:3]
    assert list(seeds.get_xdata()) == pytest.approx([0.3, 0.4])
    # 12.7062 * 0.05: Student's 97.5% at one degree of freedom, and the standard error
    assert list(interval.get_xdata()) == pytest.approx([0.35 - 0.63531, 0.35 + 0.63531], abs=1e-5)
    assert list(mean.get_xdata()) == pytest.approx([0.35])


def test_the_mismatch_is_drawn_by_probability():
    records = records_in("flips", {TV: 0.2})
    sides = Side("flips", TV, rare_ratio_error), Side("flips", TV, likely_prob_error)
    claim = Claim("c", "s", "t", (Comparison(*sides),))
    ratio, probability = panels_of(claim, records)
    assert list(ratio.lines[0].get_ydata()[:3]) == pytest.approx([0.3, 0.1, 0.05])
    assert list(probability.lines[0].get_ydata()[:3]) == pytest.approx([0.001, 0.01, 0.02])
    assert np.ma.is_masked(ratio.lines[0].get_ydata()[3])
    assert len(figures.BINS) == len(MU_BOUNDS)


# --- what is registered


def test_claims_are_of_rules_settings_and_mismatches_that_there_are():
    assert len(SEEDS) >= 10
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    assert all(bool(claim.tests) == (claim.unreachable is None) for claim in CLAIMS)
    cells = [*cells_of(CLAIMS), *survey_cells()]
    assert len({cell.key for cell in cells}) == len(cells)
    for cell in cells:
        options = [c.removeprefix("algorithm.options.").split("=") for c in cell.changes]
        known = {name: float(value) for name, value in options if "." not in name}
        algorithm_facts(cell.algorithm, known)
        assert cell.task in tasks.TASKS
        assert cell.mismatch in MISMATCHES
    compared_rules = {
        c.algorithm for c in cells if (c.task, c.mismatch) == ("moe", SETTINGS["drift"].mismatch)
    }
    missing = PRESETS.keys() - compared_rules
    # They are other names or other estimates of compared rules, or compared elsewhere. The last two have no runs.
    assert missing == {
        "cispo", "ppo", "grpo", "dppo-topk-kl", "dppo-exact-kl", "recomputed-exact-tv", "recomputed-exact-kl",
        "mask-0.8", "relax-high", "relax-low", "relax-both", "cppo-topk-tv", "pdm-uniform", "pdm-tail", "pdm-exact",
        "cppo-binary-kl", "cppo-topk-kl", "triage", "troll",
    }  # fmt: skip
    assert set(OTHERS) <= compared_rules


def test_a_claim_and_its_repetition_count_once():
    records = read_results(DOCS / "findings" / "results.jsonl.gz")
    found = findings.verdicts(CLAIMS, records)
    words = findings.distinct_words(found, CLAIMS)
    counts = Counter(words.values())
    assert counts == {
        findings.Word.REPRODUCED: 6,
        findings.Word.CONTRARY: 4,
        findings.Word.UNDECIDED: 15,
    }
    assert (words["topk"], words["anchor"]) == (findings.Word.REPRODUCED,) * 2
    undecided = f"{counts[findings.Word.UNDECIDED]} of {len(words)} claims stay undecided"
    assert undecided in " ".join((ROOT / "README.md").read_text().split())
    # Without the runs of the repetitions, the first verdicts stay.
    first = [claim for claim in CLAIMS if claim.repeats is None]
    assert words.keys() == findings.distinct_words(findings.verdicts(first, records), first).keys()


def test_a_repetition_names_the_pair_that_it_decides():
    texts = {claim.repeats: claim.text for claim in CLAIMS if claim.repeats is not None}
    assert "dppo-binary-tv against dppo-topk-tv in drift" in texts["topk"]
    assert "against dppo-binary-tv tv_threshold=0.1" in texts["thresholds"]


def test_further_seeds_repeat_a_primary_test_without_the_seeds_that_were_seen():
    claims = {claim.name: claim for claim in CLAIMS}
    repeated = [name for name in claims if name.endswith("-again")]
    assert len(repeated) == 5
    for name in repeated:
        first = claims[name.removesuffix("-again")]
        assert claims[name].tests == first.tests[:1]
        assert not set(claims[name].seeds) & set(first.seeds)
        assert len(set(claims[name].seeds)) == 35


def test_what_a_row_cannot_tell_stands_beside_it():
    cell = SETTINGS["stale-64"].cell(TV, 1)
    mismatch = MISMATCHES[cell.mismatch]
    steps = int(dict(c.split("=") for c in cell.changes)["run.steps"])
    assert mismatch.age > 0.75 * steps  # before the last quarter, whose reward is the outcome
    lines = findings.rules_csv({cell.key: make_record([0.5] * 8)}).splitlines()
    assert any("stale-64" in line and SETTINGS["stale-64"].caution in line for line in lines)
    for name, setting in SETTINGS.items():
        is_start = MISMATCHES[setting.mismatch].age > 0.75 * steps
        assert bool(setting.caution) == is_start, name


def test_a_key_holds_each_change_whole():
    cell = Setting("moe", "none", ("optimizer.lr=1.5e-3",), "").cell("ppo clip_low=0.1", 4)
    reading = readings.reading_of("ppo", ["algorithm.options.clip_low=0.1"])
    assert cell.key == f"moe/none/ppo-lr=1.5e-3-clip_low=0.1@{reading}/4"


def test_a_line_that_was_cut_off_is_a_run_to_make_again(tmp_path):
    path = tmp_path / "results.jsonl"
    line = json.dumps({"key": "a", "seconds": 1.0, "values": {"x": [1.0, None]}})
    path.write_text(line + "\n" + line[:-9])
    records = read_results(path)
    assert records.keys() == {"a"}
    assert records["a"]["x"][0] == 1.0
    assert math.isnan(records["a"]["x"][1])
    assert read_results(tmp_path / "none") == {}


# --- roundings


def test_roundings():
    assert bfloat16(torch.tensor([1 + 2**-7, 1 + 2**-9])).tolist() == [1 + 2**-7, 1.0]
    # The scale makes the largest value of a row 448. Then 28 is a number of E4M3, and 28.5 rounds to it.
    row = torch.tensor([[448.0, 28.0, 28.5, -448.0], [0.448, 0.028, 0.0, 0.0]])
    assert float8(row)[0].tolist() == [448.0, 28.0, 28.0, -448.0]
    assert torch.allclose(float8(row)[1], row[1])
    # Two groups of two with scales 1 and 10.
    assert int4(torch.tensor([[7.0, 1.4, -70.0, 16.0]]), group=2).tolist() == [
        [7.0, 1.0, -70.0, 20.0]
    ]


# --- tasks


def test_the_words_of_a_topic_are_rare_and_lead_to_each_other():
    topic, masses = tasks.topics(), tasks.next_masses()
    assert np.allclose(masses.sum(1), 1)
    at_start = [float(masses[-1, topic == p].sum()) for p in range(tasks.PROBLEMS)]
    assert min(at_start) > 0.015
    assert max(at_start) < 0.045
    assert masses[3, topic == 3].sum() == pytest.approx(0.5 + 0.5 * at_start[3])
    assert masses[-1, topic >= 0].max() < 0.0025  # the likeliest word of any topic


def test_a_long_response_earns_what_precedes_its_first_error():
    def word(digit, spelling=0):
        return tasks.FIRST_DIGIT + digit * tasks.SPELLINGS + spelling

    prompt = np.array([1, word(3), word(9)])
    right = np.array([word(2, 4), word(1), word(3, 1), word(4)])
    assert tasks.share_before_error(prompt, right) == 1.0
    wrong = right.copy()
    wrong[2] = word(4)
    assert tasks.share_before_error(prompt, wrong) == 0.5
    wrong[0] = 0  # no digit
    assert tasks.share_before_error(prompt, wrong) == 0.0
    masses = tasks.next_words(prompt[-2:])
    assert masses.sum() == pytest.approx(1)
    assert masses[word(2) : word(3)].sum() == pytest.approx(0.96 + 0.04 / 10)
    assert masses[word(2)] > 1.9 * masses[word(2, 1)]


def test_the_longer_task_has_hundreds_of_tokens(monkeypatch):
    batches = {}
    monkeypatch.setattr(
        tasks, "start_policy", lambda name, shape, batch, steps: batches.update({name: batch})
    )
    for name, length in (("long", 96), ("longer", 256)):
        task = tasks.TASKS[name]()
        ids, target = batches[name](np.random.default_rng(0))
        assert task.tokens == length
        assert f"rollout.max_response_tokens={length}" in task.settings
        assert ids.shape == (32, 3 + length - 1)
        assert target.shape == (32, length, 64)
        # The target of a word is the distribution that its two predecessors ask for.
        assert np.allclose(target[5, 40], tasks.next_words(ids[5, 41:43].numpy()))


# --- speed


def test_what_a_step_costs_leaves_start_and_end_out():
    costs = {speed.FEW: speed.Cost(5.0, 8.0), speed.MANY: speed.Cost(15.0, 20.0)}
    step = speed.of_step(costs.__getitem__)
    assert step == speed.Cost(10 / 40, 12 / 40)
    assert speed.table({speed.DEMO: speed.Cost(2.0, 3.0), "lab": step})[2:] == [
        "| demo's recipe | 2.000 | 1.0 | 3.00 | 1.0 |",
        "| lab | 0.250 | 8.0 | 0.30 | 10.0 |",
    ]


# --- the real loop's side


def test_each_mismatch_of_a_claim_is_in_the_real_loop_too():
    for cell in real_cells(CLAIMS):
        mismatch = MISMATCHES[cell.mismatch]
        settings = real_loop.settings_of(mismatch)
        assert f"rollout.max_staleness={mismatch.age}" in settings
        assert ("rollout.router_replay=true" in settings) == mismatch.replays
        is_changed = cell.mismatch in ("int4", "flips", "flips-r3", "few-flips", "few-flips-r3")
        variables = real_loop.engine_variables(cell.mismatch)
        assert bool(variables) == is_changed
        assert not is_changed or variables["ARENA_MISMATCH"] == cell.mismatch
        assert ("weight_sync.canary_every=0" in settings) == is_changed
    for name in ("bf16", "decode"):
        with pytest.raises(ValueError, match="the lab's alone"):
            real_loop.settings_of(MISMATCHES[name])


def test_an_engine_of_the_real_loop_is_quantised_by_the_package_itself():
    for name, replays in (("w8a8", "false"), ("w8a8-r3", "true")):
        settings = real_loop.settings_of(MISMATCHES[name])
        assert "engine.quantization=fp8" in settings
        assert f"rollout.router_replay={replays}" in settings
        assert "weight_sync.canary_every=0" not in settings
        assert not real_loop.engine_variables(name)


@pytest.fixture
def changed_model(monkeypatch):
    """The arena's change to SGLang's models, on a small model in their form. A token takes two of four experts."""
    monkeypatch.setenv("ARENA_MISMATCH", "int4")
    from examples.arena.engine_models import changed

    class Gate(torch.nn.Module):
        def forward(self, logits):
            return logits, None

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = Gate()

    class Model(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.zeros(1, 16))
            self.vector = torch.nn.Parameter(torch.full((2,), 1.4))
            self.mlp = Block()

        def load_weights(self, row):
            self.matrix.data.copy_(row)

        def forward(self, logits=None, error=None):
            if error is not None:
                raise error
            if logits is not None:
                return self.mlp.gate(logits)[0]
            return self.matrix.data.clone(), self.vector.data.clone()

    return type("ChangedModel", (changed.Changed, Model), {})


def test_an_engine_computes_with_rounded_matrices_and_keeps_what_it_was_sent(changed_model):
    model = changed_model(None)
    sent = torch.tensor([[7.0, 1.4, *[0.0] * 14]])
    for scale in (1.0, 2.0):  # two updates
        model.load_weights(sent * scale)
        matrix, vector = model()
        assert matrix[0, :2].tolist() == [7.0 * scale, 1.0 * scale]
        assert vector.tolist() == pytest.approx([1.4, 1.4])
        assert torch.equal(model.matrix.data, sent * scale)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(error=RuntimeError("out of memory"))
    assert torch.equal(model.matrix.data, sent * 2)


def test_an_engine_routes_a_share_of_tokens_to_the_next_best_expert(changed_model, monkeypatch):
    monkeypatch.setenv("ARENA_MISMATCH", "flips")
    model = changed_model(SimpleNamespace(num_experts_per_tok=2))
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0]).repeat(1000, 1)
    chosen = model(logits).topk(2).indices
    assert set(chosen[:, 0].tolist()) == {1}
    # Half of the tokens are flipped: 500, with a standard error of 16.
    flipped = chosen[:, 1] == 2
    assert 420 < int(flipped.sum()) < 580
    assert set(chosen[~flipped, 1].tolist()) == {3}
    # The weights of the chosen experts are a softmax over these two, as in the lab's copy.
    expected = torch.tensor([3.0, 1.0]).softmax(0)
    routed_logits = model(logits)
    rows = routed_logits[routed_logits[:, 3] == -math.inf]
    weights = rows.softmax(-1)[:, [1, 2]]
    assert torch.allclose(weights / weights.sum(-1, keepdim=True), expected.expand(len(rows), 2))


def test_the_real_loops_words_are_the_labs_ids(tmp_path):
    prompts = torch.tensor([[1, 4, 9], [1, 14, 24]])
    checkpoint = tmp_path / "long"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"vocab_size": 64, "eos_token_id": 0}))
    rows = prompts.numpy()
    task = tasks.Task(
        "long", checkpoint, prompts, 3, lambda p, ids: tasks.share_before_error(rows[p], ids)
    )
    real_loop.write_words(task, tmp_path / "long-real")
    tokenizer = load_tokenizer(tmp_path / "long-real")
    problems = load_problems(
        tmp_path / "long-real" / "problems.jsonl",
        tokenizer,
        max_prompt_tokens=8,
        form=PromptForm(apply_chat_template=False),
    ).problems
    assert [list(p.prompt_ids) for p in problems] == prompts.tolist()
    response = np.array([9, 15, 63])  # 0 + 1 = 1 (right), 1 + 1 = 2 (right), no digit
    text = tokenizer.decode(response)
    assert text == "w9 w15 w63"
    assert (
        real_loop.reward_long("w1 w4 w9", text) == task.reward(0, response) == pytest.approx(2 / 3)
    )
    # the topic of the prompt w5 is 3
    words = [int(np.flatnonzero(tasks.topics() == topic)[0]) for topic in (3, 4)]
    assert real_loop.reward_rare("w1 w5", " ".join(f"w{i}" for i in words)) == 0.5
    # Word 0 is a word like any other: it ends no response, and is part of the text.
    assert json.loads((tmp_path / "long-real" / "config.json").read_text())["eos_token_id"] is None
    assert tokenizer.eos_token_id is None
    assert tokenizer.decode([9, 0, 15], skip_special_tokens=True) == "w9 w0 w15"
    # A response without tokens earns nothing.
    assert real_loop.reward_rare("w1 w5", "") == real_loop.reward_long("w1 w4 w9", "") == 0.0


def test_the_real_loops_one_pair_stands_beside_the_labs_spread():
    test = comparison_of("kpop", "gspo")
    cells = {rule: SETTINGS["drift"].cell(rule, 1) for rule in ("kpop", "gspo")}
    assert findings.in_real_loop(test, {}) is None
    records = {
        real_loop.real_key(cells[rule]): make_record([x] * 8)
        for rule, x in (("kpop", 0.52), ("gspo", 0.5))
    }
    assert findings.in_real_loop(test, records) == pytest.approx(0.02)
