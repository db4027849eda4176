"""The training run on one rank, from its start to its end."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.batch_file import save_batch
from megatron_dppo.data.seal import Seal, text_digest
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine import held_tensors
from megatron_dppo.environments.over_http import absent_services
from megatron_dppo.fleet.membership import EngineUnavailableError
from megatron_dppo.logging import FAILED, fatal, note_failure
from megatron_dppo.loop.ending import RunFence, RunStoppedError, StopFlag, run_fence
from megatron_dppo.loop.engine_session import EngineSession
from megatron_dppo.loop.evaluation import Evaluations, Evaluator, last_due
from megatron_dppo.loop.frequency_canary import FrequencyError
from megatron_dppo.loop.gap_guard import GapError
from megatron_dppo.loop.input_hashes import BackgroundHashes
from megatron_dppo.loop.inputs import RunData, model_files
from megatron_dppo.loop.learning import Learner, PlannedBatch
from megatron_dppo.loop.ownership import own_positions
from megatron_dppo.loop.profiling import StepProfiler
from megatron_dppo.loop.recorder import Recorder, RecordingError
from megatron_dppo.loop.resuming import continue_sampler, resume
from megatron_dppo.loop.rollout_figures import STALE_ANCHOR, file_figures, with_stale_gap_renamed
from megatron_dppo.loop.rollout_sources import (
    BatchSeals,
    GeneratedRollouts,
    ReplayedRollouts,
    RolloutBatch,
    RolloutSource,
    gathered_faults,
)
from megatron_dppo.loop.run_identity import identity_of
from megatron_dppo.loop.run_parts import active_line, generation_job, open_episodes, stats_spec
from megatron_dppo.loop.run_state import FILES, RunState, settings_of
from megatron_dppo.loop.sample_maker import SampleMaker
from megatron_dppo.loop.scorer import Scorer
from megatron_dppo.loop.server_access import free_shared_devices
from megatron_dppo.loop.spool import OwnShare, ResponseSpool, settings_of_responses
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.phase_timer import PhaseTimer
from megatron_dppo.metrics.records import (
    CHECKPOINTS_FOLDER,
    ROLLOUTS_FOLDER,
    SPOOL_FOLDER,
    RecordsError,
    mean_accuracy,
    read_records,
    remember_checkpoint,
    step_of,
)
from megatron_dppo.metrics.records import has_begun as has_begun_run
from megatron_dppo.metrics.summary import RunInfo
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.hub_download import check_download
from megatron_dppo.rewards import RewardUnavailableError
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.errors import AlteredMemoryError, RunError
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.trainer.checkpoint.directory import suspect_folder
from megatron_dppo.trainer.checkpoint.store import CheckpointStore
from megatron_dppo.trainer.collectives import any_rank, first_failure, on_rank_0
from megatron_dppo.trainer.memory_checks import MemoryChecks
from megatron_dppo.trainer.run_export import (
    Example,
    examples_of,
    export,
    gathered_examples,
    upload_export,
)
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.watchdog import patience

log = logging.getLogger(__name__)


def run_rank(config: TrainConfig, spec: RunSpec) -> None:
    """Train until ``run.steps`` or until a clean stop, and leave a checkpoint behind. Collective over all ranks."""
    stop = StopFlag().install()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        data = RunData(config)
        with run_fence(config.run.directory) as fence, ExitStack() as stack:
            Run(config, spec, data, stop, fence, stack).to_the_end()
    except AlteredMemoryError as error:
        # No user can correct the error, and the newest checkpoint is whole: the ranks may start again from it.
        fatal(f"{type(error).__name__}: {error}", FAILED)
    except RunError as error:
        fatal(f"{type(error).__name__}: {error}")


def _rows_after(directory: str, step: int) -> dict[str, Any]:
    """Return the metrics rows of the steps after ``step``, by the step as text, because JSON has no integer keys.

    If ``step`` is 0, the row of step 0 is included.
    """
    try:
        rows = read_records(directory)
    except RecordsError:
        return {}
    first_step = step + 1 if step > 0 else 0
    rows_after: dict[str, Any] = {}
    for row in rows:
        if step_of(row) >= first_step:
            rows_after[str(step_of(row))] = row
    return rows_after


def _require_services(config: TrainConfig) -> None:
    """Raise RewardUnavailableError if a reward server or an environment server does not answer."""
    faults = absent_services(config)
    if faults:
        raise RewardUnavailableError("; ".join(faults))


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


class Run:
    """The objects that training steps need. The constructor opens them, ``stack`` closes them.

    Args:
        config: configuration of the run.
        spec: facts that follow from the configuration.
        data: training and held-out problems; the constructor refuses bad answers or leaves their problems out.
        stop: whether a clean stop was requested.
        fence: raises once another start of the run has taken over.
        stack: closes what the constructor opens.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: RunSpec,
        data: RunData,
        stop: StopFlag,
        fence: RunFence,
        stack: ExitStack,
    ) -> None:
        self.config = config
        self.spec = spec
        self.data = data
        self.fence = fence
        self.should_stop = stop
        self.timer = PhaseTimer()
        metric_names.add_metrics(config.tracking.metrics)
        settings = config.algorithm
        self.algorithm = build_algorithm(settings.name, settings.options, settings.settings)
        topk = spec.rollout.topk
        with self.timer("start"), patience("others start"):
            free_shared_devices(config, spec)
            spec_of_stats = stats_spec(self.algorithm, topk, config.distillation.top_k)
            self.trainer = Trainer(config, spec_of_stats)
            self.hashes = self._start_hashing()
            fence.join()
            on_rank_0(partial(_require_services, config))
            data.refuse_or_drop(on_rank_0(data.bad_answers))
            self.store = self._checkpoint_store()
            stack.callback(self.store.close)
            self.sampler = data.sampler()
            # Step of the newest checkpoint that a start may load; 0 without such a checkpoint.
            self.saved_step = 0
            self.state = self._resume()
            self.spool = self._open_spool()
            stack.callback(self.spool.close)
            self.earlier_rows = on_rank_0(self._rows_of_repeated_steps)
            """Metrics rows of the steps that this start repeats, by the step as text. Earlier ranks wrote these rows:
            the ranks before a restart, or the ranks of an earlier start."""
        self._open_generation(stack)
        self.learner = Learner(config, self.trainer, self.algorithm, topk)
        self.memory = MemoryChecks(self.trainer)
        self.seals = self._batch_seals()
        self.recorder = stack.enter_context(self._recorder())
        self.source = self._rollout_source()
        self.evaluations = self._evaluations()
        self.profiler = StepProfiler(
            config.profile, config.run.directory, self.trainer.topology.rank
        )
        self._unsaved_batch: _UnsavedBatch | None = None
        # Examples of the last batch. At the end, the export is compared with the trainer on them.
        self.examples: list[Example] = []
        self._recorded_updates = (0, 0)
        """Numbers of committed and of verified weight updates that are in the metrics already."""

    def _start_hashing(self) -> BackgroundHashes:
        """Start the hashing of the start model's files in the background."""
        files = model_files(self.config.model.hf_checkpoint, self.config.lora.start_from)
        return BackgroundHashes(files, self.trainer.topology)

    def _checkpoint_store(self) -> CheckpointStore:
        directory = self.config.run.directory
        return CheckpointStore(
            Path(directory) / CHECKPOINTS_FOLDER,
            self.config.checkpoint.keep,
            self.fence.check_together,
            background=self.config.checkpoint.background,
            published=self._note_checkpoint,
        )

    def _note_checkpoint(self, step: int) -> None:
        """Record that the checkpoint of ``step`` is complete. Called on rank 0, from any thread."""
        remember_checkpoint(self.config.run.directory, step)
        self.spool.forget_until(step)

    def _open_spool(self) -> ResponseSpool:
        """Open the spool of the responses since the checkpoint. Collective."""
        config = self.config
        folder = None
        if config.checkpoint.keep_responses and not self.spec.rollout.replays:
            folder = Path(config.run.directory) / SPOOL_FOLDER

        def oldest_version(step: int) -> int:
            """Return the oldest weight version that may sample the batch of ``step``."""
            return max(0, step - 1 - config.rollout.max_staleness)

        spool = ResponseSpool(folder, self.trainer.topology.rank, oldest_version)
        identity = identity_of(config, self.data.train.sha256)
        settings_digest = text_digest(settings_of_responses(settings_of(config)), identity)
        own_groups = partial(own_positions, topology=self.trainer.topology)
        share = OwnShare(own_groups, config.rollout.group_size, self.data.train.problems)
        spool.open(settings_digest, self.state.step, share, is_fresh=self._is_fresh)
        repeated_steps = spool.last_trained - self.state.step
        if repeated_steps > 0:
            log.info("repeating %d steps from the responses of earlier ranks", repeated_steps)
        return spool

    def _rows_of_repeated_steps(self) -> dict[str, Any]:
        """Return the metrics rows of the steps that this start repeats. Called on rank 0.

        The recorder drops these rows from the records. So store them in the spool: another restart may come before all
        of them are written again.
        """
        step = self.state.step
        # A row of the records is newer than a row of the spool.
        rows = self.spool.read_rows() | _rows_after(self.config.run.directory, step)
        repeated_rows: dict[str, Any] = {}
        for number, row in rows.items():
            if (step == 0 or int(number) > step) and self._repeats(int(number)):
                repeated_rows[number] = row
        self.spool.keep_rows(repeated_rows)
        return repeated_rows

    def _open_generation(self, stack: ExitStack) -> None:
        """Open the engine session, the scorer and the episodes. ``stack`` closes them."""
        config = self.config
        self.engine: EngineSession | None = None
        if not self.spec.rollout.replays:
            fence = self.fence.check_together
            place_of = self.data.place_of
            session = EngineSession(
                config, self.spec, self.trainer, self.should_stop, fence, place_of
            )
            self.engine = stack.enter_context(session)
        self.scorer = Scorer.of(config, self.data)
        # Only leaders score responses, so only they need reward workers.
        if self.trainer.topology.is_leader:
            stack.enter_context(self.scorer)
        self.episodes = open_episodes(config, self.spec, self.data)
        if self.episodes is not None:
            stack.callback(self.episodes.pool.close)
        if self.algorithm.needs_recomputed and config.rollout.max_staleness:
            log.warning(STALE_ANCHOR, config.algorithm.name)
        self.samples = SampleMaker.of(config, self.data)
        self.job = generation_job(config, self.data, self.spec, self.episodes)

    def _batch_seals(self) -> BatchSeals:
        rollout = self.config.rollout
        seals = BatchSeals(
            self.data.origin(),
            rollout.max_staleness,
            keeps=rollout.save,
            replays=self.spec.rollout.replays,
        )
        # Stored responses may have been sampled by versions older than the checkpoint.
        for version, stored_digest in sorted(self.spool.known_digests.items()):
            seals.remember(version, stored_digest)
        digest = self.memory.remember_weights(self.state.step)
        seals.remember(self.state.step, digest)
        self.spool.note_trained(self.state.step, digest)
        if self.state.step and self._watches_optimizer:
            # Hash the loaded optimizer state now: minutes may pass until the first step, while the servers start.
            self.memory.remember_optimizer(self.state.step)
        return seals

    def _recorder(self) -> Recorder:
        config = self.config
        return Recorder(
            config.run,
            RunInfo.of_config(config.model_dump()),
            self.trainer.topology.rank,
            self.state.step,
            evaluates=self.engine is not None and bool(config.data.evaluation),
            text_of=self.data.text_of,
            fence=self.fence.check,
            mark=self.state.records,
            tracking=config.tracking,
            config=config.model_dump(),
        )

    def to_the_end(self) -> None:
        """Train until the last step or until a stop, and leave a checkpoint behind."""
        try:
            self.begin()
            while self.state.step < self.config.run.steps:
                with self.profiler.of(self.state.step + 1):
                    self.step()
            self.finish()
        except RunStoppedError as stopped:
            self.stop(str(stopped))
            self._check_records()
        except RecordingError:
            self._stop_unrecorded()
            raise
        except EngineUnavailableError:
            self.stop("no server is available")
            raise
        except RewardUnavailableError:
            self.stop("a reward is unavailable")
            raise
        except (FrequencyError, GapError):
            # Every rank raised before the optimiser step, so the checkpoint has the weights that failed the check.
            self.stop("the batch was not trained on", suspect=True)
            raise
        except BaseException:
            # Note the time of the failure before the stack closes the run's objects, which may take long.
            note_failure()
            raise

    def begin(self) -> None:
        """Send the trainer's weights to the engine and evaluate the start policy."""
        config = self.config
        if self.engine is not None:
            with self.timer("start"), patience("waiting for the servers"):
                self.engine.connect()
        if self.trainer.topology.rank == 0:
            placement = config.engine.placement
            dtype = config.model.dtype
            layout = self.trainer.layout
            log.info("%s", active_line(config.rollout, placement, dtype, self.algorithm, layout))
        self._check_files()
        step = self.state.step
        if self._repeats(step + 1) and (step == 0 or not self._lacks_evaluation(step)):
            # The next step needs no server: its responses are stored. So the servers receive weights for the first time
            # after the last repeated step. Earlier ranks have evaluated the start policy already.
            if step == 0:
                self._write_row(0, {})
            self._check_records()
            return
        update_figures = self._update_weights()
        if step == 0:
            accuracies = self.evaluations.measure(0)
            self.recorder.write(0, {**update_figures, **accuracies, **self.timer.finish_step()})
        elif self._lacks_evaluation(step):
            accuracies = self.evaluations.measure(step)
            self.recorder.complete(step, {**update_figures, **accuracies})
        else:
            self.recorder.carry_over(update_figures)
        self._check_records()

    def _complete_step(self, step: int, weights: str, sampler: dict[str, Any]) -> None:
        """Record that ``step`` is complete. ``weights``: the hash of the weights that the step made. Collective."""
        self.state.step = step
        self.state.sampler = sampler
        self.spool.sync(step)
        self.fence.check_together()
        self.spool.note_trained(step, weights)

    def _lacks_evaluation(self, step: int) -> bool:
        """Return whether the record of ``step`` lacks an evaluation. Collective: only rank 0 has the records."""
        return any_rank(self.recorder.lacks_evaluation(self.evaluations.last_due(step)))

    def _repeats(self, step: int) -> bool:
        """Return whether earlier ranks have trained on ``step`` already, and the spool has all its responses."""
        return step <= self.spool.last_trained

    def step(self) -> None:
        """Train on one rollout batch and send the new weights to the engine."""
        step = self.state.step + 1
        with patience("others generate"):
            batch = self.source.collect(step)
        with self.timer("exchange"):
            seal = self.seals.check(step, batch)
        self._take_devices()
        self._check_checkpoint()
        failpoint("step/batch")
        with self.timer("train"):
            self._check_memory()
        self.samples.take(step, batch)
        planned, learned, weights_hash = self._learn(step, batch, seal)
        self._complete_step(step, weights_hash, batch.sampler)
        self.examples = examples_of(planned.trajectories)
        if seal is not None:
            seal = seal.trained(weights_hash)
        self._save_batch(step, planned.trajectories, seal)
        samples = self.samples.of_step(step, planned.trajectories, self.learner.masked_by_response)
        # Free the batch before the next one arrives: two do not fit in memory.
        del planned
        self.recorder.write_masked_tokens(step, self.learner.most_masked)
        self._record_faults(batch.environment_faults)
        measured = {**batch.figures, **with_stale_gap_renamed(learned, batch.figures)}
        if batch.seal is not None and step in batch.seal.weights:
            # A replayed batch: compare the weights with the weights that the replayed run made of this batch.
            measured[metric_names.REDERIVED] = float(batch.seal.weights[step] == weights_hash)
        failpoint("step/saved")
        measured |= file_figures(batch.outlines, self.data.files, self.config.rollout.group_size)
        try:
            self.evaluations.before_update(step)
            with patience("others generate"):
                self.source.wait_before_update(step)
            # Before a repeated step, whose responses are stored, only an evaluation needs servers with these weights.
            if not self._repeats(step + 1) or self._has_lost_evaluation(step):
                measured |= self._update_weights()
                measured |= self._evaluate(step)
            failpoint("step/generate_ahead")
            self.source.run_ahead(step)
        finally:
            # If a stop ends the block above, a checkpoint of this step is saved: write the step's metrics row too.
            measured |= {**self._failed_rewards(), **self.store.figures()}
            self._write_row(step, {**measured, **self.timer.finish_step()})
            self.recorder.write_samples(samples)
        # While the trainer is parked, the checkpoint waits for the trainer's next turn.
        if self._is_due(self.config.checkpoint.every) and not self.trainer.parked:
            self._save_checkpoint()
        self._check_records()
        # A signal reaches the ranks at different moments. If only one rank stopped, the other ranks would wait for it
        # in a collective.
        if any_rank(self.should_stop()):
            raise RunStoppedError(f"stopped after step {step}")

    def _learn(
        self, step: int, batch: RolloutBatch, seal: Seal | None
    ) -> tuple[PlannedBatch, dict[str, float], str]:
        """Do the optimiser steps of a batch, and hash the new weights.

        Returns the batch as this rank received it, the metrics, and the hash of all ranks' weights.
        """
        with self.timer("train"):
            planned = self.learner.plan(batch)
            try:
                learned = self.learner.learn(planned)
            except (FrequencyError, GapError):
                # Keep the batch, so that ``megatron-dppo doctor`` can explain the failure.
                self._save_batch(step, planned.trajectories, seal)
                self._write_held_tensors(step)
                raise
            if self.learner.warned_of_gap:
                self._write_held_tensors(step)
            weights_hash = self.memory.remember_weights(step)
            is_saved = last_due(step, self.config.checkpoint.every, self.config.run.steps) == step
            if is_saved and self._watches_optimizer:
                self.memory.remember_optimizer(step)
        failpoint("step/trained")
        self.seals.remember(step, weights_hash)
        failpoint("step/sealed")
        return planned, learned, weights_hash

    def _write_held_tensors(self, step: int) -> None:
        """Write checksums of the servers' tensors to a file beside the batch of ``step``.

        The caller has found that trainer and servers disagree about the probabilities of this batch.
        """
        if self.config.rollout.save and self.engine is not None:
            folder = Path(self.config.run.directory) / ROLLOUTS_FOLDER
            self.engine.write_held_tensors(held_tensors.file_of(folder, step))

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the policy if an evaluation is due and no record has its result. Collective."""
        if self._repeats(step) and not self._has_lost_evaluation(step):
            return {}
        return self.evaluations.after_update(step)

    def _has_lost_evaluation(self, step: int) -> bool:
        """Return whether an evaluation after ``step`` is due, and no metrics row of earlier ranks has its result."""
        is_due = bool(self.data.held_out) and self.evaluations.last_due(step) == step
        return is_due and mean_accuracy(self.earlier_rows.get(str(step), {})) is None

    def _write_row(self, step: int, measured: Mapping[str, float]) -> None:
        """Write the metrics row of ``step``.

        A repeated step keeps the row of the earlier ranks, because only their row has the times of generation. New
        accuracies are added to the row, and the counts of ``measured`` are carried over to the next row.
        """
        earlier_row = None
        if self._repeats(step):
            earlier_row = self.earlier_rows.get(str(step))
        if earlier_row is None:
            self.recorder.write(step, measured)
            return
        values: dict[str, float] = {}
        for name, value in measured.items():
            if metric_names.accuracy_set(name) is not None:
                values[name] = value
        for name, earlier_value in earlier_row.items():
            if name not in ("step", "weight_version"):
                # The file has null for NaN.
                values[name] = math.nan if earlier_value is None else earlier_value
        self.recorder.write(step, values)
        self.recorder.carry_over(measured)

    def finish(self) -> None:
        """Export the policy, compare the export with the trainer, write report and summary, and upload the export."""
        max_logprob_diff = None
        self._take_devices()
        self.memory.check_weights()
        self._finish_checkpoint()
        self.fence.check_together()
        if self.config.checkpoint.export_hf:
            with self.timer("export"), patience("others export"):
                # Without examples, ``export`` does not compare the log-probabilities of export and trainer.
                examples = None
                if self.config.checkpoint.verify_export:
                    examples = gathered_examples(self.examples) or self.data.train.problems
                max_logprob_diff = export(self.config.run.directory, self.trainer, examples)
        # Faults of the last evaluation's episodes are not recorded yet.
        self._record_faults(gathered_faults(self.episodes))
        self.recorder.finish(max_logprob_diff)
        repository = self.config.checkpoint.upload
        if repository is not None:
            with patience("rank 0 sends the export"):
                run = self.config.run
                on_rank_0(partial(upload_export, run.directory, repository, run.steps))

    def stop(self, reason: str, *, suspect: bool = False) -> None:
        """Leave a checkpoint of the last completed step.

        A ``suspect`` checkpoint is only read by ``megatron-dppo doctor``; no start loads it.
        """
        self._take_devices()
        resumes_after = self.saved_step if suspect else self.state.step
        if self.state.step > self.saved_step:
            self._save_checkpoint(suspect=suspect)
        self._finish_checkpoint()
        if resumes_after < self.state.step:
            folder = suspect_folder(self.store.directory, self.state.step)
            reason = (
                f"{reason}; the weights of step {self.state.step} are in {folder} for megatron-dppo doctor, and no "
                f"start goes on from them unless the folder is renamed to {folder.stem}"
            )
        log.info("%s; the same command resumes after step %d", reason, resumes_after)

    def _stop_unrecorded(self) -> None:
        """Save a checkpoint if the disk has room for it; otherwise log why it was not saved."""
        try:
            self.stop("the run's records can't be written")
        except CheckpointError as error:
            log.warning("no checkpoint of step %d: %s", self.state.step, error)
        # Save the batch after the checkpoint, because the checkpoint matters more: without a checkpoint of the step, a
        # later start makes the step and its batch again.
        if self._unsaved_batch is not None:
            self._unsaved_batch.save_again()

    def _check_records(self) -> None:
        """Raise RecordingError, on every rank, if rank 0 could not write a record."""
        failure = self.recorder.failure
        reason = first_failure(None if failure is None else str(failure))
        if reason is not None:
            raise RecordingError(reason)

    def _take_devices(self) -> None:
        """Take the devices that the trainer shares with servers, and save a checkpoint that had to wait for them."""
        if self.engine is None or not self.trainer.parked:
            return
        with self.timer("switch"), patience("others park"):
            self.engine.take_devices()
        if self.state.step > self.saved_step and self._is_due(self.config.checkpoint.every):
            self._save_checkpoint()

    def _resume(self) -> RunState:
        """Load the state that this start continues from into the trainer and the sampler, and return it."""
        self.fence.check_together()
        identity = identity_of(self.config, self.data.train.sha256)
        replays = self.spec.rollout.replays
        run = self.config.run
        checkpoints = self.config.checkpoint
        nonce = self.fence.nonce
        has_begun = on_rank_0(partial(has_begun_run, run.directory, nonce))
        state = resume(
            run, checkpoints, self.trainer, self.store, identity, replays=replays, nonce=nonce
        )
        # Whether the run begins at step 0 now. Ranks that are restarted before the first checkpoint have no state
        # either, but the run has begun already.
        self._is_fresh = state is None and not has_begun
        if state is None:
            return RunState(sampler=self.sampler.state_dict(), identity=identity)
        self.saved_step = state.step
        continue_sampler(self.sampler, state, self.config)
        return state

    def _check_files(self) -> None:
        """Compare the files that this start reads with the hashes that the run's state has, and store new hashes."""
        with self.timer("start"), patience("others hash the start model"):
            hashes = self.hashes.wait()
            paths = model_files(self.config.model.hf_checkpoint, self.config.lora.start_from)
            hash_of_path = {paths[name]: digest for name, digest in hashes.items()}
            on_rank_0(partial(check_download, hash_of_path))
            all_hashes = hashes | self.data.evaluation_hashes
        self.state.check_files(all_hashes, "the checkpoint of this run")
        self.state.identity = {**self.state.identity, FILES: all_hashes}

    def _rollout_source(self) -> RolloutSource:
        rollout = self.config.rollout
        problems = self.data.train.problems
        if rollout.replay_from is not None:
            topology = self.trainer.topology
            origin = self.data.origin()
            return ReplayedRollouts(rollout, topology, problems, self.sampler, origin)
        assert self.engine is not None
        return GeneratedRollouts(
            rollout,
            self.config.algorithm,
            self.trainer.topology,
            self.engine,
            self.scorer,
            self.job,
            problems,
            self.sampler,
            self.timer,
            steps=self.config.run.steps,
            episodes=self.episodes,
            credit=self.config.environment.credit,
            spool=self.spool,
        )

    def _evaluations(self) -> Evaluations:
        config = self.config
        # Colocated servers are paused while the trainer works, so evaluations can't run in the background.
        is_colocated = config.engine.placement == "colocated"
        evaluator = Evaluator(
            self.data.held_out if self.engine is not None else {},
            config.evaluation,
            self.job,
            config.algorithm,
            self.trainer.topology,
            self.engine,
            self.scorer,
            self.samples,
        )
        return Evaluations(
            evaluator,
            self.recorder,
            self.timer,
            steps=config.run.steps,
            background=config.rollout.max_staleness > 0 and not is_colocated,
        )

    def _update_weights(self) -> dict[str, float]:
        """Send the weights to the engine. Return metrics of this update, and counts of all updates since the last call.

        Recoveries of lost servers count as updates too.
        """
        if self.engine is None:
            return {}
        with self.timer("sync"), patience("others update the engine's weights"):
            report = self.engine.update_weights(self.state.step)
        updates = self.engine.updates
        recorded_count, recorded_verified = self._recorded_updates
        self._recorded_updates = (updates.count, updates.verified)
        return {
            metric_names.WEIGHT_UPDATES: updates.count - recorded_count,
            metric_names.WEIGHT_UPDATES_VERIFIED: updates.verified - recorded_verified,
            **report.metrics(),
        }

    def _failed_rewards(self) -> dict[str, float]:
        """Return the counts of failed rewards since the last call, over all leaders.

        A reward failed if it timed out or crashed, or if its response was replaced.
        """
        names = (
            metric_names.REWARD_TIMEOUTS,
            metric_names.REWARD_CRASHES,
            metric_names.REWARD_REPLACED,
        )
        counts = {name: float(self.scorer.failures[name]) for name in names}
        self.scorer.failures.clear()
        return counts

    def _record_faults(self, faults: Counter[str]) -> None:
        name = self.config.environment.name
        if name is not None:
            self.recorder.write_environment_faults(self.state.step, name, faults)

    def _is_due(self, every: int) -> bool:
        """Return whether an action is due after the present step.

        The action is due after each ``every`` steps, and after the last step of the run.
        """
        return last_due(self.state.step, every, self.config.run.steps) == self.state.step

    def _save_batch(self, step: int, batch: Mapping[int, Trajectory], seal: Seal | None) -> None:
        if self.config.rollout.save and self.trainer.topology.rank == 0:
            folder = Path(self.config.run.directory) / ROLLOUTS_FOLDER
            trajectories: list[Trajectory] = []
            for position, trajectory in sorted(batch.items()):
                loss_columns = self.learner.loss_columns.get(position, {})
                trajectories.append(trajectory.with_columns(**loss_columns))
            try:
                save_batch(folder, step, trajectories, seal)
            except OSError as error:
                failure = RecordingError(f"rollout.save: {folder}: {error.strerror}")
                # ``_check_records`` raises the first failure on every rank.
                self.recorder.failure = self.recorder.failure or failure
                self._unsaved_batch = _UnsavedBatch(folder, step, trajectories, seal)

    def _save_checkpoint(self, *, suspect: bool = False) -> None:
        """Start writing a checkpoint of this step, after the previous checkpoint is complete.

        Raises AlteredMemoryError if the weights or the optimizer state have changed since the step made them.
        """
        state = self.state
        failpoint("step/checkpoint")
        with self.timer("checkpoint"), patience("others save"):
            digest = self.memory.check_weights()
            self.memory.check_optimizer()
            state.weights = {self.trainer.weights_form(): digest}
            state.settings = on_rank_0(partial(settings_of, self.config))
            state.records = on_rank_0(partial(self.recorder.mark, state.step))
            self.store.save(self.trainer, state.step, state.to_json(), suspect=suspect)
        if not suspect:
            self.saved_step = state.step

    def _check_memory(self) -> None:
        """Raise AlteredMemoryError, on every rank, if weights or optimizer state changed since the last step."""
        self.memory.check_weights()
        self.memory.check_optimizer()
        self.memory.forget_optimizer()

    @property
    def _watches_optimizer(self) -> bool:
        return self.config.memory_checks.optimizer

    def _check_checkpoint(self) -> None:
        """Raise CheckpointError if a checkpoint could not be written in the background."""
        with self.timer("checkpoint"):
            self.store.poll()

    def _finish_checkpoint(self) -> None:
        with self.timer("checkpoint"), patience("others save"):
            self.store.finish()
