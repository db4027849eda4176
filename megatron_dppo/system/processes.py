"""Processes: start one, ask it to end, kill it with all its descendants, describe how it ended."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import psutil

from megatron_dppo.system.network import require_free_port

_PR_SET_NAME = 15
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_KILL_WAIT_S = 10.0
_TAIL_BYTES = 1 << 16
_TRACEBACK = "Traceback (most recent call last):"
_LONGEST_EXCEPTION = 300


_STARTED: set[int] = set()
"""Ids of all processes that ``start_process`` has started here, running or not."""


def start_process(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: int,
    errors: int = subprocess.STDOUT,
    stdin: int = subprocess.DEVNULL,
    dies_with_thread: bool = True,
    inherited: Sequence[int] = (),
    lifts_memory_limit: bool = False,
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session and process group of its own, which Ctrl-C does not reach.

    Args:
        command: program and arguments. Every user can read them with ``ps``: secrets go through ``stdin``.
        environment: all of the child's variables.
        output: file descriptor of its standard output, or ``subprocess.PIPE``.
        errors: file descriptor of its standard error; by default both go to ``output``.
        stdin: ``subprocess.PIPE`` opens an unbuffered pipe to its standard input.
        dies_with_thread: whether the kernel kills it when the *thread* that called this ends, and so also when this
            process is killed. Call it from a thread that lives as long as the child.
        inherited: further descriptors that it inherits, under the same numbers.
        lifts_memory_limit: whether its address space has only the hard limit, not this process's soft one.
    """
    parent = os.getpid()

    def prepare() -> None:
        if lifts_memory_limit:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        if dies_with_thread:
            die_with_parent(parent)

    process = subprocess.Popen(
        list(command),
        bufsize=0,
        stdin=stdin,
        stdout=output,
        stderr=errors,
        env=dict(environment),
        start_new_session=True,
        pass_fds=tuple(inherited),
        # prepare makes only system calls between fork and exec.
        preexec_fn=prepare if dies_with_thread or lifts_memory_limit else None,  # noqa: PLW1509
    )
    _STARTED.add(process.pid)
    return process


def die_with_parent(parent: int) -> None:
    """Make the kernel SIGKILL this process when the thread of ``parent`` that started it ends.

    Exits at once where ``parent`` is dead already.
    """
    # Make only system calls: this runs between fork and exec, where locks that other threads held are lost.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent died before prctl took effect.
    if os.getppid() != parent:
        os._exit(1)


_RANK_NAME = "rank"


def name_rank(rank: int) -> None:
    """Name this process after its rank, as ``ps -o comm`` and ``top`` show it."""
    _LIBC.prctl(_PR_SET_NAME, f"{_RANK_NAME}{rank}".encode(), 0, 0, 0)


def is_rank_name(name: str) -> bool:
    """Whether ``name_rank`` gave a process this name."""
    return name.startswith(_RANK_NAME) and name.removeprefix(_RANK_NAME).isdigit()


def bound_memory(gib: int, *, is_final: bool) -> None:
    """Limit the address space of this process and its children to so many GiB.

    A number with 10^9 digits, or an endless list, must not take the node's memory. ``is_final``: the limit can't be
    lifted again; otherwise ``start_process`` can lift it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    memory = gib << 30
    soft = memory
    if hard != resource.RLIM_INFINITY:
        soft = min(memory, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, soft if is_final else hard))


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that it can end them.

    Raises OSError where the kernel refuses.
    """
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


class OrphanReaper:
    """Reaps ended processes that this one has adopted, so that their entries do not stay in the process table.

    For a process that adopts orphans. An orphan is reaped when two looks in a row have found it ended. The exit code of
    a process that ``start_process`` started stays with its handle, and that of one that ends within the code that
    started it is taken between two looks.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next_look = time.monotonic() + every_s
        self._ended_before: frozenset[int] = frozenset()

    def poll(self) -> None:
        """Look, if ``every_s`` seconds have passed since the last look."""
        if time.monotonic() >= self._next_look:
            self.look()
            self._next_look = time.monotonic() + self._every_s

    def look(self) -> None:
        """Reap the orphans that had ended at the last look."""
        ended = _ended_orphans()
        for pid in ended & self._ended_before:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended_before = ended - self._ended_before


def _ended_orphans() -> frozenset[int]:
    found = set()
    for child in psutil.Process().children():
        if child.pid not in _STARTED and not _runs(child):
            found.add(child.pid)
    return frozenset(found)


def kill_descendants(timeout_s: float = 10.0) -> list[int]:
    """SIGKILL every process below this one and reap it; return the ids of those that do not end in time.

    For a process that adopts orphans, at its own end: the function takes the exit codes of all children.
    """
    deadline = time.monotonic() + timeout_s
    # Repeat until no process is left: one may fork during the search.
    while True:
        family = psutil.Process().children(recursive=True)
        _kill(family)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            # No child is left, and orphans would have become children.
            return []
        if time.monotonic() > deadline:
            return [process.pid for process in family]
        time.sleep(0.02)


def continue_guarded(descriptor: int) -> None:
    """Fork: return in the child, while this process adopts and reaps orphans below it.

    When the child ends, or the other side of ``descriptor`` is closed, this process kills everything below it, and ends
    as the child did.
    """
    guarding = os.getpid()
    adopt_orphans()
    if (child := os.fork()) != 0:
        _guard(child, descriptor)
    die_with_parent(guarding)


@contextmanager
def guarded(command: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command`` under a guard process, which ends as the command does; yield the guard.

    ``settings`` are those of ``start_process``. When the command, the guard or the block ends, every process that the
    command started is killed, whatever its session or parent.
    """
    guard_end, own_end = os.pipe()
    inherited = [guard_end, *settings.pop("inherited", ())]
    try:
        guard = [sys.executable, "-m", __name__, str(guard_end), *command]
        process = start_process(guard, inherited=inherited, **settings)
    except BaseException:
        os.close(own_end)
        raise
    finally:
        os.close(guard_end)
    try:
        yield process
    finally:
        # Closing the pipe tells the guard to end.
        os.close(own_end)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_WAIT_S)
        kill_families([process])


