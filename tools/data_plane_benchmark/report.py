"""Figures of the benchmark, extrapolated to a step of full size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STEP_TOKENS = 256 * 16 * 16_384
RATE = 40_000
REPLICAS, NODES, NODE_RANKS = 8, 4, 8
FORMULAS = f"""Full size: {STEP_TOKENS / 1e6:.0f} M tokens on {NODES} nodes of {NODE_RANKS} ranks, {REPLICAS} replicas.
client: CPU seconds per generated token of all processes that read answers, x {RATE} tokens/s = cores.
after the last response: CPU seconds of the busiest rank per token that it trains on, x full size / {REPLICAS}.
At full size every rank has its own core; here all ranks share this machine's cores.
received: bytes that arrive at all ranks, over the bytes that they train on.
memory: the sum of all ranks' peaks above the start of the phase, per trained token, x the tokens of {NODE_RANKS} ranks.
Memory that ranks share is not private. Columns a node: as if every rank had its own columns."""


def figures(engine: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return figures by name, from the measurements of the engine's side and of the ranks."""
    generated = sum(r["generated"] for r in ranks)
    trained = sum(r["trained"] for r in ranks)
    leader_cpu_s = sum(r["generate"]["cpu"] for r in ranks if r["leader"])
    child_cpu_s = sum(r.get("child_cpu_s", 0.0) for r in ranks)
    busiest = max(r["exchange"]["cpu"] / r["trained"] for r in ranks)
    peak = sum(r["exchange"]["peak"] for r in ranks) / trained
    packs = sum(r["pack"]["peak"] for r in ranks) / trained
    needed = sum(r["needed"] for r in ranks)
    columns = needed / trained
    rank_tokens = STEP_TOKENS / REPLICAS
    node_tokens = rank_tokens * NODE_RANKS
    return {
        "wire bytes a token": engine["bytes"] / engine["tokens"],
        "engine us a token": engine["seconds"] / engine["tokens"] * 1e6,
        "client in the training processes, us a token": leader_cpu_s / generated * 1e6,
        "client beside them, us a token": child_cpu_s / generated * 1e6,
        f"cores in the training processes at {RATE} tokens/s": leader_cpu_s / generated * RATE,
        f"cores beside them at {RATE} tokens/s": child_cpu_s / generated * RATE,
        "exchange wall s here": max(r["exchange"]["wall"] for r in ranks),
        "exchange CPU s here": sum(r["exchange"]["cpu"] for r in ranks),
        "after the last response, s at full size": busiest * rank_tokens,
        "received / needed": sum(r["received"] for r in ranks) / needed,
        "columns a node, GB": columns * node_tokens / 1e9,
        "private memory of the exchange a node, GB": peak * node_tokens / 1e9,
        "packs a node, GB": packs * node_tokens / 1e9,
    }


def table(runs: Mapping[str, Mapping[str, float]]) -> str:
    """A Markdown table, a column for each run."""
    lines = [f"| | {' | '.join(runs)} |", f"|---|{'---:|' * len(runs)}"]
    for name in next(iter(runs.values())):
        values = [f"{run[name]:.3g}" if name in run else "" for run in runs.values()]
        lines.append(f"| {name} | {' | '.join(values)} |")
    return "\n".join(lines)
