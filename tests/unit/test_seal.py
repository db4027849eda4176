"""Seals: a healthy batch passes. Each planted fault is named before the batch is trained on, in the loop's check and
in a saved batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save

from megatron_dppo.algorithms.advantages import group_relative, turn_relative
from megatron_dppo.data.batch_file import BatchFormatError, SavedBatch, load_batch, save_batch
from megatron_dppo.data.seal import Origin, Seal, SealError, advantage_faults, row_digest
from megatron_dppo.data.trajectory import Outline, Problem, Trajectory
from megatron_dppo.engine.protocol import SamplingParams
from megatron_dppo.fleet.generation import SamplingSeeds
from megatron_dppo.loop.rollout_sources import BatchSeals, RolloutBatch
from tests.messages import mentions
from tests.trajectories import same

pytestmark = pytest.mark.usefixtures("one_rank")

STEP, GROUP = 3, 2
PROBLEMS = {i: Problem(i, f"prompt {i}", str(i), (1, 5 + i)) for i in range(40)}
SAMPLING = SamplingParams(4)
ORIGIN = Origin(SAMPLING.as_json(), "template", GROUP, PROBLEMS)


def response(step: int, problem: int, sample: int, sampling: SamplingParams) -> Trajectory:
    """Return a stamped response like a server's: random tokens by a seed, log-probabilities and routing."""
    seed = SamplingSeeds(1, f"step {step}", [problem]).of(0, sample)
    draw = np.random.default_rng(seed)
    tokens = draw.integers(3, 50, draw.integers(2, 5))
    log_probs = -draw.random(len(tokens))
    experts = draw.permuted(np.tile(np.arange(4), (len(tokens) + 1, 2, 1)), axis=2)
    answer = Trajectory.of_response(
        PROBLEMS[problem].prompt_ids,
        tokens,
        problem_id=problem,
        sample_index=sample,
        columns={
            "rollout_log_probs": log_probs.astype(np.float32),
            "weight_version": np.full(len(tokens), step - 1, np.int32),
            "routed_experts": experts[..., :2].astype(np.uint8),
        },
    )
    return answer.stamped(sampling.as_json(), seed)


def make_batch(step: int = STEP, sampling: SamplingParams = SAMPLING) -> list[Trajectory]:
    """Return four groups of two scored responses. The problems depend on the step."""
    answers = [
        response(step, (4 * step + g) % len(PROBLEMS), sample, sampling)
        for g in range(4)
        for sample in range(GROUP)
    ]
    rewards = [float(i % 3 == 0) for i in range(len(answers))]
    advantages = group_relative(rewards, GROUP).tolist()
    return [t.scored(r, a) for t, r, a in zip(answers, rewards, advantages, strict=True)]


def batch_of(answers: list[Trajectory], seal: Seal | None = None) -> RolloutBatch:
    return RolloutBatch([Outline.of(t) for t in answers], dict(enumerate(answers)), {}, {}, seal)


def make_seals(*, replays: bool = False) -> BatchSeals:
    seals = BatchSeals(ORIGIN, 1, keeps=True, replays=replays)
    for version in range(STEP):
        seals.remember(version, f"weights {version}")
    return seals


def seal_of(answers: list[Trajectory]) -> Seal:
    seal = make_seals().check(STEP, batch_of(answers))
    assert seal is not None
    return seal


def test_a_healthy_batch_gets_its_seal():
    answers = make_batch()
    seal = seal_of(answers)
    assert (seal.step, seal.template) == (STEP, "template")
    assert dict(seal.weights) == {STEP - 1: "weights 2"}
    assert seal.rows == {i: row_digest(PROBLEMS[i]) for i in range(12, 16)}
    assert list(seal.stamps) == [t.stamp for t in answers]
    assert seal.trained("weights 3").weights == {2: "weights 2", 3: "weights 3"}
    assert Seal.from_text(seal.to_text()) == seal


