"""Compare every row kernel that can run here with a dense float64 computation, also on shards of several ranks.

Legend: T = tokens, C = columns with padding, V = true vocabulary, K = ids of TopK(mu).
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.cluster.preflight.inspection import package_version
from megatron_dppo.diagnostics.gpu_check import Bench, CheckRow, must_run, part
from megatron_dppo.system.ports import free_port

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

DTYPES = ("float32", "bfloat16")
LOG_PROB_LIMIT = 4e-6
"""Nats. Rounding to float32 alone changes a log-probability between -64 and -32 by up to 1.9e-6."""
GRADIENT_LIMITS = {"float32": 1e-6, "bfloat16": 2**-8}
"""Relative error of the gradient's norm by the logits' dtype: bfloat16 keeps 8 bits of each element."""
_TIMEOUT = timedelta(seconds=60)

TEMPERATURE = 0.8
K = 20


@dataclass(frozen=True)
class KernelCase:
    """Logits with every special case that kernels must handle.

    ``logits`` [T, C]: the columns from ``vocab`` on are padding; the first row begins with a long run of -inf.
    ``targets`` [T] and ``topk`` [T, K] are token ids. ``weights`` float64 [2, T]: dL/d log pi and dL/d entropy. Both
    are 0 for the third token, so its row of logits has no gradient.
    """

    logits: Tensor
    targets: Tensor
    topk: Tensor
    weights: Tensor
    vocab: int

    @classmethod
    def drawn(
        cls, tokens: int, vocab: int, padding: int, dtype: torch.dtype, device: torch.device
    ) -> KernelCase:
        """Draw a case. Every machine and rank draws the same case."""
        import torch

        seeded = torch.Generator().manual_seed(2)
        logits = (torch.randn(tokens, vocab + padding, generator=seeded) * 3).to(dtype)
        logits[0, : vocab // 2] = -math.inf
        # Large padding: a kernel that reads it has large errors everywhere.
        logits[:, vocab:] = 30.0
        targets = torch.randint(0, vocab, (tokens,), generator=seeded)
        # Both ends of the vocabulary are targets. The first target lies outside the first row's -inf.
        targets[:3] = torch.tensor([vocab - 1, 0, vocab - 1])
        topk = torch.randint(0, vocab, (tokens, K), generator=seeded)
        # An engine that has fewer than K ids returns -1 in the remaining places.
        topk[-1, -1] = -1
        weights = torch.randn(2, tokens, generator=seeded, dtype=torch.float64)
        weights[:, 2] = 0
        logits, targets, topk, weights = (x.to(device) for x in (logits, targets, topk, weights))
        return cls(logits, targets, topk, weights, vocab)

    def shard(self, rank: int, ranks: int) -> KernelCase:
        """Return the case of a tensor-parallel rank, with a copy of its columns; C must be a multiple of ``ranks``."""
        width = self.logits.shape[1] // ranks
        # Copy: the backward pass overwrites the logits.
        columns = self.logits[:, rank * width : (rank + 1) * width].clone()
        return KernelCase(columns, self.targets, self.topk, self.weights, self.vocab)


@dataclass(frozen=True)
class KernelErrors:
    """The largest errors against the dense float64 computation.

    ``log_prob``, ``topk``, ``entropy``: nats. ``gradient``: relative error of the gradient's norm. ``padding``: the
    largest gradient in the padding and in the row of weight 0; these gradients must be 0.
    """

    log_prob: float
    topk: float
    entropy: float
    gradient: float
    padding: float


def errors(case: KernelCase, backend: str, group: dist.ProcessGroup | None = None) -> KernelErrors:
    """Return the errors of ``backend`` for ``case``; with ``group``, the errors of this rank's shard."""
    import torch
    import torch.distributed as dist

    from megatron_dppo.vocab_parallel.policy_stats import dense_policy_stats, policy_stats

    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    leaf = case.shard(rank, ranks).logits.requires_grad_()
    arguments: dict[str, Any] = {
        "vocab_size": case.vocab,
        "temperature": TEMPERATURE,
        "topk_ids": case.topk,
        "with_entropy": True,
    }
    stats = policy_stats(leaf, case.targets, group, backend=backend, **arguments)
    assert stats.entropy is not None
    assert stats.topk_log_probs is not None
    (stats.log_probs * case.weights[0] + stats.entropy * case.weights[1]).sum().backward()
    whole_logits = case.logits.double().requires_grad_()
    dense = dense_policy_stats(whole_logits, case.targets, **arguments)
    assert dense.entropy is not None
    assert dense.topk_log_probs is not None
    (dense.log_probs * case.weights[0] + dense.entropy * case.weights[1]).sum().backward()
    assert leaf.grad is not None
    assert whole_logits.grad is not None
    gradient = leaf.grad.double()
    width = leaf.shape[1]
    first_column = rank * width
    expected_gradient = whole_logits.grad[:, first_column : first_column + width]
    padding = gradient[:, max(case.vocab - first_column, 0) :]
    return KernelErrors(
        _largest(stats.log_probs, dense.log_probs),
        _largest(stats.topk_log_probs, dense.topk_log_probs),
        _largest(stats.entropy, dense.entropy),
        float((gradient - expected_gradient).norm() / expected_gradient.norm()),
        float(torch.cat([gradient[2], padding.flatten()]).abs().max()),
    )


