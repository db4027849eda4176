"""The SGLang server as a child process: start it, wait for it, end it.

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
from collections.abc import Callable
from pathlib import Path

import psutil

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.rollout.errors import EngineStartError
from megatron_dppo.rollout.server_options import server_environment, server_options, write_options

ProgressCallback = Callable[[float, str], None]
"""Called with the seconds waited and the last line of the server's log."""

_POLL_SECONDS = 0.25
_PROGRESS_SECONDS = 1.0
_LOG_TAIL_BYTES = 1 << 16
_TAIL_LINES = 40


class EngineProcess:
    """One server on one port: ``start``, ``wait_healthy``, ``poll``, then ``stop`` or ``kill``.

    The server leads a session and process group of its own, so the terminal's Ctrl-C does not reach
    it, and it dies with the *thread* that called ``start`` (the kernel counts the thread, not the
    process): start it from the main thread. ``seed`` seeds its sampling; give each restart another
    one, or it repeats the samples of the dead server.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        port: int,
        log_path: Path,
        seed: int,
        api_key: str | None,
        admin_api_key: str,
    ) -> None:
        self.host = config.engine.host
        self.port = port
        self.log_path = log_path
        self.options_path = log_path.with_suffix(".yaml")
        self._start_timeout = config.engine.start_timeout_s
        self._keys = {"api_key": api_key, "admin_api_key": admin_api_key}
        self._options = server_options(config, port=port, seed=seed)
        self._environment = server_environment(config)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    @property
    def url(self) -> str:
        """Base URL for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server, which is its process group's id too."""
        if self._process is None:
            raise ValueError("the engine was not started")
        return self._process.pid

    def start(self) -> None:
        """Start the process and return at once. Raises EngineStartError where the port is taken."""
        if self._process is not None:
            raise ValueError(f"the engine was started already, as process {self._process.pid}")
        require_free_port(self.host, self.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        write_options(self._options, self.options_path)
        command = [
            sys.executable,
            "-m",
            "megatron_dppo.rollout.launch_server",
            "--config",
            str(self.options_path),
        ]
        with open(self.log_path, "ab") as log:
            log.write(f"--- {' '.join(command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._started_at = time.monotonic()
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps({"parent": os.getpid(), **self._keys}).encode())

    def wait_healthy(self, on_progress: ProgressCallback | None = None) -> float:
        """Wait until the server answers, and return how long it took, in seconds since ``start``.

        Raises EngineStartError with the log's end when it exits first or ``engine.start_timeout_s``
        passes; the process is killed then. ``on_progress`` is called about once a second.
        """
        next_progress = 0.0
        while True:
            waited = time.monotonic() - self._started_at
            code = self.poll()
            if code is not None:
                self._give_up(f"the engine exited with code {code} after {waited:.0f} s")
            if self._answers():
                return waited
            if waited > self._start_timeout:
                self._give_up(f"the engine was not healthy after {self._start_timeout:.0f} s")
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

    def _answers(self) -> bool:
        """Whether this server listens on the port: it takes our key and serves our model."""
        address = self.url.removeprefix("http://").rsplit(":", 1)[0].strip("[]")
        connection = http.client.HTTPConnection(address, self.port, timeout=5)
        headers = (
            {"Authorization": f"Bearer {self._keys['api_key']}"} if self._keys["api_key"] else {}
        )
        try:
            connection.request("GET", "/model_info", headers=headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return (
            answer.status == 200 and json.loads(body)["model_path"] == self._options["model_path"]
        )

    def _give_up(self, reason: str) -> None:
        tail = self.log_tail()
        self.kill()
        raise EngineStartError(f"{reason}; the end of {self.log_path}:\n{tail}")


def require_free_port(host: str, port: int) -> None:
    """Raise EngineStartError where ``port`` of ``host`` cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineStartError(
                f"engine.port: cannot bind {host}:{port} ({error.strerror}); "
                "leave engine.port empty for a free one, or end what listens there"
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
