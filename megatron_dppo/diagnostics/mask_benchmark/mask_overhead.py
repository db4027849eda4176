"""Measure the overhead of a mask in a policy update, compared with the same update without a mask."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.algorithms.algorithm import Algorithm, build_algorithm
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.algorithms.table import ENGINE_WHOLE_VOCABULARY
from megatron_dppo.diagnostics.mask_benchmark.meters import Clock, Collectives, counted_collectives
from megatron_dppo.diagnostics.mask_benchmark.rank_bench import RankBench, median_iqr
from megatron_dppo.vocab_parallel import PolicyStats, policy_stats

NEVER = {
    "tv_threshold": 1.0,
    "kl_threshold": 1e9,
    "clip_low": 1.0,
    "clip_high": 1e9,
    "log_clip": 1e9,
    "budget_high": 1.0,
    "budget_low": 1.0,
    "largest_k2": 1e9,
    "mean_k3": 1e9,
    "drift_threshold": 1e9,
    "kl_bound": 1e9,
    "sequence_low": 0.0,
    "sequence_high": 1e9,
    "second_moment": 1e9,
    "largest_shift": 1e9,
}
"""Thresholds that no token exceeds, so that every mask runs and blocks nothing."""


MASKS = (
    "dppo-binary-tv",
    "dppo-binary-kl",
    "dppo-topk-tv",
    "dppo-topk-kl",
    "dppo-symmetric",
    "kpop",
    "bpo",
    "sapo",
    "gspo",
    "gmpo",
    "minpro",
    "trm-max",
    "trm-mean",
    "geometric-mask",
    "off-policy-sequence-mask",
    "cppo-binary-tv",
    "cppo-topk-tv",
    "pdm-aggregated",
    "pdm-uniform",
    "pdm-tail",
    "score-centering",
    "m2po",
    "m2po-areal",
    "vaco",
    "triage",
    "troll",
    "dppo-exact-tv",
    "dppo-exact-kl",
    "pdm-exact",
)


QUADRATIC = "pg-is + (log r)^2"
"""Name of the update whose loss adds a multiple of the squared log-ratio."""


RESPONSE_TOKENS = 128
"""Tokens of each response, for rules that read whole responses."""


class Update:
    """Statistics, loss and backward pass of one algorithm on the benchmark's logits.

    ``skipped``: bool [T]; tokens whose advantage is set to 0, so that the backward pass skips their rows of logits.
    """

    def __init__(
        self, bench: RankBench, algorithm: Algorithm, skipped: Tensor | None = None
    ) -> None:
        self.bench = bench
        self.algorithm = algorithm
        tokens = bench.options.tokens
        vocab_size = bench.inputs.vocab_size
        self.topk_ids = bench.inputs.topk_ids
        if algorithm.needs_full_distribution:
            all_ids = torch.arange(vocab_size, device=bench.device)
            self.topk_ids = all_ids.expand(tokens, vocab_size)
        k = self.topk_ids.shape[1]
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(tokens, generator=generator) * 0.05
        with torch.no_grad():
            start = self.policy_statistics(bench.fresh(), topk=True)
        assert start.topk_log_probs is not None
        self.rollout = start.log_probs + noise.to(bench.device)
        self.rollout_topk = torch.cat([start.topk_log_probs, self.rollout[:, None]], 1)
        self.valid = torch.ones(tokens, k + 1, dtype=torch.bool, device=bench.device)
        # The last column is the sampled token. The column is invalid if the other columns are the whole vocabulary:
        # then they contain the sampled token too.
        self.valid[:, -1] = not algorithm.needs_full_distribution
        self.advantages = bench.coefficients.clone()
        if skipped is not None:
            self.advantages[skipped] = 0
        self.trained = torch.ones(tokens, dtype=torch.bool, device=bench.device)
        self.responses = torch.arange(tokens, device=bench.device) // RESPONSE_TOKENS
        # Number of ids that are neither in the Top-K nor sampled, if the sampled id is not in the Top-K.
        self.tail = torch.full_like(self.responses, max(0, vocab_size - k - 1))

    def policy_statistics(self, logits: Tensor, topk: bool, *, entropy: bool = True) -> PolicyStats:
        """Compute the policy's statistics as the trainer does."""
        inputs = self.bench.inputs
        return policy_stats(
            logits,
            inputs.target_ids,
            inputs.group if inputs.ranks > 1 else None,
            vocab_size=inputs.vocab_size,
            with_entropy=entropy,
            with_squares=entropy and self.algorithm.needs_sum_squares,
            topk_ids=self.topk_ids if topk else None,
        )

    @torch.no_grad()
    def step_bound(self, logits: Tensor) -> Tensor | None:
        """Compute the bound of a whole optimiser step in a pass without gradient; None without such a bound."""
        if self.algorithm.step_bound is None:
            return None
        stats = self.policy_statistics(logits, topk=False, entropy=False)
        log_ratio = stats.log_probs - self.rollout
        # All tokens are on this rank: sums need no reduction over replicas.
        bound = self.algorithm.step_bound(log_ratio, self.advantages, lambda sums: sums)
        return torch.full_like(self.rollout, bound)

    def inputs(self, stats: PolicyStats, step_bound: Tensor | None) -> TokenInputs:
        """Return the inputs of the loss, with Top-K if ``stats`` has it."""
        assert stats.entropy is not None
        topk = stats.topk_log_probs
        if topk is not None:
            if not self.algorithm.needs_topk_gradient:
                topk = topk.detach()
            topk = torch.cat([topk, stats.log_probs.detach()[:, None]], 1)
        return TokenInputs(
            log_probs=stats.log_probs,
            rollout_log_probs=self.rollout,
            advantages=self.advantages,
            loss_mask=self.trained,
            # The benchmark does not measure the pass that recomputes these log-probabilities.
            recomputed_log_probs=self.rollout if self.algorithm.needs_recomputed else None,
            topk_log_probs=topk,
            rollout_topk_log_probs=None if topk is None else self.rollout_topk,
            topk_valid=None if topk is None else self.valid,
            entropy=stats.entropy.detach(),
            sequence_ids=self.responses,
            tail_ids=self.tail,
            sum_squares=stats.sum_squares,
            step_bound=step_bound,
        )

    def run(self) -> dict[str, float]:
        """Run one update; return the CPU milliseconds (on a GPU: wall-clock) of the loss and of the whole update."""
        leaf = self.bench.fresh()
        clock = Clock(self.bench.device)
        step_bound = self.step_bound(leaf)
        reads_topk = self.algorithm.topk > 0 or self.algorithm.needs_full_distribution
        stats = self.policy_statistics(leaf, topk=reads_topk)
        statistics_ms = self._read_ms(clock)
        clock = Clock(self.bench.device)
        loss = policy_loss(self.algorithm, self.inputs(stats, step_bound)).loss
        loss_ms = self._read_ms(clock)
        clock = Clock(self.bench.device)
        loss.backward()
        backward_ms = self._read_ms(clock)
        return {"loss": loss_ms, "total": statistics_ms + loss_ms + backward_ms}

    def _read_ms(self, clock: Clock) -> float:
        wall_ms, cpu_ms = clock.read()
        if self.bench.device == "cuda":
            return wall_ms
        return cpu_ms


