#!/usr/bin/env python3
"""Benchmark of the output layer with the policy's statistics, forward and backward. This project's head without logits
is compared with the path through whole logits, and with two published ways that avoid whole logits.

    python tools/bench_head.py --tokens 1024 --hidden 256 --vocabulary 151936 --tp 2

Counts: peak memory of tensors in addition to hidden states, weight and the weight's fp32 gradient, in units of whole
logits; matrix products, in units of one product over all tokens; all-reduces and their bytes. Seconds: the median over
rounds, and its ratio to the path through logits with the same row kernels. Each round first runs all ways in turn with
row kernels in plain torch: this compares the ways, not the kernels. Then it runs `logits` and `head` with the machine's
fastest kernels.

    logits        all logits in one product, policy_stats over them; their gradient overwrites the logits
    head          vocab_parallel.head, in chunks of --chunks tokens
    vocabulary    splits of the vocabulary, as verl's linear_cross_entropy is described: running maxima and sums, three
                  reductions; backward computes each split's logits again and adds to the hidden states' gradient
    in forward    chunks of tokens whose gradients are computed in the forward pass, as Liger's fused losses are
                  described: no logits are computed twice, but the loss's gradient by token must be known, and ranks
                  reduce in every chunk

Under tensor parallelism the caller sums the hidden states' gradients over ranks, for every way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from benchmark_rows import Quantity, write_rows
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_dppo.diagnostics.gpu_check.held_memory import LiveTensors
from megatron_dppo.system.ports import hold_port
from megatron_dppo.vocab_parallel import policy_stats
from megatron_dppo.vocab_parallel.head import HeadFactor, HeadOptions, head_stats

SPLITS = 16
"""Number of splits of a rank's columns in ``vocabulary``: with 152,064 columns, a split has 9,504."""


@dataclass(frozen=True)
class Problem:
    """The inputs of a way.

    Attributes:
        hidden: hidden states [T, H].
        weight: this rank's columns of the output matrix, [C, H].
        main: fp32 gradient of the weight, [C, H].
        ids: token ids [T].
        gradient: dL/d log pi [T]; 0 for tokens without a loss.
        counted: which tokens need statistics, [T].
        vocabulary: number of columns of all ranks without padding.
        chunk: tokens of a chunk.
        backend: backend of the row kernels.
    """

    hidden: Tensor
    weight: Tensor
    main: Tensor
    ids: Tensor
    gradient: Tensor
    counted: Tensor
    vocabulary: int
    chunk: int
    backend: str | None
    group: dist.ProcessGroup | None


Way = Callable[[Problem], tuple[Tensor, Tensor]]
"""Function of a problem. It returns log pi [T] (0 for tokens that are not counted) and dL/dhidden [T, H], and adds
dL/dweight to ``main``."""


def with_logits(problem: Problem) -> tuple[Tensor, Tensor]:
    """All logits at once. The gradient overwrites the logits."""
    hidden = problem.hidden.detach().requires_grad_()
    weight = problem.weight
    logits = (hidden.detach() @ weight.T).requires_grad_()
    stats = policy_stats(
        logits, problem.ids, problem.group, vocab_size=problem.vocabulary, backend=problem.backend
    )
    gradient = torch.where(problem.counted, problem.gradient, 0.0)
    (d_logits,) = torch.autograd.grad(stats.log_probs, logits, gradient)
    _accumulate(problem.main, d_logits, problem.hidden)
    log_probs = torch.where(problem.counted, stats.log_probs.detach(), 0.0)
    return log_probs, d_logits @ weight


def head(problem: Problem) -> tuple[Tensor, Tensor]:
    """This project's head."""
    hidden = problem.hidden.detach().requires_grad_()
    stats = head_stats(
        [HeadFactor(hidden, problem.weight.detach().requires_grad_(), problem.main)],
        problem.ids, problem.group, vocab_size=problem.vocabulary, counted=problem.counted,
        options=HeadOptions(problem.chunk, backend=problem.backend),
    )  # fmt: skip
    stats.log_probs.backward(problem.gradient)
    assert hidden.grad is not None
    return stats.log_probs.detach(), hidden.grad


