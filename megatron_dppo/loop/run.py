"""One run on one rank, told top to bottom."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.algorithms.algorithm import Algorithm, build_algorithm
from megatron_dppo.algorithms.table import carried_topk
from megatron_dppo.config.schema import RolloutConfig, TrainConfig
from megatron_dppo.data.batch_file import save_batch
from megatron_dppo.data.seal import Seal
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.protocol import RoutedShape, SamplingParams
from megatron_dppo.environments.episodes import EpisodeLimits, Episodes
from megatron_dppo.environments.over_http import absent_services
from megatron_dppo.environments.workers import EnvironmentPool, EnvironmentSpec
from megatron_dppo.fleet.generation import GenerationJob, SamplingSeeds
from megatron_dppo.fleet.membership import EngineUnavailableError
from megatron_dppo.logging import fatal, note_failure
from megatron_dppo.loop.ending import RunFence, RunStoppedError, StopFlag, run_fence
from megatron_dppo.loop.engine_session import EngineSession
from megatron_dppo.loop.evaluation import Evaluations, Evaluator, last_due
from megatron_dppo.loop.inputs import BackgroundHashes, RunData, model_files
from megatron_dppo.loop.learning import Learner
from megatron_dppo.loop.recorder import Recorder, RecordingError, SampleMaker, StepProfiler
from megatron_dppo.loop.resuming import (
    FILES,
    ResumeError,
    RunState,
    changes_of,
    identity_of,
    resume,
    settings_of,
)
from megatron_dppo.loop.rollout_figures import (
    STALE_ANCHOR,
    FrequencyError,
    GapError,
    file_figures,
    with_gap_named,
)
from megatron_dppo.loop.rollout_sources import (
    BatchSeals,
    GeneratedRollouts,
    ReplayedRollouts,
    RolloutSource,
    gathered_faults,
)
from megatron_dppo.loop.scoring import Scorer
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.progress import PhaseTimer
from megatron_dppo.metrics.records import CHECKPOINTS_FOLDER, ROLLOUTS_FOLDER, remember_checkpoint
from megatron_dppo.metrics.summary import RunInfo
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.layout import Layout
from megatron_dppo.rewards import RewardUnavailableError
from megatron_dppo.system.errors import RunError
from megatron_dppo.trainer.checkpoint.directory import suspect_folder
from megatron_dppo.trainer.checkpoint.store import CheckpointStore
from megatron_dppo.trainer.collectives import any_rank, first_failure, on_rank_0
from megatron_dppo.trainer.hugging_face import (
    Example,
    examples_of,
    export,
    gathered_examples,
    upload_export,
)
from megatron_dppo.trainer.step import StatsSpec
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.watchdog import patience

# What is active in a run, in a line: its algorithm with its numbers, replay, filter, staleness, layout.


def active_line(
    rollout: RolloutConfig, placement: str, dtype: str, algorithm: Algorithm, layout: Layout
) -> str:
    """``active: dppo-binary-tv (tv_threshold 0.15), R3 off, filter off, staleness 0, TP2 EP2, float32``."""
    numbers = ", ".join(
        f"{name} {value:g}" for name, value in algorithm.numbers.items() if math.isfinite(value)
    )
    parts = [
        f"{algorithm.name} ({numbers})" if numbers else algorithm.name,
        f"R3 {_switch(rollout.router_replay)}",
        f"filter {_switch(rollout.drop_zero_variance_groups)}",
        f"staleness {rollout.max_staleness}",
        rollout.interrupt if rollout.max_staleness else "",
        placement if placement != "separate" else "",
        f"replaying {rollout.replay_from}" if rollout.replay_from is not None else "",
        layout.describe(),
        dtype,
    ]
    return "active: " + ", ".join(part for part in parts if part)


def _switch(active: bool) -> str:
    return "on" if active else "off"


log = logging.getLogger(__name__)


def run_rank(config: TrainConfig) -> None:
    """Train until ``run.steps``, or until a clean stop; then leave a checkpoint behind. Collective over all ranks."""
    stop = StopFlag().install()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        data = RunData(config)
        with ExitStack() as stack:
            fence = stack.enter_context(run_fence(config.run.directory))
            Run(config, data, stop, fence, stack).to_the_end()
    except RunError as error:
        fatal(f"{type(error).__name__}: {error}")


def _require_services(config: TrainConfig) -> None:
    """Raise RewardUnavailableError where a server that gives rewards, or plays the environment, does not answer."""
    if faults := absent_services(config):
        raise RewardUnavailableError("; ".join(faults))


class Run:
    """Everything a step needs, opened on construction and closed by ``stack``."""

    def __init__(
        self,
        config: TrainConfig,
        data: RunData,
        stop: StopFlag,
        fence: RunFence,
        stack: ExitStack,
    ) -> None:
        self.config = config
        self.data = data
        self.fence = fence
        self.should_stop = stop
        self.timer = PhaseTimer()
        chosen = config.algorithm
        self.algorithm = algorithm = build_algorithm(chosen.name, chosen.options, chosen.settings)
        self.topk = carried_topk(
            algorithm,
            config.rollout.topk_log_probs,
            load_model_shape(config.model.hf_checkpoint).vocab_size,
        )
        with self.timer("start"), patience("others start"):
            topk = self.topk > 0 or algorithm.needs_recomputed_distribution
            spec = StatsSpec(topk, True, algorithm.needs_topk_gradient, algorithm.needs_sum_squares)
            self.trainer = Trainer(config, spec)
            files = model_files(config.model.hf_checkpoint, config.lora.start_from)
            self.hashes = BackgroundHashes(files, self.trainer.topology)
            fence.join()
            on_rank_0(partial(_require_services, config))
            data.settle(on_rank_0(data.bad_answers))
            self.store = CheckpointStore(
                Path(config.run.directory) / CHECKPOINTS_FOLDER,
                config.checkpoint.keep,
                fence.check_together,
                background=config.checkpoint.background,
                published=partial(remember_checkpoint, config.run.directory),
            )
            stack.callback(self.store.close)
            self.sampler = data.sampler()
            self.saved_step = 0
            self.state = self._resume()
        self.engine: EngineSession | None = None
        if config.rollout.replay_from is None:
            self.engine = stack.enter_context(
                EngineSession(config, self.trainer, stop, fence.check_together, self.data.place_of)
            )
        self.scorer = Scorer(config.reward)
        # Nobody else scores, so nobody else needs workers.
        if self.trainer.topology.is_leader:
            stack.enter_context(self.scorer)
        self.episodes = self._episodes()
        if self.episodes is not None:
            stack.callback(self.episodes.pool.close)
        if algorithm.needs_recomputed and config.rollout.max_staleness:
            log.warning(STALE_ANCHOR, config.algorithm.name)
        zeroes_truncated = config.algorithm.truncated_responses == "zero-reward"
        self.samples = SampleMaker(
            config.reward.name,
            data,
            zeroes_truncated=zeroes_truncated,
            is_alone=config.environment.name is None and not config.reward.further,
        )
        self.learner = Learner(config, self.trainer, algorithm, self.topk)
        self.seals = BatchSeals(
            data.origin(),
            config.rollout.max_staleness,
            keeps=config.rollout.save,
            replays=config.rollout.replay_from is not None,
        )
        self.seals.remember(self.state.step, self.trainer.weights_digest())
        self.recorder = stack.enter_context(
            Recorder(
                config.run,
                RunInfo.of_config(config.model_dump()),
                self.trainer.topology.rank,
                self.state.step,
                evaluates=self.engine is not None and bool(config.data.evaluation),
                text_of=data.text_of,
                fence=fence.check,
                mark=self.state.records,
                tracking=config.tracking,
                config=config.model_dump(),
            )
        )
        self.job = self._job()
        self.source = self._rollout_source()
        self.evaluations = self._evaluations()
        rank = self.trainer.topology.rank
        self.profiler = StepProfiler(config.profile, config.run.directory, rank)
        self.examples: list[Example] = []
        self._counted_updates = (0, 0)

    # --- the run's story

    def to_the_end(self) -> None:
        """All steps, or those until a stop; then a checkpoint is left behind."""
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
            self.stop("the servers are given up")
            raise
        except RewardUnavailableError:
            self.stop("no reward could be had")
            raise
        except (FrequencyError, GapError):
            # Before the step's first update, on every rank: the weights are those of the step before.
            self.stop("the batch was not trained on", suspect=True)
            raise
        except BaseException:
            # What is open is closed next.
            note_failure()
            raise

    def begin(self) -> None:
        """Bring the engine to the trainer's weights and measure where the run starts."""
        config = self.config
        if self.engine is not None:
            with self.timer("start"), patience("waiting for the servers"):
                self.engine.connect()
        if self.trainer.topology.rank == 0:
            log.info(
                "%s",
                active_line(
                    config.rollout,
                    config.engine.placement,
                    config.model.dtype,
                    self.algorithm,
                    self.trainer.layout,
                ),
            )
        self._check_files()
        update = self._update_weights()
        if self.state.step == 0:
            accuracies = self.evaluations.measure(0)
            self.recorder.write(0, {**update, **accuracies, **self.timer.finish_step()})
        # Rank 0 alone has the records.
        elif any_rank(self.recorder.lacks_evaluation(self.evaluations.last_due(self.state.step))):
            accuracies = self.evaluations.measure(self.state.step)
            self.recorder.complete(self.state.step, {**update, **accuracies})
        else:
            self.recorder.carry_over(update)
        self._check_records()

    def step(self) -> None:
        """One rollout batch, trained on; the engine then holds the new weights."""
        step = self.state.step + 1
        with patience("others generate"):
            batch = self.source.collect(step)
        with self.timer("exchange"):
            seal = self.seals.check(step, batch)
        self._take_devices()
        self._check_checkpoint()
        with self.timer("train"):
            self._check_weights()
        self.samples.take(step, batch)
        with self.timer("train"):
            planned = self.learner.plan(batch)
            try:
                learned = self.learner.learn(planned)
            except (FrequencyError, GapError):
                # For ``megatron-dppo doctor``.
                self._save_batch(step, planned.trajectories, seal)
                raise
            weights = self.trainer.weights_digest()
        self.seals.remember(step, weights)
        self.state.step = step
        self.state.sampler = batch.sampler
        self.examples = examples_of(planned.trajectories)
        self.fence.check_together()
        self._save_batch(step, planned.trajectories, seal and seal.trained(weights))
        samples = self.samples.of_step(step, planned.trajectories, self.learner.masked_by_response)
        # Before the next batch is received.
        del planned
        self.recorder.write_masked_tokens(step, self.learner.most_masked)
        self._record_faults(batch.environment_faults)
        measured = {**batch.figures, **with_gap_named(learned, batch.figures)}
        if batch.seal is not None and step in batch.seal.weights:
            measured[names.REDERIVED] = float(batch.seal.weights[step] == weights)
        measured |= file_figures(batch.outlines, self.data.files, self.config.rollout.group_size)
        try:
            self.evaluations.before_update(step)
            with patience("others generate"):
                self.source.settle(step)
            measured |= self._update_weights()
            measured |= self.evaluations.after_update(step)
            self.source.run_ahead(step)
        finally:  # a stop in the middle leaves a checkpoint of this step, so its record too
            measured |= {**self._failed_checks(), **self.store.figures()}
            self.recorder.write(step, {**measured, **self.timer.finish_step()})
            self.recorder.write_samples(samples)
        # Where the trainer has left its devices, the checkpoint waits for its next turn.
        if self._is_due(self.config.checkpoint.every) and not self.trainer.parked:
            self._save_checkpoint()
        self._check_records()
        # A signal reaches the ranks at different moments: whoever stopped alone would leave the others in a
        # collective.
        if any_rank(self.should_stop()):
            raise RunStoppedError(f"stopped after step {step}")

    def finish(self) -> None:
        """Export the policy, compare the export with the trainer, write report and summary, and send the export."""
        difference = None
        self._take_devices()
        self._check_weights()
        self._finish_checkpoint()
        self.fence.check_together()
        if self.config.checkpoint.export_hf:
            with self.timer("export"), patience("others export"):
                examples = gathered_examples(self.examples) or self.data.train.problems
                difference = export(
                    self.config.run.directory,
                    self.trainer,
                    examples if self.config.checkpoint.verify_export else None,
                )
        # Those of the last evaluation.
        self._record_faults(gathered_faults(self.episodes))
        self.recorder.finish(difference)
        if (repository := self.config.checkpoint.upload) is not None:
            with patience("rank 0 sends the export"):
                run = self.config.run
                on_rank_0(partial(upload_export, run.directory, repository, run.steps))

    def stop(self, reason: str, *, suspect: bool = False) -> None:
        """Leave a checkpoint of the last completed step; a ``suspect`` one is for the doctor, and no start loads it."""
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
        """Leave a checkpoint where the disk still takes one, and tell why not where it doesn't."""
        try:
            self.stop("the run's records can't be written")
        except CheckpointError as error:
            log.warning("no checkpoint of step %d: %s", self.state.step, error)

    # --- its parts

    def _check_records(self) -> None:
        """Raise RecordingError, on every rank, where rank 0 could not write a record."""
        failure = self.recorder.failure
        first = first_failure(None if failure is None else str(failure))
        if first is not None:
            raise RecordingError(first)

    def _take_devices(self) -> None:
        """The trainer's turn on devices that it shares with servers; a checkpoint that waits for it is written."""
        if self.engine is None or not self.trainer.parked:
            return
        with self.timer("switch"), patience("others park"):
            self.engine.take_devices()
        if self.state.step > self.saved_step and self._is_due(self.config.checkpoint.every):
            self._save_checkpoint()

    def _resume(self) -> RunState:
        """The state that this start goes on from, loaded into the trainer and the sampler."""
        self.fence.check_together()
        identity = identity_of(self.config, self.data.train.sha256)
        replays = self.config.rollout.replay_from is not None
        run, checkpoints = self.config.run, self.config.checkpoint
        state = resume(run, checkpoints, self.trainer, self.store, identity, replays=replays)
        if state is None:
            return RunState(sampler=self.sampler.state_dict(), identity=identity)
        self.saved_step = state.step
        changes = changes_of(state, settings_of(self.config))
        if changes is not None and self.trainer.topology.rank == 0:
            log.warning("%s", changes)
        try:
            self.sampler.load_state_dict(state.sampler)
        except ValueError as error:
            raise ResumeError(
                f"the checkpoint's position in the data does not fit: {error}; give back the settings "
                "of data, or start anew with run.resume=never"
            ) from error
        return state

    def _check_files(self) -> None:
        """Compare the files that the run starts from with those that it began with, and remember them."""
        with self.timer("start"), patience("others hash the start model"):
            files = self.hashes.wait() | self.data.evaluation_hashes
        self.state.check_files(files, "the checkpoint of this run")
        self.state.identity = {**self.state.identity, FILES: files}

    def _job(self) -> GenerationJob:
        """What every generation of the run asks for alike; problems and the seeds' purpose are to come."""
        rollout = self.config.rollout
        columns: dict[str, Any] = {"topk": self.topk} if self.topk else {}
        if rollout.router_replay:
            columns["routed_experts"] = RoutedShape.of_model(self.trainer.shape)
        sampling = SamplingParams(
            rollout.max_response_tokens,
            temperature=rollout.temperature,
            stop_token_ids=tuple(rollout.stop_token_ids),
            stop=tuple(rollout.stop),
        )
        deterministic = self.config.engine.deterministic
        seeds = SamplingSeeds(self.config.run.seed, "", ()) if deterministic else None
        decode = self.data.text_of if rollout.interrupt == "abort" else None
        play = None if self.episodes is None else self.episodes.play
        return GenerationJob((), rollout.group_size, sampling, columns, seeds, decode, play)

    def _episodes(self) -> Episodes | None:
        """What plays the episodes of this rank; None where a response has one turn."""
        config, turns = self.config.environment, self.data.turns
        if config.name is None or turns is None:
            return None
        spec = EnvironmentSpec(
            config.name,
            dict(config.options),
            config.step_timeout_s,
            config.memory_gib,
            passed_variables=tuple(config.passed_variables),
        )
        prompt, rollout = self.config.data.max_prompt_tokens, self.config.rollout
        evaluated = self.config.evaluation.max_response_tokens or 0
        limits = EpisodeLimits(
            config.max_turns,
            config.longest(prompt, max(rollout.max_response_tokens, evaluated)),
            config.max_observation_tokens,
            config.retries,
            answers_cut_turns=config.cut_turns == "answer",
        )
        return Episodes(EnvironmentPool(spec, config.workers), turns, limits)

    def _rollout_source(self) -> RolloutSource:
        rollout = self.config.rollout
        problems = self.data.train.problems
        if rollout.replay_from is not None:
            topology, origin = self.trainer.topology, self.data.origin()
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
        )

    def _evaluations(self) -> Evaluations:
        config = self.config
        # Colocated servers are silent while the trainer works.
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
        """Push the weights; what this and recoveries since the last call amount to."""
        if self.engine is None:
            return {}
        with self.timer("sync"), patience("others update the engine's weights"):
            report = self.engine.update_weights(self.state.step)
        totals = self.engine.updates.count, self.engine.updates.verified
        counted, self._counted_updates = self._counted_updates, totals
        return {
            names.WEIGHT_UPDATES: totals[0] - counted[0],
            names.WEIGHT_UPDATES_VERIFIED: totals[1] - counted[1],
            **report.metrics(),
        }

    def _failed_checks(self) -> dict[str, float]:
        """Rewards that were killed, died or could not be had since the last call, over all leaders."""
        rows = (names.REWARD_TIMEOUTS, names.REWARD_CRASHES, names.REWARD_REPLACED)
        counted = {name: float(self.scorer.failures[name]) for name in rows}
        self.scorer.failures.clear()
        return counted

    def _record_faults(self, faults: Counter[str]) -> None:
        name = self.config.environment.name
        if name is not None:
            self.recorder.write_environment_faults(self.state.step, name, faults)

    def _is_due(self, every: int) -> bool:
        return last_due(self.state.step, every, self.config.run.steps) == self.state.step

    def _save_batch(self, step: int, batch: Mapping[int, Trajectory], seal: Seal | None) -> None:
        if self.config.rollout.save and self.trainer.topology.rank == 0:
            folder = Path(self.config.run.directory) / ROLLOUTS_FOLDER
            loss_columns = self.learner.loss_columns
            try:
                whole = [
                    t.with_columns(**loss_columns.get(i, {})) for i, t in sorted(batch.items())
                ]
                save_batch(folder, step, whole, seal)
            except OSError as error:
                failure = RecordingError(f"rollout.save: {folder}: {error.strerror}")
                self.recorder.failure = self.recorder.failure or failure

    def _save_checkpoint(self, *, suspect: bool = False) -> None:
        """Begin a checkpoint of this step; end the one before it. Nothing is saved of weights that no step made."""
        state = self.state
        with self.timer("checkpoint"), patience("others save"):
            digest = self._check_weights()
            state.weights = {self.trainer.weights_form(): digest}
            state.settings = on_rank_0(lambda: settings_of(self.config))
            state.records = on_rank_0(lambda: self.recorder.mark(state.step))
            self.store.save(self.trainer, state.step, state.to_json(), suspect=suspect)
        if not suspect:
            self.saved_step = state.step

    def _check_weights(self) -> str:
        """Raise AlteredWeightsError, on every rank, unless the trainer holds what the last step made; its hash."""
        digest = self.trainer.weights_digest()
        self.seals.check_weights(self.state.step, digest)
        return digest

    def _check_checkpoint(self) -> None:
        """End the run where the checkpoint in the making failed."""
        with self.timer("checkpoint"):
            self.store.poll()

    def _finish_checkpoint(self) -> None:
        with self.timer("checkpoint"), patience("others save"):
            self.store.finish()
