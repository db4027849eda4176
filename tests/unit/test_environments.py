"""Episodes, which join the turns of a policy and the answers of an environment to one trajectory: the tokens between
turns, limits, environments that fail, and rewards."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, NoReturn, cast

import numpy as np
import pytest

from megatron_dppo.config.data_schema import RewardConfig
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.columns import usable_rows
from megatron_dppo.data.trajectory import FinishReason, Outline, Problem, Trajectory
from megatron_dppo.engine.protocol import GenerationRequest, RoutedShape, SamplingParams
from megatron_dppo.environments import (
    Calculator,
    ChatCall,
    Environment,
    EnvironmentFaultError,
    SingleTurn,
    Step,
    Turn,
    calculate,
    check_environment,
    find_environment,
    makes_prompts,
    workers,
)
from megatron_dppo.environments.episodes import EpisodeLimits, Episodes, _Episode
from megatron_dppo.environments.turn_template import TurnTemplate
from megatron_dppo.environments.workers import EnvironmentPool, EnvironmentSpec
from megatron_dppo.fleet.generation import GenerationJob, GenerationLimits, generate_many
from megatron_dppo.loop.credit import with_rewards
from megatron_dppo.loop.rollout_figures import GroupRow
from megatron_dppo.loop.scorer import Scorer
from megatron_dppo.loop.scoring import score_on_arrival
from megatron_dppo.rewards.verifier import Score
from megatron_dppo.system import plugins
from megatron_dppo.system.async_runner import AsyncRunner
from tests.chat_templates import reader_of
from tests.messages import mentioning, mentions
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

PLANTED = "tests.unit.planted_environments"
IM_START, IM_END = 1, 2
PROBLEM = Problem(7, "3+5", "8", (10, 11, 12))
SHAPE = RoutedShape(hidden_layers=1, moe_layers=(0,), top_k=2, experts=100)


# --- an engine of these tests


tokenizer = cache(tiny_tokenizer)


def text_of(ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(ids)))


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(workers, "_CANCEL_S", 0.5)


class Engine:
    """An engine that answers the requests of a problem with the problem's ``texts``, one after the other.

    A response has the tokens of its text and an end of turn. In call c of a problem, each row of the routing has the
    number c, and token i has the log-probability -i - c / 10. ``asked``: the requests so far."""

    def __init__(self, texts: dict[int, list[str]]) -> None:
        self.tokenizer = tokenizer()
        self.texts = texts
        self.asked: list[GenerationRequest] = []
        self.calls: dict[int, int] = {}

    async def generate(self, requests: Sequence[GenerationRequest], rid: str) -> list[Trajectory]:
        await asyncio.sleep(0)
        return [self.answer(request) for request in requests]

    def answer(self, request: GenerationRequest) -> Trajectory:
        call = self.calls.get(request.problem_id, 0) + 1
        self.calls[request.problem_id] = call
        self.asked.append(request)
        texts = self.texts[request.problem_id]
        text = texts[(call - 1) % len(texts)]
        ids = [*self.tokenizer(text)["input_ids"], IM_END][: request.sampling.max_new_tokens]
        rows = len(request.prompt_ids) + len(ids) - 1
        columns: dict[str, Any] = {
            "rollout_log_probs": [-i - call / 10 for i in range(len(ids))],
            "weight_version": [call] * len(ids),
        }
        if "routed_experts" in request.columns:
            routing = np.full((rows, 1, 2), [[call, 50]], np.uint8)
            routing[: request.columns["routed_experts"].start] = 0
            columns["routed_experts"] = routing
        return Trajectory.of_response(
            request.prompt_ids,
            ids,
            problem_id=request.problem_id,
            columns=columns,
            text=text,
            finish_reason="stop" if ids[-1] == IM_END else "length",
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=max(0, len(request.prompt_ids) - 5),
        )

    async def abort(self, rid: str, count: int) -> None:
        return

    async def watch(self, hang_timeout_s: float) -> NoReturn:
        await asyncio.sleep(3600)
        raise AssertionError


LIMITS = EpisodeLimits(turns=8, tokens=1000, observation_tokens=64, retries=1)


def play(
    engine: Engine,
    environment: str = "Counting",
    limits: EpisodeLimits = LIMITS,
    problems: int = 1,
    timeout_s: float = 60.0,
    role: str = "user",
    problem: Problem = PROBLEM,
    turn_tokens: int = 16,
    memory_gib: int = 4,
    sampling: Mapping[str, float] | None = None,
    **options: Any,
) -> tuple[list[Trajectory], Episodes]:
    """Play an episode of each of the problems 0, 1, ..., two at a time, with environments in one worker process.
    ``environment``: a name of the table, or a class in PLANTED. Returns the trajectories and the Episodes."""
    is_registered = environment in plugins.targets(plugins.ENVIRONMENTS)
    name = environment if is_registered else f"{PLANTED}:{environment}"
    spec = EnvironmentSpec(name, options, timeout_s, memory_gib, sampling=sampling or {})
    pool = EnvironmentPool(spec, workers=1)
    episodes = Episodes(
        pool, TurnTemplate(engine.tokenizer, role), limits, reader_of(engine.tokenizer)
    )
    job = GenerationJob(
        [replace(problem, problem_id=i) for i in range(problems)],
        1,
        SamplingParams(turn_tokens),
        {"routed_experts": SHAPE},
        play=episodes.play,
    )

    async def work() -> list[Trajectory]:
        def play_problem(request: GenerationRequest, ask: Any) -> Any:
            key: Any = request.key
            return episodes.play(job.problems[key[0]], request, ask)

        two_at_a_time = GenerationLimits(2)
        results = await generate_many(engine, job.requests(), two_at_a_time, play=play_problem)
        return job.trajectories(results)

    try:
        with AsyncRunner() as runner:
            return runner.run(work()), episodes
    finally:
        pool.close()


def tokens_between(engine: Engine, said: str) -> list[int]:
    """Return the tokens between two turns, without the sampled end of turn. ``said``: the environment's answer."""
    text = f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    return engine.tokenizer(text)["input_ids"]


