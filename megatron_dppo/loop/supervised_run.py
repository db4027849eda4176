"""A supervised run on one rank: maximum likelihood of responses, with held-out loss, records and checkpoints.

The loss of a step is the mean over the step's response tokens of -log pi(token | tokens before it), in nats. A stopped
run goes on from its newest checkpoint, and computes what an uninterrupted run computes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import xxhash

from megatron_dppo.algorithms.likelihood import negative_log_likelihood
from megatron_dppo.algorithms.policy_loss import LossSums
from megatron_dppo.config.schema import SupervisedConfig
from megatron_dppo.data.packing import PackedBatch
from megatron_dppo.data.problems import Turns, TurnSets
from megatron_dppo.data.sampling import ProblemSampler
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.loop.batch_layout import BatchLayout
from megatron_dppo.loop.checkpoints import RunCheckpoints
from megatron_dppo.loop.ending import RunFence, StopFlag, rank_of_run
from megatron_dppo.loop.recorder import MetricsRecorder
from megatron_dppo.loop.run_of_steps import RunOfSteps
from megatron_dppo.loop.run_state import last_due
from megatron_dppo.metrics import records
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.progress import progress
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.trainer.collectives import all_gather_json, any_rank
from megatron_dppo.trainer.run_export import export
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.watchdog import patience
from megatron_dppo.vocab_parallel.policy_stats import PolicyStats


def run_supervised_rank(config: SupervisedConfig) -> None:
    """Train until ``run.steps`` or until a clean stop, and leave a checkpoint behind. Collective over all ranks."""
    with rank_of_run(config.run.directory) as (stop, fence, stack):
        SupervisedRun(config, TurnSets.load(config), stop, fence, stack).to_the_end()


class SupervisedRun(RunOfSteps):
    """A supervised run on one rank. The constructor opens what the steps need, and ``stack`` closes it.

    Args:
        config: configuration of the run.
        data: training sequences and held-out sequences.
        stop: whether a clean stop was requested.
        fence: raises once another start of the run has taken over.
        stack: closes what the constructor opens.
    """

    def __init__(
        self,
        config: SupervisedConfig,
        data: TurnSets,
        stop: StopFlag,
        fence: RunFence,
        stack: ExitStack,
    ) -> None:
        super().__init__(stop, fence)
        self.config: SupervisedConfig = config
        self._data = data
        with self.timer("start"), patience("others start"):
            self.trainer = Trainer.read(config)
        self._layout = BatchLayout.of(self.trainer)
        fence.join()
        self.checkpoints = RunCheckpoints(config, self.trainer, fence)
        stack.callback(self.checkpoints.store.close)
        self._sampler = ProblemSampler(len(data.train), config.run.seed)
        self.state = self.checkpoints.resume(self._sampler, _identity(config, data.train))
        if self.state.step == 0:
            self._require_no_export()
        self.recorder = stack.enter_context(
            MetricsRecorder(
                config.run,
                self.trainer.topology.rank,
                self.state.step,
                fence=fence.check,
                mark=self.state.records,
                tracking=config.tracking,
                config=config.model_dump(),
            )
        )
        self._bar = stack.enter_context(progress("supervised training", config.run.steps))

    def begin(self) -> None:
        """Record the loss of the start policy, unless an earlier start did."""
        if self.state.step == 0:
            self._record(self._held_out_losses())

    def step(self) -> None:
        """Train on the next sequences."""
        values = self._train()
        step = self.state.step = self.state.step + 1
        self.state.sampler = self._sampler.state_dict()
        if last_due(step, self.config.evaluation.every, self.config.run.steps) == step:
            values |= self._held_out_losses()
        self._record(values)
        if self.checkpoints.is_due(step):
            self.save_checkpoint()
        self.checkpoints.store.poll()
        loss = values[metric_names.NEGATIVE_LOG_LIKELIHOOD]
        self._bar.update(completed=step, note=f"{loss:.3f} nats a token")

    def finish(self) -> None:
        """Export the policy after its last checkpoint is complete."""
        self.finish_checkpoint()
        self.fence.check_together()
        with patience("others export"):
            export(self.config.run.directory, self.trainer, None)

    def _train(self) -> dict[str, float]:
        """Make one optimiser step. Return the step's metrics; its loss is the loss before the step."""
        count = self.config.training.sequences_per_step
        with self.timer("train"):
            sequences = [self._data.train[i] for i in self._sampler.next(count)]
            batches, tokens = self._own_batches(sequences)
            result = self.trainer.train_mini_batch(batches, _loss, float(tokens))
        return {
            metric_names.NEGATIVE_LOG_LIKELIHOOD: result.metrics.values()[metric_names.LOSS]
            / tokens,
            metric_names.TRAINED_TOKENS: tokens,
            metric_names.GRAD_NORM: result.grad_norm,
            metric_names.LEARNING_RATE: result.lr,
        }

    def _held_out_losses(self) -> dict[str, float]:
        """Return the mean of -log pi over the response tokens of each held-out set, nats, by metric. Collective."""
        losses: dict[str, float] = {}
        with self.timer("evaluation"):
            for name, sequences in self._data.held_out.items():
                losses[metric_names.held_out_loss(name)] = self._mean_loss(sequences)
        return losses

    def _mean_loss(self, sequences: Sequence[Turns]) -> float:
        chunk_size = self.config.training.sequences_per_step
        own_sum = 0.0
        tokens = 0
        for start in range(0, len(sequences), chunk_size):
            batches, chunk_tokens = self._own_batches(sequences[start : start + chunk_size])
            tokens += chunk_tokens
            for log_probs in self.trainer.log_probs(batches):
                own_sum -= log_probs.double().sum().item()
        # All ranks of a replica have the same sum.
        sum_of_replica = dict(all_gather_json([self.trainer.topology.dp_rank, own_sum]))
        return sum(sum_of_replica.values()) / tokens

    def _own_batches(self, sequences: Sequence[Turns]) -> tuple[list[PackedBatch], int]:
        """Return this replica's micro-batches of ``sequences``, and the response tokens of all replicas."""
        layout = self._layout
        samples = [_trajectory(turns) for turns in sequences]
        positions, _ = layout.divide(samples, self.config.training.micro_batch_tokens)
        batches = [layout.pack(samples, part) for part in positions[layout.dp_rank]]
        return batches, sum(sample.sampled for sample in samples)

    def _record(self, values: Mapping[str, float]) -> None:
        """Write the metrics of the present step, with the seconds of its phases."""
        figures = {**values, **self.checkpoints.store.figures(), **self.timer.finish_step()}
        self.recorder.write(self.state.step, figures)

    def _require_no_export(self) -> None:
        """Raise CheckpointError if an export is there, and no checkpoint that it belongs to."""
        out = Path(self.config.run.directory) / records.EXPORT_FOLDER
        if any_rank(out.exists()):
            raise CheckpointError(f"{out}: there already; remove it, or name another run.directory")


def _identity(config: SupervisedConfig, sequences: Sequence[Turns]) -> dict[str, object]:
    """Return the settings that must not change between two starts of a run, with their values."""
    hasher = xxhash.xxh3_128()
    for turns in sequences:
        for ids in turns:
            hasher.update(np.array([len(ids), *ids], np.int64).data)
    return {"data.train (hash of the token ids)": hasher.hexdigest(), "run.seed": config.run.seed}


def _trajectory(turns: Turns) -> Trajectory:
    """Return the trajectory of ``turns``. Every second part of them is a response."""
    mask = [np.full(len(ids), number % 2 == 1) for number, ids in enumerate(turns)]
    return Trajectory(
        problem_id=0,
        sample_index=0,
        token_ids=np.array([token for ids in turns for token in ids], np.int32),
        loss_mask=np.concatenate(mask),
    )


def _loss(stats: PolicyStats, batch: PackedBatch) -> LossSums:
    return negative_log_likelihood(stats.log_probs, batch.loss_mask.to(stats.log_probs.device))
