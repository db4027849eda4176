"""What a committed update reports: bytes against their static lower bounds, seconds, the canary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.metrics import names


@dataclass(frozen=True)
class CanaryReport:
    """Differences of log-probabilities in nats over all tokens of the fixed prompts."""

    max_abs_diff: float
    mean_abs_diff: float
    tokens: int


@dataclass(frozen=True)
class UpdateReport:
    """One committed update; known on every rank but for ``seconds`` and ``canary``, rank 0's own.

    ``bytes``: of the weights as the engines load them. ``bytes_moved``: what trainer ranks exchanged
    to make tensors whole, and what went to the engines. ``bytes_bound``: its static lower bound: over
    all tensors what the best holder lacks, and the weights once for each engine rank (SGLang takes
    whole tensors). ``seconds`` by phase, in time that the caller waited: drain, begin, gather (the
    trainer's collective), transfer (for the engines), hash, arrive, end, verify, canary, commit.
    ``verified``: every tensor was compared; ``tensors``: how many, over all engine ranks.
    ``bytes_between_nodes``: of ``bytes_moved``, what the plan sends from one node to another: gathers, and each
    sender's bytes once to each engine host but its own. ``bytes_between_nodes_bound``: all weights once to each host
    of engines without a sender. ``bytes_into_node_bound``: of it, what must enter one node: all weights, or nothing
    where every host of engines has a sender. ``update_s``: of the whole update; ``stall_s``: of it, from the engines'
    pause to the commit. ``network``: bytes/s that can enter a node; None: not stated.
    """

    version: int
    bytes: int
    bytes_moved: int
    bytes_bound: int
    seconds: Mapping[str, float]
    verified: bool
    tensors: int
    bytes_between_nodes: int
    bytes_between_nodes_bound: int
    bytes_into_node_bound: int
    update_s: float
    stall_s: float
    canary: CanaryReport | None = None
    network: float | None = None

    def metrics(self) -> dict[str, float]:
        """As recorded: bytes, bytes over their bound, seconds, the fewest seconds that the network allows (where its
        rate is stated), GB of weights per second of stall, the canary's differences in nats.
        """
        values: dict[str, float] = {
            "weights/bytes": self.bytes,
            names.UPDATE_BYTES_MOVED: self.bytes_moved,
            names.UPDATE_BYTES_BOUND: self.bytes_bound,
            "weights/bytes_over_bound": self.bytes_moved / max(self.bytes_bound, 1),
            names.UPDATE_BYTES_BETWEEN_NODES: self.bytes_between_nodes,
            "weights/bytes_between_nodes_bound": self.bytes_between_nodes_bound,
            "weights/bytes_into_node_bound": self.bytes_into_node_bound,
            names.UPDATE_SECONDS: self.update_s,
            names.UPDATE_STALL: self.stall_s,
            "weights/gb_per_s": self.bytes / max(self.stall_s, 1e-9) / 1e9,
        }
        if self.network is not None:
            values[names.UPDATE_BOUND] = self.bytes_into_node_bound / self.network
        if self.canary is not None:
            values["weights/canary_max_abs_diff"] = self.canary.max_abs_diff
            values["weights/canary_mean_abs_diff"] = self.canary.mean_abs_diff
        return values | {f"weights/{phase}_s": s for phase, s in self.seconds.items()}


def count_bytes(facts: Sequence[Sequence[Any]], bound: int, between_nodes: int) -> dict[str, int]:
    """An UpdateReport's counts of bytes.

    Args:
        facts: of each rank, 0 first: bytes sent to engines, bytes received from ranks, parts of
            checksums, the engines' hosts that are not its own, and, of rank 0, how often bytes move to
            engines and the bytes of all weights there.
        bound: the fewest bytes that ranks must exchange.
        between_nodes: bytes that ranks exchange between nodes.
    """
    copies, whole = facts[0][4:]
    sent = sum(fact[0] for fact in facts)
    foreign_to_all = set.intersection(*(set(fact[3]) for fact in facts if fact[0]))
    return {
        "bytes": sent,
        "bytes_moved": sum(fact[1] for fact in facts) + copies * sent,
        "bytes_bound": bound + copies * whole,
        "bytes_between_nodes": between_nodes + sum(fact[0] * len(fact[3]) for fact in facts),
        "bytes_between_nodes_bound": whole * len(foreign_to_all),
        "bytes_into_node_bound": whole if foreign_to_all else 0,
    }
