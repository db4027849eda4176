"""The real loop: Megatron-Core in two processes, the SGLang server, verified weights; and what may go wrong."""

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dppo.data.trajectory_codec import load_batch
from megatron_dppo.system.lease_files import LeaseFiles
from tests.integration.runs import (
    GROUP,
    PROMPTS,
    TrainingRun,
    records_of,
    steps_of,
    summary_of,
    write_material,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_material(tmp_path_factory.mktemp("loop"))


def assert_every_response_counted_once(directory: Path, steps: int) -> None:
    for step in range(1, steps + 1):
        keys = [(r.problem_id, r.sample_index) for r in load_batch(directory / "rollouts", step)]
        assert len(keys) == len(set(keys)) == PROMPTS * GROUP


@pytest.fixture(scope="module")
def disturbed(config):
    """Four steps, the engine killed while it generates for the third."""
    run = TrainingRun(config, "rollout.max_response_tokens=48")
    with run:
        run.wait_for_step(2)
        time.sleep(0.3)
        signalled = time.monotonic()
        run.find("launch_server").send_signal(signal.SIGKILL)
        run.finish()
        run.seconds = time.monotonic() - signalled
    return run


def test_a_killed_engine_is_replaced_and_the_run_completes(disturbed):
    assert steps_of(disturbed.directory) == [0, 1, 2, 3, 4]
    assert "restart 1 of 3" in disturbed.text
    assert "engine restored at weight version 2" in disturbed.text
    assert_every_response_counted_once(disturbed.directory, 4)


def test_every_weight_update_was_verified(disturbed):
    summary = summary_of(disturbed.directory)
    assert summary["steps"] == 4
    assert summary["weight_updates"] == summary["weight_updates_verified"] == 4 + 1 + 1
    versions = {
        span.weight_version
        for r in load_batch(disturbed.directory / "rollouts", 4)
        for span in r.version_spans
    }
    assert versions == {3}


def test_trainer_engine_and_export_agree(disturbed):
    summary = summary_of(disturbed.directory)
    assert summary["mean_abs_prob_gap"] <= 1e-4
    assert summary["hf_export_max_logprob_diff"] <= 1e-4
    assert (disturbed.directory / "report.png").stat().st_size > 10_000
    assert list((disturbed.directory / "tensorboard").iterdir())
    assert {"generate", "train", "sync"} <= set(summary["seconds_per_phase"])


def test_a_dead_rank_ends_the_run_and_the_next_start_resumes_until_ctrl_c(config, tmp_path):
    directory = tmp_path / "killed"
    overrides = (f"run.directory={directory}", "run.steps=40", "evaluation.every=40")
    with TrainingRun(config, *overrides) as run:
        run.wait_for_step(2)
        run.find("RANK=1", "megatron_dppo.train").send_signal(signal.SIGKILL)
        run.finish(code=1, timeout=60)
        assert "rank 1 was killed by SIGKILL" in run.text
    reached = steps_of(directory)[-1]
    with TrainingRun(config, *overrides) as run:
        run.wait_for_step(reached + 2)
        run.interrupt()
        run.finish(code=130, timeout=60)
        assert "resumed from" in run.text
        assert "the same command resumes after step" in run.text
    recorded = steps_of(directory)
    assert recorded == list(range(len(recorded)))
    saved = sorted((directory / "checkpoints").iterdir())
    assert saved[-1].name == f"step_{recorded[-1]:06d}"
    assert_every_response_counted_once(directory, recorded[-1])


def test_a_run_that_another_start_took_over_changes_nothing_more(config, tmp_path):
    directory = tmp_path / "fenced"
    with TrainingRun(config, f"run.directory={directory}", "run.steps=40") as run:
        run.wait_for_step(2)
        files = LeaseFiles(directory)
        files.install(replace(files.holder(), nonce="2" * 16, host="b", pid=88))
        left = steps_of(directory), sorted((directory / "rollouts").iterdir())
        run.finish(code=1, timeout=60)
        assert "another start of this run took over: process 88 on b" in run.text
        assert "Traceback" not in run.text
    assert (steps_of(directory), sorted((directory / "rollouts").iterdir())) == left
    assert [
        p for p in (directory / "checkpoints").iterdir() if int(p.name[5:11]) > left[0][-1]
    ] == []


def test_ctrl_c_while_the_engine_starts_is_a_clean_stop(config, tmp_path):
    with TrainingRun(config, f"run.directory={tmp_path / 'early'}") as run:
        run.wait_for(lambda: "waiting for the engine" in run.text)
        run.interrupt()
        run.finish(code=130, timeout=60)
        assert "Traceback" not in run.text


def test_another_algorithm_does_not_continue_a_run(config, disturbed):
    overrides = (f"run.directory={disturbed.directory}", "algorithm.name=grpo", "run.steps=5")
    with TrainingRun(config, *overrides) as run:
        run.finish(code=2)
        assert "algorithm.name: 'dppo-binary-tv' there, 'grpo' now" in run.text


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(config, disturbed, tmp_path):
    """On the rollouts that the disturbed run recorded: 4 steps at once against 2, a new process, and 2 more."""
    common = (f"rollout.replay_from={disturbed.directory}/rollouts", "algorithm.name=pg-is")
    directories = {}
    for name, parts in {"whole": (4,), "halves": (2, 4)}.items():
        directories[name] = tmp_path / name
        for steps in parts:
            overrides = (*common, f"run.directory={directories[name]}", f"run.steps={steps}")
            with TrainingRun(config, *overrides) as run:
                run.finish()
    weights = [(d / "hf" / "model.safetensors").read_bytes() for d in directories.values()]
    assert weights[0] == weights[1]
    losses = [[r.get("optimizer/grad_norm") for r in records_of(d)] for d in directories.values()]
    assert losses[0] == losses[1]
