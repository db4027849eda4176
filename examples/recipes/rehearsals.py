"""Rehearse the recipes and further layouts, one at a time, and write docs/evidence/rehearsals.csv.

python -m examples.recipes.rehearsals [NAME ...]    # rehearse these recipes or layouts of FURTHER (default: all)
python -m examples.recipes.rehearsals --missing     # rehearse all recipes and layouts that have no result yet
python -m examples.recipes.rehearsals --write       # put the results in runs/rehearsals into the table; rows
                                                    # without a result do not change
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.recipes.verdicts import NODES
from megatron_dppo.cluster.rehearsal import RESULT
from megatron_dppo.cluster.rehearsal.verdict import features
from megatron_dppo.config import TrainConfig, load_config
from megatron_dppo.model.layout import Layout

HERE = Path(__file__).resolve().parent
TABLE = HERE.parents[1] / "docs" / "evidence" / "rehearsals.csv"
RESULTS = Path("runs") / "rehearsals"
FURTHER: Mapping[str, tuple[str, Sequence[str]]] = {
    "TP2-PP2-EP4-DP2": (
        "qwen3_30b_a3b_r3",
        ["parallel={world_size: 8, tensor: 2, pipeline: 2, expert: 4, expert_tensor: 1}"],
    ),
    "PP2-VPP2-EP8-topk": (
        "qwen3_30b_a3b_base_r3",
        [
            "parallel={world_size: 16, pipeline: 2, virtual_pipeline: 2, expert: 8}",
            "algorithm={name: dppo-topk-tv}",
        ],
    ),
    "TP2-CP4-EP8": (
        "qwen3_30b_a3b_base_32k",
        ["parallel={world_size: 8, tensor: 2, context: 4, expert: 8, expert_tensor: 1}"],
    ),
    "colocated": (
        "qwen3_30b_a3b_r3",
        [
            "parallel={world_size: 4, tensor: 2, expert: 4, expert_tensor: 1}",
            "engine.placement=colocated",
            "weight_sync.strategy=tensor",
        ],
    ),
}
"""Layouts and options that no recipe has: name -> a recipe, and overrides of its values."""
NAMES = (*NODES, *FURTHER)
HEAD = ["recipe", "layout", "ranks", "verdict", "gap", "export, nats"]


def words_of(name: str) -> list[str]:
    """Return the recipe's path and the overrides of a rehearsal."""
    recipe, overrides = FURTHER.get(name, (name, ()))
    return [str(HERE / f"{recipe}.yaml"), *overrides]


def rehearse(name: str, results: Path = RESULTS) -> int:
    """Rehearse one recipe or layout; return the exit code."""
    module = "megatron_dppo.cluster.rehearsal"
    directory = f"--directory={results / name}"
    command = [sys.executable, "-m", module, *words_of(name), directory]
    return subprocess.run(command, check=False).returncode


def result_of(name: str, results: Path = RESULTS) -> dict[str, Any] | None:
    """Return the result of a rehearsal; None if there is no result."""
    path = results / name / RESULT
    if not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def table(results: Path = RESULTS, stored: str = "") -> str:
    """Return all rehearsals as a CSV file.

    A rehearsal without a result in ``results`` keeps its row of ``stored``, such a file. If ``stored`` has no row of
    the rehearsal, the row says "not run".
    """
    stored_rows = {(row[0], row[1]): row for row in csv.reader(io.StringIO(stored))}
    rows = [HEAD]
    for name in NAMES:
        result = result_of(name, results)
        recipe, _ = FURTHER.get(name, (name, ()))
        key = recipe, _layout(name)
        not_run = [*key, str(_config(name).parallel.world_size), "not run", "", ""]
        row = stored_rows.get(key, not_run)
        if result is not None:
            row = [*key, str(result["ranks"]), *_cells(result)]
        rows.append(row)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _config(name: str) -> TrainConfig:
    path, *overrides = words_of(name)
    return load_config(path, overrides)


def _layout(name: str) -> str:
    """Return a recipe's layout, and the features that decide which code runs, without the most common features."""
    config = _config(name)
    sizes = Layout.of(config.parallel.sizes).describe().partition(",")[0]
    common = {"algorithm dppo-binary-tv", "reward math_verify"}
    distinct_features = [feature for feature in features(config) if feature not in common]
    return ", ".join([sizes, *distinct_features])


def _cells(result: Mapping[str, Any]) -> list[str]:
    """Return the row's cells after the number of ranks."""
    measured = {row["label"]: row["measured"] for row in result["findings"]}
    verdict = "passed"
    if not result["passed"]:
        missed = [row["label"] for row in result["findings"] if row["holds"] is False]
        verdict = f"failed: {', '.join(missed) or 'the run'}"
    return [
        verdict,
        measured.get("|pi - mu| at equal weights", ""),
        measured.get("export in transformers, nats", ""),
    ]


def main() -> int:
    """Rehearse, or write the table; return the largest exit code of the rehearsals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--missing", action="store_true", help="leave out rehearsals with a result")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    if options.write:
        stored = TABLE.read_text(encoding="utf-8")
        TABLE.write_text(table(options.results, stored), encoding="utf-8")
        return 0
    names = options.names or NAMES
    if options.missing:
        names = [name for name in names if result_of(name, options.results) is None]
    return max((rehearse(name, options.results) for name in names), default=0)


if __name__ == "__main__":
    sys.exit(main())
