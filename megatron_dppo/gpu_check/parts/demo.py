"""The demo on this machine's GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from megatron_dppo.gpu_check.commands import run_command
from megatron_dppo.gpu_check.part import Row, Site
from megatron_dppo.gpu_check.tiny_runs import require_engine

SHOWS = "the demo: a tiny mixture of experts learns by DPPO"
LIMIT_S = 1200.0
_FIGURES = ("eval_accuracy_start", "eval_accuracy_end", "mean_abs_prob_gap")


def run(site: Site) -> Iterator[Row]:
    """The demo judges itself by its exit code; its figures and its report."""
    require_engine()
    run = site.folder / "run"
    code = run_command(["demo", "--directory", str(run)])
    yield Row("exit code", str(code), "0", code == 0)
    summary = run / "summary.json"
    if summary.exists():
        told = json.loads(summary.read_text(encoding="utf-8"))
        for name in _FIGURES:
            yield Row(name.replace("_", " "), f"{told[name]:.3g}")
        verified, updates = told["weight_updates_verified"], told["weight_updates"]
        yield Row("weight updates verified", f"{verified} of {updates}", "all", verified == updates)
        (site.folder / "report.png").write_bytes((run / "report.png").read_bytes())
