"""Bandwidth of the policy statistics and cost of the masks, beside every other implementation that is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.gpu_check.commands import must_run
from megatron_dppo.gpu_check.part import Row, Site
from megatron_dppo.preflight.inspection import package_version

SHOWS = "bandwidth of policy statistics beside TE, Liger, Megatron and torch; what a mask adds"
LIMIT_S = 420.0
_PEERS = {"transformer-engine": "Transformer Engine's", "liger-kernel": "Liger's"}
_LOG_PROB_LIMIT = 4e-6


def run(site: Site) -> Iterator[Row]:
    """``megatron-dppo bench-mask`` on one GPU, and on two where there are; its figures, tables and chart."""
    for name, owner in _PEERS.items():
        if package_version(name) is None:
            yield Row(f"{owner} cross entropy", f"not here: {name} is not installed")
        elif not site.gpus:
            yield Row(f"{owner} cross entropy", "not here: it needs a GPU")
    for ranks in (1, 2) if site.gpus > 1 else (1,):
        result = _measured(site, ranks)
        yield from rows(result)
    if site.gpus == 1:
        yield Row("TP2", "not here: one GPU only")


def _measured(site: Site, ranks: int) -> dict[str, Any]:
    stem = site.folder / f"mask_tp{ranks}"
    size = ("4096", "151936", "30") if site.gpus else ("48", "32768", "5")
    tokens, vocab, repetitions = size
    files = [
        f"--{kind}={stem}.{end}"
        for kind, end in (("json", "json"), ("png", "png"), ("markdown", "md"))
    ]
    device = ["--device=cuda", "--compile"] if site.gpus else ["--device=cpu"]
    sizes = [
        f"--tokens={tokens}",
        f"--vocab={vocab}",
        f"--repetitions={repetitions}",
        f"--tp={ranks}",
    ]
    must_run(["bench-mask", *device, *sizes, *files])
    return json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))


def rows(result: Mapping[str, Any]) -> Iterator[Row]:
    """A row of each implementation and of each mask."""
    ranks = result["settings"]["tp"]
    for found in result["implementations"]:
        ms = found["forward_ms"] + found["backward_ms"]
        share = found["floor_share_of_copy_bandwidth"]
        told = (
            f"{ms:.2f} ms, {found['floor_mb'] / ms:.0f} GB/s ({share:.0%} of a copy), peak "
            f"{found['peak_extra_over_logits']:.2f} x logits, log-prob error {found['max_log_prob_error']:.1e}"
        )
        ours = found["name"].startswith("policy_stats")
        holds = found["max_log_prob_error"] <= _LOG_PROB_LIMIT if ours else None
        expected = f"log-prob error at most {_LOG_PROB_LIMIT:.0e}" if ours else ""
        numbers = {key: value for key, value in found.items() if isinstance(value, float)}
        yield Row(f"TP{ranks}, {found['name']}", told, expected, holds, numbers)
    for mask in result["masks"][1:]:
        told = (
            f"{mask['overhead']:+.2%} ± {mask['overhead_iqr']:.2%} of the update, "
            f"{mask['loss_overhead']:+.2%} in the loss, {mask['extra_all_reduces']:+d} all-reduces"
        )
        numbers = {key: value for key, value in mask.items() if isinstance(value, float)}
        yield Row(f"TP{ranks}, {mask['name']} adds", told, "", None, numbers)
