"""The leader that owns each problem of a batch, and the outlines of all responses on every rank.

A leader is the rank of a replica that requests and scores the replica's responses. An outline has a trajectory's
length, score and weight version. Tokens and columns follow later (``loop/exchange.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dppo.data.trajectory import Outline, Trajectory
from megatron_dppo.trainer.collectives import all_gather_json
from megatron_dppo.trainer.topology import Topology


def owner(position: int, topology: Topology) -> int:
    """Return the data-parallel rank whose leader generates the responses to the problem at ``position``."""
    return position % topology.dp_size


def own_positions(positions: Sequence[int], topology: Topology) -> list[int]:
    """Return the ``positions`` whose problems this rank owns: none on a rank that is not a leader."""
    return [p for p in positions if topology.is_leader and owner(p, topology) == topology.dp_rank]


def announce(
    trajectories: Sequence[Trajectory],
    topology: Topology,
    group_size: int,
    positions: Sequence[int],
) -> tuple[list[Outline], dict[int, Trajectory]]:
    """Return the outlines of all leaders' trajectories, and this rank's ``trajectories`` by the index of their outline.

    The outlines of a group are adjacent, and the groups are in the order of ``positions``. Collective.

    Args:
        trajectories: this leader's trajectories, groups adjacent, in the order of ``positions``.
        topology: the layout of ranks.
        group_size: responses per group.
        positions: the position of each group among all generated groups. It determines the group's owner.
    """
    rows_by_rank = all_gather_json([Outline.of(t) for t in trajectories])
    rows_of_leader = {leader: iter(rows_by_rank[leader]) for leader in topology.leaders}
    own_trajectories = iter(trajectories if topology.is_leader else ())
    outlines: list[Outline] = []
    trajectory_at: dict[int, Trajectory] = {}
    for position in positions:
        leader = topology.leaders[owner(position, topology)]
        for _ in range(group_size):
            if leader == topology.rank:
                trajectory_at[len(outlines)] = next(own_trajectories)
            outlines.append(Outline.from_json(next(rows_of_leader[leader])))
    return outlines, trajectory_at
