"""``make arena``: claims and their tests, tasks, what is kept of runs, and its page."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from examples.arena import findings, real_loop, tasks
from examples.arena.claims import (
    CLAIMS,
    OTHERS,
    SEEDS,
    SETTINGS,
    Claim,
    Comparison,
    Difference,
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
from examples.arena.lab import PROB_ERROR, RATIO_ERROR
from examples.arena.run import cells_of, others, read_results
from examples.arena.sampler import MISMATCHES, int4
from megatron_dppo.algorithms.table import PRESETS, algorithm_facts
from megatron_dppo.data.problems import PromptForm, load_problems, load_tokenizer
from megatron_dppo.doctor.reference import bfloat16, float8
from megatron_dppo.metrics import table as names


def a_record(rewards, entropies=None):
    return {
        names.REWARD: rewards,
        names.ENTROPY: entropies or [1.0] * len(rewards),
        names.GAP_ON_POLICY: [0.001, *[math.nan] * (len(rewards) - 1)],
        names.GAP_STALE: [math.nan, *[0.005] * (len(rewards) - 1)],
        RATIO_ERROR: [0.3, 0.1, 0.05, math.nan, 0.01],
        PROB_ERROR: [0.001, 0.01, 0.02, math.nan, 0.04],
    }


# --- outcomes and their statistics, by hand


def test_outcomes():
    record = a_record(
        [0.0] * 4 + [1.0] * 10 + [0.25, 0.75, 0.5, 0.5, 0.5, 0.5], [2.0] * 19 + [math.nan]
    )
    assert (
        final(record) == 0.55
    )  # (0.25 + 0.75 + 3 * 0.5) / 5: the last 5 of 20 are 0.75, and 4 times 0.5
    assert area(record) == 0.65
    assert loss_of_best(record) == pytest.approx(1.0 - final(record))
    assert entropy(record) == 2.0
    assert rare_ratio_error(record) == pytest.approx(0.2)
    assert likely_prob_error(record) == pytest.approx(0.04)


def test_an_interval_is_students():
    d = Difference.of([1.0, 2.0, 3.0])
    # 4.302653 * 1 / sqrt(3)
    assert (d.mean, d.low, d.high) == pytest.approx((2.0, 2 - 2.484138, 2 + 2.484138))
    with pytest.raises(ValueError, match="1 seeds, expected two or more"):
        Difference.of([1.0])


@pytest.mark.parametrize(
    ("low", "high", "margin", "expected"),
    [
        (0.01, 0.2, None, Finding.AS_CLAIMED),
        (0.0, 0.2, None, Finding.OPEN),
        (-0.2, -0.01, None, Finding.CONTRARY),
        (-0.2, 0.0, None, Finding.OPEN),
        (-0.04, 0.04, 0.05, Finding.AS_CLAIMED),
        (-0.05, 0.04, 0.05, Finding.OPEN),
        (0.051, 0.2, 0.05, Finding.CONTRARY),
        (-0.2, -0.051, 0.05, Finding.CONTRARY),
        (0.05, 0.2, 0.05, Finding.OPEN),
    ],
)
def test_a_finding_needs_the_whole_interval(low, high, margin, expected):
    test = Comparison(Side("drift", "pg-is"), Side("drift", "ppo"), margin)
    assert test.finding(Difference((low + high) / 2, low, high)) is expected


def records_of(rewards_by_rule, seeds=(1, 2, 3)):
    return {
        Side("drift", rule).key(seed): a_record([value + 0.01 * seed] * 8)
        for rule, value in rewards_by_rule.items()
        for seed in seeds
    }


def test_a_claim_is_reproduced_where_all_of_its_tests_are_as_claimed():
    def above(first, second):
        return Comparison(Side("drift", first), Side("drift", second))

    records = records_of({"ppo": 0.5, "gspo": 0.3, "kpop": 0.6})
    seeds = (1, 2, 3)
    # Pairs of one seed: its 0.01 * seed is in both, and their differences have no spread.
    assert above("ppo", "gspo").difference(records, seeds) == Difference.of([0.2] * 3)
    verdicts = {
        "reproduced": (above("ppo", "gspo"), above("kpop", "ppo")),
        "not reproduced": (above("ppo", "gspo"), above("ppo", "kpop")),
        "not run yet": (above("ppo", "gspo"), above("ppo", "sapo")),
    }
    for word, tests in verdicts.items():
        assert findings.verdict(Claim("c", "s", "t", tests), records, seeds) == word
    assert findings.verdict(Claim("c", "s", "t", unreachable="x"), {}, seeds) == "out of reach here"


def test_the_page_has_verdicts_figures_and_every_rule(tmp_path):
    claim = Claim("c", "s", "t", (Comparison(Side("drift", "kpop"), Side("drift", "gspo")),))
    records = records_of({"kpop": 0.5, "gspo": 0.3})
    page = findings.write_findings([claim], records, (1, 2, 3), tmp_path).read_text()
    assert "| [c](#c) | s | t | **reproduced** | 1 as claimed |  |" in page
    assert (
        "| final, kpop (drift) less final, gspo (drift) | +0.200 | +0.200 to +0.200 | above 0 | as claimed |"
        in page
    )
    assert page.index("| drift | kpop | 0.520 | 0.510 to 0.530 |") < page.index(
        "| drift | gspo | 0.320 |"
    )
    assert "| drift | moe | stale-8 | 4.5e-03 |" in page  # (0.001 + 7 * 0.005) / 8
    assert "| exact | rare | none | not run |" in page
    assert imread(tmp_path / "findings" / "c.png").std() > 0.01


# --- what is registered


def test_claims_are_of_rules_settings_and_mismatches_that_there_are():
    assert len(SEEDS) >= 10
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    assert all(bool(claim.tests) == (claim.unreachable is None) for claim in CLAIMS)
    cells = [*cells_of(CLAIMS, SEEDS), *others(SEEDS)]
    assert len({cell.key for cell in cells}) == len(cells)
    for cell in cells:
        options = [c.removeprefix("algorithm.options.").split("=") for c in cell.changes]
        known = {name: float(value) for name, value in options if "." not in name}
        algorithm_facts(cell.algorithm, known)
        assert cell.task in tasks.TASKS
        assert cell.mismatch in MISMATCHES
    in_every = {
        c.algorithm for c in cells if (c.task, c.mismatch) == ("moe", SETTINGS["drift"].mismatch)
    }
    missing = PRESETS.keys() - in_every
    # Other names, other estimates of the same, and what is compared elsewhere.
    assert missing == {
        "cispo", "ppo", "grpo", "dppo-topk-kl", "dppo-exact-kl", "recomputed-exact-tv", "recomputed-exact-kl",
        "mask-0.8", "relax-high", "relax-low", "relax-both", "cppo-topk-tv", "pdm-uniform", "pdm-exact",
    }  # fmt: skip
    assert set(OTHERS) <= in_every


def test_a_key_holds_each_change_whole():
    cell = Setting("moe", "none", ("optimizer.lr=1.5e-3",), "").cell("ppo clip_low=0.1", 4)
    assert cell.key == "moe/none/ppo-lr=1.5e-3-clip_low=0.1/4"


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
    # The row's largest is 448 of its units; 1 / 16 of that is a number of E4M3, 1 / 16 + 1 / 448 rounds to it.
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


# --- the real loop's side


def test_the_real_loops_words_are_the_labs_ids(tmp_path):
    prompts = torch.tensor([[1, 4, 9], [1, 14, 24]])
    checkpoint = tmp_path / "long"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"vocab_size": 64}))
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


def test_the_real_loop_is_held_against_the_labs_mean():
    test = Comparison(Side("drift", "a"), Side("drift", "b"))
    alike = Comparison(Side("drift", "a"), Side("drift", "b"), margin=0.05)
    claim = Claim("c", "s", "t", (test, alike))
    rewards = {("a", 1): 0.6, ("a", 2): 0.7, ("b", 1): 0.5, ("b", 2): 0.5}
    cells = {rule: SETTINGS["drift"].cell(rule, 1) for rule in "ab"}
    records = {
        SETTINGS["drift"].cell(rule, seed).key: a_record([x] * 8)
        for (rule, seed), x in rewards.items()
    }
    assert findings.confirmed(claim, records, (1, 2)) == ""
    records |= {
        real_loop.real_key(cells[rule]): a_record([x] * 8) for rule, x in (("a", 0.52), ("b", 0.5))
    }
    # above 0 in both; within 0.05 of 0 in the real loop alone, as the lab's mean is 0.15
    assert findings.in_real_loop(test, records) == pytest.approx(0.02)
    assert findings.confirmed(claim, records, (1, 2)) == "1 of 2"
