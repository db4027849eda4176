"""``megatron-dppo explain`` on a real run shows every token as the loss saw it, or refuses.

Two pipeline stages of two replicas each replay a batch whose mu is known, so no engine is needed. The
second of the two mini-batches is trained on with other weights than the first.
"""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.data.batch_file import load_batch, save_batch
from megatron_dppo.data.columns import LOSS_COLUMNS
from megatron_dppo.data.problems import PromptForm, load_problems, load_tokenizer
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.explain import __main__ as explain
from megatron_dppo.diagnostics.explain import replay
from megatron_dppo.diagnostics.report import write_report
from megatron_dppo.metrics.records import read_step_lines
from megatron_dppo.metrics.samples import read_samples
from tests.integration.runs import GROUP, PROMPTS, ROOT, TrainingRun, records_of, write_material
from tests.metric_tables import restored_metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

THRESHOLD, STEP = 0.001, 1
FIRST = PROMPTS // 2 * GROUP
"""Responses in the first mini-batch."""


def recorded_batch(folder: Path) -> list[Trajectory]:
    """Return random responses. Their mu is the model's pi plus noise, and some responses are truncated."""
    policy = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    problems = load_problems(
        folder / "train.jsonl",
        load_tokenizer(folder / "model"),
        max_prompt_tokens=32,
        form=PromptForm(),
    ).problems
    draw = np.random.default_rng(0)
    batch = []
    for problem in problems[:PROMPTS]:
        for sample in range(GROUP):
            response = draw.integers(3, 40, draw.integers(3, 12))
            exact = log_probs(policy, problem.prompt_ids, response)
            mu = np.minimum(exact + draw.normal(0, 0.4, len(exact)), -0.01).astype(np.float32)
            batch.append(
                Trajectory.of_response(
                    problem.prompt_ids,
                    response,
                    problem_id=problem.problem_id,
                    sample_index=sample,
                    finish_reason="length" if sample == 3 else "stop",
                    advantage=0.5 if sample % 2 else -0.5,
                    columns={
                        "rollout_log_probs": mu,
                        "weight_version": np.zeros(len(mu), np.int32),
                    },
                )
            )
    return batch


