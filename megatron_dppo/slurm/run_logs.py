"""The logs of a run: which there are, and the lines in them that matter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dppo.launch.placement import LaunchError
from megatron_dppo.system.processes import tail

_LOOK_BACK = 400
_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \[\w+\] (\w+) ")
_MATTERS = {"WARNING", "ERROR", "CRITICAL"}
_FOR_AUTHORS = re.compile(r" py\.warnings: .*(Deprecation|Future)Warning")
_TOLD = ("supervisor.log", "rank0.log")


def log_lines(directory: Path, name: str | None, count: int) -> list[str]:
    """The last lines of a log.

    Args:
        directory: of the run.
        name: such as ``rank3`` or ``engine0``: the newest file whose name begins so; None: those of
            supervisor and rank 0, by their times.
        count: how many.

    Raises:
        LaunchError: there is no such log; it names those that there are.
    """
    folder = directory / "logs"
    if name is None:
        return merged([folder / file for file in _TOLD], count)
    named = re.compile(rf"{re.escape(name)}(?!\d)")  # rank1 is not rank12
    paths = (path for path in folder.glob("*") if named.match(path.name))
    found = sorted(paths, key=lambda path: path.stat().st_mtime)
    if not found:
        known = ", ".join(sorted(path.name for path in folder.glob("*"))) or "none"
        raise LaunchError(f"{folder}: no log begins with {name!r}; there are: {known}")
    return [f"# {found[-1]}", *tail(found[-1], count).splitlines()]


def important_lines(directory: Path, count: int) -> list[str]:
    """The last warnings and errors of supervisor and rank 0, each with its further lines left out; without
    what Python tells the authors of libraries."""
    lines = merged([directory / "logs" / file for file in _TOLD], _LOOK_BACK)
    return [line for line in lines if _matters(line)][-count:]


def _matters(line: str) -> bool:
    match = _LINE.match(line)
    return match is not None and match[1] in _MATTERS and not _FOR_AUTHORS.search(line)


def merged(paths: Sequence[Path], count: int) -> list[str]:
    """The last ``count`` lines of several logs together, records in the order of their times."""
    records = [record for path in paths for record in _records(path)]
    lines = [line for record in sorted(records, key=lambda record: record[0]) for line in record]
    return lines[-count:]


def _records(path: Path) -> Iterator[list[str]]:
    """Records of a log, each with the lines that belong to it."""
    record: list[str] = []
    for line in tail(path, _LOOK_BACK).splitlines():
        if _LINE.match(line) and record:
            yield record
            record = []
        record.append(line)
    if record:
        yield record
