"""A supervised run on one rank: maximum likelihood of responses, with held-out loss, records and checkpoints.

The loss of a step is the mean over the step's response tokens of -log pi(token | tokens before it), in nats. A stopped
run goes on from its newest checkpoint, and computes what an uninterrupted run computes, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
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
from megatron_dppo.loop.ending import RunFence, RunStoppedError, StopFlag, rank_of_run
from megatron_dppo.loop.recorder import MetricsRecorder, RecordingError
from megatron_dppo.loop.run_state import last_due
from megatron_dppo.metrics import records
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.phase_timer import PhaseTimer
from megatron_dppo.metrics.progress import progress
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.trainer.collectives import all_gather_json, any_rank, on_rank_0
from megatron_dppo.trainer.run_export import export
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.watchdog import patience
from megatron_dppo.vocab_parallel.policy_stats import PolicyStats

log = logging.getLogger(__name__)


def run_supervised_rank(
    config: SupervisedConfig, load_data: Callable[[SupervisedConfig], TurnSets]
) -> None:
    """Train until ``run.steps`` or until a clean stop, and leave a checkpoint behind. Collective over all ranks."""
    with rank_of_run(config.run.directory) as (stop, fence, stack):
        SupervisedRun(config, load_data(config), stop, fence, stack).to_the_end()


class SupervisedRun:
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
        self._config = config
        self._data = data
        self._should_stop = stop
        self._fence = fence
        self._timer = PhaseTimer()
        with self._timer("start"), patience("others start"):
            self._trainer = Trainer(config)
        self._layout = BatchLayout.of(self._trainer)
        fence.join()
        self._checkpoints = RunCheckpoints(config, self._trainer, fence)
        stack.callback(self._checkpoints.store.close)
        self._sampler = ProblemSampler(len(data.train), config.run.seed)
        self._state = self._checkpoints.resume(self._sampler, _identity(config, data.train))
        if self._state.step == 0:
            self._require_no_export()
        self._recorder = stack.enter_context(
            MetricsRecorder(
                config.run,
                self._trainer.topology.rank,
                self._state.step,
                fence=fence.check,
                mark=self._state.records,
                tracking=config.tracking,
                config=config.model_dump(),
            )
        )

    def to_the_end(self) -> None:
        """Train until the last step or until a stop, and leave a checkpoint behind."""
        try:
            self._train()
        except RunStoppedError as stopped:
            self._leave_checkpoint()
            log.info("%s; the same command resumes after step %d", stopped, self._state.step)
            return
        except RecordingError:
            self._leave_checkpoint()
            raise
        self._leave_checkpoint()
        self._fence.check_together()
        with patience("others export"):
            export(self._config.run.directory, self._trainer, None)

    def _train(self) -> None:
        steps = self._config.run.steps
        state = self._state
        with progress("supervised training", steps) as bar:
            if state.step == 0:
                self._record(self._held_out_losses())
            while state.step < steps:
                values = self._step()
                state.step += 1
                state.sampler = self._sampler.state_dict()
                if last_due(state.step, self._config.evaluation.every, steps) == state.step:
                    values |= self._held_out_losses()
                self._record(values)
                if self._checkpoints.is_due(state.step):
                    self._save()
                self._checkpoints.store.poll()
                loss = values[metric_names.NEGATIVE_LOG_LIKELIHOOD]
                bar.update(completed=state.step, note=f"{loss:.3f} nats a token")
                # A signal reaches the ranks at different moments.
                if any_rank(self._should_stop()):
                    raise RunStoppedError(f"stopped after step {state.step}")

    def _step(self) -> dict[str, float]:
        """Make one optimiser step. Return the step's metrics; its loss is the loss before the step."""
        count = self._config.training.sequences_per_step
        with self._timer("train"):
            samples = [_trajectory(self._data.train[i]) for i in self._sampler.next(count)]
            tokens = sum(sample.sampled for sample in samples)
            result = self._trainer.train_mini_batch(
                self._own_batches(samples), _loss, float(tokens)
            )
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
        with self._timer("evaluation"):
            for name, sequences in self._data.held_out.items():
                losses[metric_names.held_out_loss(name)] = self._mean_loss(sequences)
        return losses

    def _mean_loss(self, sequences: Sequence[Turns]) -> float:
        chunk_size = self._config.training.sequences_per_step
        own_sum = 0.0
        tokens = 0
        for start in range(0, len(sequences), chunk_size):
            samples = [_trajectory(turns) for turns in sequences[start : start + chunk_size]]
            tokens += sum(sample.sampled for sample in samples)
            for log_probs in self._trainer.log_probs(self._own_batches(samples)):
                own_sum -= log_probs.double().sum().item()
        # All ranks of a replica have the same sum.
        sum_of_replica = dict(all_gather_json([self._trainer.topology.dp_rank, own_sum]))
        return sum(sum_of_replica.values()) / tokens

    def _own_batches(self, samples: Sequence[Trajectory]) -> list[PackedBatch]:
        """Divide ``samples`` among the replicas, and return this replica's micro-batches."""
        positions, _ = self._layout.divide(samples, self._config.training.micro_batch_tokens)
        return [self._layout.pack(samples, part) for part in positions[self._layout.dp_rank]]

    def _record(self, values: Mapping[str, float]) -> None:
        """Write the metrics of the present step, with the seconds of its phases. Raises RecordingError."""
        figures = {**values, **self._checkpoints.store.figures(), **self._timer.finish_step()}
        self._recorder.write(self._state.step, figures)
        self._recorder.check()

    def _require_no_export(self) -> None:
        """Raise CheckpointError if an export is there, and no checkpoint that it belongs to."""
        out = Path(self._config.run.directory) / records.EXPORT_FOLDER
        if any_rank(out.exists()):
            raise CheckpointError(f"{out}: there already; remove it, or name another run.directory")

    def _save(self) -> None:
        """Start writing a checkpoint of this step, after the previous checkpoint is complete."""
        state = self._state
        with self._timer("checkpoint"), patience("others save"):
            state.records = on_rank_0(partial(self._recorder.mark, state.step))
            self._checkpoints.save(state, self._trainer.weights_digest())

    def _leave_checkpoint(self) -> None:
        """Leave a complete checkpoint of this step, unless the run has made no step."""
        if self._state.step > self._checkpoints.saved_step:
            self._save()
        with patience("others save"):
            self._checkpoints.store.finish()


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
