"""Overhead of a mask in a policy update, paired with the same update without a mask."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.algorithms.presets import Algorithm, build_algorithm
from megatron_dppo.mask_benchmark.clock import Clock, counted_collectives
from megatron_dppo.vocab_parallel import PolicyStats, policy_stats

if TYPE_CHECKING:
    from megatron_dppo.mask_benchmark.measure import Bench

NEVER = {"tv_threshold": 1.0, "kl_threshold": 1e9}
"""Thresholds that no token exceeds: every mask runs and blocks nothing."""
MASKS = ("dppo-binary-tv", "dppo-binary-kl", "dppo-topk-tv", "dppo-topk-kl")


class Update:
    """Statistics, loss and backward pass of one algorithm on the benchmark's logits.

    ``dead``: bool [T]; these tokens get A = 0, so their rows are skipped.
    """

    def __init__(self, bench: Bench, algorithm: Algorithm, dead: Tensor | None = None) -> None:
        self.bench, self.algorithm = bench, algorithm
        tokens, k = bench.options.tokens, bench.options.topk
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(tokens, generator=generator) * 0.05
        with torch.no_grad():
            start = self.statistics(bench.fresh(), topk=True)
        assert start.topk_log_probs is not None
        self.rollout = start.log_probs + noise.to(bench.device)
        self.rollout_topk = torch.cat([start.topk_log_probs, self.rollout[:, None]], 1)
        self.valid = torch.ones(tokens, k + 1, dtype=torch.bool, device=bench.device)
        self.advantages = bench.coefficients.clone()
        if dead is not None:
            self.advantages[dead] = 0
        self.trained = torch.ones(tokens, dtype=torch.bool, device=bench.device)

    def statistics(self, logits: Tensor, topk: bool) -> PolicyStats:
        """Call policy_stats as the trainer does."""
        inputs = self.bench.inputs
        return policy_stats(
            logits,
            inputs.target_ids,
            inputs.group if inputs.ranks > 1 else None,
            vocab_size=inputs.vocab_size,
            with_entropy=True,
            topk_ids=inputs.topk_ids if topk else None,
        )

    def inputs(self, stats: PolicyStats) -> TokenInputs:
        """Inputs of the loss; with Top-K if ``stats`` has it."""
        assert stats.entropy is not None
        topk = None
        if stats.topk_log_probs is not None:
            topk = torch.cat([stats.topk_log_probs, stats.log_probs.detach()[:, None]], 1)
        return TokenInputs(
            log_probs=stats.log_probs,
            rollout_log_probs=self.rollout,
            advantages=self.advantages,
            loss_mask=self.trained,
            topk_log_probs=topk,
            rollout_topk_log_probs=None if topk is None else self.rollout_topk,
            topk_valid=None if topk is None else self.valid,
            entropy=stats.entropy.detach(),
        )

    def run(self) -> dict[str, float]:
        """Run once; CPU milliseconds (GPU: wall) of the loss and of the whole update."""
        leaf = self.bench.fresh()
        unit = 0 if self.bench.device == "cuda" else 1
        clock = Clock(self.bench.device)
        stats = self.statistics(leaf, topk=self.algorithm.topk > 0)
        statistics_ms = clock.read()[unit]
        clock = Clock(self.bench.device)
        loss = policy_loss(self.algorithm, self.inputs(stats)).loss
        loss_ms = clock.read()[unit]
        clock = Clock(self.bench.device)
        loss.backward()
        return {"loss": loss_ms, "total": statistics_ms + loss_ms + clock.read()[unit]}


def mask_overheads(bench: Bench) -> list[dict[str, Any]]:
    """Measure every mask and row skipping; returns one row for each.

    ``overhead``: median over repetitions of (with mask - without) / without, of the whole update,
    with its interquartile range. ``loss_overhead``: the difference of the loss alone (where a mask
    runs) / the update without a mask: less noise, but without Top-K's part in the statistics.
    """
    names = ["pg-is", *MASKS]
    options = {n: _never(n, bench.options.topk) for n in names}
    updates = [Update(bench, build_algorithm(n, options[n])) for n in names]
    dead = evenly_spread(bench.options.tokens, bench.options.masked_share)
    updates.append(Update(bench, build_algorithm("pg-is"), dead))
    collectives = []
    for update in updates:
        with counted_collectives() as seen:
            update.run()
        collectives.append((seen.payloads, seen.payload_bytes / 1e6))
    runs: list[list[dict[str, float]]] = [[] for _ in updates]
    for repetition in range(bench.options.repetitions):
        for i in range(len(updates)):
            turn = (i + repetition) % len(updates)
            runs[turn].append(updates[turn].run())
    labels = [*names, f"pg-is, {float(dead.float().mean()):.1%} of rows skipped"]
    return [
        _row(labels[i], runs[i], runs[0], *collectives[i], *collectives[0])
        for i in range(len(updates))
    ]


def evenly_spread(count: int, share: float) -> Tensor:
    """Bool [count], True for ``share`` of the positions, evenly spaced."""
    steps = (torch.arange(count + 1, dtype=torch.float64) * share).floor()
    return steps.diff() > 0


def _never(name: str, topk: int) -> dict[str, float | int]:
    wanted = {k: v for k, v in NEVER.items() if k in build_algorithm(name).numbers}
    return {**wanted, **({"topk": topk} if "topk" in name else {})}


def _row(
    name: str,
    runs: list[dict[str, float]],
    base: list[dict[str, float]],
    payloads: int,
    wire: float,
    base_payloads: int,
    base_wire: float,
) -> dict[str, Any]:
    from megatron_dppo.mask_benchmark.measure import median_iqr

    whole = statistics.median(r["total"] for r in base)
    overhead, spread = median_iqr(
        [(r["total"] - b["total"]) / b["total"] for r, b in zip(runs, base, strict=True)]
    )
    loss, loss_spread = median_iqr(
        [(r["loss"] - b["loss"]) / whole for r, b in zip(runs, base, strict=True)]
    )
    return {
        "name": name,
        "total_ms": statistics.median(r["total"] for r in runs),
        "overhead": overhead,
        "overhead_iqr": spread,
        "loss_overhead": loss,
        "loss_overhead_iqr": loss_spread,
        "extra_all_reduces": payloads - base_payloads,
        "extra_wire_mb": wire - base_wire,
    }
