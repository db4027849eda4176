"""Processes: start a process, ask it to end, kill it with all its descendants, describe how it ended."""

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

from megatron_dppo.system.ports import require_free_port

_PR_SET_NAME = 15
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_KILL_WAIT_S = 10.0
_TAIL_BYTES = 1 << 16
_TRACEBACK = "Traceback (most recent call last):"
_LONGEST_EXCEPTION = 300


_STARTED: set[int] = set()
"""Ids of all processes that this process has started by ``start_process``, running or not."""


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
    """Start ``command`` in a new session and process group, so that Ctrl-C does not reach it.

    Args:
        command: program and arguments. Every user can read them with ``ps``: secrets go through ``stdin``.
        environment: all environment variables of the child process.
        output: file descriptor of its standard output, or ``subprocess.PIPE``.
        errors: file descriptor of its standard error; default: the descriptor of its standard output.
        stdin: ``subprocess.PIPE`` opens an unbuffered pipe to its standard input.
        dies_with_thread: whether the kernel kills it when the *thread* that called this function ends, and so also when
            this process is killed. Call the function from a thread that lives as long as the child process.
        inherited: further descriptors that it inherits, under the same numbers.
        lifts_memory_limit: whether only the hard limit applies to its address space, not this process's soft limit.
    """
    parent = os.getpid()

    def prepare() -> None:
        if lifts_memory_limit:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        if dies_with_thread:
            die_with_parent(parent)

    needs_preparation = dies_with_thread or lifts_memory_limit
    process = subprocess.Popen(
        list(command),
        bufsize=0,
        stdin=stdin,
        stdout=output,
        stderr=errors,
        env=dict(environment),
        start_new_session=True,
        pass_fds=tuple(inherited),
        # PLW1509 warns of locks that other threads held at the fork; prepare makes only system calls.
        preexec_fn=prepare if needs_preparation else None,  # noqa: PLW1509
    )
    _STARTED.add(process.pid)
    return process


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends.

    ``parent`` is the id of that thread's process. If the process ``parent`` has ended already, this process exits at
    once.
    """
    # Make only system calls. This function runs between fork and exec: a lock that another thread held at the fork is
    # never released.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # The parent ended before prctl took effect.
        os._exit(1)


_RANK_NAME = "rank"


def name_rank(rank: int) -> None:
    """Name this process after its rank, as ``ps -o comm`` and ``top`` show it."""
    _LIBC.prctl(_PR_SET_NAME, f"{_RANK_NAME}{rank}".encode(), 0, 0, 0)


def is_rank_name(name: str) -> bool:
    """Whether ``name_rank`` gave a process this name."""
    return name.startswith(_RANK_NAME) and name.removeprefix(_RANK_NAME).isdigit()


def bound_memory(gib: int, *, is_final: bool) -> None:
    """Limit the address space of this process, and of processes that it starts later, to ``gib`` GiB.

    Foreign code that computes a number with 10^9 digits, or an endless list, then can't take the node's memory.
    ``is_final``: whether the hard limit is set too; otherwise ``start_process`` can lift the limit.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    soft_limit = gib << 30
    if hard_limit != resource.RLIM_INFINITY:
        soft_limit = min(soft_limit, hard_limit)
    if is_final:
        hard_limit = soft_limit
    resource.setrlimit(resource.RLIMIT_AS, (soft_limit, hard_limit))


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent ends, so that it can kill them.

    Raises OSError if the kernel refuses.
    """
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


class OrphanReaper:
    """Reaps ended processes that this process has adopted, so that their entries do not stay in the process table.

    Use it in a process that adopts orphans. Reaping a child takes the exit code away from the code that waits for the
    child. Therefore processes of ``start_process`` are not reaped here. Any other child is reaped only if two looks in
    a row have found the child ended: code that starts a child without ``start_process`` waits for the child, and has
    reaped it before the second look.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next_look = time.monotonic() + every_s
        self._ended_at_last_look: frozenset[int] = frozenset()

    def poll(self) -> None:
        """Call ``look`` if ``every_s`` seconds have passed since the last look."""
        if time.monotonic() >= self._next_look:
            self.look()
            self._next_look = time.monotonic() + self._every_s

    def look(self) -> None:
        """Reap the orphans that had already ended at the last look."""
        ended = _ended_orphans()
        to_reap = ended & self._ended_at_last_look
        for pid in to_reap:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended_at_last_look = ended - to_reap


