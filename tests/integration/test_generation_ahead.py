"""Generation ahead of training, in real runs: versions, updates in mid-response, a lost engine, stops, filtering; and
kills at random moments."""

import json
import random
import signal
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

import psutil
import pytest

from megatron_dppo.data.batch_file import load_batch
from megatron_dppo.data.sampling import ProblemSampler
from megatron_dppo.metrics.records import read_step_lines
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


AHEAD = ("rollout.max_staleness=2", "rollout.interrupt=retract")


@pytest.fixture(scope="module")
def disturbed_run(config):
    """A run whose engine is killed while it evaluates and generates two steps ahead. Ctrl-C ends it six steps later."""
    # Evaluations end before batches, so updates that wait for an evaluation interrupt a batch.
    lengths = ("rollout.max_response_tokens=96", "evaluation.max_response_tokens=24")
    # With few requests at a time, generation takes longer than training, so updates interrupt it.
    slow = ("rollout.max_concurrent_requests=4",)
    overrides = (*lengths, *slow, "run.steps=40", "evaluation.every=2")
    with TrainingRun(config, *AHEAD, *overrides) as run:
        run.wait_for_step(2)
        run.find("launch_server").send_signal(signal.SIGKILL)
        run.wait_for_step(8)
        run.interrupt()
        run.finish(code=130, timeout=60)
    return run


@pytest.fixture(scope="module")
def resumed_run(config, disturbed_run):
    """Two more steps of the same run, in which groups without a spread of rewards are replaced."""
    steps = steps_of(disturbed_run.directory)[-1] + 2
    overrides = (
        f"run.steps={steps}",
        "evaluation.every=2",
        "rollout.drop_zero_variance_groups=true",
        "rollout.oversampling=1.5",
        "rollout.max_generation_rounds=2",
    )
    with TrainingRun(config, "rollout.max_staleness=1", *overrides) as run:
        run.finish()
    return run


def batches(directory: Path) -> dict[int, list]:
    folder = directory / "rollouts"
    return {s: load_batch(folder, s) for s in steps_of(directory) if s > 0}


def versions(batch: list) -> set[int]:
    return {span.weight_version for t in batch for span in t.version_spans}


def test_no_token_is_older_than_the_bound(disturbed_run):
    found = {step: versions(batch) for step, batch in batches(disturbed_run.directory).items()}
    assert found[1] == {0}
    for step, seen in found.items():
        assert seen <= set(range(max(0, step - 3), step)), step
    records = {r["step"]: r for r in records_of(disturbed_run.directory)}
    assert max(r.get("rollout/staleness_max", 0) for r in records.values()) == 2
    assert 0 <= records[3]["rollout/generation_overlapped"] <= 1
    assert "mismatch/mean_abs_prob_gap" not in records[3]
    assert "policy/abs_prob_gap_stale" in records[3]


def test_updates_interrupt_responses_and_lose_none(disturbed_run):
    """Some responses have tokens of several versions. Every version was committed, and every response is there once."""
    records = {r["step"]: r for r in records_of(disturbed_run.directory)}
    interrupted = 0
    for step, batch in batches(disturbed_run.directory).items():
        keys = [(r.problem_id, r.sample_index) for r in batch]
        assert len(keys) == len(set(keys)) == PROMPTS * GROUP
        several = [t for t in batch if len(t.version_spans) > 1]
        interrupted += len(several)
        share = records[step].get("rollout/interrupted", 0)
        assert share == pytest.approx(len(several) / len(batch))
        again = sum(len(t.prompt_ids) + span.start for t in several for span in t.version_spans[1:])
        assert records[step].get("rollout/recomputed_tokens", 0) == again
    assert interrupted > 0


def test_an_engine_lost_in_the_background_comes_back_with_the_newest_weights(disturbed_run):
    assert disturbed_run.text.count("joins the fleet") == 2
    latest = [max(versions(b)) for b in batches(disturbed_run.directory).values()]
    assert latest == sorted(latest)
    assert latest[-1] >= 3


def test_a_stop_during_the_overlap_leaves_the_step_s_checkpoint(disturbed_run):
    assert "Traceback" not in disturbed_run.text
    last = steps_of(disturbed_run.directory)[-1]
    saved = sorted((disturbed_run.directory / "checkpoints").iterdir())
    assert any(folder.name == f"step_{last:06d}" for folder in saved)
    assert f"the same command resumes after step {last}" in disturbed_run.text


def evaluated_at(directory: Path) -> list[int]:
    return [r["step"] for r in records_of(directory) if "evaluation/sums/accuracy" in r]


