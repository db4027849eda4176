"""The logs of a run: which there are, and the lines in them that matter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dppo.launch.errors import LaunchError
from megatron_dppo.system.processes import tail

_LOOK_BACK = 400
_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \[\w+\] (\w+) ")
_MATTERS = {"WARNING", "ERROR", "CRITICAL"}
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
    found = sorted(folder.glob(f"{name}*"), key=lambda path: path.stat().st_mtime)
    if not found:
        known = ", ".join(sorted(path.name for path in folder.glob("*"))) or "none"
        raise LaunchError(f"{folder}: no log begins with {name!r}; there are: {known}")
    return [f"# {found[-1]}", *tail(found[-1], count).splitlines()]


def important_lines(directory: Path, count: int) -> list[str]:
    """The last warnings and errors of supervisor and rank 0, each with its further lines left out."""
    lines = merged([directory / "logs" / file for file in _TOLD], _LOOK_BACK)
    found = [line for line in lines if (match := _LINE.match(line)) and match[1] in _MATTERS]
    return found[-count:]


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
