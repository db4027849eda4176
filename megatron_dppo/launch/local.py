"""A run on this machine: the placement of its processes, and the supervisor that starts them."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron_dppo.config.machine import Machine
from megatron_dppo.config.schema import PolicyConfig, RunConfig, TrainConfig
from megatron_dppo.engine.process import Runtime, local_launcher
from megatron_dppo.fleet.supervision import RestartBudget
from megatron_dppo.launch.placement import Allocation, Host, LaunchError, Placement, place
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.servers import ServerStarts, supervised_fleet
from megatron_dppo.launch.supervisor import (
    RankFailure,
    RankRestarts,
    Ranks,
    Supervisor,
    failed_at,
    keep_previous,
)
from megatron_dppo.logging import TERMINAL_VARIABLE, configure_logging, failure_mark
from megatron_dppo.metrics.records import RECORDS_FILE
from megatron_dppo.spec import Roles, RunSpec
from megatron_dppo.system import interfaces, ports
from megatron_dppo.system.lease import NONCE_VARIABLE, START_VARIABLE
from megatron_dppo.system.processes import feed, kill_families, start_process
from megatron_dppo.system.scratch import remove_left_behind, remove_shared_tensors
from megatron_dppo.system.secret_variables import split_environment

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_ENDING_S = 10.0
"""Further wait for ranks that have marked their failure and still release their resources."""
_FIRST_RESTART_PAUSE_S = 0.25
_CERTAIN_CAUSES = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
"""Exit codes of a rank that was itself at fault. The failure of another rank never causes these codes."""


def run_local(config: PolicyConfig, spec: RunSpec | None, module: str, machine: Machine) -> int:
    """Run the servers, their router and the ranks on this machine; return the run's exit code.

    Each of ``parallel.world_size`` ranks runs ``python -m <module> <run.directory>/config.yaml``.

    Args:
        config: the configuration. The function writes it to ``config.yaml``.
        spec: the facts of a run of reinforcement learning; None for a supervised run.
        module: module that a rank runs.
        machine: resources of this machine.

    Raises:
        LaunchError: the run's folder or a configured port is taken, or the machine has too few GPUs.
    """
    roles = Roles.of(config)
    ranks = roles.ranks
    placement = local_placement(config, roles, machine)
    with RunDirectory(config.run.directory) as directory:
        configure_logging(directory.path, None)
        log.info(
            "starting %s; their logs are in %s",
            describe_processes(roles.servers + roles.teacher_servers, ranks),
            directory.logs,
        )
        host = _master_host(config.parallel.interface)
        port = _pinned_master_port(host)
        for server in placement.servers:
            if server.port is not None:
                _require_free("engine.port", server.host.address, server.port)
        outputs = [directory.rank_output(rank) for rank in range(ranks)]
        cores = cores_of_ranks(roles)
        # Import here: ``forked_ranks`` imports this module.
        from megatron_dppo.launch.forked_ranks import ForkedRankGroup, shares_imports

        group = ForkedRankGroup if shares_imports(ranks, machine.gpus) else RankGroup
        command = rank_command(module, directory)
        ranks_with = partial(group, command, outputs, port, master_host=host, cores=cores)
        starts = _server_starts(config, placement)
        return supervisor_of(config, spec, directory, placement, starts, ranks_with).run().code


def _server_starts(config: PolicyConfig, placement: Placement) -> ServerStarts | None:
    """Return how servers start on this machine; None for a run without servers."""
    if not isinstance(config, TrainConfig) or config.rollout.replays:
        return None
    python = config.engine.python or sys.executable
    if shutil.which(python) is None:
        raise LaunchError(f"engine.python: got {python!r}, expected a Python interpreter")
    runtime = Runtime(local_launcher(config.engine), python)
    return ServerStarts(lambda hosts: runtime, placement.master_address)


def supervisor_of(
    config: PolicyConfig,
    spec: RunSpec | None,
    directory: RunDirectory,
    placement: Placement,
    starts: ServerStarts | None,
    ranks_with: Callable[[Mapping[str, str]], Ranks],
) -> Supervisor:
    """Write the configuration and its facts, and return the supervisor of the run, which has started nothing.

    Args:
        config: the configuration.
        spec: the facts of a run of reinforcement learning; None for a supervised run.
        directory: the run's folder, under the run's lease.
        placement: the hosts of ranks, servers and router.
        starts: how servers start; None for a run without servers.
        ranks_with: takes the environment variables that every rank needs, and returns the ranks.
    """
    variables = {NONCE_VARIABLE: directory.lease.fence.nonce}
    fleet = None
    if starts is not None:
        assert isinstance(config, TrainConfig)
        assert spec is not None
        fleet = supervised_fleet(config, spec, directory, placement, starts)
        variables |= fleet.rank_variables
    directory.write_config(config)
    if spec is not None:
        directory.write_spec(spec)
    restarts = _rank_restarts(config.run, directory, Roles.of(config))
    lease = directory.lease
    return Supervisor(ranks_with(variables), fleet, lambda: lease.loss, restarts=restarts)


def _rank_restarts(run: RunConfig, directory: RunDirectory, roles: Roles) -> RankRestarts:
    """Return the object that restarts the ranks of the run in ``directory``, under the run's lease."""

    def begin(number: int) -> None:
        directory.lease.fence_other_starts(number)
        directory.fleet.begin_ranks(number)
        # A colocated trainer allows servers to start once it has left the devices.
        directory.fleet.allow_starts(not roles.colocated)
        remove_left_behind()

    budget = RestartBudget(
        run.max_restarts, run.restart_window_s, first_pause_s=_FIRST_RESTART_PAUSE_S
    )
    # The run makes progress if its file of metrics grows.
    progress = partial(_size_of, directory.path / RECORDS_FILE)
    return RankRestarts(budget, begin, progress)


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def local_placement(config: PolicyConfig, roles: Roles, machine: Machine) -> Placement:
    """Assign this machine's GPUs to ranks and servers. Raises PlacementError if there are too few GPUs."""
    address = LOOPBACK
    # None: without GPUs, any number of processes share the cores.
    devices = machine.gpus or None
    if isinstance(config, TrainConfig) and not config.rollout.replays:
        address = config.engine.host
        if config.engine.device == "cpu":
            devices = None
    host = Host("this machine", address, devices)
    return place(roles, Allocation((host,)))


