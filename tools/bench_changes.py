#!/usr/bin/env python3
"""Table of the bytes that an update with ``weight_sync.changes_only`` sends, by learning rate.

Trains random weights by Adam, with float32 master weights and bfloat16 weights, as a trainer does.
The scale of the weights is a language model's. The gradients are noise around a mean of ``--signal``
standard deviations. Prints the share of elements that one step changes in bfloat16, and the bytes of
the changes over the bytes of all weights. Both are printed for the first step, at which master and
bfloat16 weights are equal, and for the last steps. The last column has the seconds of the
comparison on a CPU.

    python tools/bench_changes.py [--elements 2000000] [--steps 200] [--signal 0.1]
"""

from __future__ import annotations

import argparse
import time

import torch

from megatron_dppo.weights.changes import find_changes

LEARNING_RATES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
SCALE = 0.02
BETAS = (0.9, 0.95)
ITEM_BYTES = 2
LAST_STEPS = 10


def sent_fraction(new: torch.Tensor, base: torch.Tensor) -> tuple[float, float]:
    """Return the bytes sent over all bytes, and the seconds of the comparison."""
    flat_new = new.view(torch.uint8)
    flat_base = base.view(torch.uint8)
    start = time.process_time()
    changes = find_changes(flat_new, flat_base, ITEM_BYTES)
    seconds = time.process_time() - start
    if changes is None:
        return 1.0, seconds
    sent = sum(piece.numel() for piece in changes.pieces())
    return sent / flat_new.numel(), seconds


def bench(lr: float, elements: int, steps: int, signal: float) -> None:
    """Train, and print one row of the table."""
    generator = torch.Generator().manual_seed(0)
    served = (SCALE * torch.randn(elements, generator=generator)).bfloat16()
    master = torch.nn.Parameter(served.float())
    mean = signal * torch.randn(elements, generator=generator)
    optimizer = torch.optim.Adam([master], lr=lr, betas=BETAS)
    fractions: list[float] = []
    changed: list[float] = []
    seconds = 0.0
    for _ in range(steps):
        master.grad = mean + torch.randn(elements, generator=generator)
        optimizer.step()
        new = master.detach().bfloat16()
        changed.append(float((new != served).float().mean()))
        fraction, taken = sent_fraction(new, served)
        fractions.append(fraction)
        seconds += taken
        served = new
    last_changed = sum(changed[-LAST_STEPS:]) / LAST_STEPS
    last_fraction = sum(fractions[-LAST_STEPS:]) / LAST_STEPS
    rate = seconds / steps / (elements * ITEM_BYTES) * 1e9
    print(
        f"| {lr:.0e} | {changed[0]:.4%} | {fractions[0]:.4f} | {last_changed:.3%} | {last_fraction:.4f} | {rate:.2f} |"
    )


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=2_000_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--signal", type=float, default=0.1)
    options = parser.parse_args()
    print("| learning rate | changed, first step | bytes | changed, last steps | bytes | s/GB |")
    print("|---|---|---|---|---|---|")
    for lr in LEARNING_RATES:
        bench(lr, options.elements, options.steps, options.signal)


if __name__ == "__main__":
    main()