def mask_overheads(bench: RankBench) -> list[dict[str, Any]]:
    """Measure the update without a mask, every mask, and row skipping; return a row for each, in this order.

    ``overhead``: median over repetitions of (time with mask - time without) / time without, for the whole update.
    ``loss_overhead``: (time of the loss with mask - time of the loss without) / median time of the whole update without
    a mask. It has less noise, but leaves out the cost of Top-K in the statistics. Both have an interquartile range.
    """
    # Masks that read mu of the whole vocabulary need a vocabulary so small that an engine can return all of it.
    is_small = bench.options.vocab <= ENGINE_WHOLE_VOCABULARY
    masks = [n for n in MASKS if is_small or not build_algorithm(n).needs_full_distribution]
    names = ["pg-is", *masks]
    algorithms = [build_algorithm(n, _never(n, bench.options.topk)) for n in names]
    names.append(QUADRATIC)
    algorithms.append(build_algorithm("pg-is", {"log_ratio_coefficient": 1e-3}))
    updates = [Update(bench, algorithm) for algorithm in algorithms]
    skipped = evenly_spread(bench.options.tokens, bench.options.masked_share)
    updates.append(Update(bench, build_algorithm("pg-is"), skipped))
    collectives: list[Collectives] = []
    for update in updates:
        with counted_collectives() as counts:
            update.run()
        collectives.append(counts)
    runs: list[list[dict[str, float]]] = [[] for _ in updates]
    for repetition in range(bench.options.repetitions):
        for i in range(len(updates)):
            # Each repetition begins with another update.
            index = (i + repetition) % len(updates)
            runs[index].append(updates[index].run())
    labels = [*names, f"pg-is, {float(skipped.float().mean()):.1%} of rows skipped"]
    rows: list[dict[str, Any]] = []
    for label, update_runs, counts in zip(labels, runs, collectives, strict=True):
        times = _overheads(update_runs, unmasked=runs[0])
        extra_payloads = counts.payloads - collectives[0].payloads
        extra_bytes = counts.payload_bytes - collectives[0].payload_bytes
        rows.append(
            {
                "name": label,
                **times,
                "extra_all_reduces": extra_payloads,
                "extra_wire_mb": extra_bytes / 1e6,
            }
        )
    return rows


def evenly_spread(count: int, share: float) -> Tensor:
    """Return bool [count], True for ``share`` of the positions, evenly spaced."""
    steps = (torch.arange(count + 1, dtype=torch.float64) * share).floor()
    return steps.diff() > 0


def _never(name: str, topk: int) -> dict[str, float | int]:
    """Return options of the algorithm ``name``: thresholds with which its mask blocks nothing, and K of the Top-K."""
    algorithm = build_algorithm(name)
    options: dict[str, float | int] = {k: v for k, v in NEVER.items() if k in algorithm.numbers}
    if algorithm.topk:
        options["topk"] = topk
    return options


def _overheads(runs: list[dict[str, float]], unmasked: list[dict[str, float]]) -> dict[str, float]:
    """Return the row's times: an update compared with the update without a mask, repetition by repetition."""
    unmasked_ms = statistics.median(run["total"] for run in unmasked)
    overheads: list[float] = []
    loss_overheads: list[float] = []
    for run, base in zip(runs, unmasked, strict=True):
        overheads.append((run["total"] - base["total"]) / base["total"])
        loss_overheads.append((run["loss"] - base["loss"]) / unmasked_ms)
    overhead, overhead_iqr = median_iqr(overheads)
    loss_overhead, loss_overhead_iqr = median_iqr(loss_overheads)
    return {
        "total_ms": statistics.median(run["total"] for run in runs),
        "overhead": overhead,
        "overhead_iqr": overhead_iqr,
        "loss_overhead": loss_overhead,
        "loss_overhead_iqr": loss_overhead_iqr,
    }
