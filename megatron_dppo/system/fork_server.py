"""The fork server: a process that imports libraries once, and then forks processes that use the libraries.

    python -m megatron_dppo.system.fork_server LIBRARY...

The imports of torch, Megatron-Core or SGLang take seconds and hundreds of MiB. Forked processes share the memory of the
imports, and start in milliseconds. The fork server computes nothing and starts no thread, because a forked process has
only the thread that forked: a library's threads would be missing.

The fork server imports the modules LIBRARY. Then it receives requests over a socket, one request in each packet. One
sort of request forks a process that runs a module as ``python -m`` does, with the descriptors in the packet. The other
sort sends a signal to a process. The fork server reports the end of the imports, and the id and the exit code of each
process. When the socket is closed, the fork server ends, and the kernel kills its processes.

A fork server may itself be a fork of a fork server that has the same libraries and lives longer
(``SharedForkServers``).
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
from megatron_dppo.system.secret_variables import hide_secrets, split_environment, without_secrets

MODULE = "megatron_dppo.system.fork_server"
_PACKET_BYTES = 1 << 17
# A packet has a ForkRequest as JSON, and less than 1 KiB around it.
_LONGEST_REQUEST = _PACKET_BYTES - (1 << 10)
_MOST_DESCRIPTORS = 8
# A process that uses a shared fork server counts its requests from its own id times 2^24, so that two processes have no
# request number in common.
_NUMBER_BITS = 24
_POLL_S = 0.02
_KILLED = -signal.SIGKILL
_RUN_PREFIX = "MEGATRON_DPPO_"
_CONTROL_VARIABLE = "MEGATRON_DPPO_FORK_CONTROL"
"""Environment variable with the descriptor of the socket that a fork server receives requests from."""
_MODULE_PATH = "PYTHONPATH"
_SHARED_VARIABLE = "MEGATRON_DPPO_FORK_SERVERS"
"""Environment variable with the fork servers that a process inherits, as JSON."""


@dataclass(frozen=True)
class ForkRequest:
    """A process that the fork server is to start.

    The packet of a request also has descriptors, in this order: standard input, standard output, standard error if
    ``has_errors``, then one for each name in ``descriptors``.

    Attributes:
        module: module whose ``main`` the process calls, with ``arguments`` in ``sys.argv``.
        arguments: arguments of its command line.
        variables: environment variables of the process, in addition to the fork server's variables.
        descriptors: names of environment variables. Each variable gets the number of one further descriptor.
        title: command line that ``ps`` shows for the process; empty: the fork server's command line.
        replaces_variables: whether the process has only ``variables``, without the fork server's variables.
        has_errors: whether the packet has a descriptor for standard error. If not, errors go to standard output.
    """

    module: str
    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    descriptors: Sequence[str] = ()
    title: str = ""
    replaces_variables: bool = False
    has_errors: bool = False


class ForkedProcess:
    """A process that a fork server starts, with the methods of ``ChildProcess``."""

    def __init__(self, server: _ForkClient, number: int) -> None:
        self._server = server
        self._number = number

    @property
    def pid(self) -> int:
        """The process's id. Before the process is forked: the fork server's id."""
        pid = self._server.pid_of(self._number)
        if pid is None:
            return self._server.process.pid
        return pid

    @property
    def is_forked(self) -> bool:
        return self._server.pid_of(self._number) is not None

    def poll(self) -> int | None:
        return self._server.code_of(self._number)

    def reported_code(self) -> int | None:
        """Return the exit code; None while the process runs, and if the kernel killed it with the fork server."""
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
        """Cancel the start of the process. Return False if the process is forked already: then nothing is cancelled."""
        while self._server.pid_of(self._number) is None and self.poll() is None:
            if self._server.cancel(self._number):
                return True
            # The fork server has imported its libraries, so it is about to fork.
            time.sleep(_POLL_S)
        return self._server.pid_of(self._number) is None


class _Pollable(Protocol):
    """A process that may have ended."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...