def test_turns_are_joined_token_by_token():
    engine = Engine({0: ["4 and", "5", "6 is"]})
    (t,), episodes = play(engine)
    turns = [[*engine.tokenizer(text)["input_ids"], IM_END] for text in ("4 and", "5", "6 is")]
    gaps = [tokens_between(engine, "1"), tokens_between(engine, "2")]
    expected = [*PROBLEM.prompt_ids, *turns[0], *gaps[0], *turns[1], *gaps[1], *turns[2]]
    assert t.token_ids.tolist() == expected
    mask = [False] * 3
    for turn, gap in zip(turns, [*gaps, []], strict=True):
        mask += [True] * len(turn) + [False] * len(gap)
    assert t.loss_mask.tolist() == mask
    assert (t.turns, t.sampled, t.finish_reason, t.text) == (3, sum(mask), "stop", "6 is")
    assert t.turn_rewards == (0.1, 0.2, 0.3)
    assert not t.wants_score
    assert not episodes.faults
    # Each prompt is the unchanged beginning of the trajectory.
    whole = t.token_ids.tolist()
    ends = [3, 3 + len(turns[0]) + len(gaps[0]), len(whole) - len(turns[2])]
    assert [list(r.prompt_ids) for r in engine.asked] == [whole[:end] for end in ends]
    assert (t.prompt_tokens, t.cached_tokens) == (sum(ends), sum(max(0, e - 5) for e in ends))
    assert t.stamp is not None
    assert t.stamp.digests == t.digests()


def test_versions_log_probabilities_and_routing_are_those_of_the_call_that_sampled():
    engine = Engine({0: ["4 and", "5", "6 is"]})
    (t,), _ = play(engine)
    lengths = [len(engine.tokenizer(text)["input_ids"]) + 1 for text in ("4 and", "5", "6 is")]
    expected = [-i - call / 10 for call, n in enumerate(lengths, 1) for i in range(n)]
    assert t.columns["rollout_log_probs"].tolist() == pytest.approx(expected)
    assert t.columns["weight_version"].tolist() == np.repeat([1, 2, 3], lengths).tolist()
    # A request asks for the missing rows only. They start with the row of the previous turn's last token.
    starts = [r.columns["routed_experts"].start for r in engine.asked]
    calls = t.columns["routed_experts"][:, 0, 0].tolist()
    ends = [
        0,
        3 + lengths[0] - 1,
        len(engine.asked[2].prompt_ids) - len(tokens_between(engine, "2")) - 1,
    ]
    assert starts == ends
    assert calls == [1] * ends[1] + [2] * (ends[2] - ends[1]) + [3] * (t.length - 1 - ends[2])
    # Every row that predicts a sampled token was recorded by the weights that sampled it.
    assert usable_rows(t.loss_mask, t.columns).all()
    predicting = np.flatnonzero(t.loss_mask) - 1
    assert [calls[i] for i in predicting] == t.columns["weight_version"].tolist()


