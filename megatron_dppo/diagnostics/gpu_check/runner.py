"""Run a part in a worker process with a time limit, so that its crash or hang does not affect the other parts.

The worker sends each row as soon as the part yields it, so that a crash loses no earlier row.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_dppo.diagnostics.gpu_check import (
    PARTS,
    Bench,
    CheckPart,
    CheckRow,
    LackingError,
    discover,
)
from megatron_dppo.system.processes import describe_exit, tail
from megatron_dppo.system.workers import WorkerLostError, WorkerProcess, connect

_MODULE = "megatron_dppo.diagnostics.gpu_check.runner"
LOG = "log.txt"
_QUOTED_LINES = 12
PartVerdict = Literal["good", "bad", "lacking", "crashed", "timed out"]


@dataclass
class PartResult:
    """The result of one part.

    ``verdict``: ``good``; ``bad`` if a row does not hold; ``lacking`` if the machine lacks a requirement; else how the
    worker ended. ``why``: the missing requirement, or how the worker ended and the end of its log. ``files``: names of
    the files that the part left in its folder.
    """

    name: str
    shows: str
    verdict: PartVerdict = "good"
    why: str = ""
    seconds: float = 0.0
    rows: list[CheckRow] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def is_fault(self) -> bool:
        """Whether the part failed. A skipped part did not fail."""
        return self.verdict in ("bad", "crashed", "timed out")


def run_part(
    part: CheckPart,
    folder: Path,
    gpus: int,
    limit_s: float,
    on_row: Callable[[CheckRow], None],
    package: str = PARTS,
    overrides: Sequence[str] = (),
) -> PartResult:
    """Run ``part`` of ``package`` in the new folder ``folder`` for at most ``limit_s`` seconds.

    ``folder`` must not exist. ``on_row`` is called with each row. ``overrides`` as in ``Bench``.
    """
    folder.mkdir(parents=True)
    result = PartResult(part.name, part.shows)
    start_time = time.monotonic()
    deadline = start_time + limit_s
    bench_arguments = [str(folder.resolve()), gpus, list(overrides)]
    part_arguments = json.dumps([package, part.name, *bench_arguments]).encode()
    with open(folder / LOG, "wb") as log:
        worker = WorkerProcess(_MODULE, part_arguments, environment=os.environ, output=log.fileno())
    code = None
    try:
        _receive_rows(worker, deadline, result, on_row)
        code = worker.ended.result(_remaining_s(deadline)).code
    except WorkerLostError as lost:
        code = lost.code
    except TimeoutError:
        # A code of None stands for a part that timed out.
        pass
    finally:
        worker.kill()
    _judge(result, code, limit_s, folder)
    result.seconds = time.monotonic() - start_time
    result.files = sorted(p.name for p in folder.iterdir() if p.name != LOG)
    return result


def _receive_rows(
    worker: WorkerProcess, deadline: float, result: PartResult, on_row: Callable[[CheckRow], None]
) -> None:
    """Ask the worker for its rows, one at a time. Raises TimeoutError at the deadline, and WorkerLostError."""
    while True:
        message = pickle.loads(worker.ask(b"", _remaining_s(deadline)))
        if message is None:
            return
        if isinstance(message, CheckRow):
            result.rows.append(message)
            on_row(message)
        else:
            # A text is the message of a LackingError.
            result.verdict = "lacking"
            result.why = message


def _remaining_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _judge(result: PartResult, code: int | None, limit_s: float, folder: Path) -> None:
    """Set the verdict and its reason; ``code`` is the worker's exit code, None if it did not end in time."""
    if code is None:
        result.verdict = "timed out"
        ending = f"did not end within {limit_s:.0f} s"
    elif code:
        result.verdict, ending = "crashed", describe_exit(code)
    else:
        if any(row.holds is False for row in result.rows):
            result.verdict = "bad"
        return
    result.why = f"{ending}\n{tail(folder / LOG, _QUOTED_LINES)}".rstrip()


def _messages(
    package: str, name: str, folder: str, gpus: int, overrides: Sequence[str]
) -> Iterator[CheckRow | str | None]:
    """Run the part and yield its rows, then the text of its LackingError if it raised one, then None."""
    part = next(p for p in discover(package) if p.name == name)
    try:
        yield from part.run(Bench(Path(folder), gpus, tuple(overrides)))
    except LackingError as lacking:
        yield str(lacking)
    yield None


def main() -> None:
    """Answer each call with the part's next message; return after the last one."""
    connection = connect(sys.argv[1])
    start = connection.receive()
    connection.answer(start, b"")
    for message in _messages(*json.loads(start.content)):
        connection.answer(connection.receive(), pickle.dumps(message))


if __name__ == "__main__":
    main()
