"""Evaluate on held-out sets: avg@k, the mean reward over k responses to each problem of a set.

In a run that generates ahead, the trainer does not wait for an evaluation. The evaluation begins right after the update
to weight version v, and runs while the next batch is trained on. It is finished before the next update, so that version
v samples all its tokens. Its figures are added to the metrics row of step v, which is still the last row at that time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from megatron_dppo.config.schema import AlgorithmConfig, EvaluationConfig
from megatron_dppo.data.trajectory import Problem, sampled_versions
from megatron_dppo.fleet.generation import GenerationJob
from megatron_dppo.loop.engine_session import EngineSession, WeightsLostError
from megatron_dppo.loop.ownership import own_positions
from megatron_dppo.loop.recorder import Recorder
from megatron_dppo.loop.run_state import last_due
from megatron_dppo.loop.sample_maker import SampleMaker, sample_positions
from megatron_dppo.loop.scorer import Scorer
from megatron_dppo.loop.scoring import ScoredGeneration
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.phase_timer import PhaseTimer
from megatron_dppo.metrics.samples import Sample
from megatron_dppo.system.errors import RunError
from megatron_dppo.trainer.collectives import all_gather_json
from megatron_dppo.trainer.topology import Topology
from megatron_dppo.trainer.watchdog import patience

log = logging.getLogger(__name__)


class MixedVersionsError(RunError):
    """Some tokens of an evaluation were sampled by weights of another version than the evaluated version."""


@dataclass(frozen=True)
class Evaluation:
    """A running evaluation of the policy after ``step`` steps. ``generations``: set -> this rank's part."""

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
        template: a training job. The evaluation uses its stop conditions, its seed and its way to play episodes.
        settings: k and the sampling.
        problems: problems of one held-out set.
        purpose: purpose of the seeds, a text: jobs with different purposes have different seeds.
        positions: positions of ``problems`` in the set.
    """
    sampling = replace(
        template.sampling,
        max_new_tokens=settings.max_response_tokens or template.sampling.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
    )
    return replace(
        template.for_problems(problems, purpose, positions),
        group_size=settings.samples_per_prompt,
        sampling=sampling,
        columns={},
        decode=None,
    )


def without_length_penalties(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Return the settings that score an evaluation: its accuracy is the mean reward before length penalties."""
    return algorithm.model_copy(update={"overlong_tokens": 0, "length_penalty": 0.0})


@dataclass(frozen=True)
class Evaluator:
    """Generates and scores responses to every held-out problem.

    Attributes:
        sets: name -> problems.
        settings: k and the sampling (in the paper: temperature 0.7, top_p 0.95).
        template: a training job, see ``evaluation_job``.
        algorithm: decides what a truncated response earns.
        topology: position of this rank; each leader evaluates its share of the problems.
        engine: servers that generate; None if there are no sets.
        scorer: scores each response as soon as it arrives.
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
        """Start to generate the responses in the background. Not collective.

        Generations with a lower ``order`` are served first. A batch's generation has the batch's step as order. These
        generations have order 0, the default, so they come before all batches. ``step``: the number of trained steps;
        the engine has the weights of this step.
        """
        generations = {}
        for name in self.sets:
            assert self.engine is not None
            job = self._job(step, name)
            description = f"evaluate on {name}"
            generations[name] = ScoredGeneration(self.engine, self.scorer, job, description)
        return Evaluation(step, generations)

    def finish(
        self, evaluation: Evaluation, trainer_version: int
    ) -> tuple[dict[str, float], list[Sample]]:
        """Wait for the responses and their scores. Collective.

        ``trainer_version``: version of the weights that the trainer holds now.

        Returns:
            metric name -> avg@k or mean of a reward's component, and the samples; the same on every rank.

        Raises:
            WeightsLostError: the whole fleet was lost, and the trainer holds newer weights.
            RunStoppedError: the run is being stopped.
            EngineUnavailableError: no server is available.
            MixedVersionsError: other weights sampled some of the tokens. This is an error of the program.

        Every rank raises each of these errors.
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
        """Return the result of ``finish``."""
        for generation in evaluation.generations.values():
            # Responses of a lost fleet must not be replaced by responses of other weights (``mixes``).
            generation.wait(trainer_version, mixes=False)
        figures: dict[str, float] = {}
        samples: list[Sample] = []
        versions: set[int] = set()
        for name, generation in evaluation.generations.items():
            accuracy, set_samples, set_versions = self._score(
                evaluation.step, name, generation, trainer_version
            )
            figures[metric_names.accuracy(name)] = accuracy
            figures |= generation.components.means(name)
            samples += [set_samples[i] for i in sample_positions(set_samples, evaluation.step)]
            versions |= set_versions
        if versions - {evaluation.step}:
            raise MixedVersionsError(
                f"the evaluation of step {evaluation.step} has tokens of weight versions {sorted(versions)}"
            )
        return figures, samples

    def _job(self, step: int, name: str) -> GenerationJob:
        """Return the job for this rank's share of a set."""
        positions = own_positions(range(len(self.sets[name])), self.topology)
        problems = [self.sets[name][p] for p in positions]
        purpose = f"evaluation on {name} after step {step}"
        return evaluation_job(self.template, self.settings, problems, purpose, positions)

    def _score(
        self, step: int, name: str, generation: ScoredGeneration, trainer_version: int
    ) -> tuple[float, list[Sample], set[int]]:
        """Return avg@k on a set, samples of every rank, and the versions of all tokens. Collective."""
        algorithm = without_length_penalties(self.algorithm)
        scored = generation.scored(algorithm, version=trainer_version, mixes=False)
        size = self.settings.samples_per_prompt
        repeated_problems: list[Problem] = []
        for problem in generation.problems:
            repeated_problems += [problem] * size
        own_samples = self.samples.of_evaluation(step, name, repeated_problems, scored)
        own_lines = [sample.to_json() for sample in own_samples]
        own_reward = sum(t.reward for t in scored)
        own_versions = sorted(sampled_versions(scored))
        total_reward = 0.0
        count = 0
        samples: list[Sample] = []
        versions: set[int] = set()
        for reward, responses, lines, rank_versions in all_gather_json(
            [own_reward, len(scored), own_lines, own_versions]
        ):
            total_reward += reward
            count += responses
            samples += map(Sample.from_json, lines)
            versions.update(rank_versions)
        return total_reward / count, samples, versions