def test_the_next_prompt_has_the_templates_end_of_a_turn_alone():
    """The engine ends a turn by <|im_end|>, the template by <|endoftext|>. A turn of only its end keeps it."""
    engine = Engine({0: ["4 and", "", "6 is"]})
    engine.tokenizer = tiny_tokenizer()
    engine.tokenizer.chat_template = CHAT_TEMPLATE.replace("<|im_end|>", "<|endoftext|>")
    (t,), episodes = play(engine)
    assert not episodes.faults
    first, _, last = ([*engine.tokenizer(text)["input_ids"]] for text in ("4 and", "", "6 is"))
    gaps = [
        engine.tokenizer(
            f"<|endoftext|>\n<|im_start|>user\n{n}<|endoftext|>\n<|im_start|>assistant\n"
        )
        for n in (1, 2)
    ]
    gap_ids = [gap["input_ids"] for gap in gaps]
    turns = [first, [IM_END], [*last, IM_END]]
    expected = [*PROBLEM.prompt_ids, *turns[0], *gap_ids[0], *turns[1], *gap_ids[1], *turns[2]]
    assert t.token_ids.tolist() == expected
    assert (t.turns, t.sampled) == (3, sum(map(len, turns)))
    assert t.turn_rewards == (0.1, 0.2, 0.3)
    assert usable_rows(t.loss_mask, t.columns).all()
    assert (
        t.columns["weight_version"].tolist() == np.repeat([1, 2, 3], list(map(len, turns))).tolist()
    )
    starts = [r.columns["routed_experts"].start for r in engine.asked]
    # The routing continues at the turn's last token that is kept.
    assert starts[1] == len(PROBLEM.prompt_ids) + len(first) - 1
    assert [list(r.prompt_ids) for r in engine.asked][1] == expected[
        : 3 + len(first) + len(gap_ids[0])
    ]


def test_a_recording_that_was_lost_in_between_is_dropped():
    class LosingEngine(Engine):
        def answer(self, request: GenerationRequest) -> Trajectory:
            answer = super().answer(request)
            return answer.without("routed_experts") if self.calls[0] == 2 else answer

    (t,), _ = play(LosingEngine({0: ["4", "5", "6"]}))
    # After the lost recording there were no rows, so the third request asked for all of them.
    versions = t.columns["routing_version"]
    assert versions.tolist() == [3] * t.sampled
    assert not usable_rows(t.loss_mask, t.columns)[np.flatnonzero(t.loss_mask)[0] - 1]
    assert usable_rows(t.loss_mask, t.columns)[-1]


@pytest.mark.parametrize(
    ("limits", "turns"),
    [
        (replace(LIMITS, turns=2), 2),
        # The prompt, a turn of 2 tokens and the environment's answer have 20 tokens or more: none is left for turn 2.
        (replace(LIMITS, tokens=20), 1),
    ],
)
def test_an_episode_that_uses_up_its_turns_or_tokens_is_truncated(limits, turns):
    engine = Engine({0: ["4", "5", "6"]})
    (t,), _ = play(engine, limits=limits)
    assert (t.turns, t.finish_reason) == (turns, "length")
    assert t.turn_rewards == (0.1, 0.2)[:turns]
    assert t.loss_mask[-1]


def test_the_last_turn_gets_the_tokens_that_are_left():
    unlimited_engine = Engine({0: ["4", "5"]})
    play(unlimited_engine)
    tokens = len(unlimited_engine.asked[1].prompt_ids) + 1
    engine = Engine({0: ["4", "5"]})
    (t,), _ = play(engine, limits=replace(LIMITS, tokens=tokens))
    assert [r.sampling.max_new_tokens for r in engine.asked] == [16, 1]
    assert (t.length, t.finish_reason, t.turns) == (tokens, "length", 2)


LONG = "1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9"


def test_a_truncated_turn_is_the_last_one(caplog):
    """The log and the response name the limit that cut the turn."""
    (first, second), _ = play(Engine({0: [LONG], 1: [LONG]}), problems=2)
    for t in (first, second):
        assert (t.turns, t.sampled, t.finish_reason, t.turn_rewards) == (1, 16, "length", (0.1,))
        assert "turn 1 " in t.ended_by
        assert "rollout.max_response_tokens" in t.ended_by
    (warning,) = [r.getMessage() for r in caplog.records if "cut_turns" in r.getMessage()]
    assert first.ended_by in warning


def test_a_truncated_turn_is_answered_where_the_run_says_so():
    """The template adds the end of turn that the policy did not sample. This token is outside the loss mask."""
    limits = replace(LIMITS, continues_after_cut=True)
    engine = Engine({0: [LONG, "5", "6"]})
    (t,), _ = play(engine, limits=limits)
    cut = engine.tokenizer(LONG)["input_ids"][:16]
    turns = [[*engine.tokenizer(text)["input_ids"], IM_END] for text in ("5", "6")]
    gaps = [[IM_END, *tokens_between(engine, "1")], tokens_between(engine, "2")]
    expected = [*PROBLEM.prompt_ids, *cut, *gaps[0], *turns[0], *gaps[1], *turns[1]]
    assert t.token_ids.tolist() == expected
    assert (t.turns, t.sampled, t.finish_reason, t.ended_by) == (3, 16 + 2 + 2, "stop", "")
    assert t.turn_rewards == (0.1, 0.2, 0.3)
    assert not t.loss_mask[3 + 16]


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        (replace(LIMITS, turns=2), "environment.max_turns"),
        (replace(LIMITS, tokens=20), "environment.max_tokens"),
        (replace(LIMITS, tokens=10), "environment.max_tokens"),
        (replace(LIMITS, tokens=10, continues_after_cut=True), "environment.max_tokens"),
    ],
)
def test_an_episode_says_which_limit_ended_it(limits, key):
    (t,), _ = play(
        Engine({0: [LONG, "5", "6"]} if limits.tokens == 10 else {0: ["4", "5", "6"]}),
        limits=limits,
    )
    assert key in t.ended_by
    assert t.finish_reason == "length"


