"""A run of either kind on one rank takes its steps, ends or stops, and leaves checkpoints behind."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from functools import partial

from megatron_dppo.config.schema import SupervisedConfig, TrainConfig
from megatron_dppo.logging import note_failure
from megatron_dppo.loop.checkpoints import RunCheckpoints
from megatron_dppo.loop.ending import RunFence, RunStoppedError, StopFlag
from megatron_dppo.loop.recorder import MetricsRecorder, RecordingError
from megatron_dppo.loop.run_state import RunState
from megatron_dppo.metrics.phase_timer import PhaseTimer
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.trainer.checkpoint.directory import suspect_folder
from megatron_dppo.trainer.collectives import any_rank, on_rank_0
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.watchdog import patience

log = logging.getLogger(__name__)


class RunOfSteps(ABC):
    """A run on one rank. A subclass's constructor sets all attributes. Every method is collective.

    Attributes:
        config: configuration of the run.
        should_stop: whether a clean stop was requested.
        fence: raises once another start of the run has taken over.
        timer: measures the phases of a step.
        trainer: the policy and its optimizer.
        checkpoints: loads the state that this start continues from, and saves the next ones.
        state: position of the run; ``state.step`` is the number of steps that were trained.
        recorder: writes the metrics row of each step.
    """

    config: TrainConfig | SupervisedConfig
    trainer: Trainer
    checkpoints: RunCheckpoints
    state: RunState
    recorder: MetricsRecorder

    def __init__(self, stop: StopFlag, fence: RunFence) -> None:
        self.should_stop = stop
        self.fence = fence
        self.timer = PhaseTimer()

    @abstractmethod
    def begin(self) -> None:
        """Record the start policy."""

    @abstractmethod
    def step(self) -> None:
        """Train one step, record it, and save its checkpoint if one is due."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the last checkpoint, and export the policy."""

    def to_the_end(self) -> None:
        """Train until the last step or until a stop, and leave a checkpoint behind."""
        try:
            self.begin()
            self.recorder.check()
            while self.state.step < self.config.run.steps:
                self.step()
                self.recorder.check()
                # A signal reaches the ranks at different moments. If only one rank stopped, the other ranks would wait
                # for it in a collective.
                if any_rank(self.should_stop()):
                    raise RunStoppedError(f"stopped after step {self.state.step}")
            self.finish()
        except RunStoppedError as stopped:
            self.stop(str(stopped))
            self.recorder.check()
        except RecordingError:
            self.stop_unrecorded()
            raise
        except BaseException as error:
            self.after_failure(error)
            raise

    def stop(self, reason: str, *, suspect: bool = False) -> None:
        """Leave a checkpoint of the last completed step.

        A ``suspect`` checkpoint is only read by ``megatron-dppo doctor``; no start loads it.
        """
        step = self.state.step
        saved_step = self.checkpoints.saved_step
        resumes_after = saved_step if suspect else step
        if step > saved_step:
            self.save_checkpoint(suspect=suspect)
        self.finish_checkpoint()
        if resumes_after < step:
            folder = suspect_folder(self.checkpoints.store.directory, step)
            reason = (
                f"{reason}; the weights of step {step} are in {folder} for megatron-dppo doctor, and no "
                f"start goes on from them unless the folder is renamed to {folder.stem}"
            )
        log.info("%s; the same command resumes after step %d", reason, resumes_after)

    def stop_unrecorded(self) -> None:
        """Save a checkpoint if the disk has room for it; otherwise log why it was not saved."""
        try:
            self.stop("the run's records can't be written")
        except CheckpointError as error:
            log.warning("no checkpoint of step %d: %s", self.state.step, error)

    def after_failure(self, error: BaseException) -> None:
        """Note the time of the failure before the caller closes the run's objects, which may take long."""
        note_failure()

    def save_checkpoint(self, *, suspect: bool = False) -> None:
        """Start writing a checkpoint of this step, after the previous checkpoint is complete.

        Raises the errors of ``weights_digest``.
        """
        state = self.state
        failpoint("step/checkpoint")
        with self.timer("checkpoint"), patience("others save"):
            digest = self.weights_digest()
            state.records = on_rank_0(partial(self.recorder.mark, state.step))
            self.checkpoints.save(state, digest, suspect=suspect)

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        with self.timer("checkpoint"), patience("others save"):
            self.checkpoints.store.finish()

    def weights_digest(self) -> str:
        """Return the hash of all ranks' weights."""
        return self.trainer.weights_digest()
