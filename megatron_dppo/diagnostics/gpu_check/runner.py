"""Runs a part in a child process with a time limit: a crash or a hang of one leaves the others alone.

The child sends every row as soon as it has it, so that a crash loses none of those before it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Literal

from megatron_dppo.diagnostics.gpu_check import PARTS, Bench, CheckPart, LackingError, Row, discover
from megatron_dppo.system.processes import (
    describe_exit,
    die_with_parent,
    kill_families,
    start_connected,
    tail,
)

LOG = "log.txt"
_QUOTED_LINES = 12
PartVerdict = Literal["good", "bad", "lacking", "crashed", "timed out"]


@dataclass
class PartResult:
    """The result of one part.

    ``verdict``: ``good``, or ``bad`` where a row does not hold. ``why``: what it lacks, or how it ended with the end of
    its log. ``files``: what it left in its folder.
    """

    name: str
    shows: str
    verdict: PartVerdict = "good"
    why: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong; what is lacking is not."""
        return self.verdict in ("bad", "crashed", "timed out")


def run_part(
    part: CheckPart, folder: Path, gpus: int, limit_s: float, tell: Callable[[Row], None],
    package: str = PARTS,
) -> PartResult:  # fmt: skip
    """Run ``part`` of ``package`` in ``folder``, which must be empty, for at most ``limit_s`` seconds.

    ``tell`` hears of every row.
    """
    folder.mkdir(parents=True)
    result = PartResult(part.name, part.shows)
    start_time = time.monotonic()
    with open(folder / LOG, "wb") as log:
        child, connection = start_connected(
            "megatron_dppo.diagnostics.gpu_check.runner", package, part.name, str(folder.resolve()), str(gpus),
            environment=os.environ, output=log.fileno(),
        )  # fmt: skip
    deadline = start_time + limit_s
    try:
        with connection:
            _hear(connection, deadline, result, tell)
        code = child.wait(max(0.0, deadline - time.monotonic()))
    except TimeoutExpired:
        code = None
    finally:
        kill_families([child])
    _judge(result, code, limit_s, folder)
    result.seconds = time.monotonic() - start_time
    result.files = sorted(p.name for p in folder.iterdir() if p.name != LOG)
    return result


def _hear(
    connection: Connection, deadline: float, result: PartResult, tell: Callable[[Row], None]
) -> None:
    """Take what the child sends until it closes the connection, or until the deadline."""
    while connection.poll(max(0.0, deadline - time.monotonic())):
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        if isinstance(message, Row):
            result.rows.append(message)
            tell(message)
        else:
            result.verdict, result.why = "lacking", message


def _judge(result: PartResult, code: int | None, limit_s: float, folder: Path) -> None:
    if code is None:
        result.verdict, ending = "timed out", f"did not end within {limit_s:.0f} s"
    elif code:
        result.verdict, ending = "crashed", describe_exit(code)
    else:
        if any(row.holds is False for row in result.rows):
            result.verdict = "bad"
        return
    result.why = f"{ending}\n{tail(folder / LOG, _QUOTED_LINES)}".rstrip()


def main(descriptor: str, package: str, name: str, folder: str, gpus: str) -> None:
    """The child: run the part; the last message is what it lacks, where it turns out to lack something."""
    die_with_parent(os.getppid())
    # Or what the part starts would keep it open.
    os.set_inheritable(int(descriptor), False)
    part = next(p for p in discover(package) if p.name == name)
    with Connection(int(descriptor)) as connection:
        try:
            for row in part.run(Bench(Path(folder), int(gpus))):
                connection.send(row)
        except LackingError as lacking:
            connection.send(str(lacking))


if __name__ == "__main__":
    main(*sys.argv[1:])
