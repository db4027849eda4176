"""The walks of docs/overview.md have the files that a run enters now."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import trace_walk  # noqa: E402


def test_a_run_enters_the_files_of_the_walks(tmp_path: Path) -> None:
    """If this fails, ``python tools/trace_walk.py --write`` writes the walks anew."""
    entries = trace_walk.trace_run(tmp_path)
    traced = trace_walk.all_walks(entries)
    written = trace_walk.walks_on(trace_walk.PAGE.read_text(encoding="utf-8"))
    assert trace_walk.differences(traced, written, entries) == []
