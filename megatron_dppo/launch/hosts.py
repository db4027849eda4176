"""A run on several hosts without a scheduler: ``megatron-dppo train CONFIG.yaml --hosts HOSTS.yaml``.

The supervisor runs on the first host and starts ranks and servers on all of them through a remote shell: ssh,
``kubectl exec``, or another command that runs a program at a host and passes its standard input on. The supervisor
watches, restarts and ends ranks and servers as on one machine. Keys travel only on the shell's standard input.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue

from pydantic import Field

from megatron_dppo.config.data_schema import Section
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.process import Runtime
from megatron_dppo.launch.forked_ranks import shares_imports
from megatron_dppo.launch.host_ranks import HostRanks
from megatron_dppo.launch.local import rank_command, supervisor_of
from megatron_dppo.launch.node_ranks import NODE_VARIABLE
from megatron_dppo.launch.placement import Allocation, Host, LaunchError, Placement, place
from megatron_dppo.launch.remote_process import MODULE, STOP, RemoteCommand, header
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.servers import ServerStarts
from megatron_dppo.launch.srun import node_command
from megatron_dppo.launch.supervisor import RankFailure
from megatron_dppo.logging import configure_logging
from megatron_dppo.spec import RunSpec
from megatron_dppo.system import processes
from megatron_dppo.system.network import is_loopback, is_of_one_host, mutual_addresses
from megatron_dppo.system.secret_variables import is_secret, split_environment, without_secrets

HOST = "{host}"
SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30"),
    *("-o", "ServerAliveInterval=15", HOST),
)
_END_S = 15.0
"""Longest wait for the end of a remote shell whose standard input was closed."""
_HOST_VARIABLES = ("HOME", "HOSTNAME", "LOGNAME", "PWD", "SHELL", "TMPDIR", "USER")
"""Variables that each host sets itself, so this process does not pass on its values."""


class HostsConfig(Section):
    """The hosts of a run. Ranks and servers fill them in this order."""

    hosts: list[str] = Field(min_length=1)
    """Names of the hosts, as the remote shell takes them. The supervisor looks up the address of each name. If other
    hosts need another address, write ``name=address``. The supervisor runs on the first host.
    """
    devices_per_host: int = Field(default=8, gt=0, le=1024)
    """Number of GPUs of each host; on hosts without GPUs, the number of ranks and servers that a host runs."""
    has_gpus: bool = True
    """Whether the devices are GPUs."""
    shell: list[str] = Field(default_factory=lambda: list(SSH))
    """Command that runs the words after it at a host and passes its standard input on. ``{host}``: the host's name."""
    python: str | None = None
    """Path of a Python on the hosts that has this package. Empty: the path of the supervisor's Python."""
    first_port: int = Field(default=21000, ge=1024, le=60000)
    """First of the run's ports on every host. Two runs on the same hosts need different first ports."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables for every rank and server, such as NCCL_SOCKET_IFNAME, added to the supervisor's variables. Ranks
    receive keys among them on standard input; servers receive only the keys in ``engine.passed_variables``.
    """

    def allocation(self) -> Allocation:
        """Return the hosts with their addresses. Raises LaunchError for a name without an address of a host."""
        names = []
        own_addresses: list[str] = []
        for entry in self.hosts:
            name, _, address = entry.partition("=")
            names.append(name)
            try:
                own_address = socket.gethostbyname(address or name)
            except OSError as error:
                raise LaunchError(
                    f"hosts: got {entry!r}, whose address can't be found ({error}); expected name=address"
                ) from error
            if not is_of_one_host(own_address):
                raise LaunchError(
                    f"hosts: got {entry!r}, with the address {own_address}, expected an address of one host"
                )
            # Several hosts of loopback are one machine on purpose, as in tests.
            if own_address in own_addresses and not is_loopback(own_address):
                earlier_entry = self.hosts[own_addresses.index(own_address)]
                raise LaunchError(
                    f"hosts: got {earlier_entry!r} and {entry!r}, both with the address {own_address}, expected each "
                    "host once: its ranks and servers would share devices and ports"
                )
            own_addresses.append(own_address)
        try:
            addresses = mutual_addresses(own_addresses)
        except OSError as error:
            raise LaunchError(
                f"hosts: got {self.hosts}, with the addresses {own_addresses}; this host has no address on the network "
                f"of the others ({error}); expected name=address"
            ) from error
        hosts = tuple(
            Host(name, address, self.devices_per_host)
            for name, address in zip(names, addresses, strict=True)
        )
        return Allocation(hosts, self.first_port)


