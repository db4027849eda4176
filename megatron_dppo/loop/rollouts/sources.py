"""What a rollout batch is, where it comes from, and how its answers are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_dppo.algorithms.advantages import group_relative
from megatron_dppo.config.schema import AlgorithmConfig, TrainConfig
from megatron_dppo.data.outline import Outline
from megatron_dppo.data.sampler import Sampler
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.fleet.sampling_seeds import SamplingSeeds
from megatron_dppo.rewards import Score
from megatron_dppo.trainer.topology import Topology
from megatron_dppo.types import Problem


@dataclass(frozen=True)
class RolloutBatch:
    """What a step trains on.

    ``outlines``: of all trajectories, groups adjacent, the same on every rank. ``own``: by position, the
    trajectories that this rank holds as a leader; a learner takes them out as it delivers them.
    ``figures``: metrics of the batch and of how it came about.
    ``sampler``: the data's position right after this batch, where a run resumed after this step goes on.
    """

    outlines: list[Outline]
    own: dict[int, Trajectory]
    figures: dict[str, float]
    sampler: dict[str, Any]


class RolloutSource(Protocol):
    """Where rollout batches come from. Every method is collective."""

    def collect(self, step: int) -> RolloutBatch:
        """The batch of ``step``; steps are asked for in order."""

    def settle(self, version: int) -> None:
        """Wait until nothing generates any more; the trainer holds weights ``version`` by now."""

    def run_ahead(self) -> None:
        """Have the next batch generated in the background, where the configuration allows it."""


class ProblemFeed:
    """The training problems in the sampler's order; every rank draws the same."""

    def __init__(self, problems: Sequence[Problem], sampler: Sampler) -> None:
        self._problems = problems
        self._sampler = sampler

    def next(self, count: int) -> list[Problem]:
        """The next ``count`` problems."""
        return [self._problems[i] for i in self._sampler.next(count)]

    def position(self) -> dict[str, Any]:
        """Where to go on from (``Sampler.state_dict``)."""
        return self._sampler.state_dict()


def owner(position: int, topology: Topology) -> int:
    """Data-parallel rank whose leader answers the problem at ``position`` of a batch."""
    return position % topology.dp_size


def own_positions(positions: Sequence[int], topology: Topology) -> list[int]:
    """Those of ``positions`` that this rank answers: none on ranks that are no leader."""
    return [p for p in positions if topology.is_leader and owner(p, topology) == topology.dp_rank]


def seeds_of(config: TrainConfig, purpose: str, positions: Sequence[int]) -> SamplingSeeds | None:
    """Seeds of the responses at ``positions`` of a batch, where the run wants its engine deterministic."""
    if not config.engine.deterministic:
        return None
    return SamplingSeeds(config.run.seed, purpose, positions)


def with_rewards(
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    group_size: int,
    algorithm: AlgorithmConfig,
) -> list[Trajectory]:
    """The same with the rewards that ``scores`` (one for each) come to, and advantages within groups of
    ``group_size`` neighbours.
    """
    if not trajectories:
        return []
    zeroed = algorithm.truncated_responses == "zero-reward"
    rewards = [
        0.0 if zeroed and t.truncated else score.value
        for t, score in zip(trajectories, scores, strict=True)
    ]
    advantages = group_relative(rewards, group_size).tolist()
    return [
        t.scored(reward, advantage)
        for t, reward, advantage in zip(trajectories, rewards, advantages, strict=True)
    ]