class _ForkClient:
    """The client of a fork server: it sends requests and receives reports.

    Args:
        control: the socket to the fork server.
        process: the process of the fork server.
        first_number: number of the first request.
    """

    def __init__(self, control: socket.socket, process: _Pollable, first_number: int) -> None:
        self.process = process
        self._control = control
        self._lock = threading.RLock()
        self._next_number = first_number
        self._is_ready = False
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def fork(
        self, request: ForkRequest, descriptors: Sequence[int], content: bytes = b""
    ) -> ForkedProcess:
        """Start a process, and return at once.

        ``descriptors``: the process's standard output, then those that ``ForkRequest`` describes. ``content``: its
        standard input.
        """
        read_end, write_end = os.pipe()
        with open(read_end, "rb") as reader, open(write_end, "wb") as writer:
            with self._lock:
                number = self._next_number
                self._next_number += 1
                message = {"number": number, "fork": asdict(request)}
                self._send(message, [reader.fileno(), *descriptors])
            writer.write(content)
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
        """Return the exit code of a process; None if the fork server has not reported it."""
        with self._lock:
            self._receive()
            return self._codes.get(number)

    def code_of(self, number: int) -> int | None:
        """Return the exit code of a process; None while it runs.

        A process that the kernel killed at the end of the fork server gets the fork server's code, or 1 if that code
        is 0.
        """
        # Poll before reading. If the fork server has ended, all its reports are then in the socket.
        server_code = self.process.poll()
        code = self.reported_code(number)
        if code is None and server_code is not None:
            return server_code or 1
        return code

    def send_signal(self, number: int, signal_number: int) -> None:
        """Send a process a signal. A process that is not forked yet receives it after the fork."""
        with self._lock:
            self._send({"number": number, "signal": signal_number})

    def _has_imported(self) -> bool:
        with self._lock:
            self._receive()
            return self._is_ready

    def cancel(self, number: int) -> bool:
        """Cancel a fork that waits for the end of the imports. Return False if the imports have ended."""
        with self._lock:
            if self._has_imported():
                return False
            # After the imports, the fork server reads the request and then this signal: it forks the process and kills
            # it at once.
            self.send_signal(number, signal.SIGKILL)
            self._codes[number] = _KILLED
            return True

    def _send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        # An error means that the fork server has ended: code_of reports that.
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)

    def _receive(self) -> None:
        """Read the reports that the fork server has sent since the last call."""
        # recv raises OSError if there is no packet.
        with contextlib.suppress(OSError):
            while packet := self._control.recv(_PACKET_BYTES, socket.MSG_DONTWAIT):
                report = json.loads(packet)
                if "pid" in report:
                    self._pids[report["number"]] = report["pid"]
                elif "code" in report:
                    self._codes[report["number"]] = report["code"]
                else:
                    self._is_ready = True


