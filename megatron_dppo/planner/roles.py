"""Which GPUs train and which serve: the placement of a run (``launch.placement``), counted by node."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron_dppo.launch.placement import Allocation, Host, Placement, PlacementError, Roles, place
from megatron_dppo.planner.devices import Cluster


@dataclass(frozen=True)
class NodeRoles:
    """What one node's GPUs do. ``ranks``: the trainer's there. ``engine``: GPUs that serve; ``servers``: the numbers of
    their servers."""

    node: int
    ranks: tuple[int, ...]
    engine: int
    servers: tuple[int, ...]
    idle: int

    @property
    def trainer(self) -> int:
        """GPUs that train."""
        return len(self.ranks)


def node_roles(roles: Roles, cluster: Cluster) -> tuple[tuple[NodeRoles, ...], list[str]]:
    """By node what its GPUs do, and why the roles don't fit the nodes: one of the two is empty."""
    names = [str(node) for node in range(cluster.nodes)]
    hosts = tuple(Host(name, name, cluster.gpus_per_node) for name in names)
    try:
        placement = place(roles, Allocation(hosts))
    except PlacementError as error:
        return (), [str(error)]
    return _by_node(placement, cluster), []


def _by_node(placement: Placement, cluster: Cluster) -> tuple[NodeRoles, ...]:
    ranks: dict[int, list[int]] = {}
    servers: dict[int, list[int]] = {}
    engine: Counter[int] = Counter()
    for rank in placement.ranks:
        ranks.setdefault(int(rank.host.name), []).append(rank.rank)
    for server in placement.servers:
        for host in server.hosts:
            node = int(host.name)
            servers.setdefault(node, []).append(server.index)
            engine[node] += server.devices
    return tuple(
        NodeRoles(
            node,
            tuple(ranks.get(node, ())),
            engine[node],
            tuple(servers.get(node, ())),
            max(0, cluster.gpus_per_node - len(ranks.get(node, ())) - engine[node]),
        )
        for node in range(cluster.nodes)
    )
