"""Child processes that never outlive their parent, and the words for how one ended."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_KILL_WAIT_S = 10.0
_TAIL_BYTES = 1 << 16


def start_process(
    command: Sequence[str],
    *,
    output: int,
    environment: Mapping[str, str],
    inherited: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own, stdout and stderr to the descriptor ``output``.

    ``inherited``: further descriptors that it gets, under the same numbers.

    The kernel kills it when the *thread* that called this ends, so call it from the main thread.
    """
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
        pass_fds=tuple(inherited),
        preexec_fn=functools.partial(_die_with_parent, os.getpid()),  # noqa: PLW1509  prctl only
    )


def _die_with_parent(parent: int) -> None:
    """Between fork and exec: nothing but system calls, since other threads' locks are lost here."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that it can end them.

    Raises OSError where the kernel refuses.
    """
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def kill_descendants(timeout_s: float = 10.0) -> list[int]:
    """SIGKILL everything below this process and reap it; the ids of what would not go in time.

    For a process that adopts orphans, at its own end: it takes over the exit codes of all children.
    Repeated until nothing is left, because a process may fork while it is being looked for.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        family = psutil.Process().children(recursive=True)
        _kill(family)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # none left, and orphans would have become children
            return []
        if time.monotonic() > deadline:
            return [process.pid for process in family]
        time.sleep(0.02)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL each and wait for them, at most ten seconds. Ones that are gone already are no
    error."""
    processes = list(processes)
    _kill(processes)
    psutil.wait_procs(processes, timeout=_KILL_WAIT_S)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def describe_exit(code: int) -> str:
    """A return code as ``Popen`` gives it, in words."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name
    hint = "; the kernel does that when memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by {name} (signal {-code}{hint})"


def tail(path: Path, lines: int = 40) -> str:
    """The last ``lines`` lines of a log, indented; a note where it is empty or missing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        text = ""
    rows = text.rstrip().splitlines()[-lines:] or ["(empty)"]
    return "\n".join(f"    {row}" for row in rows)