@torch.no_grad()
def by_vocabulary(problem: Problem) -> tuple[Tensor, Tensor]:
    """One split of the columns at a time."""
    hidden, weight = problem.hidden, problem.weight
    owned = _local_ids(problem, len(weight))
    splits = _splits(problem, len(weight))
    # Forward: the largest logit so far, and the sum of exponentials relative to it.
    top = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
    total, target = torch.zeros_like(top), torch.zeros_like(top)
    for split in splits:
        z = (hidden @ weight[split].T).float()
        new = torch.maximum(top, z.amax(1))
        total = total * (top - new).exp() + (z - new[:, None]).exp().sum(1)
        top = new
        inside = (owned >= split.start) & (owned < split.stop)
        value = z.gather(1, (owned - split.start).clamp(0, z.shape[1] - 1)[:, None])[:, 0]
        target = torch.where(inside, value, target)
    highest = _all_reduce(problem, top.clone(), dist.ReduceOp.MAX)
    total = _all_reduce(problem, total * (top - highest).exp())
    target = _all_reduce(problem, target)
    lse = highest + total.log()
    # Backward: the gradient of the logits is (one-hot - softmax) times the gradient of log pi.
    gradient = torch.where(problem.counted, problem.gradient, 0.0).float()
    d_hidden = torch.zeros_like(hidden)
    for split in splits:
        d = (hidden @ weight[split].T).float().sub_(lse[:, None]).exp_().mul_(-gradient[:, None])
        rows = ((owned >= split.start) & (owned < split.stop)).nonzero()[:, 0]
        d[rows, owned[rows] - split.start] += gradient[rows]
        d = d.to(weight.dtype)
        d_hidden += d @ weight[split]
        _accumulate(problem.main[split], d, hidden)
    return torch.where(problem.counted, target - lse, 0.0), d_hidden


@torch.no_grad()
def in_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """One chunk of tokens at a time, with its gradients."""
    hidden, weight = problem.hidden, problem.weight
    owned = _local_ids(problem, len(weight))
    columns = sum(split.stop - split.start for split in _splits(problem, len(weight)))
    d_hidden = torch.zeros_like(hidden)
    log_probs = torch.zeros(len(hidden))
    gradient = torch.where(problem.counted, problem.gradient, 0.0).float()
    for start in range(0, len(hidden), problem.chunk):
        rows = slice(start, start + problem.chunk)
        z = (hidden[rows] @ weight.T)[:, :columns].float()
        top = _all_reduce(problem, z.amax(1), dist.ReduceOp.MAX)
        z.sub_(top[:, None])
        is_owned = owned[rows] >= 0
        target = z.gather(1, owned[rows].clamp(min=0)[:, None])[:, 0] * is_owned
        z.exp_()
        sums = _all_reduce(problem, torch.stack([z.sum(1), target], 1))
        log_probs[rows] = sums[:, 1] - sums[:, 0].log()
        z.mul_((-gradient[rows] / sums[:, 0])[:, None])
        z.scatter_add_(1, owned[rows].clamp(min=0)[:, None], (gradient[rows] * is_owned)[:, None])
        d = z.to(weight.dtype)
        d_hidden[rows] = d @ weight[:columns]
        _accumulate(problem.main[:columns], d, hidden[rows])
    return torch.where(problem.counted, log_probs, 0.0), d_hidden


def _accumulate(main: Tensor, d: Tensor, hidden: Tensor) -> None:
    """Add the weight's gradient d.T @ hidden to ``main``, where ``d`` is the gradient of the logits."""
    if d.dtype == main.dtype:
        main.addmm_(d.T, hidden)
    else:
        main.add_(d.T @ hidden)


