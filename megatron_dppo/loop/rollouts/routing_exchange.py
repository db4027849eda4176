"""Recorded routing to the ranks that train on it, and to no others.

A recording is far larger than the rest of a rollout: 384 bytes a token for Qwen3-30B-A3B. So the
exchange of rollouts leaves it with the leader that generated the response. Once the plan of the
step says which replica trains on what, the owner sends each recording to that replica's leader,
which shares it with its ranks. Every receiver compares a hash with the owner's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_dppo.data.routing import usable_rows
from megatron_dppo.metrics import names
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.collectives import all_gather_json, any_rank
from megatron_dppo.trainer.topology import Topology
from megatron_dppo.types import Rollout

Directory = dict[int, dict[int, str]]
"""By position in the rollout batch: the leaders that hold its recording (by data-parallel rank),
with the hash of what they hold."""


class RoutingExchangeError(RuntimeError):
    """Recorded routing is missing, belongs to another model, or changed on its way."""


def without_routing(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts as all ranks may see them: without their recordings."""
    return [replace(rollout, routed_experts=None) for rollout in rollouts]


def keep_routing(rollouts: Sequence[Rollout], own: Sequence[Rollout]) -> None:
    """Give ``rollouts``, which went through the exchange, the recordings that they left behind."""
    for rollout, kept in zip(rollouts, own, strict=True):
        rollout.routed_experts = kept.routed_experts