def _guard(child: int, descriptor: int) -> NoReturn:
    ends = select.poll()
    # Without an event, poll tells only that the other side is closed; its data is for the child.
    ends.register(descriptor, 0)
    ends.register(os.pidfd_open(child), select.POLLIN)
    while not ends.poll(1000.0):
        _reap_all_but(child)
    ended, status = os.waitpid(child, os.WNOHANG)
    kill_descendants()
    code = os.waitstatus_to_exitcode(status) if ended else 0
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def _reap_all_but(child: int) -> None:
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, flags)) is not None and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)


def child_ids() -> frozenset[int]:
    return frozenset(child.pid for child in psutil.Process().children())


def kill_children(spared: Collection[int] = ()) -> None:
    """SIGKILL and reap the children of this process except ``spared``, and all their descendants.

    For a process that adopts orphans: then no process escapes by changing its parent or its session. Fast where there
    are no children.
    """
    while _has_children():
        doomed = [c for c in psutil.Process().children() if c.pid not in spared]
        if not doomed:
            return
        members: list[psutil.Process] = []
        for child in doomed:
            members += [*_family(child.pid), child]
        _kill(members)
        for child in doomed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)


def kill_orphans() -> None:
    """SIGKILL and reap the processes that this one has adopted, and their descendants.

    For a process that adopts orphans and starts its own children by ``start_process`` alone.
    """
    kill_children(_STARTED)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class ChildProcess(Protocol):
    """The part of ``subprocess.Popen`` that the start and the end of commands use."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...


def kill_families(processes: Iterable[ChildProcess]) -> None:
    """SIGKILL each process that ``start_process`` started, its process group and its descendants.

    Returns when all have ended, or after ten seconds. Processes that have ended already are no error.
    """
    roots = list(processes)
    family: list[psutil.Process] = []
    for root in roots:
        family += _family(root.pid)
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
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _runs(process: psutil.Process) -> bool:
    """Whether the process runs. A zombie, which may wait long until its parent reaps it, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def process_start(pid: int) -> int | None:
    """Return a process's start time in clock ticks after the boot; None where it has ended, or is a zombie."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(numbers[18])


def describe_exit(code: int, exception: str | None = None) -> str:
    """Describe how a process ended. ``exception``: the last one in its log, which explains a kill better than
    memory.
    """
    if code >= 0:
        ending = f"exited with code {code}"
    elif -code not in set(signal.Signals):
        ending = f"was killed by signal {-code}"
    else:
        is_unexplained = -code == signal.SIGKILL and exception is None
        hint = ""
        if is_unexplained:
            hint = "; the kernel does that when memory runs out"
        ending = f"was killed by {signal.Signals(-code).name} (signal {-code}{hint})"
    if exception is None:
        return ending
    return f"{ending} after {exception}"


def tail(path: Path, lines: int = 40) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def last_exception(log: str) -> str | None:
    """Return the type and message of the last Python exception in a log, in one line; None without one."""
    _, traceback_mark, traceback_text = log.rpartition(_TRACEBACK)
    if not traceback_mark:
        return None
    # The indented frames follow, then the exception.
    for line in traceback_text.splitlines()[1:]:
        if line.strip() and not line.startswith((" ", "\t")):
            return line.strip()[:_LONGEST_EXCEPTION]
    return None


def quote(text: str) -> str:
    """``text`` indented by four spaces, for a message; a note where it is empty."""
    return "".join(f"    {line}" for line in (text or "(empty)").splitlines(keepends=True))


class StartedProcess:
    """A command that was started on this machine, or the process that runs it elsewhere."""

    def __init__(self, process: ChildProcess) -> None:
        self._process = process
        self.poll = process.poll

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, grace_s: float) -> None:
        """Ask the process to end, kill it after ``grace_s`` seconds; returns when it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._kill_family()

    def kill(self) -> None:
        self._kill_family()

    def _kill_family(self) -> None:
        kill_families([self._process])