# --- environments that fail


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("crash", r"step: ZeroDivisionError: planted \(planted_environments.py, line \d+\)"),
        ("huge", r"step: ValueError: x{200} \(planted_environments.py"),
        ("exit", "its process exited with code 3"),
        ("hang", "no answer to step within 1 s"),
        ("block", "no answer to step within 1 s, and none to anything else"),
    ],
)
def test_others_go_on_where_an_environment_fails(kind, reason):
    texts = {i: ["4", "5", "6"] for i in range(4)} | {2: ["4", f"5 {kind}", "6"]}
    results, episodes = play(Engine(texts), problems=4, timeout_s=1.0)
    assert [t.finish_reason for t in results] == ["stop", "stop", "failed", "stop"]
    assert [t.sampled > 0 for t in results] == [True, True, False, True]
    planted_faults = [fault for fault in episodes.faults if "same turns" not in fault]
    assert all(re.search(reason, fault) for fault in planted_faults), planted_faults
    # An episode fails twice in a process of its own: the first attempt and one retry. Before that it may have failed in
    # a shared process, and the other three episodes with it.
    assert 2 <= episodes.faults.total() <= 3 + 3
    assert results[2].reason.startswith("tests.unit.planted_environments:Counting: ")
    assert re.search(reason, results[2].reason)
    assert (episodes.take_faults(), episodes.take_faults()) == (episodes.faults, Counter())


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ("Huge", r"an answer of 10000\d\d\d bytes, expected at most 1048576"),
        ("Long", r"an observation of \d+ tokens, expected at most 64 \(environment.max_obs"),
    ],
)
def test_what_is_too_much_to_read_is_a_fault(environment, reason):
    (t,), episodes = play(Engine({0: ["4"]}), environment)
    assert t.finish_reason == "failed"
    (fault,) = episodes.faults
    assert re.search(reason, fault)


@pytest.mark.parametrize(
    ("gib", "memory_gib", "ends"), [(3, 4, "stop"), (6, 4, "failed"), (6, 8, "stop")]
)
def test_a_worker_has_the_address_space_that_it_is_given(gib, memory_gib, ends):
    (t,), episodes = play(Engine({0: ["4", "5", "6"]}), "Mapping", memory_gib=memory_gib, gib=gib)
    assert t.finish_reason == ends
    assert all("OSError: [Errno 12]" in fault for fault in episodes.faults), episodes.faults


@pytest.mark.parametrize("places", [1, 3])
def test_no_more_episodes_are_open_at_once_than_there_may_be(places):
    engine = Engine({i: ["4"] for i in range(5)})
    open_now: list[int] = []
    counts: list[int] = []

    async def play_one(request: GenerationRequest, ask: Any) -> Trajectory:
        open_now.append(request.problem_id)
        counts.append(len(open_now))
        for _ in range(20):  # let the other episodes run
            await asyncio.sleep(0)
        open_now.remove(request.problem_id)
        return await ask(request)

    job = GenerationJob([replace(PROBLEM, problem_id=i) for i in range(5)], 1, SamplingParams(16))
    limits = GenerationLimits(2, episodes=places)
    results = asyncio.run(generate_many(engine, job.requests(), limits, play=play_one))
    assert len(results) == 5
    assert max(counts) == places


def test_half_of_a_character_is_put_to_the_model_as_a_question_mark():
    engine = Engine({0: ["4", "5", "6"]})
    (t,), episodes = play(engine, "Halving")
    assert (t.finish_reason, episodes.faults) == ("stop", Counter())
    gap = tokens_between(engine, "1?")
    assert gap == engine.asked[1].prompt_ids[-len(gap) :]


def test_what_no_tokenizer_takes_is_a_fault():
    engine = Engine({0: ["4", "5", "6"]})

    def refuse(*_: Any) -> list[int]:
        raise TypeError("planted")

    pool = EnvironmentPool(EnvironmentSpec(f"{PLANTED}:Counting", {}, 60.0), workers=1)
    episodes = Episodes(pool, TurnTemplate(engine.tokenizer, "user"), LIMITS)
    episodes.template.delta = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(EnvironmentFaultError, match="TypeError: planted"):
        episodes._encoded(lambda: episodes.template.delta([], "1"))


def test_a_fault_costs_no_sampled_token(tmp_path):
    """A new environment gets the same turns again, so no turn is sampled again."""
    engine = Engine({0: ["4", "5", "6"]})
    (t,), episodes = play(engine, "OnceBroken", flag=str(tmp_path / "flag"))
    assert (t.turns, t.finish_reason, t.turn_rewards) == (3, "stop", (0.1, 0.2, 0.3))
    assert len(engine.asked) == 3
    assert episodes.faults.total() == 1