def _ended_orphans() -> frozenset[int]:
    """Return the ids of the ended children that ``start_process`` did not start."""
    pids = set()
    for child in psutil.Process().children():
        if child.pid not in _STARTED and not _runs(child):
            pids.add(child.pid)
    return frozenset(pids)


def kill_descendants() -> list[int]:
    """SIGKILL and reap all descendants of this process. Return the ids of the processes that do not end in time.

    Call it at the end of a process that adopts orphans: the function takes the exit codes of all children.
    """
    deadline = time.monotonic() + _KILL_WAIT_S
    # Repeat until no process is left, because a process may fork while the descendants are listed.
    while True:
        descendants = psutil.Process().children(recursive=True)
        _kill(descendants)
        try:
            # Reap all children that have ended.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            # There is no child, so no descendant either: this process would have adopted it.
            return []
        if time.monotonic() > deadline:
            return [process.pid for process in descendants]
        time.sleep(0.02)


def continue_guarded(descriptor: int) -> None:
    """Fork, and return only in the child. This process becomes the child's guard: it adopts and reaps orphans.

    When the child ends, or the other side of ``descriptor`` is closed, the guard kills all its own descendants, and
    ends with the child's exit code or signal.
    """
    guard_pid = os.getpid()
    adopt_orphans()
    child = os.fork()
    if child != 0:
        # This call ends the process, so only the child goes on below.
        _guard(child, descriptor)
    die_with_parent(guard_pid)


@contextmanager
def guarded(command: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command`` under a guard process, and yield the guard.

    The guard ends with the command's exit code or signal. ``settings`` are arguments of ``start_process``. When the
    command, the guard or the block ends, every process that the command started is killed, even if the process has
    changed its session or parent.
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
        # The guard ends when the pipe is closed.
        os.close(own_end)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_WAIT_S)
        kill_families([process])


def _guard(child: int, descriptor: int) -> NoReturn:
    """Wait for the end of ``child`` or of the other side of ``descriptor``, kill all descendants, and end."""
    ends = select.poll()
    # With an event mask of 0, poll reports only that the other side is closed. Data in the pipe is for the child.
    ends.register(descriptor, 0)
    ends.register(os.pidfd_open(child), select.POLLIN)
    while not ends.poll(1000.0):
        _reap_all_but(child)
    ended_pid, status = os.waitpid(child, os.WNOHANG)
    kill_descendants()
    # If the other side was closed first, the child has no exit code of its own, and this process ends with 0.
    code = 0
    if ended_pid:
        code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # End by the child's signal, but leave no second core file.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def _reap_all_but(child: int) -> None:
    """Reap ended children until the next ended child is ``child``. The caller reaps ``child``, for its exit code."""
    # WNOWAIT: look at an ended child without reaping it.
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, flags)) is not None:
            if ended.si_pid == child:
                return
            os.waitpid(ended.si_pid, 0)


def child_ids() -> frozenset[int]:
    return frozenset(child.pid for child in psutil.Process().children())


def kill_children(spared: Collection[int] = ()) -> None:
    """SIGKILL and reap the children of this process except ``spared``, and all descendants of these children.

    Use it in a process that adopts orphans: then no process escapes by changing its parent or its session.
    """
    # Check first, because psutil's search is slow: it reads the table of all processes.
    while _has_children():
        victims = [child for child in psutil.Process().children() if child.pid not in spared]
        if not victims:
            return
        members: list[psutil.Process] = []
        for child in victims:
            members += [*_family(child.pid), child]
        _kill(members)
        for child in victims:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)


