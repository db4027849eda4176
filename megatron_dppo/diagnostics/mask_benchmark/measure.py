"""One rank of the benchmark: runs all implementations in turn on the same logits, then an update with each mask."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import math
import os
import platform as machine
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo import __version__
from megatron_dppo.algorithms.algorithm import Algorithm, build_algorithm
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.algorithms.table import ENGINE_WHOLE_VOCABULARY
from megatron_dppo.trainer import platform
from megatron_dppo.vocab_parallel import PolicyStats, policy_stats

# The implementations that are measured: this project's, Megatron-Core's, torch's and installed others. Each maps this
# rank's logits [T, V / TP] to log-probabilities [T] (and entropy [T] or None).


@dataclass(frozen=True)
class Inputs:
    """Input of every implementation beside the logits; ``group``: the tensor-parallel ranks."""

    target_ids: Tensor
    topk_ids: Tensor
    vocab_size: int
    group: dist.ProcessGroup | None
    ranks: int


Forward = Callable[[Tensor, Inputs], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Contender:
    """One implementation; ``entropy``, ``topk``: whether it returns these too."""

    name: str
    version: str
    forward: Forward
    entropy: bool = False
    topk: bool = False


def ours(*, entropy: bool, topk: bool, backend: str | None = None) -> Forward:
    """This project's policy_stats with the given extras."""

    def forward(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        stats = policy_stats(
            logits,
            inputs.target_ids,
            inputs.group if inputs.ranks > 1 else None,
            vocab_size=inputs.vocab_size,
            with_entropy=entropy,
            topk_ids=inputs.topk_ids if topk else None,
            backend=backend,
        )
        return stats.log_probs, stats.entropy

    return forward


def megatron_cross_entropy(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Megatron-Core's unfused vocab-parallel cross entropy."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(logits, inputs.target_ids), None


def megatron_fused_cross_entropy(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Megatron-Core's torch.compile cross entropy."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    return -fused_vocab_parallel_cross_entropy(logits, inputs.target_ids, inputs.group), None


def torch_log_softmax(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """fp32 log_softmax and gather; one rank only."""
    log_p = logits.float().log_softmax(-1)
    return log_p.gather(1, inputs.target_ids[:, None])[:, 0], None


def transformer_engine(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Transformer Engine's Triton cross entropy."""
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    loss = parallel_cross_entropy(
        logits[:, None],
        inputs.target_ids[:, None],
        0.0,
        False,
        inputs.group if inputs.ranks > 1 else None,
    )
    return -loss[:, 0], None


def liger(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Liger's Triton cross entropy; one rank only."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    return -liger_cross_entropy(logits, inputs.target_ids, reduction="none"), None


def prepare_megatron(tensor_parallel: int) -> None:
    """Megatron-Core's own process groups, which its cross entropies ask for."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)


def contenders(device: str, ranks: int, compiled: bool) -> list[Contender]:
    """All implementations that can run here, this project's first."""
    runnable = [
        Contender("policy_stats", __version__, ours(entropy=False, topk=False)),
        Contender(
            "policy_stats + entropy", __version__, ours(entropy=True, topk=False), entropy=True
        ),
        Contender(
            "policy_stats + entropy + Top-K",
            __version__,
            ours(entropy=True, topk=True),
            entropy=True,
            topk=True,
        ),
        Contender(
            "policy_stats (eager) + entropy",
            __version__,
            ours(entropy=True, topk=False, backend="eager"),
            entropy=True,
        ),
    ]
    megatron = importlib.metadata.version("megatron-core")
    fused = "Megatron-Core fused CE" + ("" if compiled else " (torch.compile off)")
    runnable.append(Contender("Megatron-Core CE", megatron, megatron_cross_entropy))
    runnable.append(Contender(fused, megatron, megatron_fused_cross_entropy))
    if ranks == 1:
        runnable.append(Contender("torch log_softmax", torch.__version__, torch_log_softmax))
    if device == "cuda" and importlib.util.find_spec("transformer_engine"):
        version = importlib.metadata.version("transformer-engine")
        runnable.append(Contender("Transformer Engine CE", version, transformer_engine))
    if device == "cuda" and ranks == 1 and importlib.util.find_spec("liger_kernel"):
        version = importlib.metadata.version("liger-kernel")
        runnable.append(Contender("Liger CE", version, liger))
    return runnable


# Measurement of one call on a CPU or a GPU: time, memory and collectives.


class Clock:
    """Wall and CPU milliseconds since construction; synchronises the device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._wait()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def read(self) -> tuple[float, float]:
        """(wall ms, CPU ms of this process, all threads)."""
        self._wait()
        return (
            (time.perf_counter() - self._wall) * 1e3,
            (time.process_time() - self._cpu) * 1e3,
        )


def peak_extra_bytes(device: str, call: Callable[[], None]) -> int:
    """Peak memory of ``call`` above the memory before it, bytes.

    On a CPU: the kernel's high-water mark of this process's resident memory, which is reset first.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Return the allocator's free memory to the system: it would hide the peak of the call.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_kib("VmRSS")
    call()
    return max(0, _status_kib("VmHWM") - before) * 1024


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


@dataclass
class Collectives:
    """Counts of all-reduces: floating-point payloads with their bytes, and integer headers."""

    payloads: int = 0
    payload_bytes: int = 0
    headers: int = 0


@contextmanager
def counted_collectives() -> Iterator[Collectives]:
    """Count torch.distributed.all_reduce inside the block."""
    counts, plain = Collectives(), dist.all_reduce

    def counting(tensor, *args, **kwargs):
        if tensor.is_floating_point():
            counts.payloads += 1
            counts.payload_bytes += tensor.numel() * tensor.element_size()
        else:
            counts.headers += 1
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = torch.distributed.all_reduce = counting
    try:
        yield counts
    finally:
        dist.all_reduce = torch.distributed.all_reduce = plain


def copy_bandwidth(device: str, numel: int, dtype: torch.dtype) -> float:
    """GB/s (read plus write) of a plain copy of ``numel`` elements; best of 5."""
    source = torch.ones(numel, dtype=dtype, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        clock = Clock(device)
        target.copy_(source)
        best = min(best, clock.read()[0])
    return 2 * numel * source.element_size() / best / 1e6


# Overhead of a mask in a policy update, paired with the same update without a mask.

NEVER = {
    "tv_threshold": 1.0, "kl_threshold": 1e9, "clip_low": 1.0, "clip_high": 1e9, "log_clip": 1e9,
    "budget_high": 1.0, "budget_low": 1.0, "largest_k2": 1e9, "mean_k3": 1e9, "drift_threshold": 1e9,
    "kl_bound": 1e9, "sequence_low": 0.0, "sequence_high": 1e9, "second_moment": 1e9, "largest_shift": 1e9,
}  # fmt: skip
"""Thresholds that no token exceeds: every mask runs and blocks nothing."""
MASKS = (
    "dppo-binary-tv", "dppo-binary-kl", "dppo-topk-tv", "dppo-topk-kl", "dppo-symmetric", "kpop", "bpo", "sapo",
    "gspo", "gmpo", "minpro", "trm-max", "trm-mean", "geometric-mask", "off-policy-sequence-mask",
    "cppo-binary-tv", "cppo-topk-tv", "pdm-aggregated", "pdm-uniform", "pdm-tail", "score-centering",
    "m2po", "m2po-areal", "vaco", "triage", "troll", "dppo-exact-tv", "dppo-exact-kl", "pdm-exact",
)  # fmt: skip
QUADRATIC = "pg-is + (log r)^2"
RESPONSE_TOKENS = 128
"""Tokens of each response, for rules that look at whole ones."""


class Update:
    """Statistics, loss and backward pass of one algorithm on the benchmark's logits.

    ``dead``: bool [T]; these tokens get A = 0, so their rows are skipped.
    """

    def __init__(self, bench: RankBench, algorithm: Algorithm, dead: Tensor | None = None) -> None:
        self.bench, self.algorithm = bench, algorithm
        tokens, vocab_size = bench.options.tokens, bench.inputs.vocab_size
        self.topk_ids = bench.inputs.topk_ids
        if algorithm.needs_full_distribution:
            whole = torch.arange(vocab_size, device=bench.device)
            self.topk_ids = whole.expand(tokens, vocab_size)
        k = self.topk_ids.shape[1]
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(tokens, generator=generator) * 0.05
        with torch.no_grad():
            start = self.statistics(bench.fresh(), topk=True)
        assert start.topk_log_probs is not None
        self.rollout = start.log_probs + noise.to(bench.device)
        self.rollout_topk = torch.cat([start.topk_log_probs, self.rollout[:, None]], 1)
        self.valid = torch.ones(tokens, k + 1, dtype=torch.bool, device=bench.device)
        # The sampled token is in the whole vocabulary already.
        self.valid[:, -1] = not algorithm.needs_full_distribution
        self.advantages = bench.coefficients.clone()
        if dead is not None:
            self.advantages[dead] = 0
        self.trained = torch.ones(tokens, dtype=torch.bool, device=bench.device)
        self.responses = torch.arange(tokens, device=bench.device) // RESPONSE_TOKENS
        self.tail = torch.full_like(self.responses, max(0, vocab_size - k - 1))

    def statistics(self, logits: Tensor, topk: bool, *, entropy: bool = True) -> PolicyStats:
        """Call policy_stats as the trainer does."""
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
        """Compute the bound of a rule of whole optimiser steps in a pass without gradient; None for other rules."""
        if self.algorithm.step_bound is None:
            return None
        stats = self.statistics(logits, topk=False, entropy=False)
        log_ratio = stats.log_probs - self.rollout
        bound = self.algorithm.step_bound(log_ratio, self.advantages, lambda sums: sums)
        return torch.full_like(self.rollout, bound)

    def inputs(self, stats: PolicyStats, step_bound: Tensor | None) -> TokenInputs:
        """Inputs of the loss; with Top-K if ``stats`` has it."""
        assert stats.entropy is not None
        topk = stats.topk_log_probs
        if topk is not None:
            topk = topk if self.algorithm.needs_topk_gradient else topk.detach()
            topk = torch.cat([topk, stats.log_probs.detach()[:, None]], 1)
        return TokenInputs(
            log_probs=stats.log_probs,
            rollout_log_probs=self.rollout,
            advantages=self.advantages,
            loss_mask=self.trained,
            # The pass that recomputes it is not part of what is measured.
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
        """Run once; CPU milliseconds (GPU: wall) of the loss and of the whole update."""
        leaf = self.bench.fresh()
        unit = 0 if self.bench.device == "cuda" else 1
        clock = Clock(self.bench.device)
        step_bound = self.step_bound(leaf)
        reads_topk = self.algorithm.topk > 0 or self.algorithm.needs_full_distribution
        stats = self.statistics(leaf, topk=reads_topk)
        statistics_ms = clock.read()[unit]
        clock = Clock(self.bench.device)
        loss = policy_loss(self.algorithm, self.inputs(stats, step_bound)).loss
        loss_ms = clock.read()[unit]
        clock = Clock(self.bench.device)
        loss.backward()
        return {"loss": loss_ms, "total": statistics_ms + loss_ms + clock.read()[unit]}


def mask_overheads(bench: RankBench) -> list[dict[str, Any]]:
    """Measure every mask and row skipping; returns one row for each.

    ``overhead``: median over repetitions of (with mask - without) / without, of the whole update,
    with its interquartile range. ``loss_overhead``: the difference of the loss alone (where a mask
    runs) / the update without a mask: less noise, but without Top-K's part in the statistics.
    """
    # Masks that read mu of the whole vocabulary need a vocabulary that an engine can return.
    is_small = bench.options.vocab <= ENGINE_WHOLE_VOCABULARY
    masks = [n for n in MASKS if is_small or not build_algorithm(n).needs_full_distribution]
    names = ["pg-is", *masks, QUADRATIC]
    algorithms = [build_algorithm(n, _never(n, bench.options.topk)) for n in names[:-1]]
    quadratic = build_algorithm("pg-is", {"log_ratio_coefficient": 1e-3})
    updates = [Update(bench, algorithm) for algorithm in (*algorithms, quadratic)]
    dead = evenly_spread(bench.options.tokens, bench.options.masked_share)
    updates.append(Update(bench, build_algorithm("pg-is"), dead))
    collectives = []
    for update in updates:
        with counted_collectives() as counts:
            update.run()
        collectives.append((counts.payloads, counts.payload_bytes / 1e6))
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
    return {**wanted, **({"topk": topk} if build_algorithm(name).topk else {})}


def _row(
    name: str,
    runs: list[dict[str, float]],
    base: list[dict[str, float]],
    payloads: int,
    wire: float,
    base_payloads: int,
    base_wire: float,
) -> dict[str, Any]:
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


# One rank of the benchmark: builds the logits, runs all implementations in turn, aggregates.

CHECKED_ROWS = 16
"""Rows whose values and gradients are compared with float64."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that the benchmark reports, on this rank."""
    platform.prepare()
    torch.set_num_threads(options.threads)
    device = "cuda" if options.device == "cuda" else "cpu"
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    prepare_megatron(options.tp)
    bench = RankBench(options, device)
    rows = bench.compare()
    result = {
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "machine": bench.machine(),
        "logits_mb": bench.logits.numel() * bench.logits.element_size() / 1e6,
        "implementations": rows,
        "masks": mask_overheads(bench),
    }
    dist.destroy_process_group()
    return result


class RankBench:
    """The logits of this rank, one buffer to run on, and the token ids."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        self.options, self.device = options, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        dtype = getattr(torch, options.dtype)
        width = math.ceil(options.vocab / self.ranks)
        seeded = torch.Generator().manual_seed(0)
        whole = torch.randn(options.tokens, width * self.ranks, generator=seeded)
        whole = whole.mul_(2.5).to(dtype)
        # Padding; peers do not know the unpadded vocabulary.
        whole[:, options.vocab :] = -torch.inf
        self.checked = whole[:CHECKED_ROWS].double()
        self.logits = whole[:, self.rank * width : (self.rank + 1) * width].contiguous().to(device)
        del whole
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
        """A leaf tensor with the logits, in the one buffer; ends with a barrier."""
        self.buffer = self.buffer.detach()
        self.buffer.copy_(self.logits)
        leaf = self.buffer.view_as(self.buffer).requires_grad_()
        dist.barrier()
        return leaf

    def run(self, contender: Contender) -> dict[str, float]:
        """Run one forward and backward pass; returns milliseconds."""
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
        """Time all implementations in turns whose order rotates; returns one row for each."""
        everyone = contenders(self.device, self.ranks, self.options.compile)
        # Also the warm-up.
        rows = [self.facts(c) for c in everyone]
        times: list[list[dict[str, float]]] = [[] for _ in everyone]
        for repetition in range(self.options.repetitions):
            for i in range(len(everyone)):
                turn = (i + repetition) % len(everyone)
                times[turn].append(self.run(everyone[turn]))
        bandwidth = copy_bandwidth(self.device, self.logits.numel(), self.logits.dtype)
        floor = 3 * self.logits.numel() * self.logits.element_size() / 1e6
        for row, runs in zip(rows, times, strict=True):
            for name in ("forward_ms", "backward_ms", "cpu_ms"):
                row[name], row[f"{name}_iqr"] = median_iqr([r[name] for r in runs])
            total = row["forward_ms"] + row["backward_ms"]
            row["floor_mb"] = floor
            row["copy_bandwidth_gb_s"] = bandwidth
            row["floor_share_of_copy_bandwidth"] = floor / total / bandwidth
        return rows

    def facts(self, contender: Contender) -> dict[str, Any]:
        """Memory, collectives and accuracy of one implementation, from calls that are not timed."""
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
        """Largest |log-prob| error and relative gradient error against float64, on CHECKED_ROWS."""
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
        expected = exact.grad[:, self.rank * width : (self.rank + 1) * width]
        gradient = leaf.grad[:rows, : expected.shape[1]].double().cpu()
        log_prob_error = (log_probs[:rows].detach().double().cpu() - exact_log_probs.detach()).abs()
        return (
            log_prob_error.max().item(),
            ((gradient - expected).norm() / expected.norm()).item(),
        )

    def machine(self) -> dict[str, Any]:
        name = machine.processor() or machine.machine()
        if self.device == "cuda":
            name = torch.cuda.get_device_name()
        elif Path("/proc/cpuinfo").exists():
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            name = next(
                (x.split(":")[1].strip() for x in lines if x.startswith("model name")), name
            )
        return {
            "processor": name,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "vector_unit": torch.backends.cpu.get_cpu_capability(),
        }


def median_iqr(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], 0.0
    quarters = statistics.quantiles(values, n=4, method="inclusive")
    return quarters[1], quarters[2] - quarters[0]