def test_turns_that_are_answered_otherwise_are_drawn_again(tmp_path):
    engine = Engine({0: ["4", "5", "6"]})
    limits = replace(LIMITS, retries=2)
    (t,), episodes = play(engine, "Forgetful", limits, flag=str(tmp_path / "flag"))
    assert (t.turns, t.finish_reason) == (3, "stop")
    assert len(engine.asked) == 2 + 3
    assert episodes.faults.total() == 2
    context = engine.tokenizer.decode(t.token_ids[~t.loss_mask])
    assert "user\n9" in context
    assert "user\n1" not in context


# --- first observations


def play_greeting(
    said: str, texts: list[str], limits: EpisodeLimits = LIMITS, **options: Any
) -> Any:
    """Play an episode in which the environment says ``said`` before the first turn.
    Returns the trajectory, the requests, the expected prompt of the first turn, and the Episodes."""
    engine = Engine({0: texts})
    question = "<|im_start|>user\n3+5<|im_end|>\n"
    greeting = f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    prompt = engine.tokenizer(question + "<|im_start|>assistant\n")["input_ids"]
    problem = replace(PROBLEM, prompt_ids=tuple(prompt))
    (t,), episodes = play(engine, "Greeting", limits, problem=problem, **options)
    return t, engine.asked, engine.tokenizer(question + greeting)["input_ids"], episodes


def test_a_first_observation_is_a_message_after_the_problems():
    t, requests, prompt, _ = play_greeting("Begin: 7", ["4", "5", "6"], greeting="Begin: 7")
    assert list(requests[0].prompt_ids) == t.prompt_ids.tolist() == prompt
    assert (t.turns, t.finish_reason, t.stamp.digests) == (3, "stop", t.digests())


def test_turns_that_follow_another_first_observation_are_drawn_anew(tmp_path):
    flag = str(tmp_path / "flag")
    t, requests, prompt, episodes = play_greeting("hi!", ["4", "5", "6"], greeting="hi", flag=flag)
    assert t.prompt_ids.tolist() == prompt
    assert len(requests) == 2 + 3
    assert requests[2].prompt_ids == prompt
    assert (t.turns, t.finish_reason, episodes.faults.total()) == (3, "stop", 1)


def test_a_first_observation_has_its_limits():
    t, _, _, episodes = play_greeting("", ["4"], greeting="1 " * 300)
    assert t.finish_reason == "failed"
    assert mentions(next(iter(episodes.faults)), 64, "environment.max_observation_tokens")
    _, _, prompt, _ = play_greeting("hi", ["4"], greeting="hi")
    limits = replace(LIMITS, tokens=len(prompt))
    t, _, _, _ = play_greeting("hi", ["4"], limits, greeting="hi")
    assert mentions(t.reason, "reset", len(prompt), len(prompt), "environment.max_tokens")
    # One token is left for the first turn.
    t, requests, _, _ = play_greeting(
        "hi", ["4"], replace(limits, tokens=len(prompt) + 1), greeting="hi"
    )
    assert (requests[0].sampling.max_new_tokens, t.length, t.finish_reason) == (
        1,
        len(prompt) + 1,
        "length",
    )


def test_an_empty_observation_of_plain_text_is_a_fault():
    spec = EnvironmentSpec(f"{PLANTED}:Greeting", {"greeting": ""}, 60.0)
    pool, engine = EnvironmentPool(spec, workers=1), Engine({0: ["4"]})
    episodes = Episodes(pool, TurnTemplate(engine.tokenizer, "user", is_chat=False), LIMITS)
    episode = _Episode(GenerationRequest(0, (1,), SamplingParams(1)))
    episode.branches = [turns_of([1], ())]
    with pytest.raises(EnvironmentFaultError, match="an observation of no tokens, expected one"):
        episodes._prepare_next_turn(episode, "")


def test_a_branch_that_can_not_be_is_a_fault():
    pool = EnvironmentPool(EnvironmentSpec(f"{PLANTED}:Greeting", {}, 60.0), workers=1)
    episodes = Episodes(pool, TurnTemplate(tokenizer(), "user"), LIMITS)
    request = GenerationRequest(0, (1,), SamplingParams(1, seed=5))
    episode = _Episode(request)
    episode.branches = [turns_of([1], ())]
    seeds = []
    messages = [{"role": "user", "content": "8"}]
    for number, delta in ((0, "<|im_end|>\n<|im_start|>user"), (1, "<|im_start|>user")):
        # The turn of branch 0 has no sampled end, so the template adds one. Branch 1 is new and begins with a message.
        episodes._prepare_next_turn(episode, ChatCall(messages, branch=number))
        assert text_of(episode.delta).startswith(delta)
        seeds.append(episodes._request(episode).sampling.seed)
    # Branches have different seeds, so that equal prompts of two branches get independent answers.
    assert seeds[0] == 5
    assert seeds[1] != 5
    with pytest.raises(EnvironmentFaultError, match=mentioning("branch 2", 1)):
        episodes._prepare_next_turn(episode, ChatCall(messages, branch=2))
    with pytest.raises(EnvironmentFaultError, match=mentioning("reset", "branch 1", 0)):
        episodes._begin(episode, PROBLEM, request, ChatCall(messages, branch=1))


