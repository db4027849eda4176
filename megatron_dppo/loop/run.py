"""One run on one rank, told top to bottom."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron_dppo.algorithms.presets import Algorithm, build_algorithm
from megatron_dppo.checkpoint_conversion import load_model_shape
from megatron_dppo.checkpoint_conversion.errors import CheckpointError
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.problems import DataError, ProblemSet, load_problems, load_tokenizer
from megatron_dppo.data.rollout_codec import RolloutFormatError, save_batch
from megatron_dppo.data.sampler import ProblemSampler
from megatron_dppo.logging import fatal
from megatron_dppo.loop.endpoint import EngineUnavailableError
from megatron_dppo.loop.engine_session import EngineSession
from megatron_dppo.loop.evaluation import evaluate
from megatron_dppo.loop.export_check import max_log_prob_difference
from megatron_dppo.loop.learning import Learner
from megatron_dppo.loop.recorder import Recorder, RecordingError
from megatron_dppo.loop.rollouts import GeneratedRollouts, ReplayedRollouts, RolloutSource
from megatron_dppo.loop.state import ResumeError, RunState, identity_of
from megatron_dppo.loop.stopping import RunStoppedError, StopFlag
from megatron_dppo.metrics import names
from megatron_dppo.metrics.records import RecordsError
from megatron_dppo.metrics.timing import PhaseTimer
from megatron_dppo.rewards import Verifier, VerifierError
from megatron_dppo.rollout.errors import EngineError
from megatron_dppo.rollout.generation import GenerationJob
from megatron_dppo.rollout.requests import RoutedShape, SamplingParams
from megatron_dppo.trainer.checkpoint import CheckpointStore
from megatron_dppo.trainer.distributed import any_rank
from megatron_dppo.trainer.errors import NonFiniteLossError
from megatron_dppo.trainer.step import StatsSpec
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.types import Problem, Rollout

log = logging.getLogger(__name__)

EXPORT_CHECK_SEQUENCES = 16
EXPECTED_ERRORS = (
    CheckpointError,
    DataError,
    EngineError,
    EngineUnavailableError,
    NonFiniteLossError,
    RecordingError,
    RecordsError,
    ResumeError,
    RolloutFormatError,
    VerifierError,
)
"""What can end a run without a fault in the code: the message says all, a traceback would bury it."""


def run_rank(config: TrainConfig) -> None:
    """Train until ``run.steps``, or until a clean stop; then leave a checkpoint behind. Collective over all ranks."""
    stop = StopFlag().install()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        _run(config, stop)
    except EXPECTED_ERRORS as error:
        fatal(f"{type(error).__name__}: {error}")


def _run(config: TrainConfig, stop: StopFlag) -> None:
    data = RunData(config)
    with ExitStack() as stack:
        run = Run(config, data, stop, stack)
        try:
            run.begin()
            while run.state.step < config.run.steps:
                run.step()
            run.finish()
        except RunStoppedError as stopped:
            run.stop(str(stopped))


class RunData:
    """The training and the held-out problems, tokenised. Raises DataError naming file and line."""

    def __init__(self, config: TrainConfig) -> None:
        tokenizer = load_tokenizer(config.model.hf_checkpoint)

        def load(path: str) -> ProblemSet:
            problems = load_problems(
                path,
                tokenizer,
                max_prompt_tokens=config.data.max_prompt_tokens,
                apply_chat_template=config.data.apply_chat_template,
            )
            if problems.dropped:
                log.warning("%s: %d prompts are too long and were left out", path, problems.dropped)
            return problems

        self.train = load(config.data.train)
        self.held_out = {name: load(path).problems for name, path in config.data.evaluation.items()}


class Run:
    """Everything a step needs, opened on construction and closed by ``stack``."""

    def __init__(
        self, config: TrainConfig, data: RunData, stop: StopFlag, stack: ExitStack
    ) -> None:
        self.config = config
        self.data = data
        self.should_stop = stop
        self.timer = PhaseTimer()
        algorithm = build_algorithm(config.algorithm.name, config.algorithm.options)
        self.topk = carried_topk(config, algorithm)
        with self.timer("start"):
            self.trainer = Trainer(config, StatsSpec(topk=self.topk > 0, entropy=True))
            self.store = CheckpointStore(
                Path(config.run.directory) / "checkpoints", config.checkpoint.keep
            )
            self.sampler = ProblemSampler(
                len(data.train), config.run.seed, shuffle=config.data.shuffle
            )
            self.saved_step = 0
            self.state = self._resume()
        self.engine: EngineSession | None = None
        if config.rollout.replay_from is None:
            self.engine = stack.enter_context(EngineSession(config, self.trainer, stop))
        self.verifier = Verifier(config.reward.name, config.reward.timeout_s, config.reward.workers)
        if self.trainer.topology.is_leader:  # nobody else scores, so nobody else needs workers
            stack.enter_context(self.verifier)
        self.learner = Learner(config, self.trainer, algorithm, self.topk)
        self.recorder = stack.enter_context(
            Recorder(config, self.trainer.topology.rank, first_step=self.state.step)
        )
        self.source = self._rollout_source()
        self._counted_failures = (0, 0)
        self.last_batch: list[Rollout] = []
        self._counted_updates = (0, 0)

    # --- the run's story

    def begin(self) -> None:
        """Bring the engine to the trainer's weights and measure where the run starts."""
        if self.engine is not None:
            with self.timer("start"):
                self.engine.connect()
        update = self._update_weights()
        if self.state.step == 0:
            accuracies = self._evaluate()
            self.recorder.write(0, {**update, **accuracies, **self.timer.finish_step()})
        elif any_rank(self.recorder.lacks_last_evaluation()):
            self.recorder.complete({**update, **self._evaluate()})
        else:
            self.recorder.carry_over(update)

    def step(self) -> None:
        """One rollout batch, trained on; the engine then holds the new weights."""
        step = self.state.step + 1
        problems = self._next_problems()
        batch = self.source.collect(step, problems)
        with self.timer("train"):
            learned = self.learner.learn(batch)
        self.state.step = step
        self.state.sampler = self.sampler.state_dict()
        self.last_batch = batch
        self._save_batch(step, batch)
        measured = dict(learned)
        try:
            measured |= self._update_weights()
            if self._is_due(self.config.evaluation.every):
                measured |= self._evaluate()
        finally:  # a stop in the middle leaves a checkpoint of this step, so its record too
            measured |= self._failed_checks()
            self.recorder.write_step(step, batch, measured, self.timer.finish_step())
        if self._is_due(self.config.checkpoint.every):
            self._save_checkpoint()
        if any_rank(self.should_stop()):
            raise RunStoppedError(f"stopped after step {step}")

    def finish(self) -> None:
        """Export the policy, compare the export with the trainer, and write report and summary."""
        difference = self._export() if self.config.checkpoint.export_hf else None
        self.recorder.finish(difference)

    def stop(self, reason: str) -> None:
        """Leave a checkpoint of the last completed step."""
        if self.state.step > self.saved_step:
            self._save_checkpoint()
        log.info("%s; the same command resumes after step %d", reason, self.state.step)

    # --- its parts

    def _resume(self) -> RunState:
        """The newest checkpoint's state, loaded into the trainer and the sampler; a fresh one where there is none."""
        config = self.config.run
        identity = identity_of(self.config, self.data.train.sha256)
        if config.resume == "never":
            self._set_checkpoints_aside()
        latest = self.store.latest()
        if latest is None:
            if config.resume == "required":
                raise ResumeError(
                    f"run.resume: required, but {config.directory}/checkpoints holds no complete checkpoint"
                )
            return RunState(sampler=self.sampler.state_dict(), identity=identity)
        state = RunState.from_json(self.store.load(self.trainer, latest))
        state.check_identity(identity, str(latest.path))
        self.saved_step = state.step
        self.sampler.load_state_dict(state.sampler)
        log.info("resumed from %s", latest.path)
        return state

    def _set_checkpoints_aside(self) -> None:
        """Rename an earlier run's checkpoints, so that the next plain start can't resume from them."""
        folder = Path(self.config.run.directory) / "checkpoints"
        if self.trainer.topology.rank == 0 and folder.exists():
            folder.rename(folder.with_name(f"checkpoints-{time.strftime('%Y%m%d-%H%M%S')}"))
        any_rank(False)  # nobody looks before it is done

    def _rollout_source(self) -> RolloutSource:
        rollout = self.config.rollout
        if rollout.replay_from is not None:
            return ReplayedRollouts(rollout.replay_from, rollout.group_size)
        assert self.engine is not None
        routed = (
            RoutedShape.of_model(self.config.model.hf_checkpoint) if rollout.router_replay else None
        )
        job = GenerationJob(
            (),
            rollout.group_size,
            SamplingParams(rollout.max_response_tokens, temperature=rollout.temperature),
            topk_log_probs=self.topk,
            routed_experts=routed,
        )
        topology = self.trainer.topology
        return GeneratedRollouts(self.config, topology, self.engine, self.verifier, job, self.timer)

    def _next_problems(self) -> list[Problem]:
        positions = self.sampler.next(self.config.rollout.prompts_per_step)
        return [self.data.train.problems[i] for i in positions]

    def _update_weights(self) -> dict[str, float]:
        """Push the weights; what this and recoveries since the last call amount to."""
        if self.engine is None:
            return {}
        with self.timer("sync"):
            report = self.engine.update_weights(self.state.step)
        totals = self.engine.updates, self.engine.verified_updates
        counted, self._counted_updates = self._counted_updates, totals
        return {
            names.WEIGHT_UPDATES: totals[0] - counted[0],
            names.WEIGHT_UPDATES_VERIFIED: totals[1] - counted[1],
            "weights/bytes": report.bytes,
            **{f"weights/{phase}_s": seconds for phase, seconds in report.seconds.items()},
        }

    def _evaluate(self) -> dict[str, float]:
        if self.engine is None:
            return {}
        with self.timer("evaluate"):
            return evaluate(
                self.data.held_out, self.config, self.trainer.topology, self.engine, self.verifier
            )

    def _failed_checks(self) -> dict[str, float]:
        """Reward checks that were killed or died since the last call, over all leaders."""
        totals = self.verifier.timeouts, self.verifier.crashes
        counted, self._counted_failures = self._counted_failures, totals
        if not self.trainer.topology.is_leader:
            return {}
        return {
            "reward/timeouts": totals[0] - counted[0],
            "reward/crashes": totals[1] - counted[1],
        }

    def _is_due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self.config.run.steps

    def _save_batch(self, step: int, batch: list[Rollout]) -> None:
        if self.config.rollout.save and self.trainer.topology.rank == 0:
            folder = Path(self.config.run.directory) / "rollouts"
            try:
                save_batch(folder, step, batch)
            except OSError as error:
                raise RecordingError(f"rollout.save: {folder}: {error.strerror}") from error

    def _save_checkpoint(self) -> None:
        with self.timer("checkpoint"):
            self.store.save(self.trainer, self.state.step, self.state.to_json())
        self.saved_step = self.state.step

    def _export(self) -> float | None:
        folder = Path(self.config.run.directory) / "hf"
        with self.timer("export"):
            self._clear_previous_export(folder)
            self.trainer.export_hf(folder)
            if not self.config.checkpoint.verify_export:
                return None
            sequences = self._sequences_to_check()
            return max_log_prob_difference(
                self.trainer,
                self.learner.layout,
                folder,
                sequences,
                self.config.rollout.temperature,
            )

    def _clear_previous_export(self, folder: Path) -> None:
        """Remove what an earlier, shorter run of this directory exported; its weights live on in the checkpoints."""
        if self.trainer.topology.rank == 0 and folder.exists():
            shutil.rmtree(folder)
        any_rank(False)  # nobody goes on before it is gone

    def _sequences_to_check(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Prompts and responses of the last batch; a run that had nothing left to do takes its prompts."""
        if self.last_batch:
            chosen = self.last_batch[:EXPORT_CHECK_SEQUENCES]
            return [(r.prompt_ids, r.response_ids) for r in chosen]
        prompts = self.data.train.problems[:EXPORT_CHECK_SEQUENCES]
        return [(p.prompt_ids[:1], p.prompt_ids[1:]) for p in prompts]


def carried_topk(config: TrainConfig, algorithm: Algorithm) -> int:
    """K of TopK(mu) that the engine returns: as configured, else as the algorithm asks."""
    if algorithm.needs_full_distribution:
        return load_model_shape(config.model.hf_checkpoint).vocab_size
    return config.rollout.topk_log_probs or algorithm.topk
