"""The responses that a run keeps as text: their choice, the reason of their reward, and the command that shows them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.config.data_schema import RewardConfig
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.trajectory import Outline, Problem, Trajectory
from megatron_dppo.diagnostics.samples import main
from megatron_dppo.engine.turn_text import ResponseReader
from megatron_dppo.loop.credit import length_penalties, with_rewards
from megatron_dppo.loop.rollout_sources import RolloutBatch
from megatron_dppo.loop.sample_maker import KEPT, SampleMaker, sample_positions
from megatron_dppo.metrics.records import StepLines
from megatron_dppo.metrics.samples import Sample, console_lines, one_line, shortened
from megatron_dppo.rewards import find_reward
from megatron_dppo.rewards.verifier import Score

pytestmark = pytest.mark.usefixtures("one_rank")


def trajectory(
    problem: int, reward: float = 0.0, *, cut: bool = False, text: str = ""
) -> Trajectory:
    return Trajectory.of_response(
        [1, 2], [3, 4, 5], problem_id=problem, reward=reward, advantage=reward - 0.5, text=text,
        finish_reason="length" if cut else "stop",
    )  # fmt: skip


def test_each_kind_of_response_is_among_the_chosen() -> None:
    rows = [trajectory(0) for _ in range(500)]
    rows[123], rows[321] = trajectory(0, 1.0), trajectory(0, cut=True)
    for step in range(20):
        positions = sample_positions(rows, step)
        assert len(set(positions)) == KEPT
        assert {123, 321} <= set(positions)
    assert len({tuple(sample_positions(rows, step)) for step in range(20)}) == 20
    # Other ranks have only the outlines, and choose the same responses.
    assert sample_positions(rows, 7) == sample_positions([Outline.of(t) for t in rows], 7)


def test_a_step_in_which_all_earn_nothing_has_its_samples() -> None:
    assert len(sample_positions([trajectory(0) for _ in range(9)], 1)) == KEPT
    assert sorted(sample_positions([trajectory(0, cut=True) for _ in range(2)], 1)) == [0, 1]
    assert sample_positions([], 1) == []


def make_sample_maker(*, zeroes_truncated: bool = True) -> SampleMaker:
    def text_of(ids: Any, /, *, special: bool = True) -> str:
        return " ".join(map(str, ids))

    data: Any = SimpleNamespace(
        train=SimpleNamespace(problems=[Problem(i, "p", str(i), (1, 2)) for i in range(9)]),
        text_of=text_of,
        reader=ResponseReader(text_of, {}),
    )
    return SampleMaker(RewardConfig(name="exact_integer"), data, zeroes_truncated=zeroes_truncated)


def batch_of(rows: list[Trajectory]) -> RolloutBatch:
    return RolloutBatch([Outline.of(t) for t in rows], dict(enumerate(rows)), {}, {})


def test_the_reason_of_a_sample_reads_no_unfinished_thought() -> None:
    batch = batch_of([trajectory(0, text="<think>2-2=0")])
    maker = make_sample_maker()
    maker.take(1, batch)
    (sample,) = maker.of_step(1, batch.trajectories, {})
    assert sample.reason == "no answer, expected '0'"


def test_a_sample_says_what_the_response_earned_and_why() -> None:
    rows = [
        trajectory(0, 1.0, text="=0"),
        trajectory(1, text="2=3"),
        trajectory(2, cut=True, text="2=2"),
    ]
    samples = make_sample_maker()
    samples.take(3, batch_of(rows))
    by_problem = {s.problem: s for s in samples.of_step(3, {}, {1: 2})}
    assert by_problem[0] == Sample(
        step=3, set="training", problem=0, sample=0, prompt="1 2", response="3 4 5", answer="0",
        reward=1.0, reason="'0' is right", truncated=False, tokens=3, advantage=0.5, masked=0,
    )  # fmt: skip
    assert by_problem[1].reason == "'3', expected '1'"
    assert (by_problem[1].masked, by_problem[2].masked) == (2, 0)
    assert "algorithm.truncated_responses" in by_problem[2].reason
    without_zeroing = make_sample_maker(zeroes_truncated=False)
    without_zeroing.take(3, batch_of(rows))
    assert "ended without a score" in without_zeroing.of_step(3, {}, {})[2].reason


def test_a_sample_of_an_episode_says_which_limit_ended_it() -> None:
    row = replace(trajectory(2, cut=True, text="2=2"), ended_by="turn 1 was cut off (some.key)")
    for zeroes in (True, False):
        samples = make_sample_maker(zeroes_truncated=zeroes)
        samples.take(3, batch_of([row]))
        (sample,) = samples.of_step(3, {}, {})
        assert "some.key" in sample.reason
        assert ("algorithm.truncated_responses" in sample.reason) is zeroes


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        # The reward's own score is the reward without the turns' 0.1 + 0.2.
        ({"reward": 0.1 + 0.2, "turn_rewards": (0.1, 0.2)}, "'7', expected '5'; by turn: 0.1, 0.2"),
        ({"reward": 1.3, "turn_rewards": (0.3,)}, "'7' is right"),
        ({"reward": 1.0, "turn_rewards": (1.0,), "wants_score": False}, "by the environment"),
        ({"reward": 0.5, "components": {"exact_integer": 0.0}}, "'7', expected '5'"),
        # A response from a file has only the sum of all rewards.
        ({"reward": 0.5}, "by exact_integer"),
    ],
)
def test_a_reason_is_of_the_first_rewards_own_score(fields: dict[str, Any], reason: str) -> None:
    t = Trajectory.of_response([1, 2], [3, 4], text="=7", **fields)
    samples = SampleMaker(
        RewardConfig(name="exact_integer"),
        make_sample_maker()._data,
        zeroes_truncated=True,
        is_only_reward=False,
    )
    (kept_sample,) = samples.of_evaluation(1, "set", [Problem(0, "p", "5", (1, 2))], [t])
    assert kept_sample.reason == reason


@pytest.mark.parametrize(
    ("value", "turn_rewards", "reason"),
    [(1.0, (), "'7' is right"), (0.0, (), "expected '5'"), (0.0, (0.1, 0.2), "expected '5'")],
)
def test_a_length_penalty_does_not_change_the_reason(
    value: float, turn_rewards: tuple[float, ...], reason: str
) -> None:
    algorithm = AlgorithmConfig(length_penalty=3.1, overlong_tokens=3)
    penalised = partial(length_penalties, most_tokens=8, algorithm=algorithm)
    data = make_sample_maker()._data
    samples = SampleMaker(
        RewardConfig(name="exact_integer"), data, zeroes_truncated=True, length_penalty=penalised
    )
    columns = {"rollout_log_probs": [-1.0] * 6}
    response = Trajectory.of_response(
        [1, 2], [3] * 6, problem_id=5, text="=7", turn_rewards=turn_rewards, columns=columns
    )
    batch = [response, response]
    scores = [Score(value), Score(0.0)]
    scored, _ = with_rewards(batch, scores, 2, algorithm, most_tokens=8)
    assert scored.reward < 0
    samples.take(1, batch_of([scored]))
    (sample,) = samples.of_step(1, {}, {})
    assert reason in sample.reason
    # The responses of evaluations have no penalties.
    (sample,) = samples.of_evaluation(
        1, "set", [Problem(5, "p", "5", (1, 2))], [response.scored(0.0, 0.0)]
    )
    assert "expected '5'" in sample.reason


def test_the_most_masked_response_is_kept_beside_the_chosen() -> None:
    rows = [trajectory(p % 9) for p in range(40)]
    samples = make_sample_maker()
    samples.take(1, batch_of(rows))
    left_out = sorted(set(range(40)) - set(sample_positions(rows, 1)))
    counts = {left_out[0]: 1, left_out[5]: 3, left_out[6]: 2}
    last = samples.of_step(1, dict(enumerate(rows)), counts)[-1]
    assert (last.problem, last.masked) == (rows[left_out[5]].problem_id, 3)
    samples.take(1, batch_of(rows))
    assert len(samples.of_step(1, dict(enumerate(rows)), {})) == KEPT


@pytest.mark.parametrize(
    ("reward", "response", "score", "reason"),
    [
        ("exact_integer", "1+1=+2", 1.0, "'+2' is right"),
        ("math_verify", r"so \boxed{\frac12}.", 0.0, r"'\\frac12', expected '3'"),
        ("math_verify", "", 0.0, "no answer, expected '3'"),
        ("math_verify", "Answer: 3", 0.0, "'3' is right, but the check ended without a score"),
        ("tests.unit.planted_rewards:anything", "3", 0.5, "by tests.unit.planted_rewards:anything"),
    ],
)
def test_the_reason_of_a_reward(reward: str, response: str, score: float, reason: str) -> None:
    assert find_reward(reward).reason(response, "3", score) == reason


def test_a_long_right_answer_is_recognised_although_it_is_shortened() -> None:
    answer = "1" * 100
    reason = find_reward("math_verify").reason(f"Answer: {answer}", answer, 0.0)
    assert reason == f"'{answer[:77]}...' is right, but the check ended without a score"


def test_a_reason_is_found_at_once_in_a_response_made_to_be_slow() -> None:
    assert find_reward("math_verify").reason("\\(" * 200_000, "3", 0.0).startswith("'")


def test_long_texts_keep_both_ends() -> None:
    assert shortened("a" * 50 + "b" * 50, 20) == "a" * 10 + " [... 80 characters ...] " + "b" * 10
    assert shortened("a" * 20, 20) == "a" * 20


def test_a_response_cannot_command_the_terminal() -> None:
    assert one_line("a\nb\x1b[2J") == "a\u23ceb\\x1b[2J"
    sample = Sample(1, "training", 2, 0, "p\x1b[2J", "r", "4", 0.0, "no answer", False, 3, -0.25, 1)
    first, _, last = console_lines(sample)
    assert first == "sample of training, step 1, problem 2: p\\x1b[2J"
    assert last == "  reward 0, A = -0.25, 1 of 3 tokens masked: no answer"


def sample(step: int, reward: float = 0.0, **fields: Any) -> Sample:
    base = Sample(
        step, "training", 2, 0, "p", f"<said {step}>", "4", reward, "why", False, 3, -0.25, 0
    )
    return replace(base, **fields)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    StepLines(tmp_path / "samples.jsonl", 0).write(
        [
            sample(0, 1.0, set="held-out", advantage=None, masked=None).to_json(),
            sample(1, 0.25, masked=2).to_json(),
            sample(2, truncated=True).to_json(),
            sample(3).to_json(),
        ]
    )
    return tmp_path


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ([], [0, 1, 2, 3]),
        (["--limit", "2"], [2, 3]),
        (["--step", "1"], [1]),
        (["--right"], [0, 1]),
        (["--wrong"], [2, 3]),
        (["--truncated"], [2]),
        (["--masked"], [1]),
        (["--right", "--set", "held-out"], [0]),
    ],
)
def test_the_command_shows_what_it_is_asked_for(
    run: Path, options: list[str], steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run), *options])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("<said")] == [f"<said {s}>" for s in steps]


def test_the_page_holds_the_same_and_escapes_it(run: Path) -> None:
    main([str(run), "--truncated", "--html"])
    page = (run / "samples.html").read_text()
    assert "&lt;said 2&gt;" in page
    assert "<said" not in page
    assert "truncated" in page


def test_what_is_not_there_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(run), "--step", "9"])
    assert ended.value.code == 2
    assert (
        "recorded are 4 samples of steps 0 to 3, sets held-out, training" in capsys.readouterr().err
    )