def describe_processes(servers: int, ranks: int) -> str:
    """Return the processes of a run in words, such as ``the engine and 2 ranks``."""
    trainer = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if servers == 0:
        return trainer
    if servers == 1:
        return f"the engine and {trainer}"
    return f"{servers} servers and {trainer}"


def rank_command(
    module: str, directory: RunDirectory, python: str = sys.executable
) -> Sequence[str]:
    return [python, "-m", module, str(directory.config)]


def cores_of_ranks(roles: Roles) -> int:
    """Return the number of cores that the ranks of this machine share. They leave a core to each generating server.

    The threads of a rank's parallel loop spin until the last thread has finished. With one core too few, one thread
    waits for a core in every loop, and all other threads wait for this thread.
    """
    return len(os.sched_getaffinity(0)) - roles.generating


def ranks_environment(ranks: int, cores: int) -> dict[str, str]:
    """Return the variables of this machine's ranks that do not depend on the run."""
    threads = max(1, cores // ranks)
    # An OMP_NUM_THREADS of the user replaces this number of threads.
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "PYTHONUNBUFFERED": "1",
    }


def _master_host(interface: str | None) -> str:
    """Return the address of the ranks' rendezvous: the address of ``interface``, or loopback for None."""
    try:
        if interface is None:
            return LOOPBACK
        return interfaces.interface_address(interface)
    except interfaces.InterfaceError as error:
        raise LaunchError(f"parallel.interface: {error}") from error


def _pinned_master_port(host: str) -> int | None:
    """Return the port of the ranks' rendezvous from MASTER_PORT; None: each start takes a free port."""
    pinned = os.environ.get("MASTER_PORT")
    if pinned is None:
        return None
    if not pinned.isdigit():
        raise LaunchError(f"MASTER_PORT: got {pinned!r}, expected a port number")
    _require_free("MASTER_PORT", host, int(pinned))
    return int(pinned)


def _require_free(key: str, host: str, port: int) -> None:
    try:
        ports.require_free_port(host, port)
    except ports.PortTakenError as error:
        raise LaunchError(
            f"{key}: {error}; leave {key} out for a free one, or end what listens there"
        ) from error


