"""What a rollout batch is, and its way from the leaders that generate it to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_dppo.algorithms.advantages import group_relative
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.rollout_codec import decode, encode
from megatron_dppo.data.sampler import ProblemSampler
from megatron_dppo.loop.rollouts.routing_exchange import keep_routing, without_routing
from megatron_dppo.rewards import Verifier
from megatron_dppo.trainer.collectives import broadcast_bytes
from megatron_dppo.trainer.topology import Topology
from megatron_dppo.types import Problem, Rollout


@dataclass(frozen=True)
class RolloutBatch:
    """What a step trains on, the same on every rank.

    ``rollouts``: groups adjacent. ``figures``: metrics of the batch and of how it came about.
    ``sampler``: the data's position right after this batch, where a run resumed after this step goes on.
    """

    rollouts: list[Rollout]
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

    def __init__(self, problems: Sequence[Problem], sampler: ProblemSampler) -> None:
        self._problems = problems
        self._sampler = sampler

    def next(self, count: int) -> list[Problem]:
        """The next ``count`` problems."""
        return [self._problems[i] for i in self._sampler.next(count)]

    def position(self) -> dict[str, Any]:
        """Where to go on from (``ProblemSampler.state_dict``)."""
        return self._sampler.state_dict()


def owner(position: int, topology: Topology) -> int:
    """Data-parallel rank whose leader answers the problem at ``position`` of a batch."""
    return position % topology.dp_size


def own_positions(positions: Sequence[int], topology: Topology) -> list[int]:
    """Those of ``positions`` that this rank answers: none on ranks that are no leader."""
    return [p for p in positions if topology.is_leader and owner(p, topology) == topology.dp_rank]


def share(problems: Sequence[Problem], topology: Topology) -> list[Problem]:
    """The problems that this rank answers: every dp_size-th on a leader, none on other ranks."""
    return [problems[p] for p in own_positions(range(len(problems)), topology)]


def verify(
    rollouts: list[Rollout],
    problems: Sequence[Problem],
    group_size: int,
    config: TrainConfig,
    verifier: Verifier,
) -> None:
    """Set each rollout's reward and advantage; groups of ``group_size`` in the order of ``problems``."""
    if not rollouts:
        return
    scores = verifier.score(
        [(r.text, problems[i // group_size].answer) for i, r in enumerate(rollouts)]
    )
    for rollout, score in zip(rollouts, scores, strict=True):
        unfinished = rollout.truncated and config.algorithm.truncated_responses == "zero-reward"
        rollout.reward = 0.0 if unfinished else score.value
    advantages = group_relative([r.reward for r in rollouts], group_size).tolist()
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        rollout.advantage = advantage


def exchange(
    rollouts: list[Rollout], topology: Topology, group_size: int, positions: Sequence[int]
) -> list[Rollout]:
    """All leaders' rollouts on every rank, groups in the order of ``positions``. Collective.

    ``positions``: of the groups in the batch as generated, which say who has them. Every rank decodes the same
    bytes, its own included, so that all see the same values. Recorded routing stays with its leader
    (``routing_exchange``).
    """
    blob = encode(without_routing(rollouts)) if topology.is_leader else b""
    shares = [decode(broadcast_bytes(blob, leader)) for leader in topology.leaders]
    if topology.is_leader:
        keep_routing(shares[topology.dp_rank], rollouts)
    groups = [
        iter([part[i : i + group_size] for i in range(0, len(part), group_size)]) for part in shares
    ]
    return [r for p in positions for r in next(groups[owner(p, topology)])]
