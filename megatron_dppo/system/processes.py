"""Child processes: start one, end it with all its descendants, say how it ended, quote its log."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    environment: Mapping[str, str],
    output: int,
    errors: int = subprocess.STDOUT,
    stdin: int = subprocess.DEVNULL,
    dies_with_thread: bool = True,
    inherited: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session and process group of its own, which Ctrl-C does not reach.

    Args:
        command: program and arguments. Everybody can read them with ``ps``: secrets go through
            ``stdin``.
        environment: all of the child's variables.
        output: file descriptor for its standard output, or ``subprocess.PIPE``.
        errors: the same for its standard error; by default both go to ``output``.
        stdin: ``subprocess.PIPE`` opens an unbuffered pipe to its standard input.
        dies_with_thread: the kernel kills it when the *thread* that called this ends, and so also
            when this process is killed. Call it from a thread that lives as long as the child.
        inherited: further descriptors that it gets, under the same numbers.
    """
    end_with = functools.partial(die_with_parent, os.getpid()) if dies_with_thread else None
    return subprocess.Popen(
        list(command),
        bufsize=0,
        stdin=stdin,
        stdout=output,
        stderr=errors,
        env=dict(environment),
        start_new_session=True,
        pass_fds=tuple(inherited),
        preexec_fn=end_with,  # noqa: PLW1509  between fork and exec it makes system calls only
    )


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when the thread of ``parent`` that started it ends.

    Exits at once where ``parent`` is dead already. Makes system calls only, so that it may run
    between fork and exec, where locks that other threads held are lost.
    """
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


def child_ids() -> frozenset[int]:
    """Process ids of this process's children."""
    return frozenset(child.pid for child in psutil.Process().children())


def kill_children(spared: Collection[int] = ()) -> None:
    """SIGKILL and reap the children of this process but ``spared``, and what is below them.

    For a process that adopts orphans: then nothing escapes by changing its parent or its session.
    Quick where there are no children.
    """
    while _has_children():
        doomed = [c for c in psutil.Process().children() if c.pid not in spared]
        if not doomed:
            return
        _kill([member for child in doomed for member in (*_family(child.pid), child)])
        for child in doomed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def kill_families(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """SIGKILL each process that ``start_process`` gave, its process group and its descendants.

    Returns when all are gone, or after ten seconds. Processes that have ended are no error.
    """
    roots = list(processes)
    family = [member for root in roots for member in _family(root.pid)]
    for root in roots:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(root.pid, signal.SIGKILL)
    _kill(family)
    for root in roots:
        root.wait()
    deadline = time.monotonic() + _KILL_WAIT_S
    while any(_runs(member) for member in family) and time.monotonic() < deadline:
        time.sleep(0.02)


def _family(pid: int) -> list[psutil.Process]:
    """Descendants of a process; empty where it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _runs(process: psutil.Process) -> bool:
    """False for a zombie too, which may wait long until its parent reaps it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def describe_exit(code: int) -> str:
    """A return code as ``Popen`` gives it, in words."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name
    hint = "; the kernel does that when memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by {name} (signal {-code}{hint})"


def tail(path: Path, lines: int = 40) -> str:
    """The last ``lines`` lines of a log file; empty where it is empty or missing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def quote(text: str) -> str:
    """``text`` indented by four spaces, for a message; a note where it is empty."""
    return textwrap.indent(text or "(empty)", "    ", lambda line: True)