def test_evaluations_run_beside_training_and_belong_to_their_step(disturbed_run):
    """The run itself refuses tokens of another version. An evaluation's record has the wait for the evaluation."""
    records = {r["step"]: r for r in records_of(disturbed_run.directory)}
    background = [step for step in evaluated_at(disturbed_run.directory) if step > 0]
    assert background
    assert [s for s, r in records.items() if "evaluation/waited_s" in r] == background
    for step in background:
        # The wait is a phase of the step that was trained on meanwhile.
        assert records[step]["evaluation/waited_s"] <= records[step + 1]["time/evaluate_s"] + 0.5


def test_every_due_evaluation_is_there_once_whatever_came_between(disturbed_run, resumed_run):
    """An evaluation is due every two steps, and after the last step. It comes on time, or one step later if a lost
    fleet or the stop left no server with its weights."""
    last = steps_of(resumed_run.directory)[-1]
    evaluated = evaluated_at(resumed_run.directory)
    due = sorted({*range(0, last, 2), last})
    for begin, end in zip(due, [*due[1:], last + 1], strict=True):
        assert len([step for step in evaluated if begin <= step < end]) == 1, (due, evaluated)
    lines = read_step_lines(resumed_run.directory / "samples.jsonl")
    shown_steps = [line["step"] for line in lines if line["set"] == "sums"]
    # Four problems have two responses each. Four of these responses are shown.
    assert shown_steps == [step for step in evaluated for _ in range(4)]


def test_a_resumed_run_takes_up_the_problems_that_were_prefetched(disturbed_run, resumed_run):
    """Whole batches follow the sampler. Filtered batches take their problems from the sampler in order."""
    ends_at = int(disturbed_run.text.rsplit("resumes after step ", 1)[1].split()[0])
    records = {r["step"]: r for r in records_of(resumed_run.directory)}
    stream, position = ProblemSampler(64, seed=1).next(64 * 8), 0
    for step, batch in batches(resumed_run.directory).items():
        group_count = records[step].get("rollout/groups_generated", PROMPTS)
        candidates = iter(stream[position : position + group_count])
        kept = [r.problem_id for r in batch[::GROUP]]
        assert len(kept) == PROMPTS
        assert all(problem in candidates for problem in kept), step
        assert step > ends_at or group_count == PROMPTS
        position += group_count


def test_a_filtered_batch_accounts_for_every_group(disturbed_run, resumed_run):
    for record in records_of(resumed_run.directory)[-2:]:
        discarded = record["rollout/groups_dropped"] + record["rollout/groups_surplus"]
        assert record["rollout/groups_generated"] == PROMPTS + discarded
        assert record["rollout/generation_rounds"] in (1, 2)
        assert record["rollout/staleness_max"] <= 1
    last = load_batch(resumed_run.directory / "rollouts", steps_of(resumed_run.directory)[-1])
    groups = [last[i : i + GROUP] for i in range(0, len(last), GROUP)]
    flat = sum(len({r.reward for r in group}) == 1 for group in groups)
    assert records_of(resumed_run.directory)[-1]["rollout/groups_filled"] == flat


