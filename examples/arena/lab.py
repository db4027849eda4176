"""One run of the lab, in one process.

Learner, trainer, rules, packing, statistics and optimizer come from the package. A copy of the policy takes the
engine's place. A repeated run is bitwise equal, even if the machine does other work beside it. The lab has no engine,
no fleet and no weight updates: real_loop.py makes runs with all three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.arena.mismatches import MISMATCHES, Mismatch
from examples.arena.readings import reading_of
from examples.arena.sampler import PolicyCopy, Sampled, Teacher
from examples.arena.tasks import TASKS, Task
from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.table import carried_topk
from megatron_dppo.checkpoint_conversion.gathering import gather
from megatron_dppo.config.loading import load_config
from megatron_dppo.config.schema import AlgorithmConfig, TrainConfig, TrainingConfig
from megatron_dppo.data.sampling import ProblemSampler
from megatron_dppo.data.trajectory import Outline, Trajectory, forms_of
from megatron_dppo.loop.credit import with_rewards
from megatron_dppo.loop.learning import Learner, pack_mini_batch, plan_mini_batches
from megatron_dppo.loop.rollout_figures import generated_figures, rows_of, with_stale_gap_renamed
from megatron_dppo.loop.rollout_sources import RolloutBatch
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.model.gather_plan import buckets_in_turn, gather_plan
from megatron_dppo.rewards.verifier import Score
from megatron_dppo.trainer.step import StatsSpec
from megatron_dppo.trainer.trainer import Trainer

CONFIG = Path(__file__).with_name("config.yaml")


class Lab:
    """Everything a step needs. A process can have only one lab, because Megatron-Core's groups are global.

    ``batch``: batch of the last step, as ``rollout.save`` would write it. ``version``: version of the weights.
    """

    def __init__(self, config: TrainConfig, task: Task, mismatch: Mismatch) -> None:
        self.config, self.task = config, task
        algorithm = build_algorithm(
            config.algorithm.name, config.algorithm.options, config.algorithm.settings
        )
        self.batch: list[Trajectory] = []
        self.version = 0
        self._generator = torch.Generator().manual_seed(config.run.seed)
        self._copy = PolicyCopy(task.checkpoint, mismatch)
        vocabulary = self._copy.vocab_size
        self._topk = carried_topk(algorithm, config.rollout.topk_log_probs, vocabulary)
        has_topk = self._topk > 0 or algorithm.needs_recomputed_distribution
        self.trainer = Trainer.read(
            config,
            StatsSpec(
                topk=has_topk,
                entropy=True,
                topk_gradient=algorithm.preset.centers,
                squares=algorithm.needs_sum_squares,
                teacher_topk=config.distillation.top_k > 0,
            ),
        )
        self._teacher = None
        if task.teacher is not None:
            self._teacher = Teacher(task.teacher, config.distillation.top_k)
        self.learner = Learner(config, self.trainer, algorithm, self._topk)
        self._problems = ProblemSampler(len(task.prompts), config.run.seed)
        sources = gather_plan(self.trainer.shape, self.trainer.layout)
        self._buckets = buckets_in_turn({0: list(sources)}, bucket_bytes=1 << 30, item_bytes=4)

    def step(self) -> dict[str, float]:
        """Sample a batch and train on it; return its metrics."""
        age = self._copy.update(self.weights())
        trajectories = self._rollout(self.version - age)
        outlines = [Outline.of(t) for t in trajectories]
        figures = generated_figures(rows_of(outlines, self.config.rollout.group_size))
        figures[metric_names.STALENESS_MAX] = age
        batch = RolloutBatch(outlines, dict(enumerate(trajectories)), figures, {})
        learned = self.learner.learn(self.learner.plan(batch))
        columns = self.learner.loss_columns
        self.batch = [t.with_columns(**columns.get(i, {})) for i, t in enumerate(trajectories)]
        self.version += 1
        return {**figures, **with_stale_gap_renamed(learned, figures)}

    def mismatch(self) -> dict[str, list[float]]:
        """Return ``RATIO_ERROR`` and ``PROB_ERROR`` of a new batch, at the trainer's present weights."""
        return errors_by_mu(*self.probabilities())

    def probabilities(self) -> tuple[Tensor, Tensor]:
        """Return pi and mu of a new batch's sampled tokens, at the trainer's present weights."""
        age = self._copy.update(self.weights())
        batch = dict(enumerate(self._rollout(self.version - age)))
        config, layout = self.config, self.learner.layout
        # One mini-batch has the whole batch. Only its micro-batches are used, and they do not depend on the algorithm.
        (plan,) = plan_mini_batches(
            [Outline.of(t) for t in batch.values()],
            TrainingConfig(
                prompts_per_mini_batch=config.rollout.prompts_per_step,
                micro_batch_tokens=config.training.micro_batch_tokens,
            ),
            config.rollout,
            AlgorithmConfig(name="pg-is"),
            layout,
        )
        packed = pack_mini_batch(batch, plan, layout, config.algorithm, forms_of([*batch.values()]))
        log_pi: list[Tensor] = []
        log_mu: list[Tensor] = []
        log_probs = self.trainer.log_probs(packed.micro_batches)
        for values, micro_batch in zip(log_probs, packed.micro_batches, strict=True):
            is_sampled = micro_batch.loss_mask
            log_pi.append(values[is_sampled])
            log_mu.append(micro_batch.column("rollout_log_probs")[is_sampled])
        return torch.cat(log_pi).exp(), torch.cat(log_mu).exp()

    def weights(self) -> dict[str, Tensor]:
        """Return the trainer's weights by their names in a checkpoint."""
        gathered = gather(self._buckets, 0, self.trainer.weights())
        return {name: tensor for bucket in gathered for name, tensor in bucket.tensors}

    def _rollout(self, version: int) -> list[Trajectory]:
        rollout, task = self.config.rollout, self.task
        problems = np.repeat(self._problems.next(rollout.prompts_per_step), rollout.group_size)
        sampled = self._copy.sample(
            task.prompts[problems], task.tokens, task.end, self._topk, self._generator
        )
        prompt_length = task.prompts.shape[1]
        trajectories, scores = [], []
        for row, problem in enumerate(problems.tolist()):
            index = row % rollout.group_size
            t = _trajectory(sampled, row, prompt_length, task.end, problem, index)
            versions = np.full(t.sampled, version, np.int32)
            trajectories.append(t.with_columns(weight_version=versions))
            scores.append(Score(task.reward(problem, t.response_ids)))
        if self._teacher is not None:
            trajectories = self._teacher.scored(trajectories, sampled.ids)
        return with_rewards(
            trajectories,
            scores,
            rollout.group_size,
            self.config.algorithm,
            most_tokens=rollout.max_response_tokens,
        )


