#!/usr/bin/env python3
"""Processor time that a rank needs to keep the scored responses of a step, at the sizes of the demo's recipe.

    python tools/bench_spool.py [--responses 256] [--tokens 16]

Each of the demo's two leaders keeps 256 responses of at most 16 tokens in a step. ``--step`` takes the processor
seconds of the rank's whole step. The benchmark then also prints the share of this time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.loop.spool import ResponseSpool
from megatron_dppo.rewards.verifier import Score

GROUP = 8


def step_seconds(spool: ResponseSpool, step: int, responses: int, tokens: int) -> float:
    """Keep the responses of a step and wait until they are written; return the processor seconds of all threads."""
    generator = np.random.default_rng(step)
    groups = responses // GROUP
    problems = [Problem(number, "7*8-5", "51", tuple(range(12))) for number in range(groups)]
    batch: list[tuple[tuple[int, int], Trajectory]] = []
    for number, problem in enumerate(problems):
        for sample in range(GROUP):
            columns = {
                "rollout_log_probs": generator.normal(size=tokens).astype(np.float32),
                "weight_version": np.full(tokens, step - 1, np.int32),
            }
            trajectory = Trajectory.of_response(
                problem.prompt_ids,
                generator.integers(0, 500, tokens).tolist(),
                problem_id=problem.problem_id,
                columns=columns,
            )
            batch.append(((number, sample), trajectory))
    began = time.process_time()
    part = spool.part(step, list(range(groups)))
    for key, trajectory in batch:
        part.keep(key, trajectory, Score(1.0))
    spool.sync(step)
    spool.note_trained(step, f"{step:064x}")
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=256, help="of a rank in a step (256)")
    parser.add_argument("--tokens", type=int, default=16, help="of a response (16)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps (20)")
    parser.add_argument("--step", type=float, help="processor seconds of a step of the rank")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spool = ResponseSpool(Path(folder) / "spool", 0, lambda step: step - 1)
        seconds = []
        for step in range(1, options.steps + 1):
            seconds.append(step_seconds(spool, step, options.responses, options.tokens))
            if step % 10 == 0:
                spool.forget_until(step)
        spool.close()
    median_s = statistics.median(seconds)
    print(f"{1000 * median_s:.1f} ms of processor time a step")
    if options.step:
        print(f"{100 * median_s / options.step:.2f}% of a step")


if __name__ == "__main__":
    main()
