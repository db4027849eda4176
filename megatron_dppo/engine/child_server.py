"""An HTTP server as a child process: start it, wait for it, end it, quote its log.

Light: imports neither torch nor sglang.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_dppo.engine.errors import EngineStartError

ProgressCallback = Callable[[float, str], None]
"""Called with the seconds waited and the last line of the server's log."""

_POLL_SECONDS = 0.25
_PROGRESS_SECONDS = 1.0
_LOG_TAIL_BYTES = 1 << 16
_TAIL_LINES = 40


class ChildServer(ABC):
    """One server on one port: ``start``, ``wait_healthy``, ``poll``, then ``stop`` or ``kill``.

    The server leads a session and process group of its own, so the terminal's Ctrl-C does not reach
    it, and it dies with the *thread* that called ``start`` (the kernel counts the thread, not the
    process): start it from the main thread.
    """

    what = "the server"
    """In messages."""
    port_key = "port"
    """The key of the configuration that sets ``port``."""

    def __init__(self, host: str, port: int, log_path: Path, start_timeout_s: float) -> None:
        self.host = host
        self.port = port
        self.log_path = log_path
        self._start_timeout = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    @abstractmethod
    def _command(self) -> Sequence[str]:
        """Arguments of this Python, from ``-m`` on; whoever runs ``ps`` sees them."""

    @abstractmethod
    def _environment(self) -> Mapping[str, str]:
        """The process's environment."""

    @abstractmethod
    def _secrets(self) -> Mapping[str, Any]:
        """JSON for its standard input, beside ``parent``."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it is this server, and ready, that listens on the port."""

    @property
    def url(self) -> str:
        """Base URL for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server, which is its process group's id too."""
        if self._process is None:
            raise ValueError(f"{self.what} was not started")
        return self._process.pid

    def start(self) -> None:
        """Start the process and return at once. Raises EngineStartError where the port is taken."""
        if self._process is not None:
            raise ValueError(f"{self.what} was started already, as process {self._process.pid}")
        require_free_port(self.host, self.port, self.port_key)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, *self._command()]
        with open(self.log_path, "ab") as log:
            log.write(f"--- {' '.join(command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self._environment()),
                start_new_session=True,
            )
        self._started_at = time.monotonic()
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps({"parent": os.getpid(), **self._secrets()}).encode())

    def wait_healthy(self, on_progress: ProgressCallback | None = None) -> float:
        """Wait until the server answers, and return how long it took, in seconds since ``start``.

        Raises EngineStartError with the log's end when it exits first or the time to start passes;
        the process is killed then. ``on_progress`` is called about once a second.
        """
        next_progress = 0.0
        while True:
            waited = time.monotonic() - self._started_at
            code = self.poll()
            if code is not None:
                self._give_up(f"{self.what} exited with code {code} after {waited:.0f} s")
            if self._answers():
                return waited
            if waited > self._start_timeout:
                self._give_up(f"{self.what} was not healthy after {self._start_timeout:.0f} s")
            if on_progress is not None and waited >= next_progress:
                on_progress(waited, self.log_tail(1))
                next_progress = waited + _PROGRESS_SECONDS
            time.sleep(_POLL_SECONDS)

    def poll(self) -> int | None:
        """None while the server runs, else its exit code (negative: the signal that ended it)."""
        return None if self._process is None else self._process.poll()

    def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, on which the server finishes its requests; SIGKILL after ``grace_s`` seconds."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL the server and every descendant; returns when they are gone. Harmless twice."""
        if self._process is None:
            return
        family = _descendants(self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for member in family:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait()
        _wait_dead(family, timeout_s=10.0)

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The last ``lines`` lines of the server's log."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-lines:])

    def _get(self, path: str, key: str | None) -> tuple[int, bytes] | None:
        """Status and body of a GET on the port; None where nothing answers."""
        address = self.url.removeprefix("http://").rsplit(":", 1)[0].strip("[]")
        connection = http.client.HTTPConnection(address, self.port, timeout=5)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _give_up(self, reason: str) -> None:
        tail = self.log_tail()
        self.kill()
        raise EngineStartError(f"{reason}; the end of {self.log_path}:\n{tail}")


def require_free_port(host: str, port: int, key: str = "engine.port") -> None:
    """Raise EngineStartError where ``port`` of ``host`` cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineStartError(
                f"{key}: cannot bind {host}:{port} ({error.strerror}); "
                f"leave {key} empty for a free one, or end what listens there"
            ) from error


def free_port(host: str) -> int:
    """A TCP port of ``host`` that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _wait_dead(family: list[psutil.Process], timeout_s: float) -> None:
    """Until none runs; a zombie that nobody reaps counts as dead."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(_runs(member) for member in family):
        time.sleep(0.02)


def _runs(member: psutil.Process) -> bool:
    try:
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