def _trajectory(
    sampled: Sampled, row: int, prompt_length: int, end_id: int | None, problem: int, index: int
) -> Trajectory:
    """Return response ``index`` to ``problem``: row ``row`` of ``sampled``, up to the first token ``end_id``."""
    prompt_ids = sampled.ids[row, :prompt_length]
    response_ids = sampled.ids[row, prompt_length:]
    ends = np.flatnonzero(response_ids == end_id)
    count = int(ends[0]) + 1 if len(ends) else len(response_ids)
    columns = {"rollout_log_probs": sampled.log_probs[row, :count]}
    if sampled.topk_ids is not None and sampled.topk_log_probs is not None:
        columns |= {
            "topk_ids": sampled.topk_ids[row, :count],
            "topk_log_probs": sampled.topk_log_probs[row, :count],
        }
    if sampled.experts is not None:
        columns["routed_experts"] = sampled.experts[row, : prompt_length + count - 1]
    is_truncated = end_id is not None and not len(ends)
    return Trajectory.of_response(
        prompt_ids,
        response_ids[:count],
        problem_id=problem,
        sample_index=index,
        columns=columns,
        finish_reason="length" if is_truncated else "stop",
    )


def configured(task: Task, mismatch: Mismatch, changes: Sequence[str]) -> TrainConfig:
    """Return the lab's configuration for ``task``. ``changes``: overrides, in the form ``key.path=value``."""
    # The lab reads no data files, but a configuration needs data.train.
    placed = [f"model.hf_checkpoint={task.checkpoint}", f"data.train={CONFIG}"]
    if task.teacher is not None:
        placed.append(f"distillation.teachers.teacher.hf_checkpoint={task.teacher}")
    engine = [f"rollout.router_replay={str(mismatch.replays).lower()}"]
    if mismatch.blocks:
        engine.append("engine.quantization=fp8")
    return load_config(CONFIG, [*placed, *engine, *task.settings, *changes])


