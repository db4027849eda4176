"""What a check of gold answers found, and the file by which the check of a start tells the ranks."""

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
"""File -> [problem id, what is wrong with its answer] of each; plain JSON."""
VARIABLE = "MEGATRON_DPPO_CHECKED_ANSWERS"
"""The file's path, in the environment of the processes of a run."""


@contextmanager
def checked_answers_file() -> Iterator[str]:
    """The path of a file that only this user can read, for the processes started within; removed after."""
    with tempfile.TemporaryDirectory(prefix="megatron_dppo-") as folder:
        path = os.environ[VARIABLE] = str(Path(folder) / "answers.json")
        try:
            yield path
        finally:
            del os.environ[VARIABLE]


def hand_over(path: Path, scored: Mapping[str, str], bad: BadAnswers) -> None:
    """Write ``bad`` for another process. ``scored``: what it was found of."""
    write_atomically(path, json.dumps({"scored": dict(scored), "bad": bad}))


def handed_over(scored: Mapping[str, str]) -> BadAnswers | None:
    """What the check of this start wrote of the same; None where it wrote nothing, or of something else."""
    try:
        content = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
    # A launcher started this rank, or on another machine.
    except (KeyError, OSError, ValueError):
        return None
    return content["bad"] if content["scored"] == dict(scored) else None