@dataclass(eq=False)
class Evaluations:
    """Runs each evaluation when it is due, and adds its figures to the metrics row of its step.

    At most one evaluation runs at a time. Every method is collective. ``background``: the trainers train during an
    evaluation, except after the last of ``steps`` steps.
    """

    evaluator: Evaluator
    recorder: Recorder
    timer: PhaseTimer
    _: KW_ONLY
    steps: int
    background: bool
    _running: Evaluation | None = field(default=None, init=False)
    _has_missed: bool = field(default=False, init=False)
    """Whether the last evaluation was lost with its servers."""

    def last_due(self, step: int) -> int:
        """Return the last step, up to ``step``, after which the policy is evaluated."""
        return last_due(step, self.evaluator.settings.every, self.steps)

    def measure(self, step: int) -> dict[str, float]:
        """Evaluate the policy after ``step`` steps, and return the figures as ``Evaluator.finish`` does."""
        return self._wait(self.evaluator.begin(step), step)

    def after_update(self, step: int) -> dict[str, float]:
        """Evaluate the weights of ``step`` if an evaluation is due. The engine must have received these weights.

        Returns the figures; an empty dict if no evaluation is due, or if it runs in the background.
        """
        is_due = self._has_missed or self.last_due(step) == step
        if not self.evaluator.sets or not is_due:
            return {}
        self._has_missed = False
        if not self.background or step == self.steps:
            return self.measure(step)
        self._running = self.evaluator.begin(step)
        return {}

    def before_update(self, step: int) -> None:
        """Finish the running evaluation before the engine receives the weights of ``step``.

        If the whole fleet was lost meanwhile, no process has the evaluated weights, and ``after_update`` evaluates the
        new weights instead.
        """
        evaluation = self._running
        self._running = None
        if evaluation is None:
            return
        start_time = time.monotonic()
        try:
            figures = self._wait(evaluation, step)
        except WeightsLostError as error:
            log.warning("%s; step %d is evaluated instead of step %d", error, step, evaluation.step)
            self._has_missed = True
            return
        figures[metric_names.EVALUATION_WAITED] = time.monotonic() - start_time
        self.recorder.complete(evaluation.step, figures)

    def _wait(self, evaluation: Evaluation, trainer_version: int) -> dict[str, float]:
        with self.timer("evaluate"), patience("others generate"):
            figures, samples = self.evaluator.finish(evaluation, trainer_version)
        self.recorder.write_samples(samples)
        return figures
