"""The result of a check of gold answers, and the file that hands it from the process that starts a run to the ranks."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_dppo.system.files import write_atomically

BadAnswers = dict[str, list[list[Any]]]
"""File -> [problem id, the error in its answer] of each bad answer; plain JSON."""
VARIABLE = "MEGATRON_DPPO_CHECKED_ANSWERS"
"""The file's path, in the environment of the processes of a run."""


@contextmanager
def checked_answers_file() -> Iterator[str]:
    """Create the path of a file that only this user can read, for processes that start in this context. The file is
    removed at the end."""
    with tempfile.TemporaryDirectory(prefix="megatron_dppo-") as folder:
        path = os.environ[VARIABLE] = str(Path(folder) / "answers.json")
        try:
            yield path
        finally:
            del os.environ[VARIABLE]


def hand_over(path: Path, scored: Mapping[str, str], bad: BadAnswers) -> None:
    """Write ``bad`` for another process. ``scored`` identifies the data and rewards that were checked."""
    write_atomically(path, json.dumps({"scored": dict(scored), "bad": bad}))


def handed_over(scored: Mapping[str, str]) -> BadAnswers | None:
    """Read the result that this start wrote for the same ``scored``; None without one."""
    try:
        content = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
    # There is no file if another launcher started this rank, or on another machine.
    except (KeyError, OSError, ValueError):
        return None
    if content["scored"] == dict(scored):
        return content["bad"]
    return None