@dataclass(frozen=True)
class RemoteShell:
    """Starts programs at hosts. ``words``: the remote shell; ``variables``: environment variables of every program."""

    words: Sequence[str]
    python: str
    variables: Mapping[str, str]

    def start(self, host: str, commands: Sequence[RemoteCommand], output: Path) -> RemoteProcess:
        """Start ``commands`` at a host; the shell's own messages are appended to ``output``."""
        words = [word.replace(HOST, host) for word in self.words]
        with open(output, "ab") as file:
            process = processes.start_process(
                [*words, self.python, "-m", MODULE],
                environment=without_secrets(os.environ),
                output=file.fileno(),
                stdin=subprocess.PIPE,
            )
        return RemoteProcess(process, header(commands))

    def command(
        self, words: Sequence[str], environment: Mapping[str, str], stdin: bytes, log: Path
    ) -> RemoteCommand:
        """Return a command for a host with the variables of ``environment``, except for variables that each host sets.

        ``environment`` has no keys, because other processes can read it. The keys are in ``stdin``. Likewise, keys
        among this shell's own variables are left out, except for a variable that ``environment`` has on purpose
        (``engine.passed_variables``).
        """
        passed_variables = {
            name: value for name, value in environment.items() if name not in _HOST_VARIABLES
        }
        own_variables = {
            name: value
            for name, value in self.variables.items()
            if name in environment or not is_secret(name, value)
        }
        variables = {**passed_variables, **own_variables}
        return RemoteCommand(
            list(words), variables, stdin.decode(), str(log.absolute()), os.getcwd()
        )


class RemoteProcess(processes.StartedProcess):
    """The remote shell of one or more commands. Its standard input stays open while the commands may run.

    A thread writes to the shell, so that no method waits until the shell reads. A shell without a connection reads
    nothing, and the first line may be longer than a pipe holds.
    """

    def __init__(self, process: subprocess.Popen[bytes], first_line: bytes) -> None:
        super().__init__(process)
        assert process.stdin is not None
        self._stdin = process.stdin
        # None closes the shell's standard input.
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self._lines.put(first_line)
        self._closed_at: float | None = None
        threading.Thread(target=self._write, daemon=True, name="remote-shell-input").start()

    def stop(self, grace_s: float) -> None:
        self._lines.put(STOP)
        self._await_end(grace_s)
        self.kill()

    def close(self) -> None:
        """Close the standard input, so that the host kills the commands; returns at once."""
        if self._closed_at is None:
            self._closed_at = time.monotonic()
            self._lines.put(None)

    def kill(self) -> None:
        """Close the standard input; return when the shell has ended. Kill a shell that does not end by itself."""
        self.close()
        assert self._closed_at is not None
        self._await_end(max(0.0, self._closed_at + _END_S - time.monotonic()))
        super().kill()

    def _await_end(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _write(self) -> None:
        # Writing fails if the shell has ended. The shell's exit code reports this end.
        with contextlib.suppress(BrokenPipeError), self._stdin as pipe:
            while (line := self._lines.get()) is not None:
                pipe.write(line)
                pipe.flush()


class RemoteLauncher(processes.Launcher):
    """Starts a server at ``host``."""

    def __init__(self, shell: RemoteShell, host: Host) -> None:
        self._shell = shell
        self._host = host

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: bytes
    ) -> processes.StartedProcess:
        server = self._shell.command(command, environment, stdin, log)
        return self._shell.start(self._host.name, [server], log)

    def require_free_port(self, address: str, port: int) -> None:
        """Do nothing: ports of another host can't be tested from here, so the command reports a used port."""


