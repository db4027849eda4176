"""Processes that one process forks after it has imported their libraries.

    python -m megatron_dppo.system.fork_server LIBRARY...

The imports of torch, Megatron-Core or SGLang take seconds and hundreds of MiB. Forked processes share their pages, and
start in milliseconds. The fork server computes nothing and starts no thread: a thread of a library would be missing in
the processes.

The fork server imports the modules LIBRARY, then receives requests over a socket, one a packet: to fork a process that
runs a module as ``python -m`` does, with the descriptors in the packet, or to send a process a signal. It reports the
end of the imports, and the id and the exit code of each process. When the socket is closed the fork server ends, and
the kernel ends its processes with it.

A fork server may itself be a fork of another one with the same libraries, which outlives it (``SharedForkServers``).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil
import setproctitle

from megatron_dppo.system.processes import (
    ChildProcess,
    Launcher,
    StartedProcess,
    die_with_parent,
    feed,
    kill_families,
    process_start,
    start_process,
)
from megatron_dppo.system.secret_variables import (
    hide_secrets,
    split_environment,
    without_secrets,
)

MODULE = "megatron_dppo.system.fork_server"
_PACKET_BYTES = 1 << 17
_LONGEST_REQUEST = _PACKET_BYTES - (1 << 10)
_MOST_DESCRIPTORS = 8
_NUMBER_BITS = 24
_POLL_S = 0.02
_KILLED = -signal.SIGKILL
_RUN_PREFIX = "MEGATRON_DPPO_"
_CONTROL_VARIABLE = "MEGATRON_DPPO_FORK_CONTROL"
"""Variable with the descriptor of the socket on which a fork server receives its requests."""
_MODULE_PATH = "PYTHONPATH"
_SHARED_VARIABLE = "MEGATRON_DPPO_FORK_SERVERS"
"""Variable with the fork servers that a process inherits, as JSON."""


@dataclass(frozen=True)
class ForkRequest:
    """A process that the fork server shall start.

    Attributes:
        module: module whose ``main`` the process calls, with ``arguments`` in ``sys.argv``.
        arguments: words of its command line.
        variables: its environment variables in addition to the fork server's.
        descriptors: variables whose values are the numbers of the descriptors that come after its standard input and
            output, in this order.
        title: its command line in the output of ``ps``; empty: that of the fork server.
        replaces_variables: whether ``variables`` are all of its environment.
        has_errors: whether a descriptor of its standard error comes after that of its output.
    """

    module: str
    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    descriptors: Sequence[str] = ()
    title: str = ""
    replaces_variables: bool = False
    has_errors: bool = False


class ForkedProcess:
    """A process that a fork server starts; it has the methods of ``subprocess.Popen`` that the package uses."""

    def __init__(self, server: _Forks, number: int) -> None:
        self._server = server
        self._number = number

    @property
    def pid(self) -> int:
        """The process's id; that of the fork server while it imports its libraries."""
        pid = self._server.pid_of(self._number)
        return self._server.process.pid if pid is None else pid

    @property
    def is_forked(self) -> bool:
        return self._server.pid_of(self._number) is not None

    def poll(self) -> int | None:
        return self._server.code_of(self._number)

    def reported_code(self) -> int | None:
        """Return the exit code; None also where the process ended with the fork server."""
        return self._server.reported_code(self._number)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def terminate(self) -> None:
        self._server.send_signal(self._number, signal.SIGTERM)

    def cancel(self) -> bool:
        """Cancel the start of a process that is not yet forked; return whether that is so."""
        while self._server.pid_of(self._number) is None and self.poll() is None:
            if self._server.cancel(self._number):
                return True
            # The fork server has imported its libraries, so it forks at once.
            time.sleep(_POLL_S)
        return self._server.pid_of(self._number) is None


