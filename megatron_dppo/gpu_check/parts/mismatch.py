"""A bfloat16 trainer against the server on the same tokens, and what the difference is made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.gpu_check.commands import must_run
from megatron_dppo.gpu_check.part import Row, Site
from megatron_dppo.gpu_check.tiny_runs import gap_row, records_of, tiny_run
from megatron_dppo.metrics import names
from megatron_dppo.metrics.normal_ranges import BY_METRIC

SHOWS = "trainer against server in bfloat16: mean |pi - mu| and its parts"
LIMIT_S = 600.0


def run(site: Site) -> Iterator[Row]:
    """A step with saved rollouts and recorded routing, then ``megatron-dppo mismatch`` on its batch."""
    settings = ["rollout.save=true", "rollout.router_replay=true", "rollout.temperature=0.8"]
    run = tiny_run(site, "run", "bfloat16", settings)
    yield gap_row(records_of(run)[1], "bfloat16")
    told, picture = site.folder / "mismatch.json", site.folder / "mismatch.png"
    words = [str(run), "--step=1", f"--json={told}", f"--png={picture}"]
    if site.gpus:
        words.append("--no-precision")
        why = "not here: Transformer Engine has no float32 attention of packed sequences"
        yield Row("numerics with a float32 trainer", why)
    must_run(["mismatch", *words])
    yield from part_rows(json.loads(told.read_text(encoding="utf-8")))


def part_rows(told: Mapping[str, Any]) -> Iterator[Row]:
    """Each cause's part; the numerics, which nothing but precision removes, against the normal range."""
    bound = BY_METRIC[names.GAP_ON_POLICY].upper("bfloat16")
    for cause, part in told["parts"].items():
        judged = cause == "numerics"
        expected = f"at most {bound:.2g}" if judged else ""
        yield Row(
            f"part: {cause}",
            f"{part:.2e}",
            expected,
            part <= bound if judged else None,
            {"part": part},
        )
    exact = next((rung for rung in told["rungs"] if rung["fixes"] == "precision"), None)
    if exact is not None:
        yield Row(
            "numerics with a float32 trainer", f"{exact['gap']:.2e}", figures={"gap": exact["gap"]}
        )
