"""Processes: start one, ask it to end, end it with all its descendants, say how it ended."""

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
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

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
        command: program and arguments. Everybody can read them with ``ps``: secrets go through ``stdin``.
        environment: all of the child's variables.
        output: file descriptor for its standard output, or ``subprocess.PIPE``.
        errors: the same for its standard error; by default both go to ``output``.
        stdin: ``subprocess.PIPE`` opens an unbuffered pipe to its standard input.
        dies_with_thread: the kernel kills it when the *thread* that called this ends, and so also when this process is
            killed. Call it from a thread that lives as long as the child.
        inherited: further descriptors that it gets, under the same numbers.
        lifts_memory_limit: its address space has the hard limit alone, not this process's soft one.
    """
    parent = os.getpid()

    def prepare() -> None:
        if lifts_memory_limit:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        if dies_with_thread:
            die_with_parent(parent)

    return subprocess.Popen(
        list(command),
        bufsize=0,
        stdin=stdin,
        stdout=output,
        stderr=errors,
        env=dict(environment),
        start_new_session=True,
        pass_fds=tuple(inherited),
        # Between fork and exec it makes system calls only.
        preexec_fn=prepare if dies_with_thread or lifts_memory_limit else None,  # noqa: PLW1509
    )


def start_connected(
    module: str, *arguments: str, environment: Mapping[str, str], output: int
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start ``python -m module DESCRIPTOR arguments``; the connection's other end is what DESCRIPTOR names.

    ``recv`` raises EOFError at either end when the other process is gone. ``output``: file descriptor for all that
    the child prints.
    """
    ours, theirs = Pipe()
    with theirs:
        process = start_process(
            [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            environment=environment,
            output=output,
            # It ends with its connection: the thread that starts it may end long before.
            dies_with_thread=False,
            inherited=[theirs.fileno()],
        )
    return process, ours


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when the thread of ``parent`` that started it ends.

    Exits at once where ``parent`` is dead already.
    """
    # System calls only: it runs between fork and exec, where locks that other threads held are lost.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It died before prctl took effect.
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
    """Give this process, and what it starts, so much address space: a number with 10^9 digits, or an endless list,
    must not take the node's memory. ``is_final``: nobody can lift it again (``start_process`` can otherwise)."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    memory = gib << 30
    soft = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, soft if is_final else hard))


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that it can end them.

    Raises OSError where the kernel refuses.
    """
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def kill_descendants(timeout_s: float = 10.0) -> list[int]:
    """SIGKILL everything below this process and reap it; the ids of what would not go in time.

    For a process that adopts orphans, at its own end: it takes over the exit codes of all children.
    """
    deadline = time.monotonic() + timeout_s
    # Again and again until nothing is left: a process may fork while it is being looked for.
    while True:
        family = psutil.Process().children(recursive=True)
        _kill(family)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            # None left, and orphans would have become children.
            return []
        if time.monotonic() > deadline:
            return [process.pid for process in family]
        time.sleep(0.02)


def continue_guarded(descriptor: int) -> None:
    """Return in a child of this process, which itself adopts and reaps what is orphaned below. When the child ends, or
    nobody is left at the other side of ``descriptor``, it ends everything below, and itself as the child did."""
    guarding = os.getpid()
    adopt_orphans()
    if (child := os.fork()) != 0:
        _guard(child, descriptor)
    die_with_parent(guarding)


@contextmanager
def guarded(command: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """``command`` as ``start_process`` starts it with ``settings``, in a child of the process that is given, its guard,
    which ends as it does. With either of them, or with the block, all that the command started is gone, whatever
    session or parent it took."""
    theirs, ours = os.pipe()
    inherited = [theirs, *settings.pop("inherited", ())]
    try:
        guard = [sys.executable, "-m", __name__, str(theirs), *command]
        process = start_process(guard, inherited=inherited, **settings)
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    try:
        yield process
    finally:
        # The guard learns that nobody is left.
        os.close(ours)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_WAIT_S)
        kill_families([process])


def connect_guarded(descriptor: int) -> Connection:
    """The connection of ``start_connected`` in the process that it started, which goes on as ``continue_guarded`` says.
    Nothing that this one starts or forks has it."""
    connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    continue_guarded(descriptor)
    # Not by its number, under which a child may open something else before it forks, too.
    os.register_at_fork(after_in_child=connection.close)
    return connection


def _guard(child: int, descriptor: int) -> NoReturn:
    ends = select.poll()
    # Without an event this tells only that the other side is closed; what it sends is the child's to read.
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


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks after the boot; None where it has ended, or is a zombie."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(numbers[18])


def describe_exit(code: int, exception: str | None = None) -> str:
    """How a process ended, in words. ``exception``: the last one in its log; then that is why, and not memory."""
    if code >= 0:
        ending = f"exited with code {code}"
    elif -code not in set(signal.Signals):
        ending = f"was killed by signal {-code}"
    else:
        is_unexplained = -code == signal.SIGKILL and exception is None
        hint = "; the kernel does that when memory runs out" if is_unexplained else ""
        ending = f"was killed by {signal.Signals(-code).name} (signal {-code}{hint})"
    return ending if exception is None else f"{ending} after {exception}"


def tail(path: Path, lines: int = 40) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def last_exception(log: str) -> str | None:
    """The type and message of the last Python exception in a log, in one line; None where it has none."""
    _, found, rest = log.rpartition(_TRACEBACK)
    if not found:
        return None
    # Below it stand the frames, indented, and then the exception.
    for line in rest.splitlines()[1:]:
        if line.strip() and not line.startswith((" ", "\t")):
            return line.strip()[:_LONGEST_EXCEPTION]
    return None


def quote(text: str) -> str:
    """``text`` indented by four spaces, for a message; a note where it is empty."""
    return textwrap.indent(text or "(empty)", "    ", lambda line: True)


# --- a command at a host


class StartedProcess:
    """A command that was started on this machine, or what runs it elsewhere."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.poll = process.poll

    def stop(self, grace_s: float) -> None:
        """Ask it to end, by force after ``grace_s`` seconds; returns when it is gone."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        kill_families([self._process])

    def kill(self) -> None:
        kill_families([self._process])


class Launcher:
    """Starts commands on this machine; a subclass may start them at another host.

    A command dies with the *thread* that called ``start`` (the kernel counts the thread, not the
    process): start it from the main thread.
    """

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: bytes
    ) -> StartedProcess:
        """Start ``command`` with all of the variables in ``environment``, and return at once.

        Everybody can read the command with ``ps``: secrets go through ``stdin``. Output is appended to ``log``.
        """
        return StartedProcess(start_fed(command, environment=environment, log=log, stdin=stdin))

    def require_free_port(self, address: str, port: int) -> None:
        """Raise PortTakenError where the port can't be bound, as far as that can be told from here."""
        require_free_port(address, port)


