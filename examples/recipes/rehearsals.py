"""Rehearse the recipes and further layouts, one at a time, and write the table of docs/rehearsal.md.

python -m examples.recipes.rehearsals [NAME ...]    # rehearse those (all); NAME is a recipe or a layout of LAYOUTS
python -m examples.recipes.rehearsals --write       # put the results that are in runs/rehearsals into the table
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.recipes.verdicts import NODES

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "rehearsal.md"
RESULTS = Path("runs") / "rehearsals"
BEGIN, END = "<!-- rehearsals -->", "<!-- end of rehearsals -->"
LAYOUTS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "TP2-PP2-EP4-DP2": (
        "qwen3_30b_a3b_r3",
        {"world_size": 8, "tensor": 2, "pipeline": 2, "expert": 4, "expert_tensor": 1},
    ),
    "PP2-VPP2-EP8": (
        "qwen3_30b_a3b_base_r3",
        {"world_size": 16, "tensor": 1, "pipeline": 2, "virtual_pipeline": 2, "expert": 8},
    ),
    "TP2-CP4-EP8": (
        "qwen3_30b_a3b_base_32k",
        {"world_size": 8, "tensor": 2, "context": 4, "expert": 8, "expert_tensor": 1},
    ),
}
"""Layouts that no recipe has: name -> a recipe and its ``parallel:`` keys."""


def words_of(name: str) -> list[str]:
    """The recipe and the overrides of a rehearsal."""
    recipe, sizes = LAYOUTS.get(name, (name, {}))
    path = HERE / f"{recipe}.yaml"
    return [str(path), *(f"parallel.{key}={value}" for key, value in sizes.items())]


def rehearse(name: str) -> int:
    """Rehearse one of them; returns the exit code."""
    module = "megatron_dppo.cluster.rehearsal"
    directory = f"--directory={RESULTS / name}"
    command = [sys.executable, "-m", module, *words_of(name), directory]
    return subprocess.run(command, check=False).returncode


def table(results: Path = RESULTS) -> str:
    """Markdown of the rehearsals whose results are there."""
    head = ["recipe", "layout", "ranks", "verdict", "CPU s", "MiB a rank: training", "at the end"]
    head += ["gap", "export, nats"]
    rows = [head, ["---"] * len(head)]
    for name in [*NODES, *LAYOUTS]:
        path = results / name / "rehearsal.json"
        if path.is_file():
            rows.append(_row(name, json.loads(path.read_text(encoding="utf-8"))))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str, result: Mapping[str, Any]) -> list[str]:
    measured = {row["label"]: row["measured"] for row in result["findings"]}
    missed = [row["label"] for row in result["findings"] if row["holds"] is False]
    recipe = LAYOUTS.get(name, (name, {}))[0]
    layout = measured.get("layout", "").partition(",")[0]
    verdict = "passed" if result["passed"] else f"failed: {', '.join(missed) or 'the run'}"
    phases = [phase["memory_mib"] for phase in result["phases"].values()]
    means = [memory["rank_mean"] for memory in phases if memory is not None]
    training = result["phases"].get("train after resume") or {}
    in_training = (training.get("memory_mib") or {}).get("rank_mean")
    return [
        f"`{recipe}`",
        layout,
        str(result["ranks"]),
        verdict,
        f"{sum(result['cpu_seconds']):.0f}",
        "" if in_training is None else f"{in_training:.0f}",
        f"{max(means):.0f}" if means else "",
        measured.get("|pi - mu| at equal weights", ""),
        measured.get("export in transformers, nats", ""),
    ]


def written(text: str, results: Path = RESULTS) -> str:
    """The page with the present table."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{table(results)}\n{END}", text)


def main() -> int:
    """Rehearse, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    if options.write:
        page = written(PAGE.read_text(encoding="utf-8"), options.results)
        PAGE.write_text(page, encoding="utf-8")
        return 0
    codes = [rehearse(name) for name in options.names or [*NODES, *LAYOUTS]]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
