"""Evaluation on one rank with a scripted engine: the jobs that it starts, when it scores, and avg@k by hand."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.config.data_schema import RewardConfig
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.thoughts import TurnText
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.engine.protocol import SamplingParams
from megatron_dppo.engine.turn_text import ResponseReader
from megatron_dppo.fleet.generation import GenerationJob, SamplingSeeds
from megatron_dppo.loop.credit import with_rewards
from megatron_dppo.loop.engine_session import WeightsLostError
from megatron_dppo.loop.evaluation import Evaluations, Evaluator, MixedVersionsError
from megatron_dppo.loop.recorder import Recorder
from megatron_dppo.loop.sample_maker import SampleMaker
from megatron_dppo.loop.scorer import PendingScore, Scorer
from megatron_dppo.loop.scoring import ScoredGeneration
from megatron_dppo.metrics.phase_timer import PhaseTimer
from megatron_dppo.metrics.records import read_records, read_step_lines
from megatron_dppo.metrics.summary import RunInfo
from megatron_dppo.rewards import RewardUnavailableError
from megatron_dppo.rewards.verifier import Score, VerifierError
from tests.generations import RecordedStarts
from tests.unit.config_files import minimal_config

pytestmark = pytest.mark.usefixtures("one_rank")

EXACT = RewardConfig(name="exact_integer")
TOPOLOGY: Any = SimpleNamespace(is_leader=True, dp_rank=0, dp_size=1)


def response(problem: Problem, sample: int, text: str, version: int = 0, **how: Any) -> Trajectory:
    return Trajectory.of_response(
        problem.prompt_ids, [3], problem_id=problem.problem_id, sample_index=sample, text=text,
        columns={"rollout_log_probs": [-0.5], "weight_version": [version]}, **how,
    )  # fmt: skip


class AnsweringEngine(RecordedStarts):
    """An engine whose responses ``answer`` makes, by the problem, the number of the sample and the generation.

    A generation has the ``version`` of the engine at its start. Its responses arrive in reverse order: with
    ``at_start`` when it starts, otherwise when it is finished. ``finished``: trainer version, ``mixes`` and order of
    each generation that was finished. ``under_way``: the generations that were neither finished nor dropped."""

    def __init__(
        self, answer: Callable[[Problem, int, Any], Trajectory], *, at_start: bool = False
    ) -> None:
        super().__init__()
        self.answer, self.at_start, self.version = answer, at_start, 0
        self.finished: list[tuple[Any, bool, int]] = []
        self.under_way: list[Any] = []

    def start(self, *arguments: Any, **options: Any) -> Any:
        generation = super().start(*arguments, **options)
        generation.version = self.version
        self.under_way.append(generation)
        if self.at_start:
            self.respond(generation)
        return generation

    def respond(self, generation: Any) -> None:
        """Make the responses that the generation does not have yet."""
        job = generation.job
        keys = [(i, s) for i in range(len(job.problems)) for s in range(job.group_size)]
        missing_keys = [key for key in keys if key not in generation.done]
        for i, sample in missing_keys:
            generation.done[i, sample] = self.answer(job.problems[i], sample, generation)
        for key in reversed(missing_keys):
            self.send(generation, key)

    def send(self, generation: Any, key: tuple[int, int]) -> None:
        generation.on_response(key, generation.done[key])

    def finish(self, generation: Any, trainer_version: Any, *, mixes: bool) -> list[Trajectory]:
        if not self.at_start:
            self.respond(generation)
        self.finished.append((trainer_version, mixes, generation.order))
        self.under_way.remove(generation)
        return [generation.done[key] for key in sorted(generation.done)]

    def drop(self, generation: Any) -> None:
        self.under_way.remove(generation)


class Engine(AnsweringEngine):
    """An engine that answers each request with the number of its sample.

    The last response arrives only after the scorer has released ``scored`` for each of the others."""

    def __init__(self, scored: threading.Semaphore) -> None:
        super().__init__(lambda p, sample, g: response(p, sample, str(sample), g.version))
        self._scored = scored

    def send(self, generation: Any, key: tuple[int, int]) -> None:
        if key == (0, 0):
            for _ in range(len(generation.done) - 1):
                assert self._scored.acquire(timeout=60), "a response was not scored before the last"
        super().send(generation, key)

    def finish(self, generation: Any, trainer_version: Any, *, mixes: bool) -> list[Trajectory]:
        assert not mixes
        assert trainer_version == generation.version
        assert generation.order == 0  # evaluations come before any batch
        return super().finish(generation, trainer_version, mixes=mixes)


class CountingScorer(Scorer):
    """A scorer that releases the semaphore ``scored`` once for each scored response."""

    def __init__(self) -> None:
        super().__init__(EXACT)
        self.scored = threading.Semaphore(0)

    def submit(self, problem: Problem, text: TurnText) -> PendingScore:
        pending = super().submit(problem, text)
        for future in pending.scores.values():
            future.add_done_callback(lambda _: self.scored.release())
        return pending


def settings(folder: Path, **evaluation: Any) -> TrainConfig:
    return minimal_config(folder, evaluation={"samples_per_prompt": 4, **evaluation})


def sample_maker(problems: list[Problem]) -> SampleMaker:
    def text_of(ids: Any, /, *, special: bool = True) -> str:
        return " ".join(map(str, ids))

    data: Any = SimpleNamespace(
        train=SimpleNamespace(problems=problems),
        text_of=text_of,
        reader=ResponseReader(text_of, {}),
    )
    return SampleMaker(RewardConfig(), data, zeroes_truncated=True)


PROBLEM = Problem(0, "p", "1", (7,))


def evaluator_of(
    engine: Any, config: TrainConfig, scorer: Scorer, sets: dict[str, list[Problem]] | None = None
) -> Evaluator:
    """Return an evaluator of ``sets``, or of PROBLEM, on the only rank of a run."""
    sets = sets or {"test": [PROBLEM]}
    sampling = SamplingParams(config.rollout.max_response_tokens)
    seeds = SamplingSeeds(config.run.seed, "", ()) if config.engine.deterministic else None
    template = GenerationJob((), 2, sampling, seeds=seeds)
    maker = sample_maker([problem for problems in sets.values() for problem in problems])
    return Evaluator(
        sets, config.evaluation, template, config.algorithm, TOPOLOGY, engine, scorer, maker
    )


def test_each_response_has_a_seed_of_its_own_where_the_run_is_deterministic(tmp_path: Path) -> None:
    evaluation, engine_section = {"samples_per_prompt": 2}, {"deterministic": True}
    config = minimal_config(tmp_path, evaluation=evaluation, engine=engine_section)
    scorer = CountingScorer()
    engine = Engine(scorer.scored)
    sets = {name: [Problem(i, "p", "0", (7,)) for i in range(3)] for name in ("one", "two")}
    evaluator = evaluator_of(engine, config, scorer, sets)
    for step in (1, 2):
        engine.version = step
        evaluator.finish(evaluator.begin(step), step)
    seeds = {r.sampling.seed for job in engine.jobs for r in job.requests()}
    assert len(seeds) == 2 * 2 * 3 * 2
    assert None not in seeds


def test_responses_are_scored_while_others_are_generated(tmp_path: Path) -> None:
    scorer = CountingScorer()
    engine = Engine(scorer.scored)
    problems = [
        Problem(0, "p", "0", (7, 8)),
        Problem(1, "p", "3", (9,)),
        Problem(2, "p", "5", (9,)),
    ]
    config = settings(tmp_path, top_p=0.5)
    # A length penalty changes only training rewards, so the accuracy must be without it.
    penalty = {"length_penalty": 7.0, "overlong_tokens": 3}
    with_penalty = config.algorithm.model_copy(update=penalty)
    config = config.model_copy(update={"algorithm": with_penalty})
    sets = {"test": problems[:2], "hard": problems[1:]}
    evaluator = evaluator_of(engine, config, scorer, sets)
    engine.version = 6
    accuracies, samples = evaluator.finish(evaluator.begin(6), 6)
    # The responses are 0 to 3. One of them answers problem 0, one problem 1 and none problem 2.
    assert accuracies == {"evaluation/test/accuracy": 2 / 8, "evaluation/hard/accuracy": 1 / 8}
    assert [s.set for s in samples] == ["test"] * 4 + ["hard"] * 4
    # The samples that are written include the correct response.
    for name in ("test", "hard"):
        assert 1.0 in {s.reward for s in samples if s.set == name}
    assert engine.descriptions == ["evaluate on test", "evaluate on hard"]
    assert [list(job.problems) for job in engine.jobs] == [problems[:2], problems[1:]]
    assert [job.group_size for job in engine.jobs] == [4, 4]
    assert {(job.sampling.temperature, job.sampling.top_p) for job in engine.jobs} == {(0.7, 0.5)}


@pytest.mark.parametrize(("limit", "expected"), [({"max_response_tokens": 9}, 9), ({}, 64)])
def test_an_evaluation_has_its_own_limit_or_the_rollouts(
    tmp_path: Path, limit: dict[str, int], expected: int
) -> None:
    scorer, config = CountingScorer(), settings(tmp_path, **limit)
    assert config.rollout.max_response_tokens == 64
    engine = Engine(scorer.scored)
    evaluator_of(engine, config, scorer).begin(0)
    assert [job.sampling.max_new_tokens for job in engine.jobs] == [expected]


def ready_engine(responses: list[Trajectory]) -> AnsweringEngine:
    """Return an engine that already has the responses to one problem."""
    return AnsweringEngine(lambda problem, sample, generation: responses[sample], at_start=True)


def score(responses: list[Trajectory], folder: Path, **algorithm: Any) -> list[Trajectory]:
    job = GenerationJob([PROBLEM], len(responses), SamplingParams(4))
    engine: Any = ready_engine(responses)
    generation = ScoredGeneration(engine, Scorer(EXACT), job, "")
    generation.wait(3)
    assert ([version for version, *_ in engine.finished], generation.seconds) == ([3], 1.0)
    changed_algorithm = settings(folder).algorithm.model_copy(update=algorithm)
    return generation.scored(changed_algorithm)


def test_scores_belong_to_their_responses_whatever_comes_first(tmp_path: Path) -> None:
    responses = [response(PROBLEM, s, text) for s, text in enumerate("0110")]
    trajectories = score(responses, tmp_path)
    assert [t.reward for t in trajectories] == [0, 1, 1, 0]
    assert [t.advantage for t in trajectories] == [-0.5, 0.5, 0.5, -0.5]


def test_a_truncated_response_earns_nothing_where_the_run_wants_it(tmp_path: Path) -> None:
    responses = [response(PROBLEM, 0, "1", finish_reason="length"), response(PROBLEM, 1, "1")]
    for setting, rewards in (("zero-reward", [0, 1]), ("as-verified", [1, 1])):
        trajectories = score(responses, tmp_path, truncated_responses=setting)
        assert [t.reward for t in trajectories] == rewards


def test_a_refusal_of_the_reward_ends_the_evaluation(tmp_path: Path) -> None:
    unanswerable = replace(PROBLEM, answer="one")
    engine = ready_engine([response(unanswerable, s, "1") for s in range(4)])
    sets = {"test": [unanswerable]}
    evaluator = evaluator_of(engine, settings(tmp_path), Scorer(EXACT), sets)
    evaluation = evaluator.begin(0)
    with pytest.raises(VerifierError, match=r"reward exact_integer: .*'one'"):
        evaluator.finish(evaluation, 0)


class WordEngine(AnsweringEngine):
    """An engine that answers the requests for one problem with ``words``, one after the other."""

    def __init__(self, words: list[str]) -> None:
        remaining_words = iter(words)
        super().__init__(lambda p, s, g: response(p, s, next(remaining_words)), at_start=True)

    def start(self, *arguments: Any, **options: Any) -> Any:
        generation = super().start(*arguments, **options)
        generation.timed_out = 2
        return generation


def generate_with_replacements(words: list[str], folder: Path, rounds: int = 2) -> tuple[Any, ...]:
    config = RewardConfig(
        name="tests.unit.planted_rewards:unlucky", attempts=1, workers=1, max_replacements=rounds
    )
    engine: Any = WordEngine(words)
    job = GenerationJob([PROBLEM], 3, SamplingParams(4), seeds=SamplingSeeds(1, "step 4", (0,)))
    with Scorer(config) as scorer:
        generation = ScoredGeneration(engine, scorer, job, "step 4: generate", 7)
        generation.wait(3, mixes=False)
        trajectories = generation.scored(settings(folder).algorithm, version=3, mixes=False)
    assert set(engine.finished) == {(3, False, 7)}
    return trajectories, engine, scorer, generation


def test_a_response_whose_reward_cannot_be_had_is_replaced_by_another(tmp_path: Path) -> None:
    trajectories, engine, scorer, generation = generate_with_replacements(
        ["abcde", "bad", "a", "bad", "ab"], tmp_path
    )
    assert [(t.text, t.reward) for t in trajectories] == [("abcde", 5), ("ab", 2), ("a", 1)]
    # A response without a reward does not count as 0: the mean is over the three rewards 5, 2 and 1.
    assert [t.advantage for t in trajectories] == pytest.approx([7 / 3, -2 / 3, -5 / 3])
    assert [t.sample_index for t in trajectories] == [0, 1, 2]
    assert engine.descriptions == [
        "step 4: generate",
        "step 4: generate, replacement 1",
        "step 4: generate, replacement 2",
    ]
    # Each replacement has another seed: a deterministic engine would sample the same response again.
    assert len({job.seeds.of(0, 1) for job in engine.jobs}) == 3
    assert scorer.failures["reward/replaced"] == 2
    assert (generation.seconds, generation.timed_out) == (3.0, 6)
    assert generation.components.means() == {"reward/component/length": 8 / 3}


def test_a_run_ends_where_replacements_have_no_reward_either(tmp_path: Path) -> None:
    with pytest.raises(RewardUnavailableError, match=r"1 responses .*reward unlucky: .*\(after 1 "):
        generate_with_replacements(["a", "bad", "c", "bad"], tmp_path, rounds=1)


class LosingEngine(WordEngine):
    """An engine that loses its weights while it samples a replacement."""

    def finish(self, generation: Any, trainer_version: Any, *, mixes: bool) -> list[Trajectory]:
        if len(self.jobs) > 1:
            raise WeightsLostError("killed")
        return super().finish(generation, trainer_version, mixes=mixes)


def test_an_evaluation_that_is_lost_with_a_replacement_leaves_nothing_under_way(
    tmp_path: Path,
) -> None:
    name = "tests.unit.planted_rewards:unlucky"
    engine = LosingEngine(["bad", "a", "b", "c"])
    config = settings(tmp_path, samples_per_prompt=3)
    with Scorer(RewardConfig(name=name, attempts=1, workers=1, max_replacements=1)) as scorer:
        evaluator = evaluator_of(engine, config, scorer)
        with pytest.raises(WeightsLostError):
            evaluator.finish(evaluator.begin(5), 6)
    assert engine.descriptions == ["evaluate on test", "evaluate on test, replacement 1"]
    assert engine.under_way == []


def test_a_truncated_response_never_gains_by_it(tmp_path: Path) -> None:
    """A truncated response gets 0 in place of a positive reward. It keeps a negative reward: 0 would be more."""
    truncated = response(PROBLEM, 0, "x", finish_reason="length")
    algorithm = settings(tmp_path).algorithm
    zeroing = algorithm.model_copy(update={"truncated_responses": "zero-reward"})
    for value, reward in ((-3.0, -3.0), (2.0, 0.0)):
        (trajectory,) = with_rewards([truncated], [Score(value)], 1, zeroing, most_tokens=16)
        assert trajectory.reward == reward


def test_a_generation_frees_its_responses_with_itself() -> None:
    job = GenerationJob([PROBLEM], 1, SamplingParams(4))
    engine: Any = RecordedStarts()
    gc.disable()
    try:
        generation = ScoredGeneration(engine, Scorer(EXACT), job, "")
        alive = weakref.ref(generation)
        del generation
        assert alive() is None
    finally:
        gc.enable()


# --- when a run evaluates, and which record gets the figures


class LoggingEngine(AnsweringEngine):
    """An engine that records its calls in ``log``.

    ``right``: how many of 4 responses to problem 0 are correct. ``lost``: whether ``finish`` finds that the engine has
    lost the weights."""

    def __init__(self) -> None:
        super().__init__(lambda p, s, g: response(p, s, "1" if s < g.right else "0", g.version))
        self.right, self.lost = 0, False
        self.log: list[str] = []

    def start(self, *arguments: Any, **options: Any) -> Any:
        self.log.append(f"begin {self.version}")
        generation = super().start(*arguments, **options)
        generation.right = self.right
        return generation

    def finish(self, generation: Any, trainer_version: int, *, mixes: bool) -> list[Trajectory]:
        self.log.append(f"finish {generation.version}, trainer {trainer_version}")
        if self.lost and not mixes and trainer_version != generation.version:
            raise WeightsLostError(f"weight version {generation.version} is lost: killed")
        return super().finish(generation, trainer_version, mixes=mixes)

    def drop(self, generation: Any) -> None:
        super().drop(generation)
        self.log.append(f"drop {generation.version}")


class Run:
    """Steps of a run as ``loop.run`` takes them, with ``steps`` = 5 and ``evaluation.every`` = 2."""

    def __init__(self, folder: Path, *, background: bool) -> None:
        evaluation = {"samples_per_prompt": 4, "every": 2}
        config = minimal_config(folder, run={"steps": 5}, evaluation=evaluation)
        self.engine = LoggingEngine()
        self.folder, self.timer = folder / "run", PhaseTimer()
        info = RunInfo.of_config(config.model_dump())
        self.recorder = Recorder(config.run, info, 0, 0, evaluates=True)
        evaluator = evaluator_of(self.engine, config, Scorer(EXACT), {"sums": [PROBLEM]})
        self.evaluations = Evaluations(
            evaluator, self.recorder, self.timer, steps=5, background=background
        )

    def step(self, step: int) -> None:
        self.engine.log.append(f"train {step}")
        self.evaluations.before_update(step)
        self.engine.log.append(f"update to {step}")
        self.engine.version = step
        self.engine.right = step - 1
        figures = self.evaluations.after_update(step)
        self.recorder.write(step, {**figures, **self.timer.finish_step()})

    @property
    def accuracies(self) -> dict[int, float]:
        values = {r["step"]: r.get("evaluation/sums/accuracy") for r in read_records(self.folder)}
        return {step: value for step, value in values.items() if value is not None}  # type: ignore[misc]


def test_an_evaluation_goes_on_while_the_next_batch_is_trained_on(tmp_path: Path) -> None:
    """Version v answers v - 1 of 4 responses correctly. The row of step v gets this accuracy, although it is known only
    when a later step is trained."""
    run = Run(tmp_path, background=True)
    for step in (1, 2):
        run.step(step)
    assert run.accuracies == {}
    for step in (3, 4, 5):
        run.step(step)
    assert run.engine.log == [
        "train 1", "update to 1",
        "train 2", "update to 2", "begin 2",
        "train 3", "finish 2, trainer 3", "update to 3",
        "train 4", "update to 4", "begin 4",
        "train 5", "finish 4, trainer 5", "update to 5", "begin 5", "finish 5, trainer 5",
    ]  # fmt: skip
    assert run.accuracies == {2: 1 / 4, 4: 3 / 4, 5: 4 / 4}
    records = {r["step"]: r for r in read_records(run.folder)}
    assert list(records) == [1, 2, 3, 4, 5]
    # The time of the step that waited contains the wait. The row of the evaluated step has it as well.
    assert [s for s, r in records.items() if "time/evaluate_s" in r] == [3, 5]
    assert [s for s, r in records.items() if "evaluation/waited_s" in r] == [2, 4]
    assert [line["step"] for line in read_step_lines(run.folder / "samples.jsonl")] == (
        [2] * 4 + [4] * 4 + [5] * 4
    )


def test_a_synchronous_run_evaluates_before_it_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, background=False)
    for step in range(1, 6):
        run.step(step)
    waits = [line for line in run.engine.log if line.startswith(("finish", "update"))]
    assert waits == [
        "update to 1", "update to 2", "finish 2, trainer 2", "update to 3",
        "update to 4", "finish 4, trainer 4", "update to 5", "finish 5, trainer 5",
    ]  # fmt: skip
    assert run.accuracies == {2: 1 / 4, 4: 3 / 4, 5: 4 / 4}
    assert not any("evaluation/waited_s" in record for record in read_records(run.folder))


def test_weights_that_nobody_has_any_more_are_not_evaluated_but_the_next_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, background=True)
    for step in (1, 2):
        run.step(step)
    run.engine.lost = True
    run.step(3)
    expected = "weight version 2 is lost: killed; step 3 is evaluated instead of step 2"
    assert expected in caplog.text
    run.engine.lost = False
    for step in (4, 5):
        run.step(step)
    assert run.engine.log[5:9] == [
        "train 3", "finish 2, trainer 3", "drop 2", "update to 3",
    ]  # fmt: skip
    assert run.accuracies == {3: 2 / 4, 4: 3 / 4, 5: 4 / 4}


def test_a_token_of_other_weights_is_refused(tmp_path: Path) -> None:
    engine = ready_engine([response(PROBLEM, s, "1", version=s // 3) for s in range(4)])
    evaluator = evaluator_of(engine, settings(tmp_path), Scorer(EXACT))
    evaluation = evaluator.begin(0)
    with pytest.raises(MixedVersionsError, match=r"step 0 .*\[0, 1\]"):
        evaluator.finish(evaluation, 0)
