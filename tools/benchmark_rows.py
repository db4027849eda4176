"""The results of a benchmark, in the form that ``tools/scale_report.py`` reads.

    from benchmark_rows import Quantity, write_rows
    write_rows(options.json, "data plane", [Quantity("seconds after the last response", 6.1, "s", "two processes")])

A file: ``{"benchmark", "command", "machine", "rows": [{"quantity", "value", "unit", "how"}, ...]}``. The published
files are in ``docs/evidence/benchmarks/``.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "benchmarks"


@dataclass(frozen=True)
class Quantity:
    """One measured number.

    Attributes:
        quantity: name of the number for readers, for example "host memory a node, after".
        value: in ``unit``: GB, GiB, s, s/GB, tokens/s, share, ...
        how: the way of measuring, in a line: sizes, processes, and the factors of extrapolations.
    """

    quantity: str
    value: float
    unit: str
    how: str


@dataclass(frozen=True)
class Benchmark:
    """All results of one run of a benchmark, on ``machine``."""

    benchmark: str
    command: str
    machine: str
    rows: tuple[Quantity, ...]


def write_rows(path: Path, benchmark: str, rows: Sequence[Quantity]) -> None:
    """Write ``rows`` with this process's command line and machine. Missing folders are created."""
    command = " ".join(["python", *map(shlex.quote, [os.path.relpath(sys.argv[0]), *sys.argv[1:]])])
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = asdict(Benchmark(benchmark, command, machine, tuple(rows)))
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_rows(folder: Path = PUBLISHED) -> list[Benchmark]:
    """Every benchmark in ``folder``, sorted by file name. No benchmarks if ``folder`` is missing.

    Raises ValueError for a file of another form.
    """
    return [_benchmark(path) for path in sorted(folder.glob("*.json"))]


def _benchmark(path: Path) -> Benchmark:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    try:
        rows = tuple(Quantity(**row) for row in content.pop("rows"))
        return Benchmark(**content, rows=rows)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected benchmark, command, machine and rows of quantity, value, unit, how: {error}"
        ) from error