class _Pollable(Protocol):
    """A process that may have ended."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...


class _Forks:
    """The client's side of a fork server: its requests and its reports.

    Args:
        control: the socket to the fork server.
        process: the fork server.
        first_number: number of the first request.
    """

    def __init__(self, control: socket.socket, process: _Pollable, first_number: int) -> None:
        self.process = process
        self._control = control
        self._lock = threading.RLock()
        self._requested = first_number
        self._is_ready = False
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def fork(self, request: ForkRequest, descriptors: Sequence[int]) -> ForkedProcess:
        """Start a process, and return at once.

        ``descriptors``: its standard input, its output, and those that ``request.descriptors`` names.
        """
        with self._lock:
            number = self._requested
            self._requested += 1
            self._send({"number": number, "fork": asdict(request)}, descriptors)
        return ForkedProcess(self, number)

    def pid_of(self, number: int) -> int | None:
        """Return the id of a process; None while it is not forked."""
        with self._lock:
            self._receive()
            return self._pids.get(number)

    def pids(self) -> list[int]:
        """Return the ids of all processes that were forked."""
        with self._lock:
            self._receive()
            return list(self._pids.values())

    def reported_code(self, number: int) -> int | None:
        """Return the exit code of a process; None where the fork server did not report it."""
        with self._lock:
            self._receive()
            return self._codes.get(number)

    def code_of(self, number: int) -> int | None:
        """Return the exit code of a process, or the fork server's where that has ended; None while it runs."""
        # Poll before reading: all that a fork server sent before its end is then in the socket.
        server_code = self.process.poll()
        code = self.reported_code(number)
        if code is None and server_code is not None:
            # The kernel ends the processes with the fork server.
            return server_code or 1
        return code

    def send_signal(self, number: int, signal_number: int) -> None:
        """Send a process a signal; one that is not yet forked receives it afterwards."""
        with self._lock:
            self._send({"number": number, "signal": signal_number})

    def _has_imported(self) -> bool:
        with self._lock:
            self._receive()
            return self._is_ready

    def cancel(self, number: int) -> bool:
        """Cancel a fork that waits for the end of the imports; return whether it does."""
        with self._lock:
            if self._has_imported():
                return False
            self.send_signal(number, signal.SIGKILL)
            self._codes[number] = _KILLED
            return True

    def _send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        # The codes tell that a fork server has ended.
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)

    def _receive(self) -> None:
        """Read what the fork server has reported."""
        # Without a packet, and after the fork server's end.
        with contextlib.suppress(OSError):
            while packet := self._control.recv(_PACKET_BYTES, socket.MSG_DONTWAIT):
                report = json.loads(packet)
                if "pid" in report:
                    self._pids[report["number"]] = report["pid"]
                elif "code" in report:
                    self._codes[report["number"]] = report["code"]
                else:
                    self._is_ready = True


