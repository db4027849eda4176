"""Run one rank of the benchmark: build the logits, run all implementations in turn, and aggregate the times."""

from __future__ import annotations

import argparse
import math
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.diagnostics.mask_benchmark.contenders import Contender, Inputs, contenders
from megatron_dppo.diagnostics.mask_benchmark.meters import (
    Clock,
    copy_bandwidth,
    counted_collectives,
    peak_extra_bytes,
)

CHECKED_ROWS = 16
"""Rows whose values and gradients are compared with float64."""


class RankBench:
    """The logits of this rank, a buffer for the computations, and the token ids.

    ``checked``: the first rows of all ranks' logits, in float64. ``coefficients``: gradient of a loss with respect to
    the log-probabilities.
    """

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        self.options = options
        self.device = device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        dtype = getattr(torch, options.dtype)
        width = math.ceil(options.vocab / self.ranks)
        seeded = torch.Generator().manual_seed(0)
        all_logits = torch.randn(options.tokens, width * self.ranks, generator=seeded)
        all_logits = all_logits.mul_(2.5).to(dtype)
        # Some implementations do not know the vocabulary's size without padding. Padding of -inf does not change their
        # results.
        all_logits[:, options.vocab :] = -torch.inf
        self.checked = all_logits[:CHECKED_ROWS].double()
        self.logits = (
            all_logits[:, self.rank * width : (self.rank + 1) * width].contiguous().to(device)
        )
        del all_logits
        self.buffer = torch.empty_like(self.logits)
        ids = torch.randint(0, options.vocab, (options.tokens, 1 + options.topk), generator=seeded)
        self.coefficients = torch.randn(options.tokens, generator=seeded).to(device)
        self.inputs = Inputs(
            target_ids=ids[:, 0].contiguous().to(device),
            topk_ids=ids[:, 1:].contiguous().to(device),
            vocab_size=options.vocab,
            group=dist.group.WORLD,
            ranks=self.ranks,
        )

    def fresh(self) -> Tensor:
        """Return a leaf tensor with a copy of the logits, in the buffer; wait until every rank has one."""
        # If an implementation changed the last leaf in place, the buffer may have an autograd history. Drop it.
        self.buffer = self.buffer.detach()
        # A backward pass may have overwritten the buffer.
        self.buffer.copy_(self.logits)
        # The leaf is another tensor on the same memory, so that the buffer itself does not require a gradient.
        leaf = self.buffer.view_as(self.buffer).requires_grad_()
        dist.barrier()
        return leaf

    def run(self, contender: Contender) -> dict[str, float]:
        """Run a forward and a backward pass of ``contender``; return their milliseconds."""
        leaf = self.fresh()
        clock = Clock(self.device)
        log_probs, _ = contender.forward(leaf, self.inputs)
        forward_wall, forward_cpu = clock.read()
        clock = Clock(self.device)
        log_probs.backward(self.coefficients)
        backward_wall, backward_cpu = clock.read()
        return {
            "forward_ms": forward_wall,
            "backward_ms": backward_wall,
            "cpu_ms": forward_cpu + backward_cpu,
        }

    def compare(self) -> list[dict[str, Any]]:
        """Time all implementations in turns, each repetition in another order; returns one row for each."""
        runnable = contenders(self.device, self.ranks, self.options.compile)
        # These untimed calls are also the warm-up.
        rows = [self.facts(c) for c in runnable]
        times: list[list[dict[str, float]]] = [[] for _ in runnable]
        for repetition in range(self.options.repetitions):
            for i in range(len(runnable)):
                index = (i + repetition) % len(runnable)
                times[index].append(self.run(runnable[index]))
        bandwidth = copy_bandwidth(self.device, self.logits.numel(), self.logits.dtype)
        # The least memory traffic of any implementation: the forward pass reads the logits, and the backward pass reads
        # them and writes the gradient in their place.
        floor_mb = 3 * self.logits.numel() * self.logits.element_size() / 1e6
        for row, runs in zip(rows, times, strict=True):
            for name in ("forward_ms", "backward_ms", "cpu_ms"):
                row[name], row[f"{name}_iqr"] = median_iqr([r[name] for r in runs])
            total_ms = row["forward_ms"] + row["backward_ms"]
            row["floor_mb"] = floor_mb
            row["copy_bandwidth_gb_s"] = bandwidth
            # MB / ms = GB/s.
            row["floor_share_of_copy_bandwidth"] = floor_mb / total_ms / bandwidth
        return rows

    def facts(self, contender: Contender) -> dict[str, Any]:
        """Measure memory, collectives and accuracy of one implementation, in calls that are not timed."""
        with counted_collectives() as counts:
            self.run(contender)
        leaf = self.fresh()

        def once() -> None:
            contender.forward(leaf, self.inputs)[0].backward(self.coefficients)

        peak = peak_extra_bytes(self.device, once)
        log_prob_error, gradient_error = self.errors(contender)
        return {
            "name": contender.name,
            "version": contender.version,
            "entropy": contender.entropy,
            "topk": contender.topk,
            "peak_extra_over_logits": peak / (self.logits.numel() * self.logits.element_size()),
            "payload_all_reduces": counts.payloads,
            "wire_mb": counts.payload_bytes / 1e6,
            "header_all_reduces": counts.headers,
            "max_log_prob_error": log_prob_error,
            "relative_gradient_error": gradient_error,
        }

    def errors(self, contender: Contender) -> tuple[float, float]:
        """Return the largest error of a log-probability and the relative error of the gradient, on CHECKED_ROWS."""
        leaf = self.fresh()
        log_probs, _ = contender.forward(leaf, self.inputs)
        log_probs.backward(self.coefficients)
        rows = min(CHECKED_ROWS, self.options.tokens)
        exact = self.checked[:, : self.options.vocab].clone().requires_grad_()
        ids = self.inputs.target_ids[:rows].cpu()
        exact_log_probs = exact.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        exact_log_probs.backward(self.coefficients[:rows].double().cpu())
        width = self.logits.shape[1]
        assert exact.grad is not None
        assert leaf.grad is not None
        exact_gradient = exact.grad[:, self.rank * width : (self.rank + 1) * width]
        # The rank's logits may end with padding. The exact gradient has no padding.
        gradient = leaf.grad[:rows, : exact_gradient.shape[1]].double().cpu()
        log_prob_error = (log_probs[:rows].detach().double().cpu() - exact_log_probs.detach()).abs()
        return (
            log_prob_error.max().item(),
            ((gradient - exact_gradient).norm() / exact_gradient.norm()).item(),
        )

    def machine(self) -> dict[str, Any]:
        """Return what the times depend on: processor, version of torch, number of threads and vector unit."""
        name = platform.processor() or platform.machine()
        if self.device == "cuda":
            name = torch.cuda.get_device_name()
        elif Path("/proc/cpuinfo").exists():
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    name = line.split(":")[1].strip()
                    break
        return {
            "processor": name,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "vector_unit": torch.backends.cpu.get_cpu_capability(),
        }


def median_iqr(values: list[float]) -> tuple[float, float]:
    """Return the median and the interquartile range."""
    if len(values) < 2:
        return values[0], 0.0
    quarters = statistics.quantiles(values, n=4, method="inclusive")
    return quarters[1], quarters[2] - quarters[0]