@dataclass(frozen=True)
class RoutingExchange:
    """Moves recordings of ``shape``'s layers between the replicas of ``topology``."""

    topology: Topology
    shape: ModelShape

    def deliver(
        self,
        rollouts: Sequence[Rollout],
        needed: Sequence[Collection[int]],
        *,
        gather: bool = False,
    ) -> dict[str, float]:
        """Set ``routed_experts`` of the rollouts that this rank needs, and clear the others'.

        Collective; ``rollouts`` are the same on all ranks but for the recordings, which leaders
        hold. ``needed``: positions by data-parallel rank. ``gather``: global rank 0 gets all. The
        metrics of the batch. Raises RoutingExchangeError, on all ranks, naming the response.
        """
        directory = self._directory(rollouts)
        wanted = [sorted(set(part) & directory.keys()) for part in needed]
        between_leaders = [list(part) for part in wanted]
        if gather:  # rank 0 leads replica 0
            between_leaders[0] = sorted(directory)
        received = self._between_leaders(rollouts, directory, between_leaders)
        own = wanted[self.topology.dp_rank]
        received |= self._within_replica(rollouts, own)
        self._verify(rollouts, directory, received)
        kept = directory.keys() if gather and self.topology.rank == 0 else set(own)
        for position, rollout in enumerate(rollouts):
            if position in received:
                rollout.routed_experts = received[position]
            if position not in kept:
                rollout.routed_experts = None
        return self._figures(rollouts, directory)

    def _directory(self, rollouts: Sequence[Rollout]) -> Directory:
        held: dict[str, str] = {}
        problems: list[str] = []
        if self.topology.is_leader:
            for position, rollout in enumerate(rollouts):
                routed = rollout.routed_experts
                if routed is None:
                    continue
                if (routed.shape, routed.dtype) != self._form(rollout):
                    shape, dtype = self._form(rollout)
                    problems.append(
                        f"{_name(position, rollout)}: recorded routing is {routed.dtype} "
                        f"{list(routed.shape)}, expected {dtype} {list(shape)}"
                    )
                held[str(position)] = _digest(routed)
        directory: Directory = {}
        shares = all_gather_json([held, problems])
        if problems := [problem for _, own in shares for problem in own]:
            raise RoutingExchangeError("\n".join(problems))
        for dp_rank, leader in enumerate(self.topology.leaders):
            for position, digest in shares[leader][0].items():
                directory.setdefault(int(position), {})[dp_rank] = digest
        if rollouts and not directory:
            raise RoutingExchangeError(
                "rollout.router_replay is true, but no response of the batch has recorded routing"
            )
        return directory

    def _between_leaders(
        self, rollouts: Sequence[Rollout], directory: Directory, wanted: Sequence[Sequence[int]]
    ) -> dict[int, np.ndarray]:
        """In rounds: every leader sends to the one ``distance`` further on."""
        at, received = self.topology, dict[int, np.ndarray]()
        if not at.is_leader:
            return received

        def sent(source: int, target: int) -> list[int]:
            return [
                position
                for position in wanted[target]
                if target not in directory[position] and min(directory[position]) == source
            ]

        for distance in range(1, at.dp_size):
            to, origin = (at.dp_rank + distance) % at.dp_size, (at.dp_rank - distance) % at.dp_size
            outgoing, incoming = sent(at.dp_rank, to), sent(origin, at.dp_rank)
            operations, buffer = [], None
            if outgoing:
                payload = self._joined(rollouts, outgoing)
                operations.append(dist.P2POp(dist.isend, payload, at.leaders[to]))
            if incoming:
                buffer = self._empty(rollouts, incoming)
                operations.append(dist.P2POp(dist.irecv, buffer, at.leaders[origin]))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            if buffer is not None:
                received |= self._split(rollouts, incoming, buffer)
        for position, routed in received.items():
            rollouts[position].routed_experts = routed
        return received

    def _within_replica(
        self, rollouts: Sequence[Rollout], positions: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """From the leader to the other ranks that hold the replica's model."""
        at = self.topology
        if not positions or at.tp_size * at.pp_size == 1:
            return {}
        if at.is_leader:
            dist.broadcast(self._joined(rollouts, positions), at.rank, at.model_group)
            return {}
        buffer = self._empty(rollouts, positions)
        dist.broadcast(buffer, at.leader, at.model_group)
        return self._split(rollouts, positions, buffer)

    def _verify(
        self, rollouts: Sequence[Rollout], directory: Directory, received: dict[int, np.ndarray]
    ) -> None:
        problems = []
        for position, routed in received.items():
            holders = directory[position]
            owner = min(holders)
            found = _digest(routed)
            if found not in holders.values():
                problems.append(
                    f"{_name(position, rollouts[position])}: the recorded routing that rank "
                    f"{self.topology.rank} received has the hash {found}, expected "
                    f"{holders[owner]}, which rank {self.topology.leaders[owner]} holds"
                )
        if any_rank(bool(problems)):
            told = [problem for part in all_gather_json(problems) for problem in part]
            raise RoutingExchangeError("\n".join(told))

    def _figures(self, rollouts: Sequence[Rollout], directory: Directory) -> dict[str, float]:
        rows = sum(r.length - 1 for r in rollouts)
        usable = sum(int(usable_rows(rollouts[position]).sum()) for position in directory)
        recorded = sum(rollouts[position].length - 1 for position in directory)
        tokens = sum(rollouts[position].length for position in directory)
        payload = sum(self._bytes(rollouts[position]) for position in directory)
        return {
            names.ROUTING_BYTES_PER_TOKEN: payload / tokens if tokens else 0.0,
            names.ROUTING_UNRECORDED: 1 - usable / rows if rows else 0.0,
            names.ROUTING_DISCARDED: recorded - usable,
        }

    # --- one recording, and several as one buffer on the ranks' device

    def _form(self, rollout: Rollout) -> tuple[tuple[int, int, int], np.dtype]:
        """Shape [P + R - 1, L, E] and type of the rollout's recording: the smallest that holds an id."""
        shape = (rollout.length - 1, len(self.shape.moe_layers), self.shape.experts_per_token)
        return shape, np.dtype(np.uint8 if self.shape.num_experts <= 256 else np.uint16)

    def _bytes(self, rollout: Rollout) -> int:
        (rows, layers, top_k), dtype = self._form(rollout)
        return rows * layers * top_k * dtype.itemsize

    def _joined(self, rollouts: Sequence[Rollout], positions: Sequence[int]) -> torch.Tensor:
        parts = []
        for position in positions:
            routed = rollouts[position].routed_experts
            assert routed is not None
            parts.append(np.ascontiguousarray(routed).reshape(-1).view(np.uint8))
        return torch.from_numpy(np.concatenate(parts)).to(platform.current().device)

    def _empty(self, rollouts: Sequence[Rollout], positions: Sequence[int]) -> torch.Tensor:
        size = sum(self._bytes(rollouts[position]) for position in positions)
        return torch.empty(size, dtype=torch.uint8, device=platform.current().device)

    def _split(
        self, rollouts: Sequence[Rollout], positions: Sequence[int], buffer: torch.Tensor
    ) -> dict[int, np.ndarray]:
        flat, parts, start = buffer.cpu().numpy(), {}, 0
        for position in positions:
            shape, dtype = self._form(rollouts[position])
            end = start + self._bytes(rollouts[position])
            parts[position] = flat[start:end].view(dtype).reshape(shape)
            start = end
        return parts


def _digest(routed: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(routed).data, digest_size=16).hexdigest()


def _name(position: int, rollout: Rollout) -> str:
    return f"sample {position} (problem {rollout.problem_id}, response {rollout.sample_index})"