def test_what_follows_a_turn_depends_on_the_end_of_its_own_branch():
    """Branch 0 ends with a sampled end of turn. Branch 1, the newest one, was cut off before its end."""
    pool = EnvironmentPool(EnvironmentSpec(f"{PLANTED}:Greeting", {}, 60.0), workers=1)
    episodes = Episodes(pool, TurnTemplate(tokenizer(), "user"), LIMITS)
    messages = [{"role": "user", "content": "8"}]
    episode = _Episode(GenerationRequest(0, (1,), SamplingParams(1)))
    episode.branches = [Trajectory.of_response([1], [end]) for end in (IM_END, 4)]
    for number, begins_with_end in ((0, False), (1, True)):
        episodes._prepare_next_turn(episode, ChatCall(messages, branch=number))
        delta = text_of(episode.delta)
        assert delta.startswith("<|im_end|>") == begins_with_end
        assert delta.removeprefix("<|im_end|>").startswith("\n<|im_start|>user")


# --- rewards and advantages of episodes


def test_what_turns_earn_is_added_to_what_the_rewards_give_the_last_one():
    """The rewards by hand are 0.25 + 0.5 + 1 and 0.5 + 0. The two truncated episodes earn at most 0: min(0, 0.75) and
    min(0, -0.25)."""

    def episode(rewards: tuple[float, ...], reason: FinishReason = "stop") -> Trajectory:
        return Trajectory.of_response([1], [2], turn_rewards=rewards, finish_reason=reason)

    whole = [episode((0.25, 0.5)), episode((0.5,))]
    batch = [*whole, episode((0.75,), "length"), episode((-0.25,), "length")]
    scores = [Score(1.0), Score(0.0), Score(0.0), Score(0.0)]
    scored = with_rewards(
        batch, scores, 4, AlgorithmConfig(truncated_responses="zero-reward"), most_tokens=16
    )
    assert [t.reward for t in scored] == [1.75, 0.5, 0.0, -0.25]
    assert [t.advantage for t in scored] == [1.25, 0.0, -0.5, -0.75]


def turns_of(lengths: list[int], rewards: tuple[float, ...], **fields: Any) -> Trajectory:
    """An episode whose turns have these lengths, with one context token before each turn."""
    mask = np.concatenate([np.arange(n + 1) > 0 for n in lengths])
    return Trajectory(7, 0, np.arange(len(mask)), mask, turn_rewards=rewards, **fields)


def test_by_turn_each_token_has_what_its_turn_and_later_ones_earn():
    """The returns by hand are (1.75, 1.5), (0.5) and (0, 0.5 - 1.25). The third response is truncated, so it earns 0 in
    all. The means are 0.75 for turn 1 and 1.25 / 3 for turn 2, where the second response counts with its only turn."""
    batch = [
        turns_of([2, 1], (0.25, 0.5)),
        turns_of([1], (0.5,)),
        turns_of([1, 2], (0.75, 0.5), finish_reason="length"),
    ]
    settings = AlgorithmConfig(truncated_responses="zero-reward")
    scored = with_rewards(
        batch, [Score(1.0), Score(0.0), Score(0.0)], 3, settings, "turn", most_tokens=16
    )
    second = [1.5 - 1.25 / 3, -0.75 - 1.25 / 3]
    assert [t.advantage for t in scored] == [1.0, -0.25, -0.75]
    assert [t.advantages.tolist() for t in scored] == [
        pytest.approx([1.0, 1.0, second[0]]),
        [-0.25],
        pytest.approx([-0.75, second[1], second[1]]),
    ]
    assert scored[0].advantages_by_turn == pytest.approx([1.0, second[0]])
    with pytest.raises(ValueError, match=mentioning(1, "turns", 2)):
        with_rewards([turns_of([1, 1], (0.5,))], [Score(0.0)], 1, settings, "turn", most_tokens=16)


def test_advantages_of_turns_are_of_the_configured_kind():
    """The returns by hand are (1, 0.75) and (0, 0.5). Leave-one-out compares each return with the other response's."""
    batch = [turns_of([1, 1], (0.25, 0.75)), turns_of([1, 1], (-0.5, 0.5))]
    leave_one_out = AlgorithmConfig(advantage="leave-one-out")
    scored = with_rewards(batch, [Score(0.0)] * 2, 2, leave_one_out, "turn", most_tokens=16)
    assert [t.advantages_by_turn for t in scored] == [[1.0, 0.25], [-1.0, -0.25]]


