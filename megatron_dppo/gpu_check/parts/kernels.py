"""Every row kernel that can run here against the dense float64 twin, also on vocabulary shards of several ranks."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_dppo.gpu_check.part import Bench, Row, must_run, part
from megatron_dppo.preflight.inspection import package_version
from megatron_dppo.system.network import free_port

DTYPES = ("float32", "bfloat16")
LOG_PROB_LIMIT = 4e-6
"""Nats: rounding to float32 alone costs 1.9e-6 where a log-probability is below -32."""
GRADIENT_LIMITS = {"float32": 1e-6, "bfloat16": 2**-8}
"""Relative error of the gradient's norm by the logits' dtype: bfloat16 keeps 8 bits of each element."""
_TIMEOUT = timedelta(seconds=60)


@part("log-probabilities, entropy, Top-K and gradients of every kernel against float64", 300.0)
def kernels(bench: Bench) -> Iterator[Row]:
    """A row of each backend and dtype, then of tensor parallelism over all GPUs (two processes without)."""
    interpreted = not bench.gpus and importlib.util.find_spec("triton") is not None
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are compiled
    import torch

    from megatron_dppo.gpu_check.kernel_case import KernelCase, errors
    from megatron_dppo.vocab_parallel.backends import BACKENDS

    torch.set_num_threads(1)
    device = torch.device("cuda" if bench.gpus else "cpu")
    tokens, vocab = (512, 151_936) if bench.gpus else (8, 8_990)
    for dtype in DTYPES:
        case = KernelCase.drawn(tokens, vocab, 64, getattr(torch, dtype), device)
        for name, backend in BACKENDS.items():
            reason = backend.unavailable(case.logits)
            label = f"{name}{' in its interpreter' if name == 'triton' and interpreted else ''}, {dtype}"
            if reason is not None:
                yield Row(label, f"not here: {reason}")
            else:
                yield kernel_row(label, asdict(errors(case, name)), dtype)
    os.environ.pop("TRITON_INTERPRET", None)
    yield from _tensor_parallel(bench)


def kernel_row(label: str, figures: Mapping[str, float], dtype: str) -> Row:
    """The ``KernelErrors`` of one backend by name, judged."""
    bounds = {
        **dict.fromkeys(("log_prob", "topk", "entropy"), LOG_PROB_LIMIT),
        "gradient": GRADIENT_LIMITS[dtype],
        "padding": 0.0,
    }
    return Row(
        label,
        ", ".join(f"{name} {value:.1e}" for name, value in figures.items()),
        f"at most {LOG_PROB_LIMIT:.0e} nats; gradient {bounds['gradient']:.0e}, padding 0",
        all(figures[name] <= bound for name, bound in bounds.items()),
        figures,
    )


def _tensor_parallel(bench: Bench) -> Iterator[Row]:
    if bench.gpus == 1:
        yield Row("tensor parallel", "not here: one GPU only")
        return
    import torch

    ranks = 1 << (min(bench.gpus, 8).bit_length() - 1) if bench.gpus else 2
    torch.multiprocessing.spawn(
        _worker, (ranks, free_port(), bench.gpus > 0, str(bench.folder)), ranks
    )
    errors_by_rank = [
        json.loads((bench.folder / f"tensor_parallel_{r}.json").read_text()) for r in range(ranks)
    ]
    kind = "GPUs over NCCL" if bench.gpus else "processes over gloo"
    for dtype in DTYPES:
        worst = {
            key: max(rank[dtype][key] for rank in errors_by_rank)
            for key in errors_by_rank[0][dtype]
        }
        label = f"TP{ranks}, {ranks} {kind}, {dtype}"
        yield kernel_row(label, worst, dtype)


def _worker(rank: int, ranks: int, port: int, on_gpus: bool, folder: str) -> None:
    """A rank: the errors on its shard, by dtype, into a file."""
    import torch
    import torch.distributed as dist

    from megatron_dppo.gpu_check.kernel_case import KernelCase, errors
    from megatron_dppo.vocab_parallel.backends import BACKENDS, PREFERENCE

    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
        world_size=ranks, timeout=_TIMEOUT,
    )  # fmt: skip
    tokens, vocab = (512, 151_936) if on_gpus else (8, 8_990)
    padding = -vocab % (64 * ranks) + 64 * ranks
    errors_by_dtype = {}
    for dtype in DTYPES:
        case = KernelCase.drawn(tokens, vocab, padding, getattr(torch, dtype), device)
        usable = (
            n for n in PREFERENCE[device.type] if BACKENDS[n].unavailable(case.logits) is None
        )
        errors_by_dtype[dtype] = asdict(errors(case, next(usable), dist.group.WORLD))
    Path(folder, f"tensor_parallel_{rank}.json").write_text(json.dumps(errors_by_dtype))
    dist.destroy_process_group()


_PEERS = {"transformer-engine": "Transformer Engine's", "liger-kernel": "Liger's"}


@part(
    "bandwidth of policy statistics beside TE, Liger, Megatron and torch; what a mask adds", 420.0
)
def mask(bench: Bench) -> Iterator[Row]:
    """``megatron-dppo bench-mask`` on one GPU, and on two where there are; its figures, tables and chart."""
    for name, owner in _PEERS.items():
        if package_version(name) is None:
            yield Row(f"{owner} cross entropy", f"not here: {name} is not installed")
        elif not bench.gpus:
            yield Row(f"{owner} cross entropy", "not here: it needs a GPU")
    for ranks in (1, 2) if bench.gpus > 1 else (1,):
        result = _measured(bench, ranks)
        yield from mask_rows(result)
    if bench.gpus == 1:
        yield Row("TP2", "not here: one GPU only")


def _measured(bench: Bench, ranks: int) -> dict[str, Any]:
    stem = bench.folder / f"mask_tp{ranks}"
    size = ("4096", "151936", "30") if bench.gpus else ("48", "32768", "5")
    tokens, vocab, repetitions = size
    files = [
        f"--{kind}={stem}.{end}"
        for kind, end in (("json", "json"), ("png", "png"), ("markdown", "md"))
    ]
    device = ["--device=cuda", "--compile"] if bench.gpus else ["--device=cpu"]
    sizes = [
        f"--tokens={tokens}",
        f"--vocab={vocab}",
        f"--repetitions={repetitions}",
        f"--tp={ranks}",
    ]
    must_run(["bench-mask", *device, *sizes, *files])
    return json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))


def mask_rows(result: Mapping[str, Any]) -> Iterator[Row]:
    """A row of each implementation and of each mask."""
    ranks = result["settings"]["tp"]
    for timed in result["implementations"]:
        ms = timed["forward_ms"] + timed["backward_ms"]
        share = timed["floor_share_of_copy_bandwidth"]
        text = (
            f"{ms:.2f} ms, {timed['floor_mb'] / ms:.0f} GB/s ({share:.0%} of a copy), peak "
            f"{timed['peak_extra_over_logits']:.2f} x logits, log-prob error {timed['max_log_prob_error']:.1e}"
        )
        ours = timed["name"].startswith("policy_stats")
        holds = timed["max_log_prob_error"] <= LOG_PROB_LIMIT if ours else None
        expected = f"log-prob error at most {LOG_PROB_LIMIT:.0e}" if ours else ""
        numbers = {key: value for key, value in timed.items() if isinstance(value, float)}
        yield Row(f"TP{ranks}, {timed['name']}", text, expected, holds, numbers)
    for update in result["masks"][1:]:
        text = (
            f"{update['overhead']:+.2%} ± {update['overhead_iqr']:.2%} of the update, "
            f"{update['loss_overhead']:+.2%} in the loss, {update['extra_all_reduces']:+d} all-reduces"
        )
        numbers = {key: value for key, value in update.items() if isinstance(value, float)}
        yield Row(f"TP{ranks}, {update['name']} adds", text, "", None, numbers)