class ForkServer(_ForkClient):
    """A running fork server. It ends when the *thread* that created this object ends.

    Args:
        libraries: modules that the fork server imports. If an import fails, each process repeats the import and reports
            the error.
        environment: all environment variables of the fork server. Its processes inherit them.
        output: file descriptor of the fork server's standard output and error.
        python: path of the fork server's interpreter.
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
        command = [python, "-m", MODULE, *libraries]
        plain_variables, secrets = split_environment(environment)
        plain_variables.pop(_SHARED_VARIABLE, None)
        with other_end:
            process: ChildProcess | None = None
            shared_server = _shared_server(self.key)
            if shared_server is not None:
                # The fork has imported the libraries already, so it gets none as arguments.
                request = ForkRequest(
                    MODULE,
                    [],
                    plain_variables,
                    [_CONTROL_VARIABLE],
                    title=" ".join(command),
                    replaces_variables=True,
                )
                descriptors = [output, other_end.fileno()]
                process = shared_server.fork_and_wait(request, descriptors, secrets)
            if process is None:
                started_process = start_process(
                    command,
                    environment={**plain_variables, _CONTROL_VARIABLE: str(other_end.fileno())},
                    output=output,
                    stdin=subprocess.PIPE,
                    inherited=[other_end.fileno()],
                )
                feed(started_process, secrets)
                process = started_process
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
        """Return the descriptor and the entry of ``_SHARED_VARIABLE`` that a process needs to use this fork server.

        The process must inherit the descriptor.
        """
        descriptor = self._control.fileno()
        entry = {
            "descriptor": descriptor,
            "pid": self.process.pid,
            "key": self.key,
            "module_path": self._module_path,
        }
        return descriptor, entry


@dataclass
class _OtherProcess:
    """A process that another process has started."""

    pid: int

    def poll(self) -> int | None:
        """Return None while the process runs, and 1 afterwards: only its parent gets its exit code."""
        if process_start(self.pid) is None:
            return 1
        return None


class _SharedServer(_ForkClient):
    """A fork server that this process has inherited from the process that started it.

    Attributes:
        module_path: PYTHONPATH of the fork server. Its processes look for modules there.
    """

    module_path: str | None = None

    def fork_and_wait(
        self, request: ForkRequest, descriptors: Sequence[int], content: bytes
    ) -> ForkedProcess | None:
        """Start a process as ``fork`` does, and wait until it is forked.

        Returns None if the request is too long for a packet.
        """
        if len(json.dumps(asdict(request))) > _LONGEST_REQUEST:
            return None
        process = self.fork(request, descriptors, content)
        # Until the fork, ``process.pid`` is the id of the shared fork server.
        while not process.is_forked and self.process.poll() is None:
            time.sleep(_POLL_S)
        return process

    @classmethod
    def inherited(cls, descriptor: int, pid: int, module_path: str | None) -> _SharedServer:
        control = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        # The socket may still have reports about requests of an earlier process. So this process has its own range of
        # request numbers.
        server = cls(control, _OtherProcess(pid), os.getpid() << _NUMBER_BITS)
        server._is_ready = True
        server.module_path = module_path
        return server


class SharedForkServers:
    """Fork servers that successive runs share, so that libraries are imported only once.

    Start a run by ``start_process`` with ``variables`` in its environment and ``descriptors`` inherited. If the run
    creates a ForkServer with the interpreter, libraries and variables of one of these fork servers, the new fork server
    is a fork of that one. ``run_forked`` forks its command from these fork servers too.
    """

    def __init__(self) -> None:
        self._servers: list[ForkServer] = []

    def add(self, libraries: Sequence[str], environment: Mapping[str, str], output: int) -> None:
        """Start a fork server, unless a fork server with these libraries and variables runs already.

        The arguments are as in ForkServer.
        """
        key = _key(sys.executable, libraries, environment)
        if not any(server.key == key and server.is_alive for server in self._servers):
            self._servers.append(ForkServer(libraries, environment, output))

    def wait_until_ready(self) -> None:
        """Wait until all fork servers have imported their libraries."""
        for server in self._servers:
            server.wait_until_ready()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of a process that is to use these fork servers."""
        if not self._servers:
            return {}
        return {_SHARED_VARIABLE: json.dumps([server.shared()[1] for server in self._servers])}

    @property
    def pids(self) -> list[int]:
        """The ids of the fork servers."""
        return [server.process.pid for server in self._servers]

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that a process must inherit, under the same numbers, to use these fork servers."""
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
        """End the fork servers and their processes."""
        for server in self._servers:
            server.close()
        self._servers.clear()


def run_forked(module: str, arguments: Sequence[str]) -> int | None:
    """Run ``python -m <module> <arguments>`` as a fork of a shared fork server that has imported ``module``.

    The fork has the environment, the standard output and the standard error of this process. Returns its exit code.
    Returns None, and runs nothing, if no shared fork server has imported ``module`` from this process's PYTHONPATH.
    """
    server = _shared_server_with(module)
    if server is None:
        return None
    plain_variables, secrets = split_environment(os.environ)
    command = [sys.executable, "-m", module, *arguments]
    request = ForkRequest(
        module,
        arguments,
        plain_variables,
        title=" ".join(command),
        replaces_variables=True,
        has_errors=True,
    )
    standard_output = 1
    standard_error = 2
    process = server.fork_and_wait(request, [standard_output, standard_error], secrets)
    if process is None:
        return None
    try:
        return process.wait()
    except BaseException:
        kill_families([process])
        raise


def _key(python: str, libraries: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a text that is equal for two fork servers whose imports leave the same state.

    The text has the interpreter, the libraries, and a hash of the environment variables. Credentials, and variables
    that begin with ``_RUN_PREFIX``, are left out of the hash.
    """
    lines: list[str] = []
    for name, value in sorted(without_secrets(environment).items()):
        if not name.startswith(_RUN_PREFIX):
            lines.append(f"{name}={value}")
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return json.dumps([python, list(libraries), digest])


def _shared_server_with(module: str) -> _SharedServer | None:
    """Return an inherited fork server that has imported ``module`` from this process's PYTHONPATH, or None."""
    for key, server in _shared_servers().items():
        _, libraries, _ = json.loads(key)
        has_same_path = server.module_path == os.environ.get(_MODULE_PATH)
        if module in libraries and has_same_path and server.is_alive:
            return server
    return None


def _shared_server(key: str) -> _SharedServer | None:
    """Return the inherited fork server with ``key``; None if there is no such fork server, or if it has ended."""
    server = _shared_servers().get(key)
    if server is not None and server.is_alive:
        return server
    return None


@functools.cache
def _shared_servers() -> dict[str, _SharedServer]:
    """Return the inherited fork servers by their keys. Child processes of this process do not inherit them."""
    servers: dict[str, _SharedServer] = {}
    for entry in json.loads(os.environ.pop(_SHARED_VARIABLE, "[]")):
        servers[entry["key"]] = _SharedServer.inherited(
            entry["descriptor"], entry["pid"], entry["module_path"]
        )
    return servers


class _StartedFork(StartedProcess):
    """A started command that is a fork. It can be killed before it is forked."""

    def __init__(self, process: ForkedProcess) -> None:
        super().__init__(process)
        self._fork = process

    def _kill_family(self) -> None:
        if not self._fork.cancel():
            super()._kill_family()


