"""``megatron-dppo explain`` on a tiny model: rows worked by hand, TopK(mu) and exact divergences, reports, refusals."""

import csv
import io
import math
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.table import PRESETS
from megatron_dppo.config.loading import load_config, resolved_yaml
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.batch_file import save_batch
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.explain import __main__ as explain
from megatron_dppo.diagnostics.explain import page
from megatron_dppo.diagnostics.explain.explanation import explain_response, threshold_text
from megatron_dppo.diagnostics.explain.replay import (
    BlockedToken,
    ComparedStep,
    derivation_overrides,
    sign_tables,
    step_table,
    trained_steps,
)
from tests.messages import mentioning
from tests.patience import run_patiently
from tests.small_config import small_config
from tests.tiny_models import save_tiny_model
from tests.unit.config_files import minimal

TEMPERATURE = 0.5
PROMPT, RESPONSES = [20, 21, 22], [([30, 31, 32, 33], 0.5), ([30, 34, 35, 36], -0.5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("explain") / "hf", "qwen2", hidden=16, layers=1)


@pytest.fixture(scope="module")
def log_pi(model):
    """log pi [R, V] of each response, computed by transformers."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    log_probs = []
    for ids, _ in RESPONSES:
        with torch.no_grad():
            logits = policy(torch.tensor([PROMPT + ids])).logits[0, 2:-1]
        log_probs.append((logits.double() / TEMPERATURE).log_softmax(-1))
    return log_probs


def answer(ids, advantage, log_probs, number=0, reward=0.0, reason="stop", **columns):
    return Trajectory.of_response(
        PROMPT, ids, problem_id=7, sample_index=number, finish_reason=reason,
        reward=reward, advantage=advantage,
        columns={"rollout_log_probs": np.asarray(log_probs, np.float32), **columns},
    )  # fmt: skip


def write_run(folder, model, rollouts, **algorithm):
    sizes = {"prompts_per_step": 1, "group_size": 2, "max_response_tokens": 8}
    config = small_config(
        folder,
        model,
        rollout={**sizes, "temperature": TEMPERATURE},
        training={"prompts_per_mini_batch": 1, "micro_batch_tokens": 64},
        algorithm=algorithm,
    )
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(resolved_yaml(config))
    save_batch(folder / "rollouts", 3, rollouts)
    return folder


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def explain_rows(run, model, tmp_path, *arguments):
    out = tmp_path / "tokens.csv"
    common = [str(run), "--policy", str(model), "--csv", str(out)]
    assert explain.main([*common, *arguments]) == 0
    return rows_of(out)


class FarFromMu:
    """Responses whose pi / mu is known at each token, because mu is set to pi divided by the ratio."""

    ratios = ([1.0, 1.5, 0.5, 1.2], [1.0, 0.5, 1.5, 0.9])

    @classmethod
    def rollouts(cls, log_pi):
        responses = []
        for n, ((ids, advantage), ratios, log_p) in enumerate(
            zip(RESPONSES, cls.ratios, log_pi, strict=True)
        ):
            own = log_p[range(len(ids)), ids] - torch.tensor(ratios).double().log()
            responses.append(answer(ids, advantage, own.tolist(), n, reward=float(advantage > 0)))
        return responses


def test_rows_by_hand(model, log_pi, tmp_path, capsys):
    """Clip-Higher holds r in [0.8, 1.28]. Token 1 of both responses is outside, and its update would lead further out.
    The updates of 0.5 at A > 0 and of 1.5 at A < 0 lead back to mu.
    """
    run = write_run(tmp_path / "run", model, FarFromMu.rollouts(log_pi))
    rows = explain_rows(run, model, tmp_path, "--algorithm", "grpo", "--option", "clip_high=0.1")
    assert [int(r["token_id"]) for r in rows] == [i for ids, _ in RESPONSES for i in ids]
    for row, ratio in zip(rows, FarFromMu.ratios[0] + FarFromMu.ratios[1], strict=True):
        assert float(row["ratio"]) == pytest.approx(ratio, rel=1e-4)
        mu, pi = float(row["mu"]), float(row["pi"])
        assert float(row["binary_tv"]) == pytest.approx(abs(pi - mu), rel=1e-4, abs=1e-8)
        assert row["topk_tv"] == row["exact_tv"] == row["recomputed"] == ""
    own = log_pi[0][range(4), RESPONSES[0][0]].exp().tolist()
    assert [float(r["pi"]) for r in rows[:4]] == pytest.approx(own, rel=1e-4)
    trains = [[r["trains"], r["ppo_trains"]] for r in rows]
    # clip_high 0.1 also blocks 1.2, which Clip-Higher's 0.28 lets train.
    assert trains == [
        ["True", "True"], ["False", "False"], ["True", "True"], ["False", "True"],
        ["True", "True"], ["False", "False"], ["True", "True"], ["True", "True"],
    ]  # fmt: skip
    assert {r["threshold"] for r in rows} == {"r > 1.1", "r < 0.8"}
    out = capsys.readouterr().out
    assert "Most often blocked by grpo: 3 tokens, 3 different" in out
    assert "only grpo blocks: 1 tokens" in out
    assert "only Clip-Higher would block: 0 tokens" in out


def test_dppo_lets_rare_tokens_train_that_the_clip_blocks(model, log_pi, tmp_path):
    run = write_run(
        tmp_path / "run", model, FarFromMu.rollouts(log_pi), options={"tv_threshold": 0.0}
    )
    strict = explain_rows(run, model, tmp_path)
    # With a threshold of 0, every token whose update leads away from mu is blocked: r > 1 at A > 0, r < 1 at A < 0.
    assert [r["trains"] for r in strict][1:4] == ["False", "True", "False"]
    assert [r["trains"] for r in strict][5:] == ["False", "True", "False"]
    loose = explain_rows(run, model, tmp_path, "--option", "tv_threshold=1")
    assert {r["trains"] for r in loose} == {"True"}
    assert [r["ppo_trains"] for r in loose] == [r["ppo_trains"] for r in strict]
    assert loose[1]["ppo_trains"] == loose[5]["ppo_trains"] == "False"


def test_topk_from_the_batch_and_exact_from_the_rollout_policy(model, log_pi, tmp_path):
    """mu is another policy. Then Binary <= Top-K <= exact, and K of the whole vocabulary is exact."""
    other = save_tiny_model(tmp_path / "mu", "qwen2", hidden=16, layers=1, seed=5)
    policy = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    sampled, exact = [], []
    for n, (ids, advantage) in enumerate(RESPONSES):
        with torch.no_grad():
            logits = policy(torch.tensor([PROMPT + ids])).logits[0, 2:-1] / TEMPERATURE
        log_mu = logits.log_softmax(-1)
        top = log_mu.topk(4)
        arrays = {"topk_ids": top.indices.int().numpy(), "topk_log_probs": top.values.numpy()}
        sampled.append(answer(ids, advantage, log_mu[range(4), ids].tolist(), n, **arrays))
        exact += (0.5 * (log_mu.double().exp() - log_pi[n].exp()).abs().sum(-1)).tolist()
    run = write_run(tmp_path / "run", model, sampled, name="dppo-topk-tv", options={"topk": 4})
    rows = explain_rows(run, model, tmp_path)
    assert all(r["exact_tv"] == "" for r in rows)
    known = explain_rows(run, model, tmp_path, "--rollout-policy", str(other))
    full = explain_rows(
        run, model, tmp_path, "--rollout-policy", str(other), "--algorithm", "recomputed-exact-kl"
    )
    for row, with_mu, all_of_it, expected in zip(rows, known, full, exact, strict=True):
        assert row["topk_tv"] == with_mu["topk_tv"]
        binary, topk = float(row["binary_tv"]), float(row["topk_tv"])
        assert float(with_mu["exact_tv"]) == pytest.approx(expected, abs=1e-6)
        assert binary - 1e-7 <= topk <= expected + 1e-6
        assert float(all_of_it["topk_tv"]) == pytest.approx(expected, abs=1e-6)
        assert float(with_mu["recomputed"]) == pytest.approx(float(row["mu"]), rel=1e-5)


@pytest.mark.parametrize("name", ["m2po", "m2po-areal"])
def test_what_a_whole_step_decides_is_not_explained_of_a_response(name, model, log_pi):
    sampled = answer(RESPONSES[0][0], 0.5, [-1.0] * 4)
    logits = torch.zeros(sampled.length, log_pi[0].shape[1])
    with pytest.raises(ValueError, match=mentioning(name)):
        explain_response(
            0, 1, sampled, build_algorithm(name), logits, None, temperature=1.0, texts=None
        )


@pytest.mark.parametrize("name", [n for n, row in PRESETS.items() if row.step_bound is None])
def test_every_preset_trains_everything_on_policy(name, model, log_pi):
    """pi = mu = pi': nothing is blocked, every weight is 1 and every divergence 0."""
    from megatron_dppo.data.problems import load_tokenizer
    from megatron_dppo.diagnostics.explain.explanation import Policy, TokenTexts

    ids, advantage = RESPONSES[0]
    arrays = {}
    if build_algorithm(name).needs_full_distribution:
        top = log_pi[0].float().topk(log_pi[0].shape[1])
        arrays = {"topk_ids": top.indices.int().numpy(), "topk_log_probs": top.values.numpy()}
    sampled = answer(ids, advantage, log_pi[0][range(4), ids].tolist(), **arrays)
    logits = Policy(model).logits(sampled)
    texts = TokenTexts(load_tokenizer(model))
    response = explain_response(
        0, 1, sampled, build_algorithm(name), logits, logits.clone(),
        temperature=TEMPERATURE, texts=texts,
    )  # fmt: skip
    for token in response.tokens:
        assert token.trains
        assert token.ppo_trains
        assert token.weight == pytest.approx(1, abs=1e-5)
        assert max(token.binary_tv, token.topk_tv, token.exact_tv) < 1e-5
    assert response.metrics.values()["policy/tokens"] == 4


def test_thresholds_in_words():
    assert threshold_text(build_algorithm("dppo-binary-tv"), True) == "TV > 0.15"
    both = build_algorithm("dppo-binary-kl", {"kl_threshold_negative": 0.02})
    assert threshold_text(both, True) == "KL > 0.05"
    assert threshold_text(both, False) == "KL > 0.02"
    assert threshold_text(build_algorithm("minirl"), True) == "r > 1.28 (against pi')"
    assert threshold_text(build_algorithm("mask-0.5"), False) == "drop >= 0.5"
    assert threshold_text(build_algorithm("mask-0.5"), True) == ""
    assert threshold_text(build_algorithm("drpo"), True) == ""


class Spans(HTMLParser):
    """Collects class, title and text of every token on the page."""

    def __init__(self):
        super().__init__()
        self.tokens, self._inside = [], False

    def handle_starttag(self, tag, attrs):
        assert tag not in {"script", "link", "img", "iframe"}
        attributes = dict(attrs)
        self._inside = tag == "span" and "title" in attributes
        if self._inside:
            self.tokens.append([attributes["class"], attributes["title"], ""])

    def handle_data(self, data):
        if self._inside:
            self.tokens[-1][2] += data

    def handle_endtag(self, tag):
        self._inside = False


class Hostile:
    """Texts that break a page that does not escape them."""

    texts = ("</span><script>alert(1)</script>", '" onmouseover="x', "a\nb", "\x1b[31m")

    def __getitem__(self, token_id):
        return self.texts[token_id - 30]

    def joined(self, token_ids):
        return "<b>prompt</b>"


def test_the_page_escapes_everything_and_loads_nothing(model, log_pi):
    from megatron_dppo.diagnostics.explain.explanation import Policy

    sampled = FarFromMu.rollouts(log_pi)[0]
    algorithm = build_algorithm("dppo-binary-tv", {"tv_threshold": 0.0})
    response = explain_response(
        0, 1, sampled, algorithm, Policy(model).logits(sampled), None,
        temperature=TEMPERATURE, texts=cast(Any, Hostile()),
    )  # fmt: skip
    tables = [
        *page.summary_tables("dppo-binary-tv", [response]),
        page.notable_table("dppo-binary-tv", response.tokens, 9),
    ]
    html = page.render("a <title>", ["<fact>"], tables, "dppo-binary-tv", [response])
    spans = Spans()
    spans.feed(html)
    classes, titles, texts = zip(*spans.tokens, strict=True)
    assert classes == ("train", "both", "train", "own")
    assert texts == (Hostile.texts[0], Hostile.texts[1], "a\u23ce\nb", "\\x1b[31m")
    assert "blocked where TV > 0" in titles[1]
    assert "r 1.5" in titles[1]
    assert "<b>" not in html.replace('<b class="up">', "")
    assert "http:" not in html
    assert "https:" not in html
    assert "&lt;b&gt;prompt&lt;/b&gt;" in html
    counts = {row[0]: row[1:4] for row in tables[0].rows}
    assert counts["blocked by dppo-binary-tv alone"] == ("1", "0", "1")
    assert "\x1b" not in str(tables)


def test_tokens_without_advantage_count_for_neither_sign(model, log_pi):
    from megatron_dppo.diagnostics.explain.explanation import Policy

    sampled = replace(FarFromMu.rollouts(log_pi)[0], advantage=0.0)
    algorithm = build_algorithm("dppo-binary-tv", {"tv_threshold": 0.0})
    response = explain_response(
        0, 1, sampled, algorithm, Policy(model).logits(sampled), None,
        temperature=TEMPERATURE, texts=cast(Any, Hostile()),
    )  # fmt: skip
    rows = page.counts_table("dppo-binary-tv", response.tokens).rows
    assert {row[1:3] for row in rows} == {("0", "0")}
    assert sum(int(row[3]) for row in rows) == len(response.tokens)


def test_responses_without_a_gradient_are_left_out(model, log_pi, tmp_path, capsys):
    first, second = FarFromMu.rollouts(log_pi)
    even = answer([30], 0.0, [-1.0], 2)
    cut = answer([31], 0.5, [-1.0], 3, reason="length")
    run = write_run(tmp_path / "run", model, [even, cut, first, second], truncated_responses="drop")
    rows = explain_rows(run, model, tmp_path, "--limit", "1")
    assert {r["response"] for r in rows} == {"2"}
    expected = "1 of 4 responses; left out: 1 dropped, 1 without advantage, 1 beyond --limit"
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "2"], "no batch of step 2; saved are 3 to 3"),
        (["--algorithm", "dppo"], "unknown algorithm 'dppo'"),
        (["--option", "tv_threshold"], "expected KEY=VALUE"),
        (["--option", "clip_low=0.1"], "has no option 'clip_low'"),
        (["--algorithm", "minirl"], "give these weights with --rollout-policy"),
        (["--algorithm", "dppo-topk-kl"], "the batch has K = 0"),
        (["--algorithm", "dppo-exact-tv"], "needs TopK(mu) with K >= "),
        (["--algorithm", "recomputed-exact-tv"], "give these weights with --rollout-policy"),
        (["--policy", "nowhere"], "nowhere: expected a Hugging Face folder"),
    ],
)
def test_unusable_input_is_one_message(arguments, message, model, log_pi, tmp_path, capsys):
    run = write_run(tmp_path / "run", model, FarFromMu.rollouts(log_pi))
    assert explain.main([str(run), "--policy", str(model), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_missing_runs_and_other_models(model, log_pi, tmp_path, capsys):
    assert explain.main([str(tmp_path / "none")]) == 2
    assert "config.yaml" in capsys.readouterr().err
    run = write_run(tmp_path / "run", model, [answer([600], 1.0, [math.log(0.5)])])
    assert explain.main([str(run), "--policy", str(model)]) == 2
    assert "token id 600, but this model's vocabulary has 512" in capsys.readouterr().err
    save_batch(run / "rollouts", 3, [answer([30], 0.0, np.log([0.5]).tolist())])
    assert explain.main([str(run), "--policy", str(model)]) == 2
    assert "nothing to explain" in capsys.readouterr().err


def test_two_rules_are_compared_by_sign_and_tokens_without_advantage_are_neither():
    def token(advantage: float, *, by_run: bool) -> BlockedToken:
        return BlockedToken(0, 0, 5, advantage, 0.25, 0.5, by_run, not by_run)

    tokens = [
        token(a, by_run=by_run)
        for a, by_run in ((1.0, True), (-1.0, False), (0.0, False), (0.0, False))
    ]
    only_run, only_other = sign_tables([ComparedStep(1, 9, tokens)])
    assert only_run.rows == [("A > 0", "1", "0.2500", "0.5000")]
    assert only_other.rows == [
        ("A < 0", "1", "0.2500", "0.5000"),
        ("A = 0", "2", "0.2500", "0.5000"),
    ]


def test_a_batch_that_no_step_was_trained_on_is_left_out(tmp_path):
    """Either the run ended before its step, or an earlier attempt saved the batch."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    assert trained_steps(tmp_path, [1, 2, 3]) == [1, 2]
    with pytest.raises(ValueError, match="the run trained on none of the batches in it"):
        trained_steps(tmp_path, [3])


def test_two_rules_of_one_name_have_columns_of_their_own():
    steps = [ComparedStep(1, 4, [])]
    assert step_table(steps, "grpo", "dppo-binary-tv").columns[2:4] == ("grpo", "dppo-binary-tv")
    assert step_table(steps, "grpo", "grpo").columns[2:4] == ("grpo (run)", "grpo (replayed)")


def test_a_derivation_uploads_traces_and_reports_nothing(tmp_path):
    (tmp_path / "problems.jsonl").write_text("{}\n")
    settings = [
        f"run.directory={tmp_path}", "run.steps=9", "checkpoint.upload=me/model", "profile.steps=[7]",
        "tracking.trackers=[tensorboard]", "model.hf_checkpoint=m", "data.train=problems.jsonl",
        "rollout.prompts_per_step=4", "rollout.group_size=2", "rollout.max_response_tokens=4", "optimizer.lr=1e-5",
        "training.prompts_per_mini_batch=4", "training.micro_batch_tokens=64",
    ]  # fmt: skip
    (tmp_path / "config.yaml").write_text("{}\n")
    config = load_config(
        tmp_path / "config.yaml", [*settings, *derivation_overrides([], tmp_path, 3)]
    )
    assert (config.checkpoint.upload, config.profile.steps, config.tracking.trackers) == (
        None,
        [],
        [],
    )
    assert (config.run.steps, config.checkpoint.export_hf) == (3, False)


WITHOUT_TORCH = """
import sys
from megatron_dppo.__main__ import main
code = main(sys.argv[1:])
print(code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "words", [("explain",), ("doctor",), ("doctor", "--parts"), ("replay",), ("replay", "--derive")]
)
def test_a_run_without_batches_is_refused_before_torch_is_imported(words, tmp_path):
    command, *options = words
    config = TrainConfig.model_validate(minimal(tmp_path))
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    result = run_patiently(
        [sys.executable, "-c", WITHOUT_TORCH, command, str(tmp_path), *options], 120, check=True
    )
    assert result.stdout == "2 False\n"
    assert "rollout.save=true" in result.stderr


def test_a_table_says_what_its_columns_mean_and_that_it_has_no_row():
    tokens = [
        BlockedToken(0, i, 5, 1.0, 0.5, 0.25, run_blocks=True, other_blocks=False) for i in (1, 2)
    ]
    for table in (step_table([ComparedStep(1, 9, tokens)], "ppo", "grpo"), *sign_tables([])):
        console_output = io.StringIO()
        table.show(Console(file=console_output, width=200))
        text = " ".join(console_output.getvalue().split())
        html = page.tables_page("title", [], [table])
        if table.rows:
            assert table.note
            assert table.note in text
            assert table.note in unescape(html)
        else:
            assert f"{table.title}: (none)" in text
            assert f"{table.title}: (none)" in unescape(html)