def test_a_thousand_healthy_steps_pass():
    seals = make_seals()
    for step in range(1, 1001):
        seals.remember(step - 1, f"weights {step - 1}")
        assert seals.check(step, batch_of(make_batch(step))) is not None


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_batch_may_come_from_every_version_that_the_bound_allows_and_from_no_other(max_staleness):
    """The batch of step 6 trains version 5; a version older than the bound is unknown by then."""
    seals = BatchSeals(ORIGIN, max_staleness, keeps=True, replays=False)
    for version in range(6):
        seals.remember(version, f"weights {version}")

    def sampled_by(version: int) -> list[Trajectory]:
        answers = make_batch(6)
        stale = [
            t.with_columns(weight_version=np.full_like(t.column("weight_version"), version))
            for t in answers
        ]
        return [
            t.stamped(SAMPLING.as_json(), answer.stamp.seed).scored(t.reward, t.advantage)
            for t, answer in zip(stale, answers, strict=True)
            if answer.stamp is not None
        ]

    for age in range(max_staleness + 1):
        seal = seals.check(6, batch_of(sampled_by(5 - age)))
        assert seal is not None
        assert dict(seal.weights) == {v: f"weights {v}" for v in {5 - age, 5}}
        seals._previous_digests = []
    with pytest.raises(SealError, match=rf"version {4 - max_staleness}\b"):
        seals.check(6, batch_of(sampled_by(4 - max_staleness)))


# --- planted faults: changes of a batch between the server's answer and the trainer

Fault = Callable[[list[Trajectory]], list[Trajectory]]


def at(position: int, change: Callable[[Trajectory], Trajectory]) -> Fault:
    """Return a fault that changes the trajectory at ``position``."""
    return lambda batch: [change(t) if i == position else t for i, t in enumerate(batch)]


def with_row(name: str, row: int, value: Any) -> Callable[[Trajectory], Trajectory]:
    """Return a function that changes one row of a trajectory's column."""

    def change(t: Trajectory) -> Trajectory:
        array = t.column(name).copy()
        array[row] = value
        return t.with_columns(**{name: array})

    return change


def with_token(t: Trajectory) -> Trajectory:
    tokens = t.token_ids.copy()
    tokens[-1] += 1
    return replace(t, token_ids=tokens)


def cut(t: Trajectory) -> Trajectory:
    """Remove the last token, which the engine did sample."""
    columns = {name: array[:-1] for name, array in t.columns.items()}
    return replace(t, token_ids=t.token_ids[:-1], loss_mask=t.loss_mask[:-1], columns=columns)


def with_swapped_prompts(batch: list[Trajectory]) -> list[Trajectory]:
    """Two responses are exchanged: each has the prompt of the other."""
    one, other = batch[0], batch[2]
    return [
        replace(one, token_ids=np.concatenate([other.prompt_ids, one.response_ids])),
        batch[1],
        replace(other, token_ids=np.concatenate([one.prompt_ids, other.response_ids])),
        *batch[3:],
    ]


def with_swapped_groups(batch: list[Trajectory]) -> list[Trajectory]:
    """Two groups exchange rewards and advantages. Each group is consistent in itself."""
    return [
        replace(t, reward=other.reward, advantage=other.advantage)
        for t, other in zip(batch, [*batch[2:4], *batch[:2], *batch[4:]], strict=True)
    ]


def with_equal_seeds(batch: list[Trajectory]) -> list[Trajectory]:
    """Two servers drew with the same seeds."""
    return [
        replace(t, stamp=replace(t.stamp, seed=batch[i % 4].stamp.seed))
        for i, t in enumerate(batch)
    ]


def with_rows_of_another(batch: list[Trajectory]) -> list[Trajectory]:
    """The recording of one response was overwritten by another's."""
    rows = batch[3].column("routed_experts")
    changed = np.resize(rows[::-1], batch[0].column("routed_experts").shape)
    return at(0, lambda t: t.with_columns(routed_experts=changed))(batch)


def with_top_p(batch: list[Trajectory]) -> list[Trajectory]:
    """The batch was sampled with an evaluation's settings."""
    return make_batch(sampling=replace(SAMPLING, top_p=0.95))


