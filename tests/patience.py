"""Waits for processes. The limits do not follow the clock alone, because a start takes far longer on a busy machine.

A second does not count if one of the processes waited in the kernel's queue for a processor
(``/proc/<pid>/task/<tid>/schedstat``). All other seconds count. So a process that hangs is found within the limit,
however busy the machine is, and a process that gets only a tenth of a core has ten times as long.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from megatron_dppo.engine.process import ChildServer

UNBOUNDED_S = 36_000.0
"""A test sets a limit of the package to this value if the limit follows the clock, and itself waits with
``Patience``."""
_LOOK_EVERY_S = 0.5


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Patience:
    """A limit of ``seconds`` for the processes whose ids ``pids`` returns. Call ``is_exhausted`` often."""

    def __init__(self, seconds: float, pids: Callable[[], Iterable[int]]) -> None:
        self._seconds, self._pids = seconds, pids
        self._spent, self._looked = 0.0, time.monotonic()
        self._queued = self._queued_by_task()

    def is_exhausted(self) -> bool:
        now = time.monotonic()
        if (passed := now - self._looked) >= _LOOK_EVERY_S:
            queued = self._queued_by_task()
            grown = [s - self._queued.get(task, 0.0) for task, s in queued.items()]
            # Take the thread that waited longest for a processor: idle threads may wait for this thread.
            self._spent += passed - min(passed, max(grown, default=0.0))
            self._queued, self._looked = queued, now
        return self._spent > self._seconds

    def _queued_by_task(self) -> dict[str, float]:
        """The seconds that each thread has waited for a processor since it began."""
        seconds = {}
        for pid in self._pids():
            # The process may end meanwhile.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                    try:
                        seconds[str(path)] = int(path.read_text().split()[1]) / 1e9
                    # The thread ended meanwhile, or this kernel does not count.
                    except (OSError, IndexError, ValueError):
                        continue
        return seconds


def own_patience(seconds: float) -> Patience:
    """Return a limit on what this process and its descendants do from now on."""
    return Patience(seconds, lambda: family_of(os.getpid()))


def happens(
    condition: Callable[[], object],
    seconds: float = 60.0,
    pids: Callable[[], Iterable[int]] | None = None,
) -> bool:
    """Return whether ``condition`` becomes true within ``seconds`` of the processes' own time.

    Args:
        condition: evaluated every 10 ms.
        seconds: limit, as in Patience.
        pids: returns the ids of the processes; None: this process and its descendants.
    """
    patience = own_patience(seconds) if pids is None else Patience(seconds, pids)
    while not condition():
        if patience.is_exhausted():
            return bool(condition())
        time.sleep(0.01)
    return True


def run_patiently(
    command: Sequence[str | Path],
    seconds: float = 300.0,
    *,
    check: bool = False,
    text_input: str | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of a command whose text output is captured, with a limit that follows its own processes.

    Args:
        command: program and arguments.
        seconds: limit, as in Patience.
        check: whether an exit code other than 0 raises CalledProcessError.
        text_input: sent to its standard input; None: nothing is connected to it.
        options: further options of ``subprocess.Popen``.

    Raises:
        subprocess.TimeoutExpired: the limit is used up; the command's processes are killed.
    """
    stdin = subprocess.DEVNULL if text_input is None else subprocess.PIPE
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=stdin, stdout=pipe, stderr=pipe, text=True, **options
    ) as process:
        patience = Patience(seconds, lambda: family_of(process.pid))
        while True:
            try:
                output, errors = process.communicate(text_input, timeout=_LOOK_EVERY_S)
            except subprocess.TimeoutExpired as error:
                # The input of the first call is kept.
                text_input = None
                if not patience.is_exhausted():
                    continue
                for pid in reversed(family_of(process.pid)):
                    psutil.Process(pid).kill()
                raise subprocess.TimeoutExpired(
                    command, seconds, error.output, error.stderr
                ) from None
            done = subprocess.CompletedProcess(command, process.returncode, output, errors)
            if check:
                done.check_returncode()
            return done


def family_of(pid: int) -> list[int]:
    """The ids of the process and of all its running descendants; empty if the process has ended."""
    try:
        root = psutil.Process(pid)
        return [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def wait_healthy(server: ChildServer, seconds: float = 300.0) -> None:
    """``server.wait_healthy`` with a limit that follows the server's own processes."""
    patience = Patience(seconds, lambda: family_of(server.pid))

    def look(waited_s: float, stage: str) -> None:
        if patience.is_exhausted():
            log = server.log_tail()
            server.kill()
            raise AssertionError(f"not healthy in {seconds:g} s of its own, {stage}:\n{log}")

    server.wait_healthy(look)