class Launcher:
    """Starts commands on this machine; a subclass may start them at another host.

    A command dies with the *thread* that called ``start`` (the kernel counts the thread, not the process): start it
    from the main thread.
    """

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        stdin: bytes,
    ) -> StartedProcess:
        """Start ``command`` with all of the variables in ``environment``, and return at once.

        Every user can read the command with ``ps``: secrets go through ``stdin``. Output is appended to ``log``.
        """
        return StartedProcess(start_fed(command, environment=environment, log=log, stdin=stdin))

    def require_free_port(self, address: str, port: int) -> None:
        """Raise PortTakenError where the port can't be bound, as far as this machine can tell."""
        require_free_port(address, port)

    def close(self) -> None:
        """End the processes that the launcher itself needs."""


def start_fed(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    stdin: bytes,
) -> subprocess.Popen[bytes]:
    """Start a process with all of its standard input, its output appended to ``log``.

    The exit code tells where the process dies before it has read the input.
    """
    with open(log, "ab") as file:
        process = start_process(
            command,
            environment=environment,
            output=file.fileno(),
            stdin=subprocess.PIPE,
        )
    feed(process, stdin)
    return process


def feed(process: subprocess.Popen[bytes], content: bytes) -> None:
    """Write all of a process's standard input, its pipe, and close it."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(content)


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back() -> Iterator[None]:
    """Delay ending signals until the block's end, also for the programs that it starts. Main thread only.

    Ignored signals stay ignored (nohup). Programs inherit the mask.
    """
    # The mask applies only to this thread, and another thread, of a library, may receive a signal that is meant for the
    # process. So the handlers store the signal until the end.
    received_signals: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)

    def note(number: int, _: FrameType | None) -> None:
        received_signals.append(number)

    handlers: dict[int, Any] = {}
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            handlers[number] = signal.signal(number, note)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for handled_number, handler in handlers.items():
            signal.signal(handled_number, handler)
        for noted in received_signals:
            signal.raise_signal(noted)


def end_now(code: int) -> NoReturn:
    """Run the exit handlers, flush the logs and both standard streams, and end without the interpreter's shutdown.

    ``with`` blocks must be left before.
    """
    # multiprocessing ends its children in this way: a daemon thread in native code during the interpreter's shutdown,
    # such as the watcher of the collectives, aborts the process when it returns to Python.
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # The disk is full; the logs have reported it.
            continue
    os._exit(code)


STOP_FILE_VARIABLE = "MEGATRON_DPPO_STOP_FILE"
"""Variable with the path of the stop file, in the environment of the processes that watch it."""
_STOP = "stop"
_STOP_LOOK_S = 1.0


def ask_to_stop(path: Path) -> None:
    """Ask the processes that watch ``path`` to stop, on any host."""
    # Write in place and never rename: NFS shows the new content of a known file, but may hide for a minute that another
    # file has its name.
    path.write_text(_STOP, encoding="utf-8")


def withdraw_stop(path: Path) -> None:
    path.write_text("", encoding="utf-8")


class StopFile:
    """A watched file; a call returns whether a stop was requested. It reads the file at most once a second."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked = False
        self._next_look = 0.0

    def __call__(self) -> bool:
        current_time = time.monotonic()
        if not self._asked and current_time >= self._next_look:
            self._next_look = current_time + _STOP_LOOK_S
            self._asked = self._path.exists() and self._path.read_text(encoding="utf-8") == _STOP
        return self._asked


HEARTBEAT_VARIABLE = "MEGATRON_DPPO_HEARTBEAT"
"""Variable with the path of the renewed file, in the environment of the processes that watch it."""
PATIENCE_VARIABLE = "MEGATRON_DPPO_HEARTBEAT_PATIENCE_S"
"""Longest time without a renewal: far longer than the time between two renewals, so that a file system that hangs
for a while ends no process.
"""
_LOOK_EVERY_S = 5.0


class Heartbeat:
    """Measures how long the content of ``path`` has not changed, by this process's clock."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._seen = self._content()
        self._since = clock()

    def stands_still_s(self) -> float:
        content = self._content()
        if content != self._seen:
            self._seen, self._since = content, self._clock()
        return self._clock() - self._since

    def _content(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError:
            return b""


def when_it_stops(path: Path, act: Callable[[], None], patience_s: float) -> None:
    """Watch ``path`` from a thread of its own; call ``act`` once its heartbeat has stopped."""

    def watch() -> None:
        heartbeat = Heartbeat(path)
        while heartbeat.stands_still_s() < patience_s:
            time.sleep(_LOOK_EVERY_S)
        act()

    threading.Thread(target=watch, name="heartbeat", daemon=True).start()


def main() -> None:
    """Become a guard; in its child become the command of ``guarded``."""
    descriptor, *command = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    continue_guarded(int(descriptor))
    # Python ignores SIGPIPE, and the command would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