FAULTS: dict[str, tuple[Fault, str]] = {
    "wrong version": (
        at(1, with_row("weight_version", 0, 9)),
        "weights: tokens 0 to 0 are of version 9, expected one of [1, 2]",
    ),
    "swapped prompts": (with_swapped_prompts, "its prompt is not the prompt of the problem"),
    "changed token": (at(2, with_token), "token_ids: got"),
    "changed log-probability": (at(2, with_row("rollout_log_probs", 1, -9.0)), "rollout_log_probs"),
    "stale routing rows": (with_rows_of_another, "routed_experts: got"),
    "truncated response": (at(1, cut), "rows of"),
    "reward of another group": (with_swapped_groups, "reward: got"),
    "equal seeds": (with_equal_seeds, "seed: 8 responses were drawn with 4 seeds"),
    "other top-p": (with_top_p, "top_p: 8 responses were asked for with 0.95, expected 1.0"),
    "another advantage": (at(0, lambda t: replace(t, advantage=0.25)), "advantage: got 0.25"),
    "a response twice": (lambda batch: [batch[0], *batch[:1], *batch[2:]], "group 0"),
    "an end that wasn't": (at(0, lambda t: replace(t, finish_reason="length")), "finish_reason"),
    "never scored": (
        at(0, lambda t: replace(t.stamped(SAMPLING.as_json(), 1), reward=0.0)),
        "reward: nothing says that it was scored",
    ),
    "no version": (
        at(0, lambda t: t.without("weight_version")),
        "weights: nothing says which version sampled it",
    ),
    "no stamp": (at(0, lambda t: replace(t, stamp=None)), "nothing says what made it"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_before_training(name):
    fault, message = FAULTS[name]
    with pytest.raises(SealError) as caught:
        make_seals().check(STEP, batch_of(fault(make_batch())))
    assert mentions(str(caught.value), f"step {STEP}", "seal")
    assert message in str(caught.value)


@pytest.mark.parametrize("advantage", ["leave-one-out", "group-standardized"])
def test_advantages_are_those_that_the_run_makes(advantage):
    """A run refuses advantages that are computed in another way than its own."""
    origin, batch = replace(ORIGIN, advantage=advantage), make_batch()
    expected = group_relative([t.reward for t in batch], GROUP, advantage).tolist()
    changed = [replace(t, advantage=a) for t, a in zip(batch, expected, strict=True)]
    changed_outlines = [Outline.of(t) for t in changed]
    assert not list(advantage_faults(changed_outlines, origin))
    assert list(advantage_faults(changed_outlines, ORIGIN))
    assert list(advantage_faults([Outline.of(t) for t in batch], origin))


def test_a_batch_that_comes_twice_is_refused():
    seals = make_seals()
    seals.check(STEP, batch_of(make_batch()))
    with pytest.raises(SealError, match="all responses are those of the batch before"):
        seals.check(STEP + 1, batch_of(make_batch()))


# --- advantages of turns

BY_TURN = replace(ORIGIN, credit="turn")


def make_batch_with_turns() -> list[Trajectory]:
    """Return a batch whose first response has two turns with an observation token between. Each turn earned 0.5."""
    batch = make_batch()
    episode, *others = batch
    mask = np.insert(episode.loss_mask, 3, False)
    columns = {
        name: np.insert(array, 3, array[2], axis=0) if name == "routed_experts" else array
        for name, array in episode.columns.items()
    }
    tokens = np.insert(episode.token_ids, 3, 9)
    episode = replace(episode, token_ids=tokens, loss_mask=mask, columns=columns)
    returns = [[1.0, 0.5], *([t.reward] for t in others)]
    batch = [episode.stamped(SAMPLING.as_json(), 1).scored(1.0, episode.advantage), *others]
    by_turn = turn_relative(returns, GROUP)
    return [t.credited(g, a) for t, g, a in zip(batch, returns, by_turn, strict=True)]


def check_by_turn(batch: list[Trajectory], origin: Origin = BY_TURN) -> Seal | None:
    seals = BatchSeals(origin, 1, keeps=True, replays=False)
    seals.remember(STEP - 1, "weights 2")
    return seals.check(STEP, batch_of(batch))


def test_a_batch_with_advantages_of_turns_passes_and_is_read_back(tmp_path):
    batch = make_batch_with_turns()
    # The returns of its turns are 1 and 0.5, and the other response of the group has 0.
    assert batch[0].advantages_by_turn == [0.5, 0.25]
    seal = check_by_turn(batch)
    assert seal is not None
    assert Seal.from_text(seal.to_text()) == seal
    save_batch(tmp_path, STEP, batch, seal)
    assert replay_saved(tmp_path, BY_TURN) is not None
    assert all(same(a, b) for a, b in zip(load_batch(tmp_path, STEP), batch, strict=True))
    with pytest.raises(SealError, match=r"credit: .*turn, .*trajectory"):
        replay_saved(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_row("advantages", -1, 0.5), "turns' advantages [0.5, 0.25]"),
        (lambda t: t.without("advantages"), "credit: got trajectory, expected turn"),
        (
            lambda t: replace(t, stamp=replace(t.stamp, returns=(0.5, 0.5))),
            "returns of turns: got (0.5, 0.5), expected 2 values, and the first equal to the reward 1",
        ),
        (
            lambda t: replace(t, stamp=replace(t.stamp, returns=(1.0,))),
            "returns of turns: got (1.0,), expected 2 values, and the first equal to the reward 1",
        ),
    ],
)
def test_advantages_of_other_turns_are_told(change, message):
    with pytest.raises(SealError) as caught:
        check_by_turn(at(0, change)(make_batch_with_turns()))
    assert message in str(caught.value)