class ForkServer(_Forks):
    """A running fork server. It dies with the *thread* that creates this object.

    Args:
        libraries: modules that it imports. An import that fails is repeated by the processes, which report its error.
        environment: all of its variables, which its processes inherit.
        output: file descriptor of its own standard output and error.
        python: its interpreter.
    """

    process: ChildProcess

    def __init__(
        self,
        libraries: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        python: str = sys.executable,
    ) -> None:
        control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.key = _key(python, libraries, environment)
        self._module_path = environment.get(_MODULE_PATH)
        shared = _shared_server(self.key)
        plain, secrets = split_environment(environment)
        plain.pop(_SHARED_VARIABLE, None)
        with other_end:
            process: ChildProcess | None = None
            if shared is not None:
                words = [python, "-m", MODULE, *libraries]
                request = ForkRequest(
                    MODULE, [], plain, [_CONTROL_VARIABLE], " ".join(words), replaces_variables=True
                )
                process = shared.fork_fed(request, secrets, [output, other_end.fileno()])
            if process is None:
                started = start_process(
                    [python, "-m", MODULE, *libraries],
                    environment={**plain, _CONTROL_VARIABLE: str(other_end.fileno())},
                    output=output,
                    stdin=subprocess.PIPE,
                    inherited=[other_end.fileno()],
                )
                feed(started, secrets)
                process = started
        super().__init__(control, process, 0)

    def wait_until_ready(self) -> None:
        """Wait until the libraries are imported, or the fork server has ended."""
        while self.is_alive and not self._has_imported():
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the fork server and its processes."""
        kill_families([self.process])
        self._control.close()

    def shared(self) -> tuple[int, dict[str, Any]]:
        """Return the descriptor to inherit, and what ``_shared_server`` reads of it."""
        descriptor = self._control.fileno()
        told = {
            "descriptor": descriptor,
            "pid": self.process.pid,
            "key": self.key,
            "module_path": self._module_path,
        }
        return descriptor, told


@dataclass
class _OtherProcess:
    """A process that this one has not started."""

    pid: int

    def poll(self) -> int | None:
        """Return None while it runs; how it ended is not known here."""
        return None if process_start(self.pid) is not None else 1


class _SharedServer(_Forks):
    """A fork server of the process that started this one.

    Attributes:
        module_path: PYTHONPATH of the fork server, where its processes look for modules.
    """

    module_path: str | None = None

    def fork_fed(
        self,
        request: ForkRequest,
        content: bytes,
        descriptors: Sequence[int],
    ) -> ForkedProcess | None:
        """Start a process with all of its standard input; None where the request is too long for a packet."""
        if len(json.dumps(asdict(request))) > _LONGEST_REQUEST:
            return None
        input_end, feeding_end = os.pipe()
        with open(input_end, "rb") as read, open(feeding_end, "wb") as fed:
            process = self.fork(request, [read.fileno(), *descriptors])
            fed.write(content)
        while not process.is_forked and self.process.poll() is None:
            time.sleep(_POLL_S)
        return process

    @classmethod
    def inherited(cls, descriptor: int, pid: int, module_path: str | None) -> _SharedServer:
        control = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        # The reports of an earlier process about its own requests have other numbers.
        server = cls(control, _OtherProcess(pid), os.getpid() << _NUMBER_BITS)
        server._is_ready = True
        server.module_path = module_path
        return server


class SharedForkServers:
    """Fork servers whose processes several runs fork, one after the other, so that their libraries are imported once.

    ``start_process`` starts the runs with ``variables`` and ``descriptors``. A fork server with the same interpreter,
    libraries and variables is then a fork of one of these; so is a command that ``run_forked`` runs.
    """

    def __init__(self) -> None:
        self._servers: list[ForkServer] = []

    def add(self, libraries: Sequence[str], environment: Mapping[str, str], output: int) -> None:
        """Start one, unless one with the same libraries and variables runs; the arguments are those of ForkServer."""
        key = _key(sys.executable, libraries, environment)
        if not any(server.key == key and server.is_alive for server in self._servers):
            self._servers.append(ForkServer(libraries, environment, output))

    def wait_until_ready(self) -> None:
        """Wait until all have imported their libraries."""
        for server in self._servers:
            server.wait_until_ready()

    @property
    def variables(self) -> dict[str, str]:
        """The variables of a process that shall use them."""
        if not self._servers:
            return {}
        return {_SHARED_VARIABLE: json.dumps([server.shared()[1] for server in self._servers])}

    @property
    def pids(self) -> list[int]:
        """The ids of the fork servers."""
        return [server.process.pid for server in self._servers]

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that it inherits under the same numbers."""
        return [server.shared()[0] for server in self._servers]

    def cpu_seconds(self) -> float:
        """Processor seconds of the fork servers, and of the processes below them that have ended."""
        total = 0.0
        for server in self._servers:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = psutil.Process(server.process.pid).cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def close(self) -> None:
        """End them and their processes."""
        for server in self._servers:
            server.close()
        self._servers.clear()


