"""Servers as child processes: start, wait for health, end, and log. EngineProcess is the SGLang server.

The supervisor imports this module, so it does not load torch or sglang. Only waiting loads the HTTP client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_dppo.engine import options
from megatron_dppo.engine.errors import EngineLostError, EngineStartError, PortHeldError
from megatron_dppo.engine.options import ServerHosts
from megatron_dppo.system import processes
from megatron_dppo.system.fork_server import ForkingLauncher
from megatron_dppo.system.gpus import has_visible_gpu
from megatron_dppo.system.network import client_host, url_host
from megatron_dppo.system.ports import PortTakenError, give_back_port
from megatron_dppo.system.scratch import remove_left_behind

if TYPE_CHECKING:
    from megatron_dppo.config.schema import EngineConfig, TrainConfig
    from megatron_dppo.engine.client import Answer, HttpClient
    from megatron_dppo.spec import ServersSpec


ProgressCallback = Callable[[float, str], None]
"""Function that is called with the seconds waited and the stage of the server's start, in words."""

MODULE = "megatron_dppo.engine.launch_server"
LIBRARIES = "megatron_dppo.cpu.engine.libraries"
"""The module whose imports forked servers share."""
_POLL_SECONDS = 0.25
_PROGRESS_SECONDS = 1.0
"""Seconds between two calls of a ProgressCallback."""
_PROBE_SECONDS = 5.0
"""Longest time of the answer to a probe."""
_FOREIGN_SECONDS = 5.0
"""If probes have been rejected for this long while the server starts, another process holds the server's port."""
_TAIL_LINES = 40
"""Lines of the log in an error."""
_EXCEPTION_LINES = 400
"""Lines at the end of the log that are searched for the exception that ended a server."""
_LOG_START = "--- "
"""Prefix of the first log line of each incarnation."""
_WARM_UP_STAGE = "answering its first requests"


def local_launcher(engine: EngineConfig) -> processes.Launcher:
    """Return the launcher of servers on this machine. Without a GPU these servers share their imports."""
    # The state of a GPU's driver does not survive a fork.
    if engine.device != "cuda" and not has_visible_gpu():
        return ForkingLauncher(MODULE, [LIBRARIES])
    return processes.Launcher()


@dataclass(frozen=True)
class Runtime:
    """The surroundings of server processes: host, Python, and additional variables."""

    launcher: processes.Launcher = field(default_factory=processes.Launcher)
    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict)


