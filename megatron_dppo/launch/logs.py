"""Print the end of a run's logs."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dppo.launch.placement import LaunchError
from megatron_dppo.launch.run_state import require_run
from megatron_dppo.logging import LOGS_FOLDER, fatal
from megatron_dppo.system.arguments import positive_count
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.processes import tail

_LINES_READ = 400
"""Number of lines that are read from the end of each of several logs, at least."""
_RECORD_START = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) \[\w+\] (\w+) ")
"""Start of a log record's first line: time, process, and the level as group 2."""
_IMPORTANT_LEVELS = {"WARNING", "ERROR", "CRITICAL"}
_WARNING_FOR_AUTHORS = re.compile(r" py\.warnings: .*(Deprecation|Future)Warning")
_MAIN_LOGS = ("supervisor.log", "rank0.log")


def log_lines(directory: Path, name: str | None, count: int) -> list[str]:
    """Return the last ``count`` lines of the newest log whose name begins with ``name``, such as ``rank3``.

    ``name`` None: the logs of supervisor and rank 0, merged by time. If no log begins with ``name``, raises LaunchError
    with the names of the existing logs.
    """
    folder = directory / LOGS_FOLDER
    if name is None:
        return merged([folder / file for file in _MAIN_LOGS], count)
    # No digit may follow: the name rank1 does not stand for rank12.
    name_pattern = re.compile(rf"{re.escape(name)}(?!\d)")
    paths = (path for path in folder.glob("*") if name_pattern.match(path.name))
    logs = sorted(paths, key=lambda path: path.stat().st_mtime)
    if not logs:
        names = ", ".join(sorted(path.name for path in folder.glob("*"))) or "none"
        raise LaunchError(f"{folder}: no log begins with {name!r}; there are: {names}")
    return [f"# {logs[-1]}", *tail(logs[-1], count).splitlines()]


def important_lines(directory: Path, count: int) -> list[str]:
    """Return the first lines of the last ``count`` warnings and errors of supervisor and rank 0.

    Python's warnings for authors of libraries are left out.
    """
    lines = merged([directory / LOGS_FOLDER / file for file in _MAIN_LOGS], _LINES_READ)
    return [line for line in lines if _is_important(line)][-count:]


def _is_important(line: str) -> bool:
    match = _RECORD_START.match(line)
    if match is None or match[2] not in _IMPORTANT_LEVELS:
        return False
    return _WARNING_FOR_AUTHORS.search(line) is None


def merged(paths: Sequence[Path], count: int) -> list[str]:
    """Return the last ``count`` lines of several logs, their records in the order of time."""
    records: list[list[str]] = []
    for path in paths:
        records += _records(path, max(count, _LINES_READ))
    lines: list[str] = []
    for record in sorted(records, key=_time_of):
        lines += record
    return lines[-count:]


def _time_of(record: Sequence[str]) -> str:
    """Return the time of a record; "" if the record's first line, which has the time, was not read."""
    start = _RECORD_START.match(record[0])
    return start[1] if start else ""


def _records(path: Path, count: int) -> Iterator[list[str]]:
    """Yield the lines of each record in the last ``count`` lines of a log, with the lines that continue it."""
    record: list[str] = []
    for line in tail(path, count).splitlines():
        if _RECORD_START.match(line) and record:
            yield record
            record = []
        record.append(line)
    if record:
        yield record


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the lines; exit with status 2 and a message if the run or the log does not exist."""
    parser = argparse.ArgumentParser(prog="megatron-dppo logs", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the run's folder (run.directory)")
    parser.add_argument(
        "name",
        nargs="?",
        help="such as rank3, engine0, router, slurm; by default supervisor and rank 0",
    )
    parser.add_argument("--lines", type=positive_count, default=40, help="how many (default: 40)")
    options = parser.parse_args(arguments)
    try:
        print("\n".join(log_lines(require_run(options.run), options.name, options.lines)))
    except RunError as error:
        fatal(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