def _largest(values: Tensor, expected: Tensor) -> float:
    import torch

    difference = (values.detach().double() - expected.detach()).abs()
    # The difference of two equal infinities is NaN: count it as 0.
    return float(torch.where(values.double() == expected, 0.0, difference).max())


@part("log-probabilities, entropy, Top-K and gradients of every kernel against float64", 300.0)
def kernels(bench: Bench) -> Iterator[CheckRow]:
    """Yield a row for each backend and dtype, then rows of tensor parallelism over all GPUs, or over two processes."""
    is_interpreted = not bench.gpus and importlib.util.find_spec("triton") is not None
    if is_interpreted:
        # Set the variable first: Triton reads it when it compiles the kernels.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from megatron_dppo.vocab_parallel.backends import BACKENDS

    torch.set_num_threads(1)
    device = torch.device(bench.device)
    tokens, vocab = (512, 151_936) if bench.gpus else (8, 8_990)
    for dtype in DTYPES:
        case = KernelCase.drawn(tokens, vocab, 64, getattr(torch, dtype), device)
        for name, backend in BACKENDS.items():
            reason = backend.unsupported_reason(case.logits)
            place = " in its interpreter" if name == "triton" and is_interpreted else ""
            label = f"{name}{place}, {dtype}"
            if reason is not None:
                yield CheckRow(label, f"not here: {reason}")
            else:
                yield kernel_row(label, asdict(errors(case, name)), dtype)
    os.environ.pop("TRITON_INTERPRET", None)
    yield from _tensor_parallel(bench)


def kernel_row(label: str, figures: Mapping[str, float], dtype: str) -> CheckRow:
    """Return the row of one backend. It holds if all ``figures``, the backend's ``KernelErrors``, are within bounds."""
    bounds = {
        **dict.fromkeys(("log_prob", "topk", "entropy"), LOG_PROB_LIMIT),
        "gradient": GRADIENT_LIMITS[dtype],
        "padding": 0.0,
    }
    return CheckRow(
        label,
        ", ".join(f"{name} {value:.1e}" for name, value in figures.items()),
        f"at most {LOG_PROB_LIMIT:.0e} nats; gradient {bounds['gradient']:.0e}, padding 0",
        all(figures[name] <= bound for name, bound in bounds.items()),
        figures,
    )


def _tensor_parallel(bench: Bench) -> Iterator[CheckRow]:
    if bench.gpus == 1:
        yield CheckRow("tensor parallel", "not here: one GPU only")
        return
    import torch

    ranks = 2
    if bench.gpus:
        # The largest power of two that is at most 8 and at most the number of GPUs.
        ranks = 1 << (min(bench.gpus, 8).bit_length() - 1)
    torch.multiprocessing.spawn(
        _worker, (ranks, free_port(), bench.gpus > 0, str(bench.folder)), ranks
    )
    errors_by_rank = [
        json.loads((bench.folder / f"tensor_parallel_{r}.json").read_bytes()) for r in range(ranks)
    ]
    kind = "processes over gloo"
    if bench.gpus:
        kind = "GPUs over NCCL"
    for dtype in DTYPES:
        largest_errors: dict[str, float] = {}
        for name in errors_by_rank[0][dtype]:
            largest_errors[name] = max(rank_errors[dtype][name] for rank_errors in errors_by_rank)
        label = f"TP{ranks}, {ranks} {kind}, {dtype}"
        yield kernel_row(label, largest_errors, dtype)