def kill_orphans() -> None:
    """SIGKILL and reap the processes that this process has adopted, and their descendants.

    Use it in a process that adopts orphans and starts processes by ``start_process`` only.
    """
    kill_children(_STARTED)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class ChildProcess(Protocol):
    """The methods of ``subprocess.Popen`` that this package uses."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...


def kill_families(processes: Iterable[ChildProcess]) -> None:
    """SIGKILL each of ``processes``, its process group and its descendants.

    Each process must lead a process group, as after ``start_process``. Waits for the ends of ``processes``, and at most
    ten seconds for the ends of the descendants. It is no error if a process has ended already.
    """
    roots = list(processes)
    descendants: list[psutil.Process] = []
    for root in roots:
        descendants += _family(root.pid)
    for root in roots:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(root.pid, signal.SIGKILL)
    _kill(descendants)
    for root in roots:
        root.wait()
    deadline = time.monotonic() + _KILL_WAIT_S
    while any(_runs(process) for process in descendants) and time.monotonic() < deadline:
        time.sleep(0.02)


def _family(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process; an empty list if it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _runs(process: psutil.Process) -> bool:
    """Whether the process runs. A zombie (ended, but not yet reaped by its parent) does not run."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def process_start(pid: int) -> int | None:
    """Return a process's start time in clock ticks after the boot; None if it has ended, or is a zombie."""
    try:
        # The process's name in brackets may contain spaces, so count the fields after it.
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if state in "ZX":
        return None
    # The start time is field 22 of proc(5); the first field after the name and the state is field 4.
    return int(numbers[22 - 4])


def describe_exit(code: int, exception: str | None = None) -> str:
    """Return how a process ended: ``exited with code 1``.

    ``exception``: the last exception in the process's log. Without an exception, the text explains a SIGKILL by lack of
    memory.
    """
    if code >= 0:
        ending = f"exited with code {code}"
    elif -code not in set(signal.Signals):
        ending = f"was killed by signal {-code}"
    else:
        hint = ""
        if -code == signal.SIGKILL and exception is None:
            hint = "; the kernel does that when memory runs out"
        ending = f"was killed by {signal.Signals(-code).name} (signal {-code}{hint})"
    if exception is None:
        return ending
    return f"{ending} after {exception}"


def tail(path: Path, lines: int = 40) -> str:
    """Return the last lines of a file; an empty text if it does not exist."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
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
    """Return ``text`` with its lines indented by four spaces; ``(empty)`` stands for an empty text."""
    lines = (text or "(empty)").splitlines(keepends=True)
    return "".join(f"    {line}" for line in lines)


class StartedProcess:
    """A command that was started on this machine, or the local process (ssh, srun) that runs it on another host."""

    def __init__(self, process: ChildProcess) -> None:
        self._process = process
        self.poll = process.poll

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, kill the process and its descendants after at most ``grace_s`` seconds; wait for their ends."""
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
    """Starts commands on this machine; a subclass may start them on another host.

    The kernel kills a command when the *thread* that called ``start`` ends, even if other threads continue: call
    ``start`` from the main thread.
    """

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: bytes
    ) -> StartedProcess:
        """Start ``command`` with exactly the variables in ``environment``, and return at once.

        Every user can read the command with ``ps``: secrets go through ``stdin``. Output is appended to ``log``.
        """
        return StartedProcess(start_fed(command, environment=environment, log=log, stdin=stdin))

    def require_free_port(self, address: str, port: int) -> None:
        """Raise PortTakenError if the port can't be bound. A subclass for another host can't check this."""
        require_free_port(address, port)

    def close(self) -> None:
        """End the launcher's own processes, for example fork servers."""


