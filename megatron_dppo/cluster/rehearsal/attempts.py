"""The two runs of a rehearsal: the first run is stopped after one step, the second run resumes and ends normally."""

from __future__ import annotations

import contextlib
import os
import re
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
from megatron_dppo.demo.material import INTERRUPTED_CODES, run_to_the_end
from megatron_dppo.launch import forked_ranks
from megatron_dppo.logging import INTERRUPTED, LOGS_FOLDER
from megatron_dppo.metrics.records import last_step
from megatron_dppo.system.fork_server import SharedForkServers
from megatron_dppo.system.processes import describe_exit

PhaseOf = Callable[[int], str]
"""Function from a run's last recorded step (-1 before the first record) to the name of the run's present phase."""
_LOOK_EVERY_S = 0.2
_MEASURE_EVERY_S = 4.0
_KEPT_LINES = 40
_KEY = re.compile(rf"\b(?:{'|'.join(TrainConfig.model_fields)})\.[a-z_]+(?:\.[a-z_]+)*")
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
"""Text in an error that names no key -> the key that is the likely cause."""


def key_of(text: str) -> str | None:
    """Return the recipe's key that an error names, or else the key for the error's class; None for any other error."""
    # Search from the end: the last error is the cause.
    for line in reversed(text.splitlines()):
        if match := _KEY.search(line):
            return match[0]
    for word, key in _KEYS_OF_ERRORS.items():
        if word in text:
            return key
    return None


@dataclass
class RehearsalRun:
    """The result of one start of the rehearsal's run.

    Attributes:
        code: the exit code.
        seconds: wall-clock seconds.
        cpu_seconds: processor seconds of the run's processes.
        was_stopped: whether the rehearsal stopped the run.
        errors: the last lines of standard error, and what this start wrote to its supervisor's log.
    """

    code: int
    seconds: float
    cpu_seconds: float
    was_stopped: bool
    errors: str

    @property
    def has_failed(self) -> bool:
        """Whether the run ended with an error. A run that the rehearsal stopped has not failed."""
        return self.code != 0 and not (self.was_stopped and self.code == INTERRUPTED)

    @property
    def was_interrupted(self) -> bool:
        """Whether the user, and not the rehearsal, ended the run."""
        return self.code in INTERRUPTED_CODES and not self.was_stopped

    def failure(self) -> str:
        """Describe the failure by the error lines of the run, or by its last lines."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("error:")]
        if not reasons:
            reasons = [line for line in lines if _EXCEPTION.match(line)]
        if not reasons:
            reasons = lines[-3:]
        return f"the run {describe_exit(self.code)}: {' '.join(reasons) or 'see its logs'}"


@dataclass(frozen=True)
class PlannedRun:
    """One of the two runs of a rehearsal.

    Attributes:
        label: name of the rehearsal's phase.
        phase_of: names the phase of a sample.
        stop_after: the step after which the run is stopped; None: never.
    """

    label: str
    phase_of: PhaseOf
    stop_after: int | None = None


@dataclass
class _Watch:
    """Threads that follow a running attempt: they copy its errors, stop it after a step and measure its usage.

    Attributes:
        planned: the run.
        directory: folder of the run.
        usage: stores the samples.
        stop_signal: the signal that stops the run.
        error_lines: the last lines of the run's standard error.
        was_stopped: whether the run was stopped.
    """

    planned: PlannedRun
    directory: Path
    usage: UsageByPhase
    stop_signal: int
    error_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    was_stopped: bool = False
    _threads: list[threading.Thread] = field(default_factory=list)
    _has_ended: threading.Event = field(default_factory=threading.Event)

    def start(self, process: subprocess.Popen[bytes]) -> None:
        for follow in (self._forward_errors, self._follow_steps):
            thread = threading.Thread(target=follow, args=(process,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join()

    def _forward_errors(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            text = line.decode(errors="replace")
            self.error_lines.append(text)
            sys.stderr.write(text)
            sys.stderr.flush()

    def _follow_steps(self, process: subprocess.Popen[bytes]) -> None:
        last_sample = 0.0
        stop_after = self.planned.stop_after
        while not self._has_ended.wait(_LOOK_EVERY_S):
            step = last_step(self.directory)
            if stop_after is not None and not self.was_stopped and step >= stop_after:
                self.was_stopped = True
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(self.stop_signal)
            if time.monotonic() - last_sample > _MEASURE_EVERY_S:
                # Measure the descendants of this process: forks of shared fork servers are no descendants of the run.
                self.usage.add(self.planned.phase_of(step), usage_of(os.getpid()))
                last_sample = time.monotonic()


@dataclass(frozen=True)
class RunForm:
    """How a rehearsal starts its run.

    Attributes:
        command: the command line before the path of the configuration.
        stop_signal: the signal that makes the run end its step and save a checkpoint.
        environment: environment variables in addition to the variables of this process.
        fork_servers: fork servers that have imported the libraries for all runs.
    """

    command: Sequence[str]
    stop_signal: int
    environment: Mapping[str, str]
    fork_servers: SharedForkServers = field(default_factory=SharedForkServers)

    def with_imports(self, servers: SharedForkServers) -> RunForm:
        """Return a copy whose runs fork their processes from ``servers``."""
        variables = {**self.environment, **servers.variables}
        return replace(self, environment=variables, fork_servers=servers)


LOCAL = RunForm(
    (sys.executable, "-m", forked_ranks.TRAIN),
    # The supervisor treats SIGINT as Ctrl-C.
    signal.SIGINT,
    # Ranks and servers run on CPUs, also on a machine with GPUs.
    {"CUDA_VISIBLE_DEVICES": ""},
)


def share_imports(config: TrainConfig, log: Path) -> SharedForkServers:
    """Start fork servers that import the libraries of ranks and servers on this machine, once for all runs.

    ``log``: file for the output of the fork servers.
    """
    servers = SharedForkServers()
    # The fork servers inherit the variables of this process, and need the variables of the runs.
    os.environ.update(LOCAL.environment)
    with log.open("wb") as file:
        forked_ranks.share_imports(servers, config, file.fileno())
    servers.wait_until_ready()
    return servers


def run_attempt(
    planned: PlannedRun, config: Path, directory: Path, usage: UsageByPhase, form: RunForm = LOCAL
) -> RehearsalRun:
    """Run ``config`` until it ends or is stopped.

    Args:
        planned: the run.
        config: path of the rehearsal's configuration.
        directory: folder of the run.
        usage: stores the samples of memory and processor time.
        form: how the run is started and stopped.
    """
    watch = _Watch(planned, directory, usage, form.stop_signal)
    servers = form.fork_servers
    log = directory / LOGS_FOLDER / "supervisor.log"
    log_size_before = log.stat().st_size if log.is_file() else 0
    start_time = time.monotonic()
    cpu_before = _cpu_of_children() + servers.cpu_seconds()
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
    seconds = time.monotonic() - start_time
    errors = "".join(watch.error_lines) + _text_from(log, log_size_before)
    cpu_seconds = _cpu_of_children() + servers.cpu_seconds() - cpu_before
    return RehearsalRun(code, seconds, cpu_seconds, watch.was_stopped, errors)


def _text_from(path: Path, position: int) -> str:
    """Return the text of a log from ``position`` on; empty if there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _cpu_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system