@torch.no_grad()
def log_probs(policy, prompt, response) -> np.ndarray:
    ids = torch.tensor([[*prompt, *response.tolist()]])
    logits = policy(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logits[range(len(response)), response.tolist()].numpy()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explained")
    config = write_material(folder)
    save_batch(folder / "recorded", STEP, recorded_batch(folder))
    overrides = (
        f"rollout.replay_from={folder}/recorded",
        "run.steps=1",
        "data.shuffle=false",
        "parallel.world_size=4",
        "parallel.tensor=1",
        "parallel.pipeline=2",
        "algorithm.truncated_responses=drop",
        f"algorithm.options.tv_threshold={THRESHOLD}",
        "checkpoint.export_hf=false",
    )
    with TrainingRun(config, *overrides) as process:
        process.finish()
    return folder / "run"


def rows_of(run, tmp_path) -> list[dict[str, str]]:
    out = tmp_path / "tokens.csv"
    assert explain.main([str(run), "--step", "1", "--limit", "0", "--csv", str(out)]) == 0
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_token_is_what_the_loss_saw(run, tmp_path, capsys):
    policy = AutoModelForCausalLM.from_pretrained(run.parent / "model", dtype=torch.float32).eval()
    batch = load_batch(run / "rollouts", STEP)
    distances = []
    for position, t in enumerate(batch):
        assert ("loss_trains" in t.columns) == (t.finish_reason == "stop")
        if t.finish_reason == "stop":
            start = log_probs(policy, t.prompt_ids.tolist(), t.response_ids)
            distances.append((position < FIRST, np.abs(t.column("loss_log_probs") - start).max()))
    assert max(d for first, d in distances if first) < 1e-4  # no update had happened yet
    assert min(d for first, d in distances if not first) > 1e-3  # one update had happened
    rows = rows_of(run, tmp_path)
    # The file has responses with blocked tokens first.
    rows.sort(key=lambda row: (int(row["response"]), int(row["position"])))
    expected = [t for t in batch if t.finish_reason == "stop"]
    assert len(rows) == sum(t.sampled for t in expected)
    for row, (t, i) in zip(rows, [(e, i) for e in expected for i in range(e.sampled)], strict=True):
        mu, pi = np.exp(
            [np.float64(t.column(n)[i]) for n in ("rollout_log_probs", "loss_log_probs")]
        )
        outward = t.advantage * (pi - mu) > 0
        assert row["trains"] == str(not (outward and abs(pi - mu) > THRESHOLD))
        assert float(row["binary_tv"]) == t.column("loss_divergence")[i]
        assert float(row["pi"]) == pytest.approx(pi, rel=1e-6)
        assert row["mini_batch"] == ("1" if int(row["response"]) < FIRST else "2")
    blocked = [r for r in rows if r["trains"] == "False"]
    record = records_of(run)[-1]
    assert len(blocked) == record["mask/masked"] > 10
    assert len(rows) == record["policy/tokens"]
    (line,) = read_step_lines(run / "masked_tokens.jsonl")
    for token in line["tokens"]:
        own = [float(r["advantage"]) for r in blocked if int(r["token_id"]) == token["id"]]
        assert token["raised"] == sum(a > 0 for a in own)
        assert token["lowered"] == sum(a < 0 for a in own)
    assert f"{len(rows)} tokens, {len(blocked)} blocked; agrees with" in capsys.readouterr().out


def test_the_samples_tell_how_many_tokens_were_masked(run):
    blocked = {
        (t.problem_id, t.sample_index): int((~t.column("loss_trains")).sum())
        for t in load_batch(run / "rollouts", STEP)
        if not t.truncated
    }
    samples = list(read_samples(run))
    assert {s.set for s in samples} == {"training"}  # nothing generates, so nothing is evaluated
    assert any(s.truncated for s in samples)  # no micro-batch trains on truncated samples
    for sample in samples:
        assert sample.masked == blocked.get((sample.problem, sample.sample), 0)
    assert max(s.masked for s in samples) == max(blocked.values()) > 1


def test_another_algorithm_on_the_same_numbers_is_told_as_such(run, tmp_path, capsys):
    command = [str(run), "--algorithm", "grpo-clip-higher", "--rows", "0"]
    assert explain.main(command) == 0
    out = capsys.readouterr().out
    assert "for dppo-binary-tv, which the run trained with" in out
    assert "only grpo-clip-higher blocks: 0 tokens" in out


def test_another_rule_on_the_whole_run_token_by_token(run, tmp_path, capsys):
    """Two thresholds of one divergence: if only one threshold blocks a token, the token's divergence is between
    them."""
    out, page = tmp_path / "blocked.json", tmp_path / "blocked.html"
    wider = ["--option", f"tv_threshold={1.5 * THRESHOLD}"]
    assert replay.main([str(run), *wider, "--json", str(out), "--html", str(page)]) == 0
    (step,) = json.loads(out.read_text())["steps"]
    record = records_of(run)[-1]
    assert (step["step"], step["trained"]) == (STEP, record["policy/tokens"])
    tokens = step["tokens"]
    assert sum(t["run_blocks"] for t in tokens) == record["mask/masked"]
    assert not any(t["other_blocks"] and not t["run_blocks"] for t in tokens)
    alone = [abs(t["pi"] - t["mu"]) for t in tokens if not t["other_blocks"]]
    both = [abs(t["pi"] - t["mu"]) for t in tokens if t["other_blocks"]]
    assert THRESHOLD < min(alone) <= max(alone) <= 1.5 * THRESHOLD + 1e-7 < min(both) + 2e-7
    output = capsys.readouterr().out
    assert str(len(alone)) in output
    assert page.read_text().startswith("<!DOCTYPE html>")


FACTOR = 1.3


@pytest.fixture(scope="module")
def own_rule_run(tmp_path_factory):
    """Train with an algorithm and a metric of a module that is outside of the package."""
    folder = tmp_path_factory.mktemp("own_rule")
    shutil.copy(ROOT / "examples" / "plugin" / "dppo_team_parts" / "factor.py", folder / "own.py")
    config = write_material(folder)
    save_batch(folder / "recorded", STEP, recorded_batch(folder))
    overrides = (
        f"rollout.replay_from={folder}/recorded",
        "run.steps=1",
        "data.shuffle=false",
        "parallel.world_size=1",
        "parallel.tensor=1",
        "algorithm.name=own:FACTOR",
        f"algorithm.options.factor={FACTOR}",
        "tracking.metrics=[own:HALVED]",
        "checkpoint.export_hf=false",
    )
    with TrainingRun(config, *overrides, variables={"PYTHONPATH": str(folder)}) as process:
        process.finish()
    return folder / "run"


def test_a_rule_and_a_metric_of_the_users_own_module_train(own_rule_run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(own_rule_run.parent)
    with restored_metrics():
        rows = rows_of(own_rule_run, tmp_path)
        _check_own_rule(own_rule_run, rows)


def _check_own_rule(own_rule_run, rows):
    """Compare the run's rows and records with the user's own rule and metric."""
    halved = 0
    for row in rows:
        ratio, advantage = float(row["ratio"]), float(row["advantage"])
        is_far = ratio > FACTOR if advantage > 0 else ratio < 1 / FACTOR
        assert row["trains"] == str(not is_far)
        assert row["threshold"] == (f"r > {FACTOR}" if advantage > 0 else f"r < 1/{FACTOR}")
        halved += ratio < 0.5
    record = records_of(own_rule_run)[-1]
    assert record["mask/masked"] == sum(row["trains"] == "False" for row in rows) > 10
    assert halved > 0
    assert record["policy/halved"] == pytest.approx(halved / len(rows))
    assert write_report(own_rule_run).is_file()
    command = [str(own_rule_run), "--algorithm", "own:FACTOR", "--option", "factor=2"]
    assert replay.main(command) == 0


def test_a_run_without_seals_is_not_derived(run, capsys):
    assert replay.main([str(run), "--derive"]) == 2
    assert "the batch of step 1 has no seal" in capsys.readouterr().err
    assert replay.main([str(run), "--derive", "--step", "3"]) == 2
    assert "no batch of step 2, expected one of every step from 1 to 3" in capsys.readouterr().err


def refusal_of(run, capsys) -> str:
    assert explain.main([str(run), "--step", "1"]) == 2
    out, error = capsys.readouterr()
    assert not out
    return error


@pytest.fixture
def run_copy(run, tmp_path):
    for name in ("config.yaml", "metrics.jsonl", "masked_tokens.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    save_batch(tmp_path / "rollouts", STEP, load_batch(run / "rollouts", STEP))
    return tmp_path


def change_batch(run, change) -> None:
    save_batch(run / "rollouts", STEP, [change(t) for t in load_batch(run / "rollouts", STEP)])


def test_a_batch_without_the_steps_own_numbers_is_refused(run_copy, capsys):
    change_batch(run_copy, lambda t: t.without(*LOSS_COLUMNS))
    assert "no mask of the step that trained on it" in refusal_of(run_copy, capsys)


def test_a_mask_that_does_not_follow_from_its_divergence_is_refused(run_copy, capsys):
    def invert_mask(t):
        if "loss_trains" not in t.columns or t.problem_id:
            return t
        return t.with_columns(loss_trains=~t.column("loss_trains"))

    change_batch(run_copy, invert_mask)
    assert "does not follow from their saved divergence" in refusal_of(run_copy, capsys)


def test_other_log_probs_than_the_recorded_ones_are_refused(run_copy, capsys):
    def shift_log_probs(t):
        if "loss_trains" not in t.columns:
            return t
        return t.with_columns(loss_log_probs=t.column("loss_log_probs") + np.float32(1e-3))

    change_batch(run_copy, shift_log_probs)
    assert "of the saved tokens is" in refusal_of(run_copy, capsys)


def test_records_of_another_step_are_refused(run_copy, capsys):
    lines = (run_copy / "masked_tokens.jsonl").read_text()
    (run_copy / "masked_tokens.jsonl").write_text(lines.replace('"raised": 1', '"raised": 0', 1))
    assert "masked_tokens.jsonl says" in refusal_of(run_copy, capsys)
    (run_copy / "metrics.jsonl").write_text("")
    assert "no record of step 1" in refusal_of(run_copy, capsys)