def _worker(rank: int, ranks: int, port: int, on_gpus: bool, folder: str) -> None:
    """Run one rank: write the errors on its shard, by dtype, to a file."""
    import torch
    import torch.distributed as dist

    from megatron_dppo.vocab_parallel.backends import BACKENDS, PREFERENCE

    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=_TIMEOUT,
    )
    tokens, vocab = (512, 151_936) if on_gpus else (8, 8_990)
    # Pad to a multiple of 64 columns on each rank. Add 64 more columns for each rank, so that there always is padding.
    padding = -vocab % (64 * ranks) + 64 * ranks
    errors_by_dtype = {}
    for dtype in DTYPES:
        case = KernelCase.drawn(tokens, vocab, padding, getattr(torch, dtype), device)
        usable = (
            n
            for n in PREFERENCE[device.type]
            if BACKENDS[n].unsupported_reason(case.logits) is None
        )
        errors_by_dtype[dtype] = asdict(errors(case, next(usable), dist.group.WORLD))
    Path(folder, f"tensor_parallel_{rank}.json").write_text(json.dumps(errors_by_dtype))
    dist.destroy_process_group()


HEAD_LIMITS = {"model": (3e-2, 1e-2), "float32": (LOG_PROB_LIMIT, 2**-8)}
"""``head.dtype`` -> bounds with bf16 weights: error of a log-probability in nats, relative error of gradients."""
GPU_PRODUCT_ERROR = 2e-5
"""Bound of a log-probability's error on a GPU, nats. A GPU's matrix units truncate float32 sums: on an H100, logits of
size 1 had errors of 1e-5."""
_MOST_CHUNKS = 2.0
"""Largest peak memory of the output layer, in chunks of logits."""