class RankGroup:
    """The ranks of one machine: processes that run ``command`` with different variables of torch.distributed.

    Rank 0 also receives this process's standard output, for its log and progress bars. Variables that hold keys reach
    a rank on its standard input.

    Args:
        command: the command of every rank.
        outputs: file of each rank for its standard output and error.
        master_port: port that rank 0 listens on; None: each start takes a free port.
        variables: environment variables for every rank, added to this process's variables.
        master_host: address that rank 0 listens on.
        cores: number of cores that the ranks share; None: all cores of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        outputs: Sequence[Path],
        master_port: int | None,
        variables: Mapping[str, str] | None = None,
        *,
        master_host: str = LOOPBACK,
        cores: int | None = None,
    ) -> None:
        self._command = command
        self._outputs = outputs
        self._cores = len(os.sched_getaffinity(0)) if cores is None else cores
        self._master_host = master_host
        self._master_port = master_port
        self._variables = dict(variables or {})
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, number: int = 1) -> None:
        self._processes.clear()
        variables = self.start_variables(number)
        for rank, path in enumerate(self._outputs):
            keep_previous(path)
            environment = (
                self.environment() | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            with path.open("wb") as file, terminal_of(rank) as terminal:
                if terminal is not None:
                    environment[TERMINAL_VARIABLE] = str(terminal)
                plain, secrets = split_environment(environment)
                process = start_process(
                    self._command,
                    output=file.fileno(),
                    environment=plain,
                    stdin=subprocess.PIPE,
                    inherited=() if terminal is None else (terminal,),
                )
            self._processes.append(process)
            feed(process, secrets)

    def start_variables(self, number: int) -> dict[str, str]:
        """Return the variables that differ between starts: the ranks' rendezvous and the start's number."""
        port = self._master_port or ports.free_port(self._master_host)
        return {
            "MASTER_ADDR": self._master_host,
            "MASTER_PORT": str(port),
            START_VARIABLE: str(number),
        }

    def environment(self) -> dict[str, str]:
        """Return the variables that all ranks have in every start."""
        return {**ranks_environment(len(self._outputs), self._cores), **self._variables}

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def failures(self, grace_s: float) -> list[RankFailure]:
        if not any(self.codes()):
            return []
        # When a rank fails, the other ranks fail in their collectives, and may exit before this rank. So wait for all
        # ranks, and wait longer for a rank that has marked its failure and still runs: the likely cause is the rank
        # with the earliest mark.
        has_certain_cause = any(code in _CERTAIN_CAUSES for code in self.codes())
        if grace_s > 0 and not has_certain_cause:
            deadline = time.monotonic() + grace_s
            while None in self.codes() and time.monotonic() < deadline:
                time.sleep(0.05)
            while self._has_failing_rank() and time.monotonic() < deadline + _ENDING_S:
                time.sleep(0.05)
        failures = [
            RankFailure(rank, code, path, failed_at(path))
            for rank, (code, path) in enumerate(zip(self.codes(), self._outputs, strict=True))
            if code
        ]
        return sorted(failures, key=lambda failure: failure.failed_at)

    def _has_failing_rank(self) -> bool:
        """Return whether a rank has marked its failure and has not exited yet."""
        for code, path in zip(self.codes(), self._outputs, strict=True):
            if code is None and failure_mark(path).exists():
                return True
        return False

    def ended(self) -> bool:
        return all(code == 0 for code in self.codes())

    def ask_to_stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def clear(self) -> None:
        """Kill the ranks and their descendants; return when they have ended."""
        self.kill()

    def kill(self) -> None:
        """Kill the ranks and their descendants; return when they have ended."""
        kill_families([process for process in self._processes if process.poll() is None])
        remove_shared_tensors(process.pid for process in self._processes)


@contextmanager
def terminal_of(rank: int) -> Iterator[int | None]:
    """Yield a duplicate of this process's standard output for rank 0, None for other ranks."""
    if rank > 0 or sys.stdout is None:
        yield None
        return
    descriptor = os.dup(sys.stdout.fileno())
    try:
        yield descriptor
    finally:
        os.close(descriptor)