class ChildServer:
    """One server on one port: ``start``, ``wait_healthy``, ``poll``, then ``stop`` or ``kill``.

    Start it from the main thread: the kernel ends a server on this machine when the *thread* that started it ends.

    Args:
        command: arguments of Python, from ``-m`` on; every user of the host can see them (``ps``).
        secrets: the object that the server reads as JSON from its standard input.
        probe: path and API key of a GET request. The answer shows whether this server answers, or another program.
    """

    title = "the server"
    """The server's name in messages."""
    port_key = "port"
    """The key of the configuration that sets ``port``."""

    def __init__(
        self,
        host: str,
        port: int,
        log_path: Path,
        start_timeout_s: float,
        runtime: Runtime | None = None,
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
        secrets: Mapping[str, Any],
        probe: tuple[str, str | None],
    ) -> None:
        self.host = host
        self.port = port
        self.log_path = log_path
        self._start_timeout = start_timeout_s
        self._runtime = Runtime() if runtime is None else runtime
        self._command = command
        self._environment = environment
        self._secrets = secrets
        self._probe = probe
        self._process: processes.StartedProcess | None = None
        self._started_at = 0.0

    def _accepts(self, answer: Answer) -> bool:
        """Whether the probe's answer shows that this server is ready: no other program accepts the run's key."""
        return answer.status == 200

    async def _warm_up(self, client: HttpClient) -> None:
        """Prepare a server that answers the probe; it counts as healthy after this call. May raise EngineError."""

    def _stage(self) -> str:
        """Return the present stage of the server's start, read from its log."""
        return "importing its libraries"

    @property
    def url(self) -> str:
        return f"http://{url_host(client_host(self.host))}:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ValueError(f"{self.title} was not started")
        return self._process.pid

    def start(self) -> None:
        """Start the process and return at once. Raises PortHeldError if the port is taken."""
        if self._process is not None:
            raise ValueError(f"{self.title} was started already, as process {self._process.pid}")
        try:
            # Check the port first: the server itself notices a taken port only after its imports, or even later.
            self._runtime.launcher.require_free_port(self.host, self.port)
        except PortTakenError as error:
            key = self.port_key
            raise PortHeldError(
                f"{key}: {error}; leave {key} empty for a free port, or end the process that listens there"
            ) from error
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [self._runtime.python, *self._command]
        # Append to the log, so that it keeps the output of earlier incarnations.
        with open(self.log_path, "ab") as log:
            log.write(f"{_LOG_START}{' '.join(command)}\n".encode())
        self._process = self._runtime.launcher.start(
            command,
            environment={**self._environment, **self._runtime.variables},
            log=self.log_path,
            # Other processes can read arguments and environment variables, but not standard input.
            stdin=json.dumps(dict(self._secrets)).encode(),
        )
        self._started_at = time.monotonic()

    def wait_healthy(self, on_progress: ProgressCallback | None = None) -> float:
        """Block until the server is healthy; return the seconds since ``start``. Any thread may call it.

        ``on_progress`` is called about once a second. On failure the process is killed. Raises EngineStartError, with
        the end of the log, if the server exits or exceeds its start timeout, and PortHeldError if another server
        answers on its port.
        """
        return asyncio.run(self._wait_healthy(on_progress))

    async def _wait_healthy(self, on_progress: ProgressCallback | None) -> float:
        """Probe the server until it answers as ``_accepts`` requires, then warm it up; see ``wait_healthy``."""
        from megatron_dppo.engine.client import HttpClient

        path, key = self._probe
        next_progress = 0.0
        stranger = _Stranger(f"{self.port_key}: {self.host}:{self.port}{path}")
        warm_up: asyncio.Task[None] | None = None
        async with HttpClient(self.url, key) as client:
            while True:
                waited_s = time.monotonic() - self._started_at
                code = self.poll()
                if code is not None and not stranger.fault:
                    ending = processes.describe_exit(code, self.last_exception())
                    self._give_up(f"{self.title} {ending} (after {waited_s:.0f} s)")
                if warm_up is None:
                    with contextlib.suppress(EngineLostError):
                        answer = await client.exchange("GET", path, timeout_s=_PROBE_SECONDS)
                        if self._accepts(answer):
                            warm_up = asyncio.create_task(self._warm_up(client))
                        else:
                            stranger.note(answer, waited_s)
                elif warm_up.done():
                    error = warm_up.exception()
                    if error is None:
                        return waited_s
                    self._give_up(f"{self.title} does not answer its first request: {error}")
                # Another program answers on the port. If this server has ended, the taken port is the reason.
                if stranger.fault and (code is not None or stranger.holds_port(waited_s)):
                    self.kill()
                    raise PortHeldError(stranger.fault)
                if waited_s > self._start_timeout:
                    self._give_up(f"{self.title} was not healthy after {self._start_timeout:.0f} s")
                if on_progress is not None and waited_s >= next_progress:
                    stage = self._stage() if warm_up is None else _WARM_UP_STAGE
                    on_progress(waited_s, stage)
                    next_progress = waited_s + _PROGRESS_SECONDS
                if warm_up is None:
                    await asyncio.sleep(_POLL_SECONDS)
                else:
                    await asyncio.wait([warm_up], timeout=_POLL_SECONDS)

    def poll(self) -> int | None:
        """Return None while the server runs, then its exit code (negative: the signal that ended it)."""
        if self._process is None:
            return None
        return self._process.poll()

    def stop(self, grace_s: float = 10.0) -> None:
        """Send SIGTERM, so that the server finishes its requests and ends, and SIGKILL after ``grace_s`` seconds."""
        if self._process is not None:
            self._process.stop(grace_s)
        give_back_port(self.port)

    def kill(self) -> None:
        """Send SIGKILL to the server and every descendant, and wait for their end. A second call does nothing."""
        if self._process is not None:
            self._process.kill()
            remove_left_behind()
        give_back_port(self.port)

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        return processes.tail(self.log_path, lines)

    def last_exception(self) -> str | None:
        """Return type and message of the last Python exception in this server's log; None if there is no exception."""
        return last_exception_of(self.log_path)

    def _give_up(self, reason: str) -> NoReturn:
        log = self.log_tail()
        self.kill()
        raise EngineStartError(f"{reason}; the end of {self.log_path}:\n{processes.quote(log)}")


def last_exception_of(log_path: Path) -> str | None:
    """Return type and message of the last Python exception that the newest incarnation wrote to a server's log.

    Returns None if the log has no exception of this incarnation.
    """
    newest_lines: list[str] = []
    for line in processes.tail(log_path, _EXCEPTION_LINES).splitlines():
        if line.startswith(_LOG_START):
            newest_lines = []
        newest_lines.append(line)
    return processes.last_exception("\n".join(newest_lines))


