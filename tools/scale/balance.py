"""Idle share of the ranks on a long-tailed batch, if the plan balances tokens or FLOPs."""

from __future__ import annotations

from functools import cache

import numpy as np
from bench_balance import LIMIT, long_tailed

from megatron_dppo.cluster.planner.run_plan import RunPlan
from megatron_dppo.data.balancing import idle_share, plan_mini_batch
from megatron_dppo.model.shape import forward_flops

HOW = "one optimiser step of log-normal lengths cut at the limit (tools/bench_balance.py, seed 0)"


def by_tokens(plan: RunPlan) -> str:
    """Return the idle share if micro-batches have equal tokens, for example "12.3%"."""
    return f"{_idle(plan)[0]:.1%}"


def by_flops(plan: RunPlan) -> str:
    """Return the idle share if micro-batches have equal FLOPs, for example "1.2%"."""
    return f"{_idle(plan)[1]:.1%}"


def _idle(plan: RunPlan) -> tuple[float, float]:
    """Return the idle shares if micro-batches have equal tokens, and if they have equal FLOPs."""
    trainer = plan.facts.trainer
    flops = forward_flops(trainer.shape)
    return _simulate(
        plan.facts.rollout.longest_response,
        plan.facts.batches()["per_step"],
        trainer.layout.data,
        trainer.tokens,
        flops.linear,
        flops.quadratic,
    )


@cache
def _simulate(
    longest: int, responses: int, replicas: int, budget: int, linear: float, quadratic: float
) -> tuple[float, float]:
    drawn_lengths = long_tailed(np.random.default_rng(0), responses)
    lengths = [max(1, round(length * longest / LIMIT)) for length in drawn_lengths]
    flops = [(linear + quadratic * length) * length for length in lengths]
    plan_by_tokens = plan_mini_batch(lengths, lengths, replicas, budget)
    plan_by_flops = plan_mini_batch(lengths, flops, replicas, budget)
    return idle_share(plan_by_tokens, flops), idle_share(plan_by_flops, flops)