RATIO_ERROR, PROB_ERROR = "mismatch/ratio_error_by_mu", "mismatch/prob_error_by_mu"
"""Means of |pi / mu - 1| and |pi - mu| of sampled tokens under the trainer's last weights.

For each of ``MU_BOUNDS`` there is one mean, over the tokens whose mu is below this bound and not below the previous
bound. A mean without tokens is NaN.
"""
MU_BOUNDS = (0.01, 0.1, 0.5, 0.9, 1.0 + 1e-6)


def errors_by_mu(pi: Tensor, mu: Tensor) -> dict[str, list[float]]:
    """Return ``RATIO_ERROR`` and ``PROB_ERROR`` of sampled tokens with the probabilities ``pi`` and ``mu``."""
    bins = torch.bucketize(mu, torch.tensor(MU_BOUNDS), right=True)
    errors = {RATIO_ERROR: (pi / mu - 1).abs(), PROB_ERROR: (pi - mu).abs()}
    means: dict[str, list[float]] = {}
    for name, error in errors.items():
        means[name] = [float(error[bins == i].mean()) for i in range(len(MU_BOUNDS))]
    return means


KEPT = (
    metric_names.REWARD,
    metric_names.ENTROPY,
    metric_names.GAP,
    metric_names.GAP_ON_POLICY,
    metric_names.GAP_STALE,
    metric_names.STALENESS_MAX,
    metric_names.RATIO_MAX,
    metric_names.BAD_UPDATE,
    metric_names.MASKED_POSITIVE,
    metric_names.MASKED_NEGATIVE,
    metric_names.ROUTING_AGREEMENT_FIRST,
    metric_names.RESPONSE_LENGTH,
    metric_names.GRAD_NORM,
    metric_names.TEACHER_GAP,
)
"""Metrics that are kept of each step. Figures and verdicts use only these metrics and ``errors_by_mu``."""


@dataclass(frozen=True)
class Cell:
    """One run. ``changes``: overrides of the lab's configuration, in the form ``key.path=value``."""

    task: str
    mismatch: str
    algorithm: str
    seed: int
    changes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The run's unique name. It has the rule's reading (readings.py) after ``@``."""
        rule = "-".join([self.algorithm, *(last_word(c) for c in self.changes)])
        reading = reading_of(self.algorithm, self.changes)
        return "/".join([self.task, self.mismatch, f"{rule}@{reading}", str(self.seed)])


def last_word(change: str) -> str:
    """Return ``tv_threshold=0.1`` of ``algorithm.options.tv_threshold=0.1``. The value itself may contain points."""
    path, equals, value = change.partition("=")
    return path.rpartition(".")[2] + equals + value


def run(cell: Cell) -> dict[str, list[float]]:
    """Train, and return the values of each kept metric, one for each step; NaN for a step without the metric.

    Call it in a separate process: see Lab.
    """
    torch.set_num_threads(1)
    task, mismatch = TASKS[cell.task](), MISMATCHES[cell.mismatch]
    changes = [*cell.changes, f"algorithm.name={cell.algorithm}", f"run.seed={cell.seed}"]
    lab = Lab(configured(task, mismatch, changes), task, mismatch)
    steps = [lab.step() for _ in range(lab.config.run.steps)]
    values = {name: [step.get(name, math.nan) for step in steps] for name in KEPT}
    return rounded(values | lab.mismatch())


def rounded(values: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the values with five digits."""
    rounded_values: dict[str, list[float]] = {}
    for name, numbers in values.items():
        rounded_values[name] = [float(f"{x:.5g}") for x in numbers]
    return rounded_values
