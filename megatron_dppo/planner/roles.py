"""Which GPUs train and which serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dppo.planner.devices import Cluster
from megatron_dppo.planner.job import Job


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


@dataclass(frozen=True)
class Roles:
    """Trainer ranks take the first GPUs, in order; servers follow, each on GPUs next to each other."""

    trainer: range
    servers: tuple[range, ...]
    cluster: Cluster

    @property
    def needed(self) -> int:
        """GPUs of the whole run."""
        return self.servers[-1].stop if self.servers else self.trainer.stop

    @property
    def nodes(self) -> tuple[NodeRoles, ...]:
        """The same by node."""
        return tuple(self._node(node) for node in range(self.cluster.nodes))

    def _node(self, node: int) -> NodeRoles:
        size = self.cluster.gpus_per_node
        here = range(node * size, (node + 1) * size)
        ranks = tuple(gpu for gpu in here if gpu in self.trainer)
        each = {i: _overlap(server, here) for i, server in enumerate(self.servers)}
        serves = sum(each.values())
        present = tuple(i for i, count in each.items() if count)
        return NodeRoles(node, ranks, serves, present, size - len(ranks) - serves)


def roles(job: Job, cluster: Cluster) -> Roles:
    """Trainer ranks 0 .. W - 1 on GPUs 0 .. W - 1, server i on the GPUs after those of the servers before it."""
    world, each = job.trainer.layout.world_size, job.engine.gpus
    starts = range(world, world + job.engine.servers * each, each)
    return Roles(range(world), tuple(range(s, s + each) for s in starts), cluster)


def role_problems(found: Roles) -> Iterator[str]:
    """Why the roles don't fit the nodes."""
    cluster = found.cluster
    if found.needed > cluster.gpus:
        yield (
            f"GPUs: {len(found.trainer)} trainer ranks and {len(found.servers)} servers need "
            f"{found.needed}, expected at most the {cluster.nodes} x {cluster.gpus_per_node} = "
            f"{cluster.gpus} there are"
        )
        return
    for number, server in enumerate(found.servers):
        if len(server) <= cluster.gpus_per_node and cluster.node_of(server[0]) != cluster.node_of(
            server[-1]
        ):
            yield (
                f"GPUs: server {number} would take GPUs {server[0]} to {server[-1]}, which are of "
                f"nodes {cluster.node_of(server[0])} and {cluster.node_of(server[-1])}, expected a "
                "server of this size on one node"
            )


def _overlap(a: range, b: range) -> int:
    return max(0, min(a.stop, b.stop) - max(a.start, b.start))
