"""How long ranks wait for each other on long-tailed batches, if micro-batches have equal tokens or equal
FLOPs: ``python tools/bench_balance.py [--json docs/evidence/benchmarks/balance.json]``.

This is a simulation: the plan is the trainer's own, the time of a micro-batch is proportional to the FLOPs of
its sequences, and the k-th micro-batches of all ranks start together.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from benchmark_rows import Quantity, write_rows

from megatron_dppo.data.balancing import idle_share, plan_mini_batch
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.shape import forward_flops

MODEL = Path(__file__).resolve().parents[1] / "examples" / "model_configs" / "qwen3-30b-a3b"
LIMIT, PROMPT = 16_384, 200
"""Tokens of a truncated response, and tokens of each prompt."""


def long_tailed(rng: np.random.Generator, responses: int) -> list[int]:
    """Log-normal lengths with a mean of about 3,200 tokens. A few responses are truncated."""
    lengths = np.exp(rng.normal(7.7, 0.9, responses))
    return (np.minimum(lengths, LIMIT).astype(int) + PROMPT).tolist()


def often_truncated(rng: np.random.Generator, responses: int) -> list[int]:
    """Two of five responses are truncated. The other lengths are log-normal around 4,000 tokens."""
    lengths = np.where(rng.random(responses) < 0.4, LIMIT, np.exp(rng.normal(8.3, 0.8, responses)))
    return (np.minimum(lengths, LIMIT).astype(int) + PROMPT).tolist()


def main() -> None:
    """Print a row for each distribution of lengths, number of replicas and token budget: the range over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=str(MODEL), help="folder with a config.json")
    parser.add_argument("--responses", type=int, default=512, help="of one optimiser step")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the worst of each row here")
    options = parser.parse_args()
    cost = forward_flops(load_model_shape(options.model))
    worst: list[Quantity] = []
    print("| lengths | replicas | tokens | idle, by tokens | idle, by FLOPs | s a plan |")
    print("|---|---|---|---|---|---|")
    for draw in (long_tailed, often_truncated):
        for replicas, budget in ((4, 17_408), (8, 17_408), (8, 34_816)):
            idle: dict[str, list[float]] = {"tokens": [], "flops": []}
            slowest_plan_s = 0.0
            for seed in range(options.seeds):
                lengths = draw(np.random.default_rng(seed), options.responses)
                flops = [cost(length) for length in lengths]
                for by, costs in (("tokens", lengths), ("flops", flops)):
                    start = time.perf_counter()
                    plan = plan_mini_batch(lengths, costs, replicas, budget)
                    slowest_plan_s = max(slowest_plan_s, time.perf_counter() - start)
                    idle[by].append(idle_share(plan, flops))
            ranges = [f"{min(x):.1%} to {max(x):.1%}" for x in idle.values()]
            name = draw.__name__.replace("_", " ")
            print(
                f"| {name} | {replicas} | {budget} | {ranges[0]} | {ranges[1]} | {slowest_plan_s:.2f} |"
            )
            how = f"{name}, {replicas} replicas, {budget} tokens a micro-batch; worst of {options.seeds} seeds"
            worst += [
                Quantity(f"ranks idle, balanced by {by}", 100 * max(x), "%", how)
                for by, x in idle.items()
            ]
            worst.append(Quantity("seconds of a plan", slowest_plan_s, "s", how))
    if options.json:
        write_rows(options.json, "balance of long-tailed batches", worst)


if __name__ == "__main__":
    main()
