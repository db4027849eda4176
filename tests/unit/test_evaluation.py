"""Evaluation on one rank with a scripted engine: what it asks for, when it scores, and avg@k by hand."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_dppo.config.schema import AlgorithmConfig, EvaluationConfig, TrainConfig
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.engine.protocol import SamplingParams
from megatron_dppo.fleet.generation import GenerationJob, SamplingSeeds
from megatron_dppo.loop.evaluation import evaluate
from megatron_dppo.loop.recorder import SampleMaker
from megatron_dppo.loop.scoring import ScoredGeneration
from megatron_dppo.rewards.verifier import Verifier, VerifierError
from tests.unit.config_files import minimal

TOPOLOGY: Any = SimpleNamespace(is_leader=True, dp_rank=0, dp_size=1)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def response(problem: Problem, sample: int, text: str, **how: Any) -> Trajectory:
    return Trajectory.of_response(
        problem.prompt_ids, [3], problem_id=problem.problem_id, sample_index=sample, text=text,
        columns={"rollout_log_probs": [-0.5], "weight_version": [0]}, **how,
    )  # fmt: skip


class Engine:
    """Answers the sample's number; its last response comes when all others are scored."""

    def __init__(self, scored: threading.Semaphore) -> None:
        self.jobs: list[GenerationJob] = []
        self.descriptions: list[str] = []
        self._scored = scored

    def start(self, job: GenerationJob, description: str, on_response: Any, order: int) -> Any:
        self.jobs.append(job)
        self.descriptions.append(description)
        return SimpleNamespace(job=job, on_response=on_response)

    def finish(self, generation: Any, held: int | None = None) -> list[Trajectory]:
        assert held is None  # evaluations run with the weights that the fleet has
        job = generation.job
        answers = {
            (i, s): response(p, s, str(s))
            for i, p in enumerate(job.problems)
            for s in range(job.group_size)
        }
        *first, last = reversed(answers.items())
        for key, answer in first:
            generation.on_response(key, answer)
        for _ in first:
            assert self._scored.acquire(timeout=60), "no response was scored before the last came"
        generation.on_response(*last)
        return list(answers.values())


class Told(Verifier):
    """Says of every response that it is scored."""

    def __init__(self) -> None:
        super().__init__("exact_integer", 5.0, 1)
        self.scored = threading.Semaphore(0)

    def submit(self, pair: Any) -> Any:
        future = super().submit(pair)
        future.add_done_callback(lambda _: self.scored.release())
        return future


def settings(folder: Path, **evaluation: Any) -> TrainConfig:
    tree = minimal(folder)
    tree["evaluation"] = {"samples_per_prompt": 4, **evaluation}
    return TrainConfig.model_validate(tree)


def sections(config: TrainConfig) -> tuple[EvaluationConfig, GenerationJob, AlgorithmConfig]:
    """What an evaluation of a run goes by."""
    sampling = SamplingParams(config.rollout.max_response_tokens)
    seeds = SamplingSeeds(config.run.seed, "", ()) if config.engine.deterministic else None
    return config.evaluation, GenerationJob((), 2, sampling, seeds=seeds), config.algorithm


def sample_maker(problems: list[Problem]) -> SampleMaker:
    data: Any = SimpleNamespace(
        train=SimpleNamespace(problems=problems), text_of=lambda ids: " ".join(map(str, ids))
    )
    return SampleMaker("math_verify", data, zeroes_truncated=True)


def test_each_response_has_a_seed_of_its_own_where_the_run_is_deterministic(tmp_path: Path) -> None:
    tree = minimal(tmp_path)
    tree["evaluation"] = {"samples_per_prompt": 2}
    tree["engine"] = {"deterministic": True}
    config, verifier = TrainConfig.model_validate(tree), Told()
    engine: Any = Engine(verifier.scored)
    sets = {name: [Problem(i, "p", "0", (7,)) for i in range(3)] for name in ("one", "two")}
    maker = sample_maker([*sets["one"], *sets["two"]])
    for step in (1, 2):
        evaluate(step, sets, *sections(config), TOPOLOGY, engine, verifier, maker)
    seeds = {r.sampling.seed for job in engine.jobs for r in job.requests()}
    assert len(seeds) == 2 * 2 * 3 * 2
    assert None not in seeds


