"""Every row kernel that can run here against the dense float64 twin, also on vocabulary shards of several ranks."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.gpu_check.part import Row, Site
from megatron_dppo.system.ports import free_port

if TYPE_CHECKING:
    import torch

    from megatron_dppo.gpu_check.problems import Errors

SHOWS = "log-probabilities, entropy, Top-K and gradients of every kernel against float64"
LIMIT_S = 300.0
DTYPES = ("float32", "bfloat16")
_TIMEOUT = timedelta(seconds=60)


def run(site: Site) -> Iterator[Row]:
    """A row of each backend and dtype, then of tensor parallelism over all GPUs (two processes without)."""
    interpreted = not site.gpus and importlib.util.find_spec("triton") is not None
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are compiled
    import torch

    from megatron_dppo.gpu_check.problems import Problem, errors
    from megatron_dppo.vocab_parallel.backends import BACKENDS

    torch.set_num_threads(1)
    device = torch.device("cuda" if site.gpus else "cpu")
    tokens, vocab = (512, 151_936) if site.gpus else (8, 8_990)
    for dtype in DTYPES:
        problem = Problem.drawn(tokens, vocab, 64, getattr(torch, dtype), device)
        for name, backend in BACKENDS.items():
            reason = backend.unavailable(problem.logits)
            label = f"{name}{' in its interpreter' if name == 'triton' and interpreted else ''}, {dtype}"
            if reason is not None:
                yield Row(label, f"not here: {reason}")
            else:
                yield row(label, errors(problem, name), getattr(torch, dtype))
    os.environ.pop("TRITON_INTERPRET", None)
    yield from _tensor_parallel(site)


def row(label: str, found: Errors, dtype: torch.dtype) -> Row:
    """The errors of one backend, judged."""
    from megatron_dppo.gpu_check.problems import GRADIENT_LIMIT, LOG_PROB_LIMIT

    bounds = {
        **dict.fromkeys(("log_prob", "topk", "entropy"), LOG_PROB_LIMIT),
        "gradient": GRADIENT_LIMIT[dtype],
        "padding": 0.0,
    }
    figures = asdict(found)
    return Row(
        label,
        ", ".join(f"{name} {value:.1e}" for name, value in figures.items()),
        f"at most {LOG_PROB_LIMIT:.0e} nats; gradient {bounds['gradient']:.0e}, padding 0",
        all(figures[name] <= bound for name, bound in bounds.items()),
        figures,
    )


def _tensor_parallel(site: Site) -> Iterator[Row]:
    if site.gpus == 1:
        yield Row("tensor parallel", "not here: one GPU only")
        return
    import torch

    from megatron_dppo.gpu_check.problems import Errors

    ranks = 1 << (min(site.gpus, 8).bit_length() - 1) if site.gpus else 2
    torch.multiprocessing.spawn(
        _worker, (ranks, free_port(), site.gpus > 0, str(site.folder)), ranks
    )
    told = [
        json.loads((site.folder / f"tensor_parallel_{r}.json").read_text()) for r in range(ranks)
    ]
    kind = "GPUs over NCCL" if site.gpus else "processes over gloo"
    for dtype in DTYPES:
        worst = {key: max(rank[dtype][key] for rank in told) for key in told[0][dtype]}
        label = f"TP{ranks}, {ranks} {kind}, {dtype}"
        yield row(label, Errors(**worst), getattr(torch, dtype))


def _worker(rank: int, ranks: int, port: int, on_gpus: bool, folder: str) -> None:
    """A rank: the errors on its shard, by dtype, into a file."""
    import torch
    import torch.distributed as dist

    from megatron_dppo.gpu_check.problems import Problem, errors
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
    found = {}
    for dtype in DTYPES:
        problem = Problem.drawn(tokens, vocab, padding, getattr(torch, dtype), device)
        usable = (
            n for n in PREFERENCE[device.type] if BACKENDS[n].unavailable(problem.logits) is None
        )
        found[dtype] = asdict(errors(problem, next(usable), dist.group.WORLD))
    Path(folder, f"tensor_parallel_{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