def test_the_run_ends_as_a_synchronous_one_does(disturbed_run, resumed_run):
    summary = summary_of(resumed_run.directory)
    assert summary["weight_updates"] == summary["weight_updates_verified"]
    assert summary["hf_export_max_logprob_diff"] <= 1e-4
    record = json.loads((resumed_run.directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["evaluation/sums/accuracy"] is not None
    assert record["weight_version"] == summary["steps"]


# --- killed at random moments

CHANCE = random.Random(5)
"""Draws the moments of the kills as shares of the run's own times, so that on any machine they come in any phase."""
KILLED_SETTINGS = (
    *("rollout.max_staleness=2", "rollout.interrupt=abort", "rollout.max_concurrent_requests=4"),
    *("evaluation.max_response_tokens=16", "evaluation.every=2", "checkpoint.every=2"),
)
LEARNING_SETTINGS = (
    *("engine.deterministic=true", "checkpoint.verify_export=false", "algorithm.name=pg-is"),
    "rollout.max_response_tokens=48",
    "reward.name=tests.unit.planted_rewards:of_every_character",
)
"""Every response has a different reward, so that a response that is trained on twice, or not, changes the weights."""


def kill_server(run: TrainingRun) -> None:
    run.find("launch_server").send_signal(signal.SIGKILL)


def kill_run(run: TrainingRun) -> None:
    """Kill the supervisor first, so that it sees no other process end. The others may have died with it."""
    family = run.family()
    for process in reversed(family):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family)


def last_step(directory: Path) -> int:
    return max(steps_of(directory), default=0)


def step_s(directory: Path) -> float:
    """Return the seconds of the last recorded step."""
    phases = {n: v for n, v in records_of(directory)[-1].items() if n.startswith("time/")}
    return sum(v or 0 for name, v in phases.items() if name != "time/start_s")


@pytest.fixture(scope="module")
def killed_directory(tmp_path_factory) -> Path:
    """The folder of a run whose servers are killed twice. The run itself is killed twice, and ends at its third
    start."""
    config = write_material(tmp_path_factory.mktemp("killed"))
    words = (*KILLED_SETTINGS, *LEARNING_SETTINGS)
    with TrainingRun(config, *words, "run.steps=1000") as run:
        began, checkpoints = time.monotonic(), run.directory / "checkpoints"
        run.wait_for(lambda: any(checkpoints.glob("step_??????")))
        started_s = time.monotonic() - began
        time.sleep(CHANCE.uniform(0, 2) * step_s(run.directory))
        kill_server(run)
        time.sleep(CHANCE.uniform(0, 2) * step_s(run.directory))
        kill_run(run)
    with TrainingRun(config, *words, "run.steps=1000") as run:
        time.sleep(CHANCE.uniform(0, 1) * started_s)
        kill_run(run)
    reached = last_step(run.directory)
    with TrainingRun(config, *words, f"run.steps={reached + 8}") as run:
        # Records of steps that no checkpoint has are dropped first.
        run.wait_for(lambda: "resumed from" in run.text)
        run.wait_for_step(last_step(run.directory) + 1)
        time.sleep(CHANCE.uniform(0, 1) * step_s(run.directory))
        kill_server(run)
        run.finish()
        assert "restart 1 of 3" in run.text
    return run.directory


@pytest.mark.slow
def test_kills_lose_no_prompt_and_train_none_twice(killed_directory):
    """The batches have the prompts of an undisturbed sampler in order, each prompt with its responses once."""
    found = batches(killed_directory)
    assert list(found) == list(range(1, len(found) + 1))
    sampled_problems = iter(ProblemSampler(64, seed=1).next(PROMPTS * len(found)))
    for step, batch in found.items():
        keys = [(t.problem_id, t.sample_index) for t in batch]
        prompts = list(islice(sampled_problems, PROMPTS))
        assert keys == [(prompt, i) for prompt in prompts for i in range(GROUP)], step


@pytest.mark.slow
def test_kills_count_nothing_twice(killed_directory):
    records = records_of(killed_directory)
    assert [r["step"] for r in records] == list(range(len(records)))
    for step, batch in batches(killed_directory).items():
        tokens = sum(t.sampled for t in batch)
        assert records[step]["rollout/tokens"] == tokens
        for name in ("rollout/response_length", "rollout/response_length_trained"):
            assert records[step][name] == tokens / (PROMPTS * GROUP)
        assert records[step]["policy/tokens"] == tokens
        assert records[step]["optimizer/steps"] == PROMPTS // 4
    for name, lines in {"samples.jsonl": 4, "masked_tokens.jsonl": 1}.items():
        read = read_step_lines(killed_directory / name)
        trained = [line["step"] for line in read if line.get("set", "training") == "training"]
        assert trained == [r["step"] for r in records[1:] for _ in range(lines)], name
    summary = summary_of(killed_directory)
    # Steps that are repeated from kept responses send no update.
    assert 0 < summary["weight_updates"] == summary["weight_updates_verified"]


@pytest.mark.slow
def test_kills_leave_the_weights_of_a_run_that_nobody_disturbed(killed_directory, tmp_path):
    """Another run trains on the recorded batches without a stop. Losses and weights are the same, bit for bit."""
    replay = (
        f"rollout.replay_from={killed_directory}/rollouts",
        f"run.directory={tmp_path / 'replay'}",
    )
    steps = f"run.steps={last_step(killed_directory)}"
    with TrainingRun(
        killed_directory.parent / "config.yaml", *LEARNING_SETTINGS, *replay, steps
    ) as run:
        run.finish()
    weights = [
        (d / "hf" / "model.safetensors").read_bytes() for d in (killed_directory, run.directory)
    ]
    assert weights[0] == weights[1]
    for name in ("optimizer/grad_norm", "loss/mean", "policy/tokens"):
        one, other = (
            [r.get(name) for r in records_of(d)] for d in (killed_directory, run.directory)
        )
        assert one == other
        assert len(set(one)) > len(one) // 2