class ForkingLauncher(Launcher):
    """Starts ``python -m module`` on this machine as a fork of a fork server that has imported ``libraries``.

    There is one fork server for each interpreter, environment and thread: libraries may read variables when they are
    imported, and a fork server ends with the thread that started it. A command that runs another module is not forked:
    Launcher starts it.
    """

    def __init__(self, module: str, libraries: Sequence[str]) -> None:
        self._module = module
        self._libraries = libraries
        self._servers: dict[Hashable, ForkServer] = {}

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: bytes
    ) -> StartedProcess:
        python, *words = command
        if words[:2] != ["-m", self._module]:
            return super().start(command, environment=environment, log=log, stdin=stdin)
        request = ForkRequest(self._module, words[2:], title=" ".join(command))
        with open(log, "ab") as file:
            server = self._server(python, environment, file.fileno())
            process = server.fork(request, [file.fileno()], stdin)
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
    """Import the libraries, and serve requests until the socket is closed; then return 0.

    In each forked process, run its module and return its exit code.
    """
    libraries = sys.argv[1:]
    # Read the credentials first: forked processes inherit them.
    hide_secrets()
    # Initialise setproctitle now: setproctitle needs the process's initial environment to find the memory of the title,
    # and a fork may clear this environment.
    with _kept_name():
        setproctitle.getproctitle()
    control = socket.socket(fileno=int(os.environ.pop(_CONTROL_VARIABLE)))
    os.set_inheritable(control.fileno(), False)
    for name in libraries:
        # If an import fails, the process that needs the module imports it again and reports the error.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Empty the buffers: otherwise each fork would write their content again.
    sys.stdout.flush()
    sys.stderr.flush()
    # Keep the objects of the imports out of garbage collection. In a fork the collector would write to the page of each
    # object, and so copy the shared memory.
    gc.collect()
    gc.freeze()
    request = _ForkLoop(control).serve()
    if request is None:
        return 0
    # From here on, this process is a fork.
    module = importlib.import_module(request.module)
    # Make the module __main__, because multiprocessing imports __main__ in the processes that it spawns.
    sys.modules["__main__"] = module
    sys.argv = [module.__file__ or request.module, *request.arguments]
    code: int | None = module.main()
    return code


class _ForkLoop:
    """The loop of the fork server."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._events = select.poll()
        self._events.register(control, select.POLLIN)
        self._pidfds: dict[int, int] = {}
        """Number of a request -> descriptor of its running process (``pidfd_open``)."""

    def serve(self) -> ForkRequest | None:
        """Serve requests until the socket is closed, then return None. In each forked process, return its request."""
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
        """Fork a process, or send a signal to a process. In the forked process, return its request."""
        number = message["number"]
        if "signal" in message:
            if number in self._pidfds:
                signal.pidfd_send_signal(self._pidfds[number], message["signal"])
            return None
        request = ForkRequest(**message["fork"])
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(request, descriptors, server_pid)
            return request
        _close(descriptors)
        pidfd = os.pidfd_open(pid)
        self._pidfds[number] = pidfd
        self._events.register(pidfd, select.POLLIN)
        self._report(number=number, pid=pid)
        return None

    def _become(self, request: ForkRequest, descriptors: Sequence[int], server_pid: int) -> None:
        """Give this process, a fork, its own session, descriptors, variables and title."""
        os.setsid()
        die_with_parent(server_pid)
        self._control.close()
        _close(self._pidfds.values())
        standard_input, output, *further_descriptors = descriptors
        errors = further_descriptors.pop(0) if request.has_errors else os.dup(output)
        for target, source in enumerate((standard_input, output, errors)):
            os.dup2(source, target)
        _close((standard_input, output, errors))
        if request.replaces_variables:
            os.environ.clear()
        os.environ |= dict(request.variables)
        for variable, descriptor in zip(request.descriptors, further_descriptors, strict=True):
            os.environ[variable] = str(descriptor)
        if request.title:
            _show_title(request.title)
        if (numpy := sys.modules.get("numpy")) is not None:
            # Otherwise all forks would draw the same numbers. Python itself seeds only its own generator anew.
            numpy.random.seed()

    def _report_end(self, pidfd: int) -> None:
        """Reap an ended process and report its exit code; negative for a signal."""
        number = next(key for key, value in self._pidfds.items() if value == pidfd)
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        assert ended is not None
        code = ended.si_status
        if ended.si_code != os.CLD_EXITED:
            # The status of a killed process is the signal.
            code = -ended.si_status
        self._events.unregister(pidfd)
        os.close(pidfd)
        del self._pidfds[number]
        self._report(number=number, code=code)

    def _report(self, **content: int) -> None:
        # An error means that the socket is closed. The loop in serve then ends.
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
    """Keep the name that ``ps -o comm`` and ``top`` show. setproctitle would change it together with the title."""
    name = setproctitle.getthreadtitle()
    yield
    setproctitle.setthreadtitle(name)


if __name__ == "__main__":
    sys.exit(main())
