"""The result of the check of gold answers, and its file: the starting process writes the file for the ranks."""

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
    """Yield the path of a file that only this user can read, and put it into the environment of new processes.

    The file is removed at the end of the context.
    """
    with tempfile.TemporaryDirectory(prefix="megatron_dppo-") as folder:
        path = str(Path(folder) / "answers.json")
        os.environ[VARIABLE] = path
        try:
            yield path
        finally:
            del os.environ[VARIABLE]


def hand_over(path: Path, scored: Mapping[str, str], bad: BadAnswers) -> None:
    """Write ``bad`` for another process. ``scored`` identifies the data and rewards that were checked."""
    write_atomically(path, json.dumps({"scored": dict(scored), "bad": bad}))


def handed_over(scored: Mapping[str, str]) -> BadAnswers | None:
    """Read the result that ``hand_over`` wrote; None if there is no result, or if its ``scored`` differs."""
    try:
        content = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
    # There is no file if another launcher, for instance torchrun, started this rank, or if the rank runs on another
    # machine.
    except (KeyError, OSError, ValueError):
        return None
    if content["scored"] == dict(scored):
        return content["bad"]
    return None