class _Stranger:
    """Another server that may hold this server's port.

    ``fault`` is the message about its answers to the probe; empty: no answer yet.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._first_answer_s = 0.0
        self.fault = ""

    def note(self, answer: Answer, time_s: float) -> None:
        """Note an answer that rejected the probe. A 5xx may come from this server while it starts."""
        if answer.status >= 500:
            return
        if not self.fault:
            self._first_answer_s = time_s
        program = answer.headers.get("Server", "unnamed")
        self.fault = (
            f"{self._address} is answered by another server ({program}, status {answer.status}); "
            "end that server, or use another port"
        )

    def holds_port(self, time_s: float) -> bool:
        """Whether the other server has answered for so long that it holds the port.

        ``time_s``: seconds since the start.
        """
        return bool(self.fault) and time_s > self._first_answer_s + _FOREIGN_SECONDS


_STAGE_LINES = 400
"""Lines at the end of the log that are searched for the stage of the start."""
_WARM_UP_PROMPT = tuple(range(1, 9))
"""Ids that every model's vocabulary has."""
_STAGES = (
    ("Load weight begin", "loading weights"),
    ("Load weight end", "laying out its cache"),
    ("CUDA graph begin", "capturing CUDA graphs"),
)
"""The text that SGLang logs at the beginning of each stage of its start, in order, and the stage in words."""


class EngineProcess(ChildServer):
    """One SGLang server.

    The file with its options is written beside ``log_path``. ``host`` is the address that the server listens on, or the
    hosts of a server over several hosts; None: ``engine.host``. If ``api_key`` is None, generation needs no key.
    ``first_device`` is the first of the server's GPUs on each of its hosts. ``runtime`` starts one process on each
    host. Each server and each restart needs another ``seed``: two servers with one seed draw the same samples.
    """

    title = "the engine"
    port_key = "engine.port"

    def __init__(
        self,
        config: TrainConfig,
        servers: ServersSpec,
        *,
        port: int,
        log_path: Path,
        seed: int,
        api_key: str | None,
        admin_api_key: str,
        host: str | ServerHosts | None = None,
        first_device: int = 0,
        runtime: Runtime | None = None,
    ) -> None:
        hosts = host if isinstance(host, ServerHosts) else None
        listen_host = config.engine.host
        if isinstance(host, ServerHosts):
            listen_host = next(iter(host.addresses.values()))
        elif host is not None:
            listen_host = host
        self.options_path = log_path.with_suffix(".yaml")
        super().__init__(
            listen_host,
            port,
            log_path,
            config.engine.start_timeout_s,
            runtime,
            command=["-m", MODULE, "--config", str(self.options_path)],
            environment=options.server_environment(config.engine, servers, hosts),
            secrets={"api_key": api_key, "admin_api_key": admin_api_key},
            probe=("/model_info", api_key),
        )
        self._config = config
        self._options = options.server_options(
            servers, host=listen_host, port=port, seed=seed, first_device=first_device, hosts=hosts
        )

    def start(self) -> None:
        if self._process is None:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            options.write_options(self._options, self.options_path)
        super().start()

    def _stage(self) -> str:
        log = self.log_tail(_STAGE_LINES)
        reached_stages = [stage for line, stage in _STAGES if line in log]
        if reached_stages:
            return reached_stages[-1]
        return super()._stage()

    async def _warm_up(self, client: HttpClient) -> None:
        """Sample two tokens with the sampling parameters of training, and two tokens with evaluation's parameters."""
        # On GPUs the first request with new kinds of parameters compiles kernels (flashinfer's kernels for top_p < 1).
        # This blocks the scheduler for minutes. During the run the server would seem to hang.
        from megatron_dppo.engine.protocol import GenerationRequest, SamplingParams, request_body

        rollout = self._config.rollout
        evaluation = self._config.evaluation
        settings = {
            (rollout.temperature, rollout.top_p),
            (evaluation.temperature, evaluation.top_p),
        }
        columns = {}
        if rollout.topk_log_probs:
            columns = {"topk": rollout.topk_log_probs}
        for number, (temperature, top_p) in enumerate(sorted(settings)):
            sampling = SamplingParams(2, temperature, top_p, ignore_eos=True)
            request = GenerationRequest(number, _WARM_UP_PROMPT, sampling, columns)
            body = request_body([request], f"warm-up-{number}")
            await client.request("POST", "/generate", body, timeout_s=None)

    def _accepts(self, answer: Answer) -> bool:
        """Return whether the server accepts the run's key and serves the run's model."""
        if answer.status != 200:
            return False
        try:
            info = json.loads(answer.body)
        except (ValueError, RecursionError):
            # SGLang answers this path with JSON, so another program sent the answer.
            return False
        return isinstance(info, dict) and info.get("model_path") == self._options["model_path"]