def test_turns_of_branches_are_paired_as_they_lie_and_not_by_time():
    """The first response sampled its second turn in a branch of its own, whose tokens stand third. This turn is
    compared with the third turn of the other response. The returns in the order of the tokens are (0.7, 0.4, 0.6) and
    (0.3, 0.3, 0.1)."""
    branched = turns_of([1, 1, 1], (0.1, 0.4, 0.2), turn_times=(0, 2, 1))
    straight = turns_of([1, 1, 1], (0.0, 0.2, 0.1))
    settings = AlgorithmConfig()
    scored = with_rewards(
        [branched, straight], [Score(0.0)] * 2, 2, settings, "turn", most_tokens=16
    )
    assert scored[0].advantages_by_turn == pytest.approx([0.2, 0.05, 0.25])
    assert scored[1].advantages_by_turn == pytest.approx([-0.2, -0.05, -0.25])


def test_a_group_of_equal_rewards_may_differ_in_its_turns():
    batch = [turns_of([1, 1], (1.0, 0.0)), turns_of([1, 1], (0.0, 1.0))]
    flat = {}
    for credit in ("turn", "trajectory"):
        group = with_rewards(batch, [Score(0.0)] * 2, 2, AlgorithmConfig(), credit, most_tokens=16)
        assert GroupRow.of([Outline.of(t) for t in group]) == GroupRow.of(group)
        flat[credit] = GroupRow.of(group).flat
    # The second turns earned 0 and 1.
    assert flat == {"turn": False, "trajectory": True}


@pytest.mark.parametrize("environment", ["single-turn", "EchoingText"])
def test_rewards_and_environments_know_the_thought_that_the_prompt_opens(environment):
    """The environment that echoes returns the turn's text as the text to score, as many agents do."""
    engine = Engine({0: ["8", "Hm.</think>8"]})
    engine.tokenizer = tiny_tokenizer()
    engine.tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    opening = engine.tokenizer("<think>\n")["input_ids"]
    problem = replace(PROBLEM, prompt_ids=(*PROBLEM.prompt_ids, *opening))
    responses = []
    for _ in range(2):
        (response,), _ = play(engine, environment, problem=problem)
        responses.append(response)
    texts = [response.scored_text for response in responses]
    assert [(text.open_thought, text.answer) for text in texts] == [
        ("<think>\n", ""),
        ("<think>\n", "8"),
    ]
    if environment == "EchoingText":
        assert [response.turn_rewards for response in responses] == [(-1.0,), (1.0,)]


def test_a_failed_episode_has_no_reward_and_one_that_is_not_scored_is_not_put_to_the_rewards():
    job = GenerationJob([PROBLEM], 3, SamplingParams(4))
    right = Trajectory.of_response([1], [2], text="= 8")
    scores: dict[Any, Any] = {}
    with Scorer(RewardConfig(name="exact_integer")) as scorer:
        on_response = score_on_arrival(scorer, job, scores)
        on_response((0, 0), right)
        on_response((0, 1), replace(right, wants_score=False))
        failed = Trajectory.of_response([1], [], finish_reason="failed", reason="x: gone")
        on_response((0, 2), failed)
        results = [scores[0, sample].result() for sample in range(3)]
    assert [score.value for score in results[:2]] == [1.0, 0.0]
    assert [score.unavailable for score in results] == [None, None, "reward environment: x: gone"]


# --- the table of environments, and the environments of this package


def first_step(environment: Any, turn: str) -> Step:
    """Return the answer of a new episode to its first turn."""

    async def work() -> Step:
        await environment.reset(PROBLEM)
        return await environment.step(Turn(turn, (1,)))

    return asyncio.run(work())


def test_rewards_are_an_environment_of_one_turn():
    assert first_step(SingleTurn(), "3+5=8") == Step(done=True, is_scored=True)


BY_KIND: dict[str, Any] = {
    "environments": {
        "calc": {"name": "calculator", "options": {"call": "!"}},
        "one": {"name": "single-turn"},
    },
    "column": "kind",
}


@pytest.mark.parametrize(("kind", "turns"), [("calc", 2), ("one", 1)])
def test_a_problem_names_its_environment(kind, turns):
    check_environment("by-problem", BY_KIND)
    engine = Engine({0: ["! 3+5", "= 8"]})
    problem = replace(PROBLEM, metadata={"kind": kind})
    (t,), episodes = play(engine, "by-problem", problem=problem, **BY_KIND)
    assert (t.turns, t.finish_reason, t.wants_score) == (turns, "stop", True)
    assert not episodes.faults.total()


def test_environments_by_problem_make_prompts_where_one_of_them_does():
    agent = {"name": "agent", "options": {"agent": f"{PLANTED}:nothing"}}
    assert not makes_prompts("by-problem", BY_KIND)
    with_agent = {"environments": {**BY_KIND["environments"], "agent": agent}}
    assert makes_prompts("by-problem", with_agent)
    assert makes_prompts("agent", {"agent": "true"})
    assert not makes_prompts(None, {})


