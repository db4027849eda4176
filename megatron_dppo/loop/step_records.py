"""What each step of a run leaves in the run's folder: its metrics row, its samples, and its batch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.batch_file import save_batch
from megatron_dppo.data.seal import Seal
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.loop.learning import Learner
from megatron_dppo.loop.recorder import Recorder, RecordingError
from megatron_dppo.loop.repeated_steps import RepeatedSteps
from megatron_dppo.loop.rollout_sources import RolloutBatch
from megatron_dppo.loop.sample_maker import SampleMaker
from megatron_dppo.metrics.records import ROLLOUTS_FOLDER
from megatron_dppo.metrics.samples import Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _UnsavedBatch:
    """A batch that could not be saved, e.g. on a full disk: its folder, step, trajectories and seal."""

    folder: Path
    step: int
    trajectories: list[Trajectory]
    seal: Seal | None

    def save_again(self) -> None:
        """Save the batch if that succeeds now; otherwise log that it is lost."""
        try:
            save_batch(self.folder, self.step, self.trajectories, self.seal)
        except OSError as error:
            log.warning(
                "%s: the batch of step %d is lost: %s; a replay of the run ends before it",
                self.folder,
                self.step,
                error.strerror,
            )


class StepRecords:
    """Records the steps of a run. Every rank calls the methods; rank 0 writes.

    Args:
        config: configuration of the run.
        rank: global rank.
        recorder: writes the run's files.
        samples: makes the samples of each batch.
        repeats: the steps whose metrics rows earlier ranks wrote.
    """

    def __init__(
        self,
        config: TrainConfig,
        rank: int,
        recorder: Recorder,
        samples: SampleMaker,
        repeats: RepeatedSteps,
    ) -> None:
        self._environment = config.environment.name
        self._saves_batches = config.rollout.save and rank == 0
        self.folder = Path(config.run.directory) / ROLLOUTS_FOLDER
        """Folder of the saved batches."""
        self.recorder = recorder
        self._samples = samples
        self._repeats = repeats
        self._step_samples: list[Sample] = []
        self._unsaved_batch: _UnsavedBatch | None = None

    def take_samples(self, step: int, batch: RolloutBatch) -> None:
        """Make the samples of a batch before the learner removes its trajectories."""
        self._samples.take(step, batch)

    def save_batch(
        self, step: int, batch: Mapping[int, Trajectory], learner: Learner, seal: Seal | None
    ) -> None:
        """Save a batch with the loss columns of ``learner``, if ``rollout.save`` says so. ``check`` raises errors."""
        if not self._saves_batches:
            return
        trajectories: list[Trajectory] = []
        for position, trajectory in sorted(batch.items()):
            loss_columns = learner.loss_columns.get(position, {})
            trajectories.append(trajectory.with_columns(**loss_columns))
        try:
            save_batch(self.folder, step, trajectories, seal)
        except OSError as error:
            failure = RecordingError(f"rollout.save: {self.folder}: {error.strerror}")
            self.recorder.failure = self.recorder.failure or failure
            self._unsaved_batch = _UnsavedBatch(self.folder, step, trajectories, seal)

    def save_lost_batch(self) -> None:
        """Save the batch that could not be saved, if there is one and the disk has room now."""
        if self._unsaved_batch is not None:
            self._unsaved_batch.save_again()

    def write_batch(
        self, step: int, batch: Mapping[int, Trajectory], learner: Learner, seal: Seal | None
    ) -> None:
        """Record a batch that ``learner`` has trained on: trajectories, samples and masked tokens. Collective."""
        self.save_batch(step, batch, learner, seal)
        self._step_samples = self._samples.of_step(step, batch, learner.masked_by_response)
        self.recorder.write_masked_tokens(step, learner.most_masked)

    def write_environment_faults(self, step: int, faults: Counter[str]) -> None:
        """Record the faults of the run's environment by reason, if it has one."""
        if self._environment is not None:
            self.recorder.write_environment_faults(step, self._environment, faults)

    def write_row(self, step: int, measured: Mapping[str, float]) -> None:
        """Write the metrics row of ``step``.

        A repeated step keeps the row of the earlier ranks. The counts of ``measured`` are then carried over to the next
        row.
        """
        earlier_row = self._repeats.row(step, measured)
        if earlier_row is None:
            self.recorder.write(step, measured)
            return
        self.recorder.write(step, earlier_row)
        self.recorder.carry_over(measured)

    def write_samples(self) -> None:
        """Write the samples of the batch that was recorded last."""
        self.recorder.write_samples(self._step_samples)