class RemoteRanks(HostRanks):
    """The ranks of a run on several hosts; see Ranks.

    Args:
        command: command of every rank.
        directory: the run's directory.
        placement: the run's placement.
        shell: starts the ranks of a host.
        variables: environment variables for every rank, added to this process's variables.
        forks: whether one process on each host forks the host's ranks, so that the ranks share their imports.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: RunDirectory,
        placement: Placement,
        shell: RemoteShell,
        variables: Mapping[str, str],
        *,
        forks: bool,
    ) -> None:
        local_size = {"LOCAL_WORLD_SIZE": str(placement.ranks_per_host)}
        super().__init__(directory, placement, {**local_size, **variables})
        self._command = command
        self._shell = shell
        self._forks = forks
        self._processes: list[RemoteProcess] = []
        """The remote shell of each host."""

    def start(self, number: int = 1) -> None:
        environment = self._begin(number)
        self._processes = []
        for node, host in enumerate(self._placement.rank_hosts):
            commands = self._commands(node, environment)
            process = self._shell.start(host.name, commands, self._node_output(node))
            self._processes.append(process)

    def ended(self) -> bool:
        return all(process.poll() == 0 for process in self._processes)

    def failures(self, grace_s: float) -> list[RankFailure]:
        """See Ranks. There is no further wait: a host ends all its ranks at the first failure."""
        failures = []
        for node, process in enumerate(self._processes):
            code = process.poll()
            if code:
                per_host = self._placement.ranks_per_host
                failures.append(self._failure(node, per_host, code, self._node_output(node)))
        return sorted(failures, key=attrgetter("failed_at"))

    def kill(self) -> None:
        # Close all shells before waiting for one of them.
        for process in self._processes:
            process.close()
        for process in self._processes:
            process.kill()

    def _commands(self, node: int, environment: Mapping[str, str]) -> list[RemoteCommand]:
        """Return the commands of a host: a single command that forks all its ranks, or a command for each rank."""
        per_host = self._placement.ranks_per_host
        logs = self._directory.logs.absolute()
        plain, secrets = split_environment({**environment, **self._shell.variables})
        if self._forks:
            words = node_command(self._command, per_host, logs)
            variables = {**plain, NODE_VARIABLE: str(node)}
            return [self._shell.command(words, variables, secrets, self._node_output(node))]
        commands = []
        for local_rank in range(per_host):
            rank = node * per_host + local_rank
            variables = {**plain, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            output = self._directory.rank_output(rank)
            commands.append(self._shell.command(self._command, variables, secrets, output))
        return commands

    def _node_output(self, node: int) -> Path:
        return self._directory.logs / f"node{node}.out"


def run_on_hosts(config: TrainConfig, spec: RunSpec, hosts: HostsConfig, module: str) -> int:
    """Run ``config`` on ``hosts`` and return the exit code. The first host is this machine.

    Raises LaunchError if the roles do not fit, a name has no address, or the run's folder is taken.
    """
    placement = place(spec.roles, hosts.allocation())
    python = hosts.python or sys.executable
    shell = RemoteShell(hosts.shell, python, hosts.environment)
    with RunDirectory(config.run.directory) as directory:
        configure_logging(directory.path, None)
        print(placement.table(), flush=True)
        server_python = config.engine.python or python
        gpus_per_host = hosts.devices_per_host if hosts.has_gpus else 0

        def runtime_at(places: Sequence[Host]) -> Runtime:
            if len(places) > 1:
                raise LaunchError(
                    "sglang.tp_size: a server over several hosts needs Slurm; expected at most "
                    f"devices_per_host = {hosts.devices_per_host}"
                )
            return Runtime(RemoteLauncher(shell, places[0]), server_python)

        starts = None
        if not spec.rollout.replays:
            starts = ServerStarts(runtime_at, placement.master_address)
        ranks_with = partial(
            RemoteRanks,
            rank_command(module, directory, python),
            directory,
            placement,
            shell,
            forks=shares_imports(placement.ranks_per_host, gpus_per_host),
        )
        return supervisor_of(config, spec, directory, placement, starts, ranks_with).run().code