@part("the output layer without logits: errors, peak memory and seconds beside whole logits", 300.0)
def head(bench: Bench) -> Iterator[CheckRow]:
    """Yield a row of errors and rows of memory and time for bf16 logits, then for fp32 logits; the weights are bf16."""
    import torch

    device = torch.device(bench.device)
    tokens, hidden, columns = (32_768, 2048, 151_936) if bench.gpus else (256, 32, 65_536)
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    states = random(tokens, hidden)
    weight = random(columns, hidden) * hidden**-0.5
    ids = torch.randint(columns, (tokens,), generator=generator, device=device)
    for name, dtype in (("model", None), ("float32", torch.float32)):
        head_errors = _head_errors(states, weight, ids, dtype)
        log_prob_limit, gradient_limit = HEAD_LIMITS[name]
        if bench.gpus:
            log_prob_limit = max(log_prob_limit, GPU_PRODUCT_ERROR)
        gradient_error = max(head_errors["hidden"], head_errors["weight"])
        yield CheckRow(
            f"head.dtype {name}, against float64",
            f"log-prob {head_errors['log_prob']:.1e}, gradient of hidden states {head_errors['hidden']:.1e}, of the "
            f"weight {head_errors['weight']:.1e}",
            f"at most {log_prob_limit:.0e} nats; gradients {gradient_limit:.0e}",
            head_errors["log_prob"] <= log_prob_limit and gradient_error <= gradient_limit,
            head_errors,
        )
        for chunk in (tokens // 4, tokens):
            figures = _head_cost(states, weight, ids, dtype, chunk)
            yield CheckRow(
                f"head.dtype {name}, chunks of {chunk:,} of {tokens:,} tokens",
                f"{figures['seconds']:.3f} s, peak {figures['chunks']:.2f} chunks of logits",
                f"at most {_MOST_CHUNKS:.0f} chunks of logits",
                figures["chunks"] <= _MOST_CHUNKS,
                figures,
            )
    yield from _head_peers(states, weight, ids)


def _head_errors(states: Any, weight: Any, ids: Any, dtype: Any) -> dict[str, float]:
    """Return the errors of 64 log-probabilities in chunks of 16, and of the gradients of their sum."""
    import torch

    from megatron_dppo.vocab_parallel.head import (
        HeadFactor,
        HeadOptions,
        dense_head_stats,
        head_stats,
    )

    arguments = {"target_ids": ids[:64], "vocab_size": len(weight)}
    leaves = [x.detach().clone().requires_grad_() for x in (states[:64], weight)]
    dense_leaves = [x.detach().double().requires_grad_() for x in (states[:64], weight)]
    stats = head_stats([HeadFactor(*leaves)], options=HeadOptions(16, dtype), **arguments)
    dense = dense_head_stats([HeadFactor(*dense_leaves)], **arguments)
    for head_result in (stats, dense):
        head_result.log_probs.sum().backward()
    head_errors = {"log_prob": float((stats.log_probs - dense.log_probs).detach().abs().max())}
    for name, leaf, exact in zip(("hidden", "weight"), leaves, dense_leaves, strict=True):
        assert leaf.grad is not None
        assert exact.grad is not None
        difference = torch.norm(leaf.grad.double() - exact.grad)
        head_errors[name] = float(difference / torch.norm(exact.grad))
    return head_errors


def _head_cost(states: Any, weight: Any, ids: Any, dtype: Any, chunk: int) -> dict[str, float]:
    """Run a forward and a backward pass twice. Return the peak memory of the first and the seconds of the second.

    The unit of the peak is one chunk of logits. The peak excludes the gradient of the hidden states.
    """
    import torch

    from megatron_dppo.diagnostics.gpu_check.held_memory import LiveTensors
    from megatron_dppo.diagnostics.mask_benchmark.meters import Clock
    from megatron_dppo.vocab_parallel.head import HeadFactor, HeadOptions, head_stats

    main_grad = torch.zeros_like(weight, dtype=torch.float32)
    hidden, leaf = (x.detach().requires_grad_() for x in (states, weight))
    live, milliseconds = LiveTensors(), 0.0
    # The first pass is also the warm-up. Counting tensors takes time, so the second pass runs without it.
    for context in (live, nullcontext()):
        clock = Clock(states.device.type)
        with context:
            factor = HeadFactor(hidden, leaf, main_grad)
            options = HeadOptions(chunk, dtype)
            stats = head_stats([factor], ids, vocab_size=len(weight), options=options)
            (gradient,) = torch.autograd.grad(stats.log_probs.sum(), hidden)
        milliseconds, _ = clock.read()
    chunk_bytes = chunk * len(weight) * (dtype or weight.dtype).itemsize
    chunks = (live.peak - gradient.nbytes) / chunk_bytes
    return {"seconds": milliseconds / 1e3, "chunks": chunks}


def _liger_head(states: Any, weight: Any, ids: Any) -> Any:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(states, weight, ids, reduction="sum")


def _cut_head(states: Any, weight: Any, ids: Any) -> Any:
    from cut_cross_entropy import linear_cross_entropy

    # Disable the filter: it leaves out small gradients.
    return linear_cross_entropy(states, weight, ids, reduction="sum", filter_eps=None)


SumLoss = Callable[[Any, Any, Any], Any]
_HEAD_PEERS: dict[str, SumLoss] = {"liger-kernel": _liger_head, "cut-cross-entropy": _cut_head}
"""Package -> its cross entropy without whole logits, summed over the tokens."""


def _head_peers(states: Any, weight: Any, ids: Any) -> Iterator[CheckRow]:
    """Yield the time and the peak memory of other output layers without logits."""
    for name, sum_loss in _HEAD_PEERS.items():
        version = package_version(name)
        if version is None:
            yield CheckRow(f"{name}'s output layer", f"not here: {name} is not installed")
        elif not states.is_cuda:
            yield CheckRow(f"{name}'s output layer", "not here: it needs a GPU")
        else:
            yield _peer_row(f"{name} {version}", sum_loss, states, weight, ids)


def _peer_row(label: str, sum_loss: SumLoss, states: Any, weight: Any, ids: Any) -> CheckRow:
    import torch

    from megatron_dppo.diagnostics.mask_benchmark.meters import Clock, peak_extra_bytes

    hidden, leaf = (x.detach().requires_grad_() for x in (states, weight))

    def run() -> None:
        torch.autograd.grad(sum_loss(hidden, leaf, ids), (hidden, leaf))

    # The first pass compiles kernels; the figures of the second pass count.
    run()
    clock = Clock("cuda")
    peak = peak_extra_bytes("cuda", run)
    seconds = clock.read()[0] / 1e3
    peak_logits = peak / (len(states) * len(weight) * weight.element_size())
    text = f"{seconds:.3f} s, peak {peak_logits:.2f} x whole logits"
    return CheckRow(label, text, "", None, {"seconds": seconds, "logits": peak_logits})


_PEERS = {"transformer-engine": "Transformer Engine's", "liger-kernel": "Liger's"}


@part(
    "bandwidth of policy statistics beside TE, Liger, Megatron and torch; what a mask adds", 420.0
)
def mask(bench: Bench) -> Iterator[CheckRow]:
    """Run ``megatron-dppo bench-mask`` on one rank, and on two GPUs if there are two; yield its figures."""
    for name, owner in _PEERS.items():
        if package_version(name) is None:
            yield CheckRow(f"{owner} cross entropy", f"not here: {name} is not installed")
        elif not bench.gpus:
            yield CheckRow(f"{owner} cross entropy", "not here: it needs a GPU")
    yield from mask_rows(_measured(bench, ranks=1))
    if bench.gpus > 1:
        yield from mask_rows(_measured(bench, ranks=2))
    if bench.gpus == 1:
        yield CheckRow("TP2", "not here: one GPU only")


def _measured(bench: Bench, ranks: int) -> dict[str, Any]:
    """Run ``megatron-dppo bench-mask`` on ``ranks`` ranks, and return the content of its JSON file."""
    stem = bench.folder / f"mask_tp{ranks}"
    tokens, vocab, repetitions = 48, 32_768, 5
    device = ["--device=cpu"]
    if bench.gpus:
        tokens, vocab, repetitions = 4096, 151_936, 30
        device = ["--device=cuda", "--compile"]
    files = [f"--json={stem}.json", f"--png={stem}.png", f"--markdown={stem}.md"]
    sizes = [
        f"--tokens={tokens}",
        f"--vocab={vocab}",
        f"--repetitions={repetitions}",
        f"--tp={ranks}",
    ]
    must_run(["bench-mask", *device, *sizes, *files])
    return json.loads(Path(f"{stem}.json").read_bytes())


def mask_rows(result: Mapping[str, Any]) -> Iterator[CheckRow]:
    """Yield a row for each implementation and each mask in ``result``, the measurements of ``bench-mask``.

    Only the rows of this project's implementations can fail.
    """
    ranks = result["settings"]["tp"]
    for measured in result["implementations"]:
        ms = measured["forward_ms"] + measured["backward_ms"]
        # The floor is the least memory traffic that the computation needs. MB / ms = GB/s.
        bandwidth = measured["floor_mb"] / ms
        share = measured["floor_share_of_copy_bandwidth"]
        error = measured["max_log_prob_error"]
        text = (
            f"{ms:.2f} ms, {bandwidth:.0f} GB/s ({share:.0%} of a copy), peak "
            f"{measured['peak_extra_over_logits']:.2f} x logits, log-prob error {error:.1e}"
        )
        expectation, holds = "", None
        if measured["name"].startswith("policy_stats"):
            expectation = f"log-prob error at most {LOG_PROB_LIMIT:.0e}"
            holds = error <= LOG_PROB_LIMIT
        numbers = {key: value for key, value in measured.items() if isinstance(value, float)}
        yield CheckRow(f"TP{ranks}, {measured['name']}", text, expectation, holds, numbers)
    # Leave out the first update: it has no mask.
    for update in result["masks"][1:]:
        text = (
            f"{update['overhead']:+.2%} ± {update['overhead_iqr']:.2%} of the update, "
            f"{update['loss_overhead']:+.2%} in the loss, {update['extra_all_reduces']:+d} all-reduces"
        )
        numbers = {key: value for key, value in update.items() if isinstance(value, float)}
        yield CheckRow(f"TP{ranks}, {update['name']} adds", text, "", None, numbers)
