#!/usr/bin/env python3
"""Put the results of ``megatron-dppo gpu-check`` into docs/evidence/gpu_first_day.md.

python tools/gpu_day_page.py runs/gpu_check/gpu_check.json   # keep the file in docs/evidence, and rewrite the page
python tools/gpu_day_page.py                                 # rewrite the page from the kept file, if there is one

The page says of each part whether it has run on a GPU. A row has the measured figure, the expected or planned figure
with the ratio of both, and the figure of the H100 of the first day.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from examples.recipes.verdicts import with_table  # noqa: E402
from megatron_dppo.diagnostics.gpu_check import discover  # noqa: E402
from megatron_dppo.diagnostics.gpu_check.__main__ import cell, table  # noqa: E402
from megatron_dppo.logging import fatal  # noqa: E402
from megatron_dppo.system.files import write_atomically  # noqa: E402

PAGE = ROOT / "docs" / "evidence" / "gpu_first_day.md"
RESULTS = PAGE.with_name("gpu_check.json")
"""The newest results, kept in the repository once there are any."""
BEGIN, END = "<!-- gpu-check -->", "<!-- end of gpu-check -->"
ON_H100 = {"machine", "kernels", "head", "layers", "cpu_twin", "handles", "full_layer"}
"""The parts that ran on the H100 of the first day, with torch's layers."""
H100_FIGURES = {
    "torch layers, float32: logits against transformers'": "1.2e-6",
    "torch layers, bfloat16: logits against float32": "0.026",
    "torch layers, bfloat16: gradients against float32": "0.021",
    "weights": "2.3 GiB",
    "gradients": "4.6 GiB",
    "optimizer": "13.9 GiB",
    "kept for backward": "2.3 GiB",
    "peak of a step above its start": "4.6 GiB",
    "an optimiser step": "0.283 s, 160 TFLOP/s, MFU 16%",
    "the hash of the weights": "0.0106 s, 234 GB/s",
    "parking": "10.5 s at first, then 0.35 s, 49 GB/s",
    "unparking": "0.35 s, 49 GB/s",
}
"""Figures of the H100 of the first day by the row's label, in the parts ``layers`` and ``full_layer``."""
_WITH_FIGURES = ("layers", "full_layer")


def generated(report: Mapping[str, Any] | None) -> str:
    """Return the generated part of the page for ``report``, the content of gpu_check.json; None: nothing has run."""
    if report is None:
        return "\n\n".join(_without_results())
    blocks: list[str] = []
    for node, result in report.get("nodes", {"": report}).items():
        blocks += _node(node, result)
    return "\n\n".join(blocks)


def _without_results() -> Iterator[str]:
    names = [part.name for part in discover() if part.name not in ON_H100]
    yield f"No results of `gpu-check --day` yet. **Not yet run on a GPU**: {_listed(names)}."
    yield (
        f"Run on the H100 of above with torch's layers, and **not yet with Transformer Engine**: "
        f"{_listed(sorted(ON_H100))}."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _node(node: str, result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sections of one machine. ``node``: its name in a cluster, or an empty text."""
    if node:
        yield f"### Node {node}"
    if "parts" not in result:
        yield f"No results: exit code {result['exit_code']}."
        return
    words = " ".join(f"`{word}`" for word in result["overrides"]) or "none"
    yield f"{result['gpus']} GPU(s), version {result['version']}, values replaced by `--set`: {words}."
    if not result["gpus"]:
        yield "**On a machine without a GPU**: the figures show that the parts work, and nothing about GPUs."
    parts = result["parts"]
    summary = []
    for part in parts:
        summary.append(
            [f"`{part['name']}`", part["verdict"], f"{part['seconds']:.0f}", cell(part["shows"])]
        )
    yield table(["part", "result", "seconds", "shows"], summary)
    ended = {part["name"] for part in parts if part["verdict"] in ("good", "bad")}
    missing = [part.name for part in discover() if part.name not in ended]
    if missing:
        yield f"**Not run to the end here**: {', '.join(missing)}."
    for part in parts:
        yield from _part(part)


def _part(part: Mapping[str, Any]) -> Iterator[str]:
    name = part["name"]
    yield f"#### `{name}`: {part['verdict']}"
    if part["why"]:
        yield f"```\n{part['why']}\n```"
    rows = []
    for row in part["rows"]:
        before = H100_FIGURES.get(row["label"], "") if name in _WITH_FIGURES else ""
        holds = "**NO**" if row["holds"] is False else ""
        texts = [cell(row[key]) for key in ("label", "measured", "expected")]
        rows.append([*texts, _ratio(row["figures"]), before, holds])
    if rows:
        head = ["what", "measured", "expected or planned", "measured / planned", "H100", "wrong"]
        yield table(head, rows)


def _ratio(figures: Mapping[str, float]) -> str:
    """Return measured / planned; an empty text for a row without a plan."""
    if "ratio" in figures:
        return f"{figures['ratio']:.2f}"
    if "planned" in figures and "measured" in figures:
        return f"{figures['measured'] / figures['planned']:.2f}"
    return ""


def main() -> int:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "results", nargs="?", type=Path, help="gpu_check.json; default: the kept file"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="default %(default)s")
    parser.add_argument("--kept", type=Path, default=RESULTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.results is not None:
        try:
            text = options.results.read_text(encoding="utf-8")
            if not {"nodes", "parts"} & set(json.loads(text)):
                fatal(f"{options.results}: got neither parts nor nodes, expected a gpu_check.json")
        except (OSError, ValueError) as error:
            fatal(f"{options.results}: {error}; expected a gpu_check.json")
        write_atomically(options.kept, text)
    report = json.loads(options.kept.read_text()) if options.kept.exists() else None
    page = options.page.read_text(encoding="utf-8")
    write_atomically(options.page, with_table(page, BEGIN, END, generated(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