@pytest.mark.parametrize(
    ("environments", "words"),
    [
        ({}, "environments"),
        ({"a": {"options": {}}}, "environments.a"),
        ({"a": {"name": "calculator", "option": {}}}, "environments.a"),
        ({"a": {"name": "calculator", "options": {"cal": "!"}}}, "'cal'"),
        ({"a": {"name": "abacus"}}, "'abacus'"),
        ({"a": {"name": "by-problem"}}, "by-problem"),
    ],
)
def test_settings_that_are_no_environments_are_refused(environments, words):
    with pytest.raises(ValueError, match=mentioning(words)):
        check_environment("by-problem", {"environments": environments})


def test_the_calculator_answers_calls_and_leaves_the_rest_to_the_rewards():
    assert first_step(Calculator(), "? 3 + 5") == Step("8")
    assert first_step(Calculator(call_reward=0.25), "well ? 3*(2-5)") == Step("-9", 0.25)
    assert first_step(Calculator(call_reward=0.25), "? 3 +") == Step("error")
    assert first_step(Calculator(), "= 8") == Step(done=True, is_scored=True)


@pytest.mark.parametrize(
    "expression",
    ["", "2**99999", "1/2", "x", "__import__('os')", "9" * 31, "1" * 201, "(" * 150, "True", "1;2"],
)
def test_the_calculator_works_out_nothing_else(expression):
    with pytest.raises(ValueError, match=r"."):
        calculate(expression)
    assert calculate("-3 * (4 - 2)") == -6


def test_names_and_options_are_checked_before_a_run():
    assert find_environment("calculator") is Calculator
    check_environment("calculator", {"call": "!"})
    check_environment(None, {})
    with pytest.raises(
        ValueError,
        match=mentioning("'abacus'", "agent", "calculator", "over-http", "python", "single"),
    ):
        find_environment("abacus")
    with pytest.raises(ValueError, match=mentioning("'cal'", "calculator")):
        check_environment("calculator", {"cal": "!"})
    with pytest.raises(
        ValueError, match=mentioning("url", "'localhost:30020'", "http://host:port")
    ):
        check_environment("over-http", {"url": "localhost:30020"})


@pytest.mark.parametrize(
    ("value", "error"), [({"reward": float("nan")}, ValueError), ({"observation": 3}, TypeError)]
)
def test_a_step_holds_text_and_a_number(value, error):
    with pytest.raises(error, match=r"expected (text|a finite number)"):
        Step(**value)


def test_a_worker_that_is_not_there_is_a_fault():
    async def work() -> None:
        pool = EnvironmentPool(EnvironmentSpec("no_such_module:X", {}, 5.0), 1)
        environment = await pool.open()
        try:
            await environment.reset(PROBLEM)
        finally:
            await environment.close()
            pool.close()

    with pytest.raises(EnvironmentFaultError, match=mentioning(1, "'no_such_module'")):
        asyncio.run(work())


def test_a_process_that_cannot_be_started_is_a_fault_and_its_place_stays_free(monkeypatch):
    def fail(spec: EnvironmentSpec) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    async def work() -> None:
        pool = EnvironmentPool(EnvironmentSpec("single-turn", {}, 5.0), 1)
        places = pool._lone_slots._value
        monkeypatch.setattr(workers, "EnvironmentWorker", fail)
        for alone in (False, True):
            with pytest.raises(EnvironmentFaultError, match="Too many open files"):
                await pool.open(alone=alone)
        assert pool._lone_slots._value == places

    asyncio.run(work())


def test_a_closed_pool_starts_no_process(monkeypatch):
    class Lone:
        kills: ClassVar[list[EnvironmentPool]] = []

        def __init__(self, spec: EnvironmentSpec) -> None:
            self.episodes = itertools.count()

        def kill(self) -> None:
            # The event loop's thread removes a worker that has ended.
            pool._lone_workers.discard(next(iter(pool._lone_workers)))
            self.kills.append(pool)

    async def work() -> None:
        for _ in range(2):
            await pool.open(alone=True)
        pool.close()
        assert len(Lone.kills) == 2
        for alone in (False, True):
            with pytest.raises(EnvironmentFaultError, match="closed"):
                await pool.open(alone=alone)

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    pool = EnvironmentPool(EnvironmentSpec("single-turn", {}, 5.0), 1)
    monkeypatch.setattr(workers, "EnvironmentWorker", Lone)
    asyncio.run(work())


def test_a_step_ends_before_its_environment_is_closed():
    events: list[str] = []

    class Slow:
        async def close(self) -> None:
            events.append("closed")

    async def step() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            events.append("step ended")

    async def work() -> None:
        host = object.__new__(workers.EnvironmentHost)
        host._environments = cast("dict[int, Environment]", {0: Slow()})
        host._tasks = {0: asyncio.create_task(step())}
        await asyncio.sleep(0)
        await host._close(0)

    asyncio.run(work())
    assert events == ["step ended", "closed"]
