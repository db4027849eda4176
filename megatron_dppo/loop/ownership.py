"""The leader that owns each problem of a batch, and the outlines of its responses, which every rank receives.

An outline has a trajectory's length, score and weight version. Tokens and columns follow later (``loop/exchange.py``).
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
    """Return those of ``positions`` whose problems this rank owns: none on ranks that are not leaders."""
    return [p for p in positions if topology.is_leader and owner(p, topology) == topology.dp_rank]


def announce(
    trajectories: Sequence[Trajectory],
    topology: Topology,
    group_size: int,
    positions: Sequence[int],
) -> tuple[list[Outline], dict[int, Trajectory]]:
    """Return the outlines of all leaders' trajectories, and this rank's ``trajectories`` by position. Collective.

    ``positions``: where each group stood in the batch as generated, which determines its owner. The outlines follow
    the order of ``positions``.
    """
    rows_by_rank = all_gather_json([Outline.of(t) for t in trajectories])
    rows = {leader: iter(rows_by_rank[leader]) for leader in topology.leaders}
    own_trajectories = iter(trajectories if topology.is_leader else ())
    outlines: list[Outline] = []
    by_position: dict[int, Trajectory] = {}
    for position in positions:
        leader = topology.leaders[owner(position, topology)]
        for _ in range(group_size):
            outlines.append(Outline.from_json(next(rows[leader])))
            if leader == topology.rank:
                by_position[len(outlines) - 1] = next(own_trajectories)
    return outlines, by_position