def run_forked(module: str, arguments: Sequence[str]) -> int | None:
    """Run ``python -m <module> <arguments>`` as a fork of a shared fork server that has imported ``module``.

    Its variables and its standard output and error are this process's. Returns its exit code; None where there is no
    such fork server with this process's PYTHONPATH, and nothing was run.
    """
    server = _shared_server_with(module)
    if server is None:
        return None
    plain, secrets = split_environment(os.environ)
    words = [sys.executable, "-m", module, *arguments]
    request = ForkRequest(
        module, arguments, plain, (), " ".join(words), replaces_variables=True, has_errors=True
    )
    process = server.fork_fed(request, secrets, [1, 2])
    if process is None:
        return None
    try:
        return process.wait()
    except BaseException:
        kill_families([process])
        raise


def _key(python: str, libraries: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a text that two fork servers share if their imports leave the same state; variables of one run are left
    out."""
    variables = without_secrets(environment)
    lines = [f"{k}={v}" for k, v in sorted(variables.items()) if not k.startswith(_RUN_PREFIX)]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return json.dumps([python, list(libraries), digest])


def _shared_server_with(module: str) -> _SharedServer | None:
    for key, server in _shared_servers().items():
        _, libraries, _ = json.loads(key)
        finds_the_same = server.module_path == os.environ.get(_MODULE_PATH)
        if module in libraries and finds_the_same and server.is_alive:
            return server
    return None


def _shared_server(key: str) -> _SharedServer | None:
    server = _shared_servers().get(key)
    return server if server is not None and server.is_alive else None


@functools.cache
def _shared_servers() -> dict[str, _SharedServer]:
    """The fork servers that this process may use, by their keys. Its own children get none of them."""
    entries = json.loads(os.environ.pop(_SHARED_VARIABLE, "[]"))
    return {
        entry["key"]: _SharedServer.inherited(
            entry["descriptor"], entry["pid"], entry["module_path"]
        )
        for entry in entries
    }


class _StartedFork(StartedProcess):
    """A fork as a started command, which can be killed before it is forked."""

    def __init__(self, process: ForkedProcess) -> None:
        super().__init__(process)
        self._fork = process

    def _kill_family(self) -> None:
        if not self._fork.cancel():
            super()._kill_family()


class ForkingLauncher(Launcher):
    """Starts ``python -m module`` on this machine as a fork of a process that has imported ``libraries``.

    One fork server serves commands with the same interpreter and the same variables, which libraries may read at their
    import, from one thread. Commands that run other modules are started as by Launcher.
    """

    def __init__(self, module: str, libraries: Sequence[str]) -> None:
        self._module = module
        self._libraries = libraries
        self._servers: dict[Hashable, ForkServer] = {}

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        stdin: bytes,
    ) -> StartedProcess:
        python, *module_words = command
        if module_words[:2] != ["-m", self._module]:
            return super().start(command, environment=environment, log=log, stdin=stdin)
        request = ForkRequest(self._module, module_words[2:], title=" ".join(command))
        input_end, feeding_end = os.pipe()
        with open(log, "ab") as file, open(input_end, "rb") as read, open(feeding_end, "wb") as fed:
            server = self._server(python, environment, file.fileno())
            process = server.fork(request, [read.fileno(), file.fileno()])
            fed.write(stdin)
        return _StartedFork(process)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    def _server(self, python: str, environment: Mapping[str, str], output: int) -> ForkServer:
        key = (python, frozenset(environment.items()), threading.get_ident())
        server = self._servers.get(key)
        if server is None or not server.is_alive:
            server = ForkServer(self._libraries, environment, output, python)
            self._servers[key] = server
        return server


def main() -> int | None:
    """Import and fork until the socket is closed; in a forked process, what its module's ``main`` returns."""
    libraries = sys.argv[1:]
    # Read the keys first: the processes inherit them as this one holds them.
    hide_secrets()
    # The library of titles finds its memory by the variables with which the process started: not once they are cleared.
    with _kept_name():
        setproctitle.getproctitle()
    control = socket.socket(fileno=int(os.environ.pop(_CONTROL_VARIABLE)))
    os.set_inheritable(control.fileno(), False)
    for name in libraries:
        # The process that needs the module imports it again, and reports the error as its own.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Each process would write what is left in the buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    # The collector would write to each object's page, and so copy it, in every process.
    gc.freeze()
    request = _Forking(control).serve()
    if request is None:
        return 0
    module = importlib.import_module(request.module)
    # Python's multiprocessing imports this module in the processes that it spawns.
    sys.modules["__main__"] = module
    sys.argv = [module.__file__ or request.module, *request.arguments]
    code: int | None = module.main()
    return code


class _Forking:
    """The loop of the fork server."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._events = select.poll()
        self._events.register(control, select.POLLIN)
        self._processes: dict[int, int] = {}
        """The descriptor of each running process by its number."""

    def serve(self) -> ForkRequest | None:
        """Serve until the socket is closed, then return None. Return the request in each process that is forked."""
        self._report(ready=True)
        while True:
            for descriptor, _ in self._events.poll():
                if descriptor != self._control.fileno():
                    self._report_end(descriptor)
                    continue
                packet, descriptors, *_ = socket.recv_fds(
                    self._control, _PACKET_BYTES, _MOST_DESCRIPTORS
                )
                if not packet:
                    return None
                request = self._handle(json.loads(packet), descriptors)
                if request is not None:
                    return request

    def _handle(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> ForkRequest | None:
        number = message["number"]
        if "signal" in message:
            if (process := self._processes.get(number)) is not None:
                signal.pidfd_send_signal(process, message["signal"])
            return None
        request = ForkRequest(**message["fork"])
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(request, descriptors, server)
            return request
        _close(descriptors)
        process = self._processes[number] = os.pidfd_open(pid)
        self._events.register(process, select.POLLIN)
        self._report(number=number, pid=pid)
        return None

    def _become(self, request: ForkRequest, descriptors: Sequence[int], server: int) -> None:
        """Give this process, a fork, its own session, descriptors, variables and title."""
        os.setsid()
        die_with_parent(server)
        self._control.close()
        _close(self._processes.values())
        standard_input, output, *further = descriptors
        errors = further.pop(0) if request.has_errors else os.dup(output)
        for target, source in enumerate((standard_input, output, errors)):
            os.dup2(source, target)
        _close((standard_input, output, errors))
        if request.replaces_variables:
            os.environ.clear()
        os.environ |= dict(request.variables)
        for variable, descriptor in zip(request.descriptors, further, strict=True):
            os.environ[variable] = str(descriptor)
        if request.title:
            _show_title(request.title)
        if (numpy := sys.modules.get("numpy")) is not None:
            # Python draws new seeds for its own generator after a fork.
            numpy.random.seed()

    def _report_end(self, descriptor: int) -> None:
        number = next(n for n, process in self._processes.items() if process == descriptor)
        ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
        assert ended is not None
        killed = ended.si_code != os.CLD_EXITED
        self._events.unregister(descriptor)
        os.close(descriptor)
        del self._processes[number]
        self._report(number=number, code=-ended.si_status if killed else ended.si_status)

    def _report(self, **content: int) -> None:
        # A closed socket ends the loop.
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(content).encode())


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _show_title(title: str) -> None:
    """Show ``title`` as this process's command line."""
    with _kept_name():
        setproctitle.setproctitle(title)


@contextlib.contextmanager
def _kept_name() -> Iterator[None]:
    """Keep the name that ``ps -o comm`` and ``top`` show, which a change of the title changes."""
    name = setproctitle.getthreadtitle()
    yield
    setproctitle.setthreadtitle(name)


if __name__ == "__main__":
    sys.exit(main())
