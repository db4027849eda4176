"""The part of a run that generates batches: servers, rewards, episodes, and the source of its batches."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.sampling import ReturningSampler
from megatron_dppo.loop.ending import RunFence, StopFlag
from megatron_dppo.loop.engine_session import EngineSession
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.loop.rollout_sources import (
    GeneratedRollouts,
    ReplayedRollouts,
    RolloutSource,
    gathered_faults,
)
from megatron_dppo.loop.run_parts import generation_job, open_episodes
from megatron_dppo.loop.scorer import Scorer
from megatron_dppo.loop.spool import ResponseSpool
from megatron_dppo.loop.teachers import Teachers
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.phase_timer import PhaseTimer
from megatron_dppo.spec import RunSpec
from megatron_dppo.trainer.topology import Topology
from megatron_dppo.trainer.trainer import Trainer


class BatchGeneration:
    """The servers, and everything that turns their responses into batches. ``stack`` closes what the constructor opens.

    Args:
        config: configuration of the run.
        spec: facts that follow from the configuration.
        data: training problems.
        trainer: holds the weights that the servers receive.
        stop: whether a clean stop was requested.
        fence: raises once another start of the run has taken over.
        sampler: draws the problems of each batch.
        spool: stores scored responses for restarted ranks.
        timer: measures the waits for responses and for rewards.
        stack: closes what the constructor opens.

    Attributes:
        engine: the fleet of servers; None in a run that replays saved batches.
        teachers: score the responses of batches; None without teachers, and in a run that replays saved batches.
        scorer: scores the responses of batches and of evaluations.
        job: template of every generation, without problems.
        source: the batches: generated ones, or the saved ones of ``rollout.replay_from``.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: RunSpec,
        data: RunData,
        trainer: Trainer,
        stop: StopFlag,
        fence: RunFence,
        sampler: ReturningSampler,
        spool: ResponseSpool,
        timer: PhaseTimer,
        stack: ExitStack,
    ) -> None:
        self.engine: EngineSession | None = None
        if not spec.rollout.replays:
            session = EngineSession(
                config, spec, trainer, stop, fence.check_together, data.place_of
            )
            self.engine = stack.enter_context(session)
        self.teachers: Teachers | None = None
        if self.engine is not None and spec.teachers:
            is_leader = trainer.topology.is_leader
            record = self.engine.record
            self.teachers = Teachers(config, spec, data, record, stop, is_leader=is_leader)
            stack.callback(self.teachers.close)
        self.scorer = Scorer.of(config, data)
        # Only leaders score responses, so only they need reward workers.
        if trainer.topology.is_leader:
            stack.enter_context(self.scorer)
        self._episodes = open_episodes(config, spec, data)
        if self._episodes is not None:
            stack.callback(self._episodes.pool.close)
        self.job = generation_job(config, data, spec, self._episodes)
        self.source = self._source(config, data, trainer.topology, sampler, spool, timer)
        self._recorded_updates = (0, 0)
        """Numbers of committed and of verified weight updates that are in the metrics already."""

    def _source(
        self,
        config: TrainConfig,
        data: RunData,
        topology: Topology,
        sampler: ReturningSampler,
        spool: ResponseSpool,
        timer: PhaseTimer,
    ) -> RolloutSource:
        problems = data.train.problems
        if self.engine is None:
            return ReplayedRollouts(config.rollout, topology, problems, sampler, data.origin())
        return GeneratedRollouts(
            config.rollout,
            config.algorithm,
            topology,
            self.engine,
            self.scorer,
            self.job,
            problems,
            sampler,
            timer,
            steps=config.run.steps,
            episodes=self._episodes,
            credit=config.environment.credit,
            spool=spool,
            teachers=self.teachers,
        )

    def connect(self, *, is_fresh: bool) -> None:
        """Wait for the servers, those of teachers too, and check them. Collective.

        ``is_fresh``: whether the run begins at step 0 now.
        """
        if self.engine is not None:
            self.engine.connect()
        if self.teachers is not None:
            self.teachers.connect(is_fresh=is_fresh)

    def update_weights(self, version: int) -> dict[str, float]:
        """Send the trainer's weights to the servers as ``version``. Collective.

        Returns metrics of this update, and counts of all updates since the last call: recoveries of lost servers count
        as updates too. Without servers, returns no metric.
        """
        if self.engine is None:
            return {}
        report = self.engine.update_weights(version)
        updates = self.engine.updates
        recorded_count, recorded_verified = self._recorded_updates
        self._recorded_updates = (updates.count, updates.verified)
        return {
            metric_names.WEIGHT_UPDATES: updates.count - recorded_count,
            metric_names.WEIGHT_UPDATES_VERIFIED: updates.verified - recorded_verified,
            **report.metrics(),
        }

    def failed_rewards(self) -> dict[str, float]:
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

    def environment_faults(self) -> Counter[str]:
        """Return the counts of environment faults of all ranks since the last call, by reason. Collective."""
        return gathered_faults(self._episodes)