def start_fed(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: bytes
) -> subprocess.Popen[bytes]:
    """``start_process`` with all of its standard input, its output appended to ``log``.

    Where it dies before it has read that, its exit code tells.
    """
    with open(log, "ab") as file:
        process = start_process(
            command, environment=environment, output=file.fileno(), stdin=subprocess.PIPE
        )
    feed(process, stdin)
    return process


def feed(process: subprocess.Popen[bytes], content: bytes) -> None:
    """Write all of a process's standard input, its pipe, and close it."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(content)


# --- what asks a process to end: signals, a file, a heartbeat that stops

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back() -> Iterator[None]:
    """Have those signals wait until the block's end, also for the programs that it starts; what is ignored stays
    ignored (nohup). Main thread only.

    Programs inherit the mask.
    """
    # The mask holds for this thread alone, and another one, of a library, may take a signal that is meant for
    # the process: so the handlers only note it until the end.
    came: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    handlers = {
        number: signal.signal(number, lambda n, _: came.append(n))
        for number in ENDING_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for noted in came:
            signal.raise_signal(noted)


def end_now(code: int) -> NoReturn:
    """Run the exit handlers, flush the logs and both standard streams, and end without the interpreter's shutdown.

    Whatever a ``with`` block must close is closed before.
    """
    # As multiprocessing ends its children: a daemon thread that is in native code while the interpreter shuts
    # down, such as what watches the collectives, aborts the process when it comes back to Python.
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # A full disk; the logs have said so.
            continue
    os._exit(code)


STOP_FILE_VARIABLE = "MEGATRON_DPPO_STOP_FILE"
"""Names the file in the environment of those that are asked."""
_STOP = "stop"
_STOP_LOOK_S = 1.0


def ask_to_stop(path: Path) -> None:
    """Ask whoever watches ``path``, on whatever host."""
    # In place, never renamed: NFS shows the new content of a file that it knows, but may hide for a
    # minute that another file has got its name.
    path.write_text(_STOP, encoding="utf-8")


def withdraw_stop(path: Path) -> None:
    path.write_text("", encoding="utf-8")


class StopFile:
    """Watches a file; call it to learn whether a stop was asked for. Looks once a second at most."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked = False
        self._next_look = 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if not self._asked and now >= self._next_look:
            self._next_look = now + _STOP_LOOK_S
            self._asked = self._path.exists() and self._path.read_text(encoding="utf-8") == _STOP
        return self._asked


HEARTBEAT_VARIABLE = "MEGATRON_DPPO_HEARTBEAT"
"""Names the file that is renewed, in the environment of those that watch it."""
PATIENCE_VARIABLE = "MEGATRON_DPPO_HEARTBEAT_PATIENCE_S"
"""For how many seconds it may stand still: far longer than the time between two renewals, so that a file
system that hangs for a while ends nothing."""
_LOOK_EVERY_S = 5.0


class Heartbeat:
    """Tells how long the content of ``path`` has not changed, by this process's clock."""

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
    """Watch ``path`` from a thread of its own; ``act`` once its heartbeat has stopped."""

    def watch() -> None:
        heartbeat = Heartbeat(path)
        while heartbeat.stands_still_s() < patience_s:
            time.sleep(_LOOK_EVERY_S)
        act()

    threading.Thread(target=watch, name="heartbeat", daemon=True).start()


def main() -> None:
    """Become a guard, and in its child the command that ``guarded`` names."""
    descriptor, *command = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    continue_guarded(int(descriptor))
    # Python ignores it, and a command would go on doing so.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
