"""The training run on one rank, from its start to its end."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from typing import Any

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.seal import Seal
from megatron_dppo.environments.over_http import absent_services
from megatron_dppo.fleet.membership import EngineUnavailableError
from megatron_dppo.loop.batch_generation import BatchGeneration
from megatron_dppo.loop.batch_training import BatchTraining
from megatron_dppo.loop.checkpoints import RunCheckpoints
from megatron_dppo.loop.ending import RunFence, StopFlag, rank_of_run
from megatron_dppo.loop.evaluation import Evaluations, Evaluator
from megatron_dppo.loop.frequency_canary import FrequencyError
from megatron_dppo.loop.gap_guard import GapError
from megatron_dppo.loop.input_hashes import BackgroundHashes
from megatron_dppo.loop.inputs import RunData, model_files
from megatron_dppo.loop.learning import PlannedBatch
from megatron_dppo.loop.profiling import StepProfiler
from megatron_dppo.loop.recorder import Recorder
from megatron_dppo.loop.repeated_steps import RepeatedSteps, open_spool
from megatron_dppo.loop.rollout_figures import STALE_ANCHOR, file_figures, with_stale_gap_renamed
from megatron_dppo.loop.rollout_sources import RolloutBatch
from megatron_dppo.loop.run_identity import identity_of
from megatron_dppo.loop.run_of_steps import RunOfSteps
from megatron_dppo.loop.run_parts import active_line, stats_spec
from megatron_dppo.loop.run_state import FILES
from megatron_dppo.loop.sample_maker import SampleMaker
from megatron_dppo.loop.server_access import free_shared_devices
from megatron_dppo.loop.step_records import StepRecords
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.summary import RunInfo
from megatron_dppo.model.hub_download import check_download
from megatron_dppo.rewards import RewardUnavailableError
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.trainer.collectives import any_rank, on_rank_0
from megatron_dppo.trainer.run_export import (
    Example,
    examples_of,
    export,
    gathered_examples,
    upload_export,
)
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.watchdog import patience
from megatron_dppo.weights.server import held_tensors

log = logging.getLogger(__name__)


def run_rank(config: TrainConfig, spec: RunSpec) -> None:
    """Train until ``run.steps`` or until a clean stop, and leave a checkpoint behind. Collective over all ranks."""
    with rank_of_run(config.run.directory) as (stop, fence, stack):
        Run(config, spec, RunData(config), stop, fence, stack).to_the_end()


def _require_services(config: TrainConfig) -> None:
    """Raise RewardUnavailableError if a reward server or an environment server does not answer."""
    faults = absent_services(config)
    if faults:
        raise RewardUnavailableError("; ".join(faults))


class Run(RunOfSteps):
    """The parts of a run that its steps need. The constructor opens them, ``stack`` closes them.

    Args:
        config: configuration of the run.
        spec: facts that follow from the configuration.
        data: training and held-out problems; the constructor refuses bad answers or leaves their problems out.
        stop: whether a clean stop was requested.
        fence: raises once another start of the run has taken over.
        stack: closes what the constructor opens.

    Attributes:
        trainer: the policy and its optimizer.
        checkpoints: loads the state that this start continues from, and saves the next ones.
        state: position of the run; ``state.step`` is the number of steps that were trained.
        repeats: steps that this start repeats from the responses of earlier ranks.
        generation: servers, rewards and episodes; its source has the batches.
        training: trains on batches and checks the weights.
        records: writes what each step leaves in the run's folder.
        evaluations: measures the policy on held-out problems.
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
        super().__init__(stop, fence)
        self.config: TrainConfig = config
        self.data = data
        metric_names.add_metrics(config.tracking.metrics)
        settings = config.algorithm
        algorithm = build_algorithm(settings.name, settings.options, settings.settings)
        if algorithm.needs_recomputed and config.rollout.max_staleness:
            log.warning(STALE_ANCHOR, settings.name)
        with self.timer("start"), patience("others start"):
            free_shared_devices(config, spec)
            statistics = stats_spec(algorithm, spec.rollout.topk, config.distillation.top_k)
            self.trainer = Trainer(config, spec.model, spec.trainer, statistics)
            topology = self.trainer.topology
            files = model_files(config.model.hf_checkpoint, config.lora.start_from)
            self.hashes = BackgroundHashes(files, topology)
            fence.join()
            on_rank_0(partial(_require_services, config))
            data.refuse_or_drop(on_rank_0(data.bad_answers))
            self.checkpoints = RunCheckpoints(config, self.trainer, fence, self._forget_responses)
            stack.callback(self.checkpoints.store.close)
            sampler = data.sampler()
            identity = identity_of(config, data.train.sha256)
            self.state = self.checkpoints.resume(sampler, identity, replays=spec.rollout.replays)
            spool = open_spool(
                config, data, topology, self.state.step, is_fresh=self.checkpoints.is_fresh
            )
            stack.callback(spool.close)
            self.repeats = RepeatedSteps(spool, config.run.directory, self.state.step)
            self.generation = BatchGeneration(
                config, spec, data, self.trainer, stop, fence, sampler, spool, self.timer, stack
            )
            self.training = BatchTraining(config, spec, data, self.trainer, algorithm)
            self.training.continue_from(self.state.step, spool)
            self.recorder: Recorder = stack.enter_context(self._recorder())
            samples = SampleMaker.of(config, data)
            self.records = StepRecords(config, topology.rank, self.recorder, samples, self.repeats)
            self.evaluations = self._evaluations(samples)
            self._profiler = StepProfiler(config.profile, config.run.directory, topology.rank)
        self.examples: list[Example] = []
        """Examples of the last batch. At the end, the export is compared with the trainer on them."""

    def _forget_responses(self, step: int) -> None:
        """Remove the kept responses up to ``step``, whose checkpoint is complete. Called on rank 0, from any thread."""
        self.repeats.spool.forget_until(step)

    def _recorder(self) -> Recorder:
        config = self.config
        return Recorder(
            config.run,
            RunInfo.of_config(config.model_dump()),
            self.trainer.topology.rank,
            self.state.step,
            evaluates=self.generation.engine is not None and bool(config.data.evaluation),
            text_of=self.data.text_of,
            fence=self.fence.check,
            mark=self.state.records,
            tracking=config.tracking,
            config=config.model_dump(),
        )

    def _evaluations(self, samples: SampleMaker) -> Evaluations:
        config = self.config
        generation = self.generation
        evaluator = Evaluator(
            {} if generation.engine is None else self.data.held_out,
            config.evaluation,
            generation.job,
            config.algorithm,
            self.trainer.topology,
            generation.engine,
            generation.scorer,
            samples,
        )
        return Evaluations(
            evaluator, self.recorder, self.timer, steps=config.run.steps, background=config.overlaps
        )

    def begin(self) -> None:
        """Send the trainer's weights to the servers and evaluate the start policy."""
        with self.timer("start"), patience("waiting for the servers"):
            self.generation.connect(is_fresh=self.checkpoints.is_fresh)
        self._log_active()
        self._check_files()
        self._begin_records()

    def _begin_records(self) -> None:
        """Record the start policy, or complete the record of the checkpoint that this start continues from."""
        step = self.state.step
        if self.repeats.has(step + 1) and (step == 0 or not self._lacks_evaluation(step)):
            # The next step needs no server: its responses are stored. So the servers receive weights for the first time
            # after the last repeated step. Earlier ranks have evaluated the start policy already.
            if step == 0:
                self.records.write_row(0, {})
            return
        recorder = self.recorder
        update_figures = self._update_weights()
        if step == 0:
            accuracies = self.evaluations.measure(0)
            recorder.write(0, {**update_figures, **accuracies, **self.timer.finish_step()})
        elif self._lacks_evaluation(step):
            accuracies = self.evaluations.measure(step)
            recorder.complete(step, {**update_figures, **accuracies})
        else:
            recorder.carry_over(update_figures)

    def step(self) -> None:
        """Train on one rollout batch and send the new weights to the servers."""
        step = self.state.step + 1
        with self._profiler.of(step):
            self._step(step)

    def _step(self, step: int) -> None:
        batch, seal = self._generate(step)
        measured = self._train(step, batch, seal)
        try:
            self.evaluations.before_update(step)
            with patience("others generate"):
                self.generation.source.wait_before_update(step)
            # Before a repeated step, whose responses are stored, only an evaluation needs servers with these weights.
            if not self.repeats.has(step + 1) or self._has_lost_evaluation(step):
                measured |= self._update_weights()
                measured |= self._evaluate(step)
            failpoint("step/generate_ahead")
            self.generation.source.run_ahead(step)
        finally:
            # If a stop ends the block above, a checkpoint of this step is saved: write the step's metrics row too.
            measured |= {**self.generation.failed_rewards(), **self.checkpoints.store.figures()}
            self.records.write_row(step, {**measured, **self.timer.finish_step()})
            self.records.write_samples()
        # While the trainer is parked, the checkpoint waits for the trainer's next turn.
        if self.checkpoints.is_due(step) and not self.trainer.parked:
            self.save_checkpoint()

    def _generate(self, step: int) -> tuple[RolloutBatch, Seal | None]:
        """Return the batch of ``step`` and its seal, and bring the trainer back to its devices."""
        with patience("others generate"):
            batch = self.generation.source.collect(step)
        with self.timer("exchange"):
            seal = self.training.check_batch(step, batch)
        self._take_devices()
        with self.timer("checkpoint"):
            self.checkpoints.store.poll()
        failpoint("step/batch")
        return batch, seal

    def _train(self, step: int, batch: RolloutBatch, seal: Seal | None) -> dict[str, float]:
        """Do the optimiser steps of a batch, record the batch, and return the step's metrics.

        When this method returns, the batch is freed: two batches do not fit in memory.
        """
        with self.timer("train"):
            self.training.begin_step()
        self.records.take_samples(step, batch)
        planned, learned, weights_hash = self._learn(step, batch, seal)
        self._complete_step(step, weights_hash, batch.sampler)
        self.examples = examples_of(planned.trajectories)
        if seal is not None:
            seal = seal.trained(weights_hash)
        self.records.write_batch(step, planned.trajectories, self.training.learner, seal)
        self.records.write_environment_faults(step, batch.environment_faults)
        failpoint("step/saved")
        measured = {**batch.figures, **with_stale_gap_renamed(learned, batch.figures)}
        if batch.seal is not None and step in batch.seal.weights:
            # A replayed batch: compare the weights with the weights that the replayed run made of this batch.
            measured[metric_names.REDERIVED] = float(batch.seal.weights[step] == weights_hash)
        measured |= file_figures(batch.outlines, self.data.files, self.config.rollout.group_size)
        return measured

    def _learn(
        self, step: int, batch: RolloutBatch, seal: Seal | None
    ) -> tuple[PlannedBatch, dict[str, float], str]:
        """Do the optimiser steps of a batch, and hash the new weights.

        Returns the batch as this rank received it, the metrics, and the hash of all ranks' weights.
        """
        learner = self.training.learner
        with self.timer("train"):
            planned = learner.plan(batch)
            try:
                learned = learner.learn(planned)
            except (FrequencyError, GapError):
                # Keep the batch, so that ``megatron-dppo doctor`` can explain the failure.
                self.records.save_batch(step, planned.trajectories, learner, seal)
                self._write_held_tensors(step)
                raise
            if learner.warned_of_gap:
                self._write_held_tensors(step)
            weights_hash = self.training.end_step(step, is_saved=self.checkpoints.is_due(step))
        return planned, learned, weights_hash

    def _complete_step(self, step: int, weights: str, sampler: dict[str, Any]) -> None:
        """Record that ``step`` is complete. ``weights``: the hash of the weights that the step made. Collective."""
        self.state.step = step
        self.state.sampler = sampler
        spool = self.repeats.spool
        spool.sync(step)
        self.fence.check_together()
        spool.note_trained(step, weights)

    def _write_held_tensors(self, step: int) -> None:
        """Write checksums of the servers' tensors to a file beside the batch of ``step``.

        The caller has found that trainer and servers disagree about the probabilities of this batch.
        """
        engine = self.generation.engine
        if self.config.rollout.save and engine is not None:
            engine.write_held_tensors(held_tensors.file_of(self.records.folder, step))

    def _update_weights(self) -> dict[str, float]:
        with self.timer("sync"), patience("others update the engine's weights"):
            return self.generation.update_weights(self.state.step)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the policy if an evaluation is due and no record has its result. Collective."""
        if self.repeats.has(step) and not self._has_lost_evaluation(step):
            return {}
        return self.evaluations.after_update(step)

    def _has_lost_evaluation(self, step: int) -> bool:
        """Return whether an evaluation after ``step`` is due, and no metrics row of earlier ranks has its result."""
        is_due = bool(self.data.held_out) and self.evaluations.last_due(step) == step
        return is_due and not self.repeats.has_accuracy(step)

    def _lacks_evaluation(self, step: int) -> bool:
        """Return whether the record of ``step`` lacks an evaluation. Collective: only rank 0 has the records."""
        return any_rank(self.recorder.lacks_evaluation(self.evaluations.last_due(step)))

    def finish(self) -> None:
        """Export the policy, compare the export with the trainer, write report and summary, and upload the export."""
        max_logprob_diff = None
        self._take_devices()
        self.training.check_weights()
        self.finish_checkpoint()
        self.fence.check_together()
        if self.config.checkpoint.export_hf:
            with self.timer("export"), patience("others export"):
                # Without examples, ``export`` does not compare the log-probabilities of export and trainer.
                examples = None
                if self.config.checkpoint.verify_export:
                    examples = gathered_examples(self.examples) or self.data.train.problems
                max_logprob_diff = export(self.config.run.directory, self.trainer, examples)
        # Faults of the last evaluation's episodes are not recorded yet.
        faults = self.generation.environment_faults()
        self.records.write_environment_faults(self.state.step, faults)
        self.recorder.finish(max_logprob_diff)
        repository = self.config.checkpoint.upload
        if repository is not None:
            with patience("rank 0 sends the export"):
                run = self.config.run
                on_rank_0(partial(upload_export, run.directory, repository, run.steps))

    def stop(self, reason: str, *, suspect: bool = False) -> None:
        """Leave a checkpoint of the last completed step, after the trainer has its devices."""
        self._take_devices()
        super().stop(reason, suspect=suspect)

    def stop_unrecorded(self) -> None:
        """Save a checkpoint and the batch if the disk has room for them; otherwise log why they were not saved."""
        super().stop_unrecorded()
        # Save the batch after the checkpoint, because the checkpoint matters more: without a checkpoint of the step, a
        # later start makes the step and its batch again.
        self.records.save_lost_batch()

    def after_failure(self, error: BaseException) -> None:
        """Leave a checkpoint after the failure of a server, of a reward or of a check of a batch."""
        if isinstance(error, EngineUnavailableError):
            self.stop("no server is available")
        elif isinstance(error, RewardUnavailableError):
            self.stop("a reward is unavailable")
        elif isinstance(error, FrequencyError | GapError):
            # Every rank raised before the optimiser step, so the checkpoint has the weights that failed the check.
            self.stop("the batch was not trained on", suspect=True)
        else:
            super().after_failure(error)

    def weights_digest(self) -> str:
        """Return the hash of all ranks' weights.

        Raises AlteredMemoryError if the weights or the optimizer state have changed since the step made them.
        """
        return self.training.check_memory()

    def _take_devices(self) -> None:
        """Take the devices that the trainer shares with servers, and save a checkpoint that had to wait for them."""
        engine = self.generation.engine
        if engine is None or not self.trainer.parked:
            return
        with self.timer("switch"), patience("others park"):
            engine.take_devices()
        step = self.state.step
        if step > self.checkpoints.saved_step and self.checkpoints.is_due(step):
            self.save_checkpoint()

    def _log_active(self) -> None:
        """Log on rank 0 the line that describes the run."""
        if self.trainer.topology.rank == 0:
            algorithm = self.training.algorithm
            log.info("%s", active_line(self.config, algorithm, self.trainer.layout))

    def _check_files(self) -> None:
        """Compare the files that this start reads with the hashes that the run's state has, and store new hashes."""
        with self.timer("start"), patience("others hash the start model"):
            hashes = self.hashes.wait()
            hash_of_path = {self.hashes.files[name]: digest for name, digest in hashes.items()}
            on_rank_0(partial(check_download, hash_of_path))
            all_hashes = hashes | self.data.evaluation_hashes
        self.state.check_files(all_hashes, "the checkpoint of this run")
        self.state.identity = {**self.state.identity, FILES: all_hashes}
