"""The computed quantities of a size, each with its formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_dppo.cluster.planner.devices import gb, gib
from megatron_dppo.cluster.planner.run_plan import RunPlan
from megatron_dppo.cluster.planner.step_time import model_flops_utilisation
from tools.scale import balance

_NONE = "-"


@dataclass(frozen=True)
class ComputedRow:
    """A row: ``of`` returns the cell of a size; ``how``: the formula and its source."""

    quantity: str
    of: Callable[[RunPlan], str]
    how: str


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s"


def _columns(name: str) -> Callable[[RunPlan], str]:
    def cell(plan: RunPlan) -> str:
        column_bytes = getattr(plan.columns, name)
        return gb(column_bytes) if column_bytes else _NONE

    return cell


def _received(plan: RunPlan) -> str:
    """Bytes of columns that arrive at ranks, over the bytes needed.

    The value is 1 if no rank receives a copy that it does not train on.
    """
    columns = plan.columns
    wire = columns.routing_wire + columns.topk_wire
    needed = columns.routing + columns.topk
    return f"{wire / needed:.2f}" if needed else _NONE


def _host(part: str) -> Callable[[RunPlan], str]:
    def cell(plan: RunPlan) -> str:
        return gib(max(getattr(host, part) for host in plan.hosts))

    return cell


def _checkpoint_rank(plan: RunPlan) -> str:
    return gb(plan.traffic.checkpoint / plan.facts.trainer.layout.world_size)


def _server_only_nodes(plan: RunPlan) -> int:
    return sum(node.engine > 0 and node.trainer == 0 for node in plan.nodes)


def _between_nodes(plan: RunPlan) -> str:
    """Bytes that must reach nodes with servers and without a trainer."""
    return gb(plan.traffic.update * _server_only_nodes(plan))


def _update_bound(plan: RunPlan) -> str:
    """Bytes of all weights, divided by the speed of the slowest link that they must cross."""
    device = plan.cluster.device
    bandwidth = device.network if _server_only_nodes(plan) else device.nvlink
    return _seconds(plan.traffic.update / bandwidth)


def _memory(plan: RunPlan) -> str:
    return f"{gib(plan.fullest.total)}, {plan.fullest.total / plan.cluster.device.memory:.0%}"


def _step(plan: RunPlan) -> str:
    return _seconds(plan.seconds.total) if plan.seconds is not None else _NONE


def _mfu(plan: RunPlan) -> str:
    if plan.seconds is None:
        return _NONE
    return f"{model_flops_utilisation(plan.facts, plan.seconds, plan.cluster):.0%}"


SECTIONS: dict[str, tuple[ComputedRow, ...]] = {
    "Data plane": (
        ComputedRow(
            "response tokens a step",
            lambda plan: f"{plan.facts.rollout.response_tokens / 1e6:.1f} M",
            "responses x mean length, half of the longest but in the fullest step",
        ),
        ComputedRow(
            "routing a step, in memory",
            _columns("routing"),
            "layers x experts a token x 1 byte x tokens",
        ),
        ComputedRow(
            "Top-K a step, in memory", _columns("topk"), "K x (4 + 4) bytes x response tokens"
        ),
        ComputedRow("on the wire over in memory", _received, "of routing and Top-K together"),
        ComputedRow(
            "host memory a node, in all",
            _host("total"),
            "columns, processes, checkpoint, pinned capture buffers",
        ),
    ),
    "Balance (simulated with the trainer's own plan)": (
        ComputedRow("ranks idle, balanced by tokens", balance.by_tokens, balance.HOW),
        ComputedRow("ranks idle, balanced by FLOPs", balance.by_flops, balance.HOW),
    ),
    "Checkpoints": (
        ComputedRow(
            "bytes",
            lambda p: gb(p.traffic.checkpoint),
            "parameters x (2 + 12) in bf16, x (4 + 8) in fp32",
        ),
        ComputedRow("bytes a rank", _checkpoint_rank, "over all ranks alike"),
        ComputedRow(
            "seconds at 5 GB/s together",
            lambda p: _seconds(p.traffic.checkpoint_seconds),
            "bytes / rate of the shared file system",
        ),
    ),
    "Weight updates": (
        ComputedRow(
            "bytes to each engine GPU",
            lambda p: gb(p.traffic.update),
            "parameters x bytes of the dtype",
        ),
        ComputedRow(
            "between nodes, at least",
            _between_nodes,
            "once into each node that serves and doesn't train",
        ),
        ComputedRow(
            "lower bound",
            _update_bound,
            "bytes once into a node / its network port's rate; within one node, into a GPU / NVLink's",
        ),
        ComputedRow(
            "expected",
            lambda p: _seconds(p.traffic.update_seconds),
            "planner/traffic.py, hash and canary included",
        ),
    ),
    "A rank": (ComputedRow("memory of the fullest trainer GPU", _memory, "planner/memory.py"),),
    "A step": (
        ComputedRow(
            "step",
            _step,
            "FLOPs, bandwidths, and shares of the peak that published runs reached (planner/step_time.py)",
        ),
        ComputedRow(
            "MFU of the trainer's seconds",
            _mfu,
            "6 x active parameters x tokens, and attention's, over the peak",
        ),
    ),
}
"""The rows by heading."""