def _splits(problem: Problem, columns: int) -> list[slice]:
    """Return the splits of this rank's columns without padding."""
    rank = 0 if problem.group is None else dist.get_rank(problem.group)
    real = min(max(problem.vocabulary - rank * columns, 0), columns)
    step = -(-columns // SPLITS)
    return [slice(start, min(start + step, real)) for start in range(0, real, step)]


def _local_ids(problem: Problem, columns: int) -> Tensor:
    """Return the column of each id in this rank's shard; -1 if another rank has the column."""
    rank = 0 if problem.group is None else dist.get_rank(problem.group)
    local = problem.ids - rank * columns
    return torch.where((local >= 0) & (local < columns), local, -1)


def _all_reduce(problem: Problem, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if problem.group is not None:
        dist.all_reduce(values, op, group=problem.group)
    return values


WAYS: dict[str, Way] = {
    "logits": with_logits,
    "head": head,
    "vocabulary": by_vocabulary,
    "in forward": in_forward,
}


PRODUCTS = {torch.ops.aten.mm: 0, torch.ops.aten.addmm: 1, torch.ops.aten.addmm_: 1}
"""Matrix product -> position of the first factor among its arguments."""


class CostCounter(LiveTensors):
    """Counts live tensors, FLOPs of matrix products, all-reduces of floating numbers, and the all-reduces' bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.reductions, self.reduced_bytes = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allreduce" in func.name() and args[0][0].is_floating_point():
            self.reductions += 1
            self.reduced_bytes += args[0][0].nbytes
        if func.overloadpacket in PRODUCTS:
            left, right = args[PRODUCTS[func.overloadpacket] :][:2]
            self.flops += 2 * left.numel() * right.shape[1]
        return super().__torch_dispatch__(func, types, args, kwargs)


def measure(rank: int, port: int, folder: str, options: argparse.Namespace) -> None:
    """Run one rank: count every way, then measure seconds by round."""
    torch.set_num_threads(options.threads)
    group = None
    if options.tp > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=options.tp)
        group = dist.group.WORLD
    cases = {
        (name, chunk, backend): (WAYS[name], make_problem(options, rank, chunk, backend, group))
        for name, chunk, backend in case_names(options)
    }
    expected: list[Tensor] | None = None
    rows: list[dict[str, Any]] = []
    for (name, chunk, backend), (way, problem) in cases.items():
        problem.main.zero_()
        counts = CostCounter()
        with counts:
            log_probs, d_hidden = way(problem)
        results = [x.float().clone() for x in (log_probs, d_hidden, problem.main)]
        expected = expected or results
        rows.append({
            "way": name, "chunk": chunk, "backend": backend or "the fastest",
            "peak": counts.peak, "flops": counts.flops,
            "reductions": counts.reductions, "reduced": counts.reduced_bytes, "seconds": [],
            "error": max(float((a - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True)),
        })  # fmt: skip
    for _ in range(options.rounds):
        for row, (way, problem) in zip(rows, cases.values(), strict=True):
            if group is not None:
                dist.barrier(group)
            began = time.perf_counter()
            way(problem)
            row["seconds"].append(time.perf_counter() - began)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    if group is not None:
        dist.destroy_process_group()


def case_names(options: argparse.Namespace) -> list[tuple[str, int, str | None]]:
    """Return (way, chunk, backend of the row kernels): all ways in plain torch, then two ways with compiled kernels."""
    chunks = options.chunks
    eager = [("logits", 0, "eager"), *(("head", c, "eager") for c in chunks)]
    eager += [("vocabulary", 0, "eager"), *(("in forward", c, "eager") for c in chunks)]
    return [*eager, ("logits", 0, None), *(("head", c, None) for c in chunks)]


def make_problem(
    options: argparse.Namespace, rank: int, chunk: int, backend: str | None, group: Any
) -> Problem:
    """Make the problem. Only the part of the weight differs between ranks."""
    g = torch.Generator().manual_seed(1)
    dtype = getattr(torch, options.dtype)
    columns = -(-options.vocabulary // options.tp)
    hidden = torch.randn(options.tokens, options.hidden, generator=g).to(dtype)
    ids = torch.randint(0, options.vocabulary, (options.tokens,), generator=g)
    counted = torch.rand(options.tokens, generator=g) < options.counted
    trained = torch.rand(options.tokens, generator=g) < options.trained
    gradient = torch.where(trained, torch.randn(options.tokens, generator=g), 0.0)
    g.manual_seed(2 + rank)
    weight = (torch.randn(columns, options.hidden, generator=g) / options.hidden**0.5).to(dtype)
    main = torch.zeros(columns, options.hidden)
    return Problem(
        hidden, weight, main, ids, gradient, counted, options.vocabulary, chunk, backend, group
    )


def table_of(rows: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    """Make the table. The reference of a ratio is the row ``logits`` with the same kernels."""
    columns = -(-options.vocabulary // options.tp)
    logits = options.tokens * columns * getattr(torch, options.dtype).itemsize
    product = 2 * options.tokens * columns * options.hidden
    table = Table(
        "way", "row kernels", "chunk", "peak / logits", "products", "all-reduces", "MB reduced",
        "seconds", "ratio", "distance",
    )  # fmt: skip
    base = {
        row["backend"]: statistics.median(row["seconds"]) for row in rows if row["way"] == "logits"
    }
    for row in rows:
        seconds = statistics.median(row["seconds"])
        table.add_row(
            row["way"], row["backend"], str(row["chunk"] or "all"), f"{row['peak'] / logits:.2f}",
            f"{row['flops'] / product:.2f}", str(row["reductions"]), f"{row['reduced'] / 1e6:.2f}",
            f"{seconds:.3f}", f"{seconds / base[row['backend']]:.2f}", f"{row['error']:.0e}",
        )  # fmt: skip
    return table


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, over gloo")
    parser.add_argument(
        "--counted", type=float, default=0.9, help="share of tokens of the loss mask"
    )
    parser.add_argument(
        "--trained", type=float, default=0.8, help="share of tokens with a gradient"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = parse_options()
    with hold_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (port, folder, options), nprocs=options.tp)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    console = Console(highlight=False, width=110)
    console.print(
        f"{options.tokens} tokens, hidden {options.hidden}, vocabulary {options.vocabulary:,}, {options.dtype}, "
        f"TP{options.tp}, {options.counted:.0%} counted, {options.trained:.0%} of all with a gradient"
    )
    console.print(table_of(rows, options))
    if options.json:
        how = f"TP{options.tp}, {options.tokens} tokens"
        quantities = []
        for row in rows:
            case = f"{row['way']}, chunk {row['chunk']}, {row['backend']}"
            seconds = statistics.median(row["seconds"])
            quantities.append(Quantity(f"{case}: peak", row["peak"] / 1e9, "GB", how))
            quantities.append(Quantity(f"{case}: seconds", seconds, "s", how))
        write_rows(options.json, "head", quantities)


if __name__ == "__main__":
    main()
