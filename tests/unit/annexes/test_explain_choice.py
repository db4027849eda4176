"""``megatron-dppo explain`` chooses the step, the responses and the rows that show the mask's work."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.explain.__main__ import chosen_step, enter_start_folder
from megatron_dppo.diagnostics.explain.explanation import Token
from megatron_dppo.diagnostics.explain.page import notable_table
from megatron_dppo.diagnostics.explain.seen_step import SeenStep
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.metrics.records import RECORDS_FILE, ROLLOUTS_FOLDER


def response(number: int, ratios: list[float]) -> Trajectory:
    """Return a response whose tokens have mu = 0.1 and A > 0, as ``dppo-binary-tv`` saw it."""
    mu = np.full(len(ratios), 0.1)
    pi = mu * ratios
    return Trajectory.of_response(
        [1, 2],
        list(range(5, 5 + len(ratios))),
        problem_id=0,
        sample_index=number,
        finish_reason="stop",
        advantage=1.0,
        columns={
            "rollout_log_probs": np.log(mu).astype(np.float32),
            "loss_log_probs": np.log(pi).astype(np.float32),
            "loss_trains": np.abs(pi - mu) <= 0.15,
            "loss_divergence": np.abs(pi - mu),
        },
    )


def test_responses_with_blocked_tokens_come_before_disputed_ones():
    blocked_ratio, disputed_ratio = 4.0, 1.5
    batch = [
        response(0, [1.0, 1.0]),
        response(1, [1.0, disputed_ratio]),
        response(2, [1.1]),
        response(3, [disputed_ratio, blocked_ratio]),
        response(4, [blocked_ratio]),
    ]
    seen = SeenStep.of(batch, AlgorithmConfig())
    decisions = seen.decisions(seen.algorithm)
    assert seen.notable_first(range(5), decisions) == [3, 4, 1, 0, 2]
    assert seen.notable_first([0, 2, 4], decisions) == [4, 0, 2]


@pytest.mark.parametrize(
    ("masked", "step", "words"),
    [
        ({1: 3, 2: 5, 3: 0}, 2, "the last with a blocked token"),
        ({1: 0, 2: 0, 3: 0}, 3, "no saved step has a blocked token"),
        ({1: 3, 9: 5}, 1, "the last with a blocked token"),
    ],
)
def test_the_default_step_is_the_last_with_a_blocked_token(tmp_path, masked, step, words):
    (tmp_path / ROLLOUTS_FOLDER).mkdir()
    for saved_step in (1, 2, 3):
        (tmp_path / ROLLOUTS_FOLDER / f"step_{saved_step:06}.safetensors").touch()
    lines = [json.dumps({"step": s, "mask/masked": count}) for s, count in masked.items()]
    (tmp_path / RECORDS_FILE).write_text("\n".join(lines) + "\n")
    options = argparse.Namespace(run=tmp_path, step=None, policy=None)
    chosen, title_words = chosen_step(options)
    assert chosen == step
    assert words in title_words
    options.step = 3
    assert chosen_step(options) == (3, "")


def test_a_saved_run_is_read_from_any_folder(tmp_path, monkeypatch):
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    for folder in (start, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(start)
    with RunDirectory("run"):
        pass
    monkeypatch.chdir(elsewhere)
    options = argparse.Namespace(run=Path("../start/run"), csv=Path("tokens.csv"), step=None)
    enter_start_folder(options)
    assert Path.cwd() == start
    assert options.run.resolve() == start / "run"
    assert options.csv == elsewhere / "tokens.csv"


def token(response: int, pi: float) -> Token:
    return Token(
        response=response, position=2, mini_batch=1, token_id=7, text="x", advantage=0.5,
        mu=0.5, pi=pi, ratio=2 * pi, weight=1.0, binary_tv=abs(pi - 0.5), binary_kl=0.1,
        topk_tv=None, topk_kl=None, exact_tv=None, exact_kl=None, recomputed=None, entropy=1.0,
        threshold="TV > 0.15", trains=pi < 0.65, ppo_trains=pi < 0.64,
    )  # fmt: skip


def test_equal_tokens_of_several_responses_are_one_row():
    tokens = [token(4, 0.9), token(1, 0.7), token(9, 0.9), token(6, 0.9), token(2, 0.5)]
    table = notable_table("dppo-binary-tv", tokens, 2)
    assert [row[1] for row in table.rows] == ["4 (+2)", "1"]
    assert table.title.startswith("4 of 5 tokens")