def test_responses_are_scored_while_others_are_generated(tmp_path: Path) -> None:
    verifier = Told()
    engine: Any = Engine(verifier.scored)
    problems = [
        Problem(0, "p", "0", (7, 8)),
        Problem(1, "p", "3", (9,)),
        Problem(2, "p", "5", (9,)),
    ]
    found, samples = evaluate(
        6, {"test": problems[:2], "hard": problems[1:]}, *sections(settings(tmp_path, top_p=0.5)), TOPOLOGY,
        engine, verifier, sample_maker(problems),
    )  # fmt: skip
    # Of the samples 0 to 3 one answers problem 0, one problem 1, none problem 2.
    assert found == {"evaluation/test/accuracy": 2 / 8, "evaluation/hard/accuracy": 1 / 8}
    assert [s.set for s in samples] == ["test"] * 4 + ["hard"] * 4
    for name in ("test", "hard"):  # what earned something is among them
        assert 1.0 in {s.reward for s in samples if s.set == name}
    assert engine.descriptions == ["evaluate on test", "evaluate on hard"]
    assert [list(job.problems) for job in engine.jobs] == [problems[:2], problems[1:]]
    assert [job.group_size for job in engine.jobs] == [4, 4]
    assert {(job.sampling.temperature, job.sampling.top_p) for job in engine.jobs} == {(0.7, 0.5)}


class Given:
    """An engine with given responses to one problem, which are told in reverse."""

    def __init__(self, responses: list[Trajectory]) -> None:
        self.responses = responses

    def start(self, job: GenerationJob, description: str, on_response: Any, order: int) -> Any:
        for sample, answer in reversed(list(enumerate(self.responses))):
            on_response((0, sample), answer)
        return SimpleNamespace(seconds=1.5)

    def finish(self, generation: Any, held: int | None) -> list[Trajectory]:
        self.held = held
        return self.responses


def scored(responses: list[Trajectory], folder: Path, **algorithm: Any) -> list[Trajectory]:
    job = GenerationJob([PROBLEM], len(responses), None)  # type: ignore[arg-type]
    engine: Any = Given(responses)
    generation = ScoredGeneration(engine, Verifier("exact_integer", 5.0, 1), job, "")
    generation.wait(3)
    assert (engine.held, generation.seconds) == (3, 1.5)
    chosen = settings(folder).algorithm.model_copy(update=algorithm)
    return generation.scored(chosen)


PROBLEM = Problem(0, "p", "1", (7,))


def test_scores_belong_to_their_responses_whatever_comes_first(tmp_path: Path) -> None:
    found = scored([response(PROBLEM, s, text) for s, text in enumerate("0110")], tmp_path)
    assert [t.reward for t in found] == [0, 1, 1, 0]
    assert [t.advantage for t in found] == [-0.5, 0.5, 0.5, -0.5]


def test_a_truncated_response_earns_nothing_where_the_run_wants_it(tmp_path: Path) -> None:
    cut = [response(PROBLEM, 0, "1", finish_reason="length"), response(PROBLEM, 1, "1")]
    assert [t.reward for t in scored(cut, tmp_path, truncated_responses="zero-reward")] == [0, 1]
    assert [t.reward for t in scored(cut, tmp_path, truncated_responses="as-verified")] == [1, 1]


def test_a_refusal_of_the_reward_ends_the_evaluation(tmp_path: Path) -> None:
    verifier = Verifier("exact_integer", 5.0, 1)
    unanswerable = replace(PROBLEM, answer="one")
    engine: Any = Given([response(unanswerable, s, "1") for s in range(4)])
    with pytest.raises(VerifierError, match="reward exact_integer: the answer is 'one'"):
        evaluate(
            1, {"test": [unanswerable]}, *sections(settings(tmp_path)), TOPOLOGY, engine, verifier,
            sample_maker([unanswerable]),
        )  # fmt: skip


def test_a_generation_frees_its_responses_with_itself() -> None:
    job = GenerationJob([PROBLEM], 1, None)  # type: ignore[arg-type]

    class Keeping:
        def start(self, job: GenerationJob, description: str, on_response: Any, order: int) -> Any:
            return SimpleNamespace(on_response=on_response)

    engine: Any = Keeping()
    gc.disable()
    try:
        generation = ScoredGeneration(engine, Verifier("exact_integer", 5.0, 1), job, "")
        alive = weakref.ref(generation)
        del generation
        assert alive() is None
    finally:
        gc.enable()
