"""Evaluation on held-out sets: avg@k, the mean reward over k responses to each problem of a set.

In a run that generates ahead the trainer doesn't wait for an evaluation: it begins right after the update to version v,
runs while the next batch is trained on, and is finished before the update after that, so that every token of it is of
version v. Its figures are added to the record of step v, which is still the last one then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from megatron_dppo.config.schema import AlgorithmConfig, EvaluationConfig
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.fleet.generation import GenerationJob
from megatron_dppo.loop.engine_session import EngineSession, WeightsLostError
from megatron_dppo.loop.ownership import own_positions
from megatron_dppo.loop.recorder import Recorder
from megatron_dppo.loop.sample_maker import SampleMaker, chosen
from megatron_dppo.loop.scorer import Scorer
from megatron_dppo.loop.scoring import ScoredGeneration
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.phase_timer import PhaseTimer
from megatron_dppo.metrics.samples import Sample
from megatron_dppo.system.errors import RunError
from megatron_dppo.trainer.collectives import all_gather_json
from megatron_dppo.trainer.topology import Topology
from megatron_dppo.trainer.watchdog import patience

log = logging.getLogger(__name__)


class MixedVersionsError(RunError):
    """An evaluation has tokens of other weights than those that it is of."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation under way of the policy after ``step`` steps. ``generations``: set -> this rank's part."""

    step: int
    generations: Mapping[str, ScoredGeneration]


def evaluation_job(
    template: GenerationJob,
    settings: EvaluationConfig,
    problems: Sequence[Problem],
    purpose: str,
    positions: Sequence[int],
) -> GenerationJob:
    """Return the job that generates ``settings.samples_per_prompt`` responses to each of ``problems``.

    Args:
        template: a job of the training; what ends a response holds here too, and so do the seeds.
        settings: k and the sampling.
        problems: of one held-out set.
        purpose: of the seeds.
        positions: of ``problems`` in the set.
    """
    sampling = replace(
        template.sampling,
        max_new_tokens=settings.max_response_tokens or template.sampling.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
    )
    seeds = template.seeds
    if seeds is not None:
        seeds = replace(seeds, purpose=purpose, positions=positions)
    samples, play = settings.samples_per_prompt, template.play
    return GenerationJob(problems, samples, sampling, seeds=seeds, play=play)