def start_fed(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: bytes
) -> subprocess.Popen[bytes]:
    """Start a process, write ``stdin`` to its standard input and close it. Output is appended to ``log``.

    It is no error here if the process ends before it has read its input: the caller sees its exit code.
    """
    with open(log, "ab") as file:
        process = start_process(
            command, environment=environment, output=file.fileno(), stdin=subprocess.PIPE
        )
    feed(process, stdin)
    return process


def feed(process: subprocess.Popen[bytes], content: bytes) -> None:
    """Write ``content`` to the pipe of a process's standard input, and close the pipe."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(content)


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back() -> Iterator[None]:
    """Delay ``ENDING_SIGNALS`` until the block's end. Main thread only.

    Programs that are started in the block inherit the signal mask, so these signals do not interrupt them. Ignored
    signals stay ignored (nohup).
    """
    # The mask applies to this thread only. The system may deliver a signal to another thread, for example a library's
    # thread. Therefore handlers store the signals until the end.
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
        for received_signal in received_signals:
            signal.raise_signal(received_signal)


def end_now(code: int) -> NoReturn:
    """Run the exit handlers, flush the logs and both standard streams, and end without the interpreter's shutdown.

    Leave all ``with`` blocks before this call: the ends of open blocks do not run.
    """
    # A daemon thread, for example the watcher of the collectives, may be in native code during the interpreter's
    # shutdown. When it returns to Python, it would abort the process. multiprocessing, too, ends its child processes by
    # os._exit.
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
"""Environment variable with the path of the stop file that a process watches."""
_STOP = "stop"
_STOP_LOOK_S = 1.0


def ask_to_stop(path: Path) -> None:
    """Ask the processes that watch ``path`` to stop, on any host."""
    # Write in place: NFS then shows the new content at once. After a rename, NFS may show the former file for a minute.
    path.write_text(_STOP, encoding="utf-8")


def withdraw_stop(path: Path) -> None:
    """Take back the request of ``ask_to_stop``."""
    path.write_text("", encoding="utf-8")


class StopFile:
    """The watcher of a stop file. A call reads it, at most once a second, and returns whether a stop was requested."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_requested = False
        self._next_look = 0.0

    def __call__(self) -> bool:
        current_time = time.monotonic()
        if not self._is_requested and current_time >= self._next_look:
            self._next_look = current_time + _STOP_LOOK_S
            if self._path.exists():
                self._is_requested = self._path.read_text(encoding="utf-8") == _STOP
        return self._is_requested


HEARTBEAT_VARIABLE = "MEGATRON_DPPO_HEARTBEAT"
"""Environment variable with the path of the file whose renewal a process watches (``Lease.heartbeat``)."""
PATIENCE_VARIABLE = "MEGATRON_DPPO_HEARTBEAT_PATIENCE_S"
"""Environment variable with the longest time between two renewals. After a longer time the process ends. The value is
far longer than the usual time between renewals, so that a file system that hangs for a while ends no process.
"""
_LOOK_EVERY_S = 5.0


class Heartbeat:
    """Measures how long the content of ``path`` has not changed, by this process's clock."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._last_content = self._content()
        self._changed_at = clock()

    def unchanged_s(self) -> float:
        """Read the file, and return the seconds since a reading first found the present content."""
        content = self._content()
        if content != self._last_content:
            self._last_content = content
            self._changed_at = self._clock()
        return self._clock() - self._changed_at

    def _content(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError:
            return b""


def call_when_unchanged(path: Path, act: Callable[[], None], patience_s: float) -> None:
    """Watch a file from a new thread; call ``act`` when the content of ``path`` is unchanged for ``patience_s`` s."""

    def watch() -> None:
        heartbeat = Heartbeat(path)
        while heartbeat.unchanged_s() < patience_s:
            time.sleep(_LOOK_EVERY_S)
        act()

    threading.Thread(target=watch, name="heartbeat", daemon=True).start()


def main() -> None:
    """Become the guard of ``guarded``; in its child process, become the command."""
    descriptor, *command = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    continue_guarded(int(descriptor))
    # Python ignores SIGPIPE, and the command would inherit this.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