def test_an_environments_first_observation_may_follow_a_prompt():
    """The last token of the prompt (1, 5 + i) is the generation prompt. Only an observation may come before it."""
    origin_of_episodes = replace(ORIGIN, generation_tokens=1)

    def has_prompt(*prompt: int) -> tuple[bool, bool]:
        t = Trajectory.of_response(prompt, [3], problem_id=4)
        return ORIGIN.has_prompt(t), origin_of_episodes.has_prompt(t)

    assert has_prompt(1, 9) == (True, True)
    assert has_prompt(1, 7, 7, 9) == (False, True)
    assert has_prompt(2, 7, 7, 9) == has_prompt(1, 8) == has_prompt(1) == (False, False)


# --- saved batches


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    answers = make_batch()
    save_batch(tmp_path, STEP, answers, seal_of(answers).trained("weights 3"))
    return tmp_path


def replay_saved(folder: Path, origin: Origin = ORIGIN, step: int = STEP) -> Seal | None:
    seals = BatchSeals(origin, 1, keeps=False, replays=True)
    saved = SavedBatch(folder, STEP)
    return seals.check(step, batch_of(saved.read(range(len(saved.problems))), saved.seal))


def test_a_saved_batch_passes_with_its_seal(folder):
    seal = replay_saved(folder)
    assert seal is not None
    assert seal.weights[STEP] == "weights 3"
    assert all(same(a, b) for a, b in zip(load_batch(folder, STEP), make_batch(), strict=True))


def test_early_files_have_no_seal_and_are_read(tmp_path):
    save_batch(tmp_path, STEP, make_batch())
    assert replay_saved(tmp_path) is None


@pytest.mark.parametrize(
    ("origin", "step", "message"),
    [
        (
            replace(ORIGIN, template="other"),
            STEP,
            "template: got the hash template, expected other",
        ),
        (
            replace(ORIGIN, problems=PROBLEMS | {12: replace(PROBLEMS[12], answer="13")}),
            STEP,
            "data row 12: got the hash",
        ),
        (
            replace(ORIGIN, sampling={**ORIGIN.sampling, "temperature": 0.7}),
            STEP,
            "temperature: 8 responses were asked for with 1.0, expected 0.7",
        ),
        (ORIGIN, STEP + 1, "step: it was made for step 3, expected 4"),
    ],
    ids=["another template", "another data row", "another temperature", "another step"],
)
def test_a_saved_batch_of_another_origin_is_refused(folder, origin, step, message):
    with pytest.raises(SealError) as caught:
        replay_saved(folder, origin, step)
    assert message in str(caught.value)


def test_lengths_and_stops_of_another_run_are_no_fault(folder):
    assert replay_saved(folder, replace(ORIGIN, sampling={**ORIGIN.sampling, "max_new_tokens": 9}))


@pytest.mark.parametrize("name", ["changed token", "changed log-probability", "truncated response"])
def test_a_file_whose_hashes_were_made_anew_still_has_its_seal(folder, name):
    """A response was changed, and the batch was written again with the old seal."""
    seal = SavedBatch(folder, STEP).seal
    save_batch(folder, STEP, FAULTS[name][0](load_batch(folder, STEP)), seal)
    with pytest.raises(SealError) as caught:
        replay_saved(folder)
    assert FAULTS[name][1] in str(caught.value)


def test_an_altered_seal_is_told(folder):
    path = folder / f"step_{STEP:06d}.safetensors"
    with safe_open(path, framework="numpy") as file:
        text = file.metadata()["seal"]
    for altered in (text.replace("weights 3", "weights 4"), "{}", json.dumps([1])):
        path.write_bytes(save(load(path.read_bytes()), {"seal": altered}))
        with pytest.raises(BatchFormatError, match="altered"):
            SavedBatch(folder, STEP)