def without_length_penalties(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Return the settings under which an evaluation is scored: its accuracy is the mean of the rewards themselves."""
    return algorithm.model_copy(update={"overlong_tokens": 0, "length_penalty": 0.0})


@dataclass(frozen=True)
class Evaluator:
    """Generates and scores responses to every held-out problem.

    Attributes:
        sets: name -> problems.
        settings: k and the sampling (the paper's: temperature 0.7, top_p 0.95).
        template: of the training's jobs; what ends a response, and the seeds, hold here too.
        algorithm: says what a truncated response earns.
        topology: position of this rank; each leader takes its share of the problems.
        engine: servers that generate; None where there are no sets.
        scorer: scores each response as soon as it is there.
        samples: makes texts of a few responses to each set.
    """

    sets: Mapping[str, Sequence[Problem]]
    settings: EvaluationConfig
    template: GenerationJob
    algorithm: AlgorithmConfig
    topology: Topology
    engine: EngineSession | None
    scorer: Scorer
    samples: SampleMaker

    def begin(self, step: int) -> Evaluation:
        """Have the responses generated in the background, before those of any batch (order 0). Not collective.

        ``step``: that the policy has been trained for; the engine has its weights.
        """
        generations = {}
        for name in self.sets:
            assert self.engine is not None
            job, description = self._job(step, name), f"evaluate on {name}"
            generations[name] = ScoredGeneration(self.engine, self.scorer, job, description)
        return Evaluation(step, generations)

    def finish(
        self, evaluation: Evaluation, trainer_version: int
    ) -> tuple[dict[str, float], list[Sample]]:
        """Wait for the responses and their scores. Collective.

        ``trainer_version``: of the weights that the trainer holds by now.

        Returns:
            metric name -> avg@k or mean of a reward's component, and the samples; the same on every rank.

        Raises on every rank WeightsLostError where the whole fleet was lost, and the trainer has other weights by now;
        RunStoppedError, EngineUnavailableError; MixedVersionsError, a fault of the program.
        """
        try:
            return self._figures(evaluation, trainer_version)
        except WeightsLostError:
            for generation in evaluation.generations.values():
                generation.drop()
            raise

    def _figures(
        self, evaluation: Evaluation, trainer_version: int
    ) -> tuple[dict[str, float], list[Sample]]:
        """What ``finish`` returns."""
        for generation in evaluation.generations.values():
            generation.wait(trainer_version, mixes=False)
        accuracies: dict[str, float] = {}
        samples: list[Sample] = []
        versions: set[int] = set()
        for name, generation in evaluation.generations.items():
            accuracies[names.accuracy(name)], shown, versions_of_set = self._score(
                evaluation.step, name, generation, trainer_version
            )
            accuracies |= generation.components.means(name)
            samples += [shown[i] for i in chosen(shown, evaluation.step)]
            versions |= versions_of_set
        if versions - {evaluation.step}:
            raise MixedVersionsError(
                f"the evaluation of step {evaluation.step} has tokens of weight versions {sorted(versions)}"
            )
        return accuracies, samples

    def _job(self, step: int, name: str) -> GenerationJob:
        """This rank's share of a set."""
        positions = own_positions(range(len(self.sets[name])), self.topology)
        problems = [self.sets[name][p] for p in positions]
        purpose = f"evaluation on {name} after step {step}"
        return evaluation_job(self.template, self.settings, problems, purpose, positions)

    def _score(
        self, step: int, name: str, generation: ScoredGeneration, trainer_version: int
    ) -> tuple[float, list[Sample], set[int]]:
        """avg@k on a set, samples of every rank, and the versions of all tokens. Collective."""
        unpenalised = without_length_penalties(self.algorithm)
        scored = generation.scored(unpenalised, version=trainer_version, mixes=False)
        size = self.settings.samples_per_prompt
        repeated_problems = [p for p in generation.problems for _ in range(size)]
        of_rank = self.samples.of_evaluation(step, name, repeated_problems, scored)
        lines = [sample.to_json() for sample in of_rank]
        versions = sorted({span.weight_version for t in scored for span in t.version_spans})
        parts = all_gather_json([sum(t.reward for t in scored), len(scored), lines, versions])
        total, count = (sum(part[i] for part in parts) for i in range(2))
        shown = [Sample.from_json(line) for _, _, lines, _ in parts for line in lines]
        return total / count, shown, {version for *_, versions in parts for version in versions}


def last_due(step: int, every: int, steps: int) -> int:
    """The last step, up to ``step``, after which what comes ``every`` so many steps, and after the last one of a run of
    so many ``steps``, falls due."""
    return step if step == steps else step - step % every


@dataclass(eq=False)
class Evaluations:
    """The evaluations of a run: each when it is due, its figures in the record of its step. Every method is collective.

    One is under way at most. ``background``: trainers go on meanwhile, but after the last of ``steps``.
    """

    evaluator: Evaluator
    recorder: Recorder
    timer: PhaseTimer
    _: KW_ONLY
    steps: int
    background: bool
    _under_way: Evaluation | None = field(default=None, init=False)
    _missed: bool = field(default=False, init=False)

    def last_due(self, step: int) -> int:
        """The last step, up to ``step``, that an evaluation belongs to."""
        return last_due(step, self.evaluator.settings.every, self.steps)

    def measure(self, step: int) -> dict[str, float]:
        """Evaluate the policy after ``step`` steps, and wait for it: metric name -> avg@k."""
        return self._wait(self.evaluator.begin(step), step)

    def after_update(self, step: int) -> dict[str, float]:
        """The engine has the weights of ``step``: evaluate them if that is due, or begin to; the figures so far."""
        if not self.evaluator.sets or not (self._missed or self.last_due(step) == step):
            return {}
        self._missed = False
        if not self.background or step == self.steps:
            return self.measure(step)
        self._under_way = self.evaluator.begin(step)
        return {}

    def before_update(self, step: int) -> None:
        """The trainer has the weights of ``step``, which the engine is about to get: finish what is under way.

        Where the whole fleet was lost meanwhile, nobody has the evaluated weights any more: it is made up for after
        the update.
        """
        evaluation, self._under_way = self._under_way, None
        if evaluation is None:
            return
        began = time.monotonic()
        try:
            figures = self._wait(evaluation, step)
        except WeightsLostError as error:
            log.warning("%s; step %d is evaluated instead of step %d", error, step, evaluation.step)
            self._missed = True
            return
        figures[names.EVALUATION_WAITED] = time.monotonic() - began
        self.recorder.complete(evaluation.step, figures)

    def _wait(self, evaluation: Evaluation, trainer_version: int) -> dict[str, float]:
        with self.timer("evaluate"), patience("others generate"):
            accuracies, samples = self.evaluator.finish(evaluation, trainer_version)
        self.recorder.write_samples(samples)
        return accuracies
