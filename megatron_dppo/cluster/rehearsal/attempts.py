"""The runs of a rehearsal: one that is stopped after its first step, and one that resumes it to its end."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_dppo.cluster.rehearsal.usage import UsageByPhase, usage_of
from megatron_dppo.config import TrainConfig
from megatron_dppo.demo.material import INTERRUPTED, run_to_the_end
from megatron_dppo.engine.options import ServerSections, server_environment
from megatron_dppo.engine.process import LIBRARIES
from megatron_dppo.launch.forked_ranks import libraries_of, shares_imports
from megatron_dppo.launch.local import cores_of_ranks, ranks_environment
from megatron_dppo.metrics.records import last_step
from megatron_dppo.system.fork_server import SharedForkServers
from megatron_dppo.system.processes import describe_exit

PhaseOf = Callable[[int], str]
"""The name of the phase in which a run is whose last recorded step is the argument (-1: none)."""
TRAIN = "megatron_dppo.train"
_LOOK_EVERY_S = 0.2
_MEASURE_EVERY_S = 4.0
_KEPT_LINES = 40
_KEY = re.compile(
    r"\b(?:run|model|head|lora|data|rollout|algorithm|reward|environment|parallel|training|optimizer|engine|sglang"
    r"|weight_sync|evaluation|checkpoint|megatron|megatron_ddp|megatron_optimizer|tracking|profile)"
    r"\.[a-z_]+(?:\.[a-z_]+)*"
)
_EXCEPTION = re.compile(r"[\w.]*Error\b.*:")
_KEYS_OF_ERRORS = {
    "VerifierError": "reward.name",
    "RewardUnavailableError": "reward.name",
    "EnvironmentFault": "environment.name",
    "DataError": "data.train",
    "ChatTemplateError": "data.prompt_template",
    "GapError": "rollout.largest_gap",
    "CheckpointError": "run.directory",
    "Engine": "sglang",
    "OutOfMemory": "training.micro_batch_tokens",
}
"""Words of an error that names no key -> the key to look at first."""


def key_of(text: str) -> str | None:
    """The recipe's key that an error names, or the one that its kind is about; None where neither is known."""
    # The last error is the cause: earlier lines are what it was before.
    for line in reversed(text.splitlines()):
        if found := _KEY.search(line):
            return found[0]
    return next((key for word, key in _KEYS_OF_ERRORS.items() if word in text), None)


@dataclass
class RehearsalRun:
    """How one start of the run ended.

    ``code``: its exit code. ``errors``: the end of its standard error and of its supervisor's log.
    """

    code: int
    seconds: float
    cpu_seconds: float
    was_stopped: bool
    errors: str

    def failure(self) -> str:
        """The reason of a failure, with the key of the recipe where one is named."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("error:")]
        reasons = reasons or [line for line in lines if _EXCEPTION.match(line)] or lines[-3:]
        return f"the run {describe_exit(self.code)}: {' '.join(reasons) or 'see its logs'}"


@dataclass
class _Watch:
    """Follows a running attempt from threads: its errors, its steps and its usage."""

    directory: Path
    phase_of: PhaseOf
    stop_after: int | None
    usage: UsageByPhase
    stop_signal: int
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    was_stopped: bool = False
    _threads: list[threading.Thread] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self, process: subprocess.Popen[bytes]) -> None:
        for act in (self._forward_errors, self._follow):
            thread = threading.Thread(target=act, args=(process,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _forward_errors(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            text = line.decode(errors="replace")
            self.lines.append(text)
            sys.stderr.write(text)
            sys.stderr.flush()

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        measured = 0.0
        while not self._ended.wait(_LOOK_EVERY_S):
            step = last_step(self.directory)
            if self.stop_after is not None and not self.was_stopped and step >= self.stop_after:
                self.was_stopped = True
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(self.stop_signal)
            if time.monotonic() - measured > _MEASURE_EVERY_S:
                # Forks of shared servers are no descendants of the run.
                self.usage.add(self.phase_of(step), usage_of(os.getpid()))
                measured = time.monotonic()


@dataclass(frozen=True)
class RunForm:
    """How a rehearsal starts its run.

    Attributes:
        command: the command line before the path of the configuration.
        stop_signal: a signal by which the run ends its step and saves a checkpoint.
        environment: variables beside this process's.
        fork_servers: import libraries once for all runs.
    """

    command: Sequence[str]
    stop_signal: int
    environment: Mapping[str, str]
    fork_servers: SharedForkServers = field(default_factory=SharedForkServers)

    def with_imports(self, servers: SharedForkServers) -> RunForm:
        """The form whose runs fork their processes from ``servers``."""
        variables = {**self.environment, **servers.variables}
        return replace(self, environment=variables, fork_servers=servers)


LOCAL = RunForm(
    (sys.executable, "-m", TRAIN),
    # The supervisor treats SIGINT as Ctrl-C.
    signal.SIGINT,
    # Ranks and servers are processes of CPUs, also on a machine with GPUs.
    {"CUDA_VISIBLE_DEVICES": ""},
)


def share_imports(config: TrainConfig, log: Path) -> SharedForkServers:
    """Import the libraries of the rehearsal's ranks and servers on this machine, once for all runs.

    ``log``: takes the output of the processes that import.
    """
    servers = SharedForkServers()
    # Variables of this process become those of the runs.
    os.environ.update(LOCAL.environment)
    sections = ServerSections.of(config).where_generated
    with log.open("wb") as file:
        if shares_imports(config.parallel.world_size, gpus=0):
            variables = ranks_environment(config.parallel.world_size, cores_of_ranks(sections))
            servers.add(libraries_of(TRAIN), variables, file.fileno())
        if sections is not None:
            servers.add([LIBRARIES], server_environment(sections), file.fileno())
    servers.wait_until_ready()
    return servers


def run_attempt(
    config: Path,
    directory: Path,
    usage: UsageByPhase,
    phase_of: PhaseOf,
    *,
    stop_after: int | None = None,
    form: RunForm = LOCAL,
) -> RehearsalRun:
    """Run ``config`` to its end.

    Args:
        config: the rehearsal's configuration.
        directory: of the run.
        usage: takes the samples.
        phase_of: names phases for the samples.
        stop_after: the step after which the run is asked to stop; None: it is not.
        form: starts and stops the run.
    """
    watch = _Watch(directory, phase_of, stop_after, usage, form.stop_signal)
    servers = form.fork_servers
    log = directory / "logs" / "supervisor.log"
    logged = log.stat().st_size if log.is_file() else 0
    began, cpu = time.monotonic(), _cpu_of_children() + servers.cpu_seconds()
    usage.begin()
    try:
        code = run_to_the_end(
            [*form.command, str(config)],
            {**os.environ, **form.environment},
            errors=subprocess.PIPE,
            started=watch.start,
            inherited=servers.descriptors,
        )
    finally:
        watch.end()
    seconds = time.monotonic() - began
    errors = "".join(watch.lines) + _text_from(log, logged)
    used = _cpu_of_children() + servers.cpu_seconds() - cpu
    return RehearsalRun(code, seconds, used, watch.was_stopped, errors)


def _text_from(path: Path, position: int) -> str:
    """Return the text of a log from ``position`` on; empty where there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def was_interrupted(attempt: RehearsalRun) -> bool:
    """Whether the user ended it, and not the rehearsal."""
    return attempt.code in INTERRUPTED and not attempt.was_stopped


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
