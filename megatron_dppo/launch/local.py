"""A configured run on this machine: which processes it takes, and the supervisor over them."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.config.machine import Machine
from megatron_dppo.config.schema import PolicyConfig, TrainConfig
from megatron_dppo.engine.child_server import Runtime
from megatron_dppo.launch.errors import LaunchError
from megatron_dppo.launch.placement import Roles, place
from megatron_dppo.launch.places import Allocation, Host, Placement
from megatron_dppo.launch.ranks import LOOPBACK, RankGroup
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.servers import Grounds, supervised_fleet
from megatron_dppo.launch.supervisor import Supervisor
from megatron_dppo.logging import configure_logging
from megatron_dppo.system.fence import NONCE_VARIABLE
from megatron_dppo.system.interfaces import InterfaceError, interface_address
from megatron_dppo.system.ports import PortTakenError, free_port, require_free_port

log = logging.getLogger(__name__)


def run_local(config: PolicyConfig, module: str, machine: Machine) -> int:
    """Run ``python -m <module> <run.directory>/config.yaml`` as ``parallel.world_size`` ranks here;
    the exit code.

    Starts its servers and their router too, where the run generates. Raises LaunchError where the
    folder or a port that was asked for is taken, or the machine has too few GPUs.
    """
    placement = local_placement(config, machine)
    python = sys.executable
    if generates(config):
        python = config.engine.python or python
        if shutil.which(python) is None:
            raise LaunchError(f"engine.python: got {python!r}, expected a Python interpreter")
    with RunDirectory(config.run.directory) as directory:
        configure_logging(directory.path, None)
        log.info("starting %s; their logs are in %s", processes(config), directory.path / "logs")
        host = _master_host(config)
        port = _master_port(host)
        _require_free_ports(placement)
        fleet = None
        if generates(config):
            runtime = Runtime(python=python)
            grounds = Grounds(lambda hosts: runtime, placement.master_address)
            fleet = supervised_fleet(config, directory, placement, grounds)
        directory.write_config(resolved_yaml(config))
        lease = directory.lease
        found = {} if fleet is None else fleet.rank_variables
        variables = {NONCE_VARIABLE: lease.fence.nonce, **found}
        outputs = rank_outputs(config, directory)
        command = rank_command(module, directory)
        ranks = RankGroup(command, outputs, port, variables, master_host=host)
        return Supervisor(ranks, fleet, lambda: lease.taken_over).run().code


def local_placement(config: PolicyConfig, machine: Machine) -> Placement:
    """Who gets which GPU of this machine. Raises PlacementError where there are too few."""
    address, gpus = LOOPBACK, machine.gpus or None
    if isinstance(config, TrainConfig):
        address = config.engine.host
        gpus = None if config.engine.device == "cpu" else gpus
    return place(Roles.of(config), Allocation((Host("this machine", address, gpus),)))


def processes(config: PolicyConfig) -> str:
    """What a run starts, in words: ``the engine and 2 ranks``."""
    size = config.parallel.world_size
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    if not generates(config) or not config.engine.started:
        return ranks
    servers = config.engine.started
    return f"{'the engine' if servers == 1 else f'{servers} servers'} and {ranks}"


def generates(config: PolicyConfig) -> TypeGuard[TrainConfig]:
    """Whether a run has servers, its own or others'."""
    return isinstance(config, TrainConfig) and config.rollout.replay_from is None


def rank_command(
    module: str, directory: RunDirectory, python: str = sys.executable
) -> Sequence[str]:
    """The program of every rank."""
    return [python, "-m", module, str(directory.config)]


def rank_outputs(config: PolicyConfig, directory: RunDirectory) -> list[Path]:
    """A file for each rank's standard output and error."""
    return [directory.rank_output(rank) for rank in range(config.parallel.world_size)]


def _master_host(config: PolicyConfig) -> str:
    """The address on which the ranks meet: that of ``parallel.interface``, else loopback."""
    interface = config.parallel.interface
    try:
        return LOOPBACK if interface is None else interface_address(interface)
    except InterfaceError as error:
        raise LaunchError(f"parallel.interface: {error}") from error


def _master_port(host: str) -> int:
    """The port on which the ranks meet: MASTER_PORT of the environment, else a free one."""
    pinned = os.environ.get("MASTER_PORT")
    if pinned is None:
        return free_port(host)
    if not pinned.isdigit():
        raise LaunchError(f"MASTER_PORT: got {pinned!r}, expected a port number")
    _require_free("MASTER_PORT", host, int(pinned))
    return int(pinned)


def _require_free_ports(placement: Placement) -> None:
    for server in placement.servers:
        if server.port is not None:
            _require_free("engine.port", server.host.address, server.port)


def _require_free(key: str, host: str, port: int) -> None:
    try:
        require_free_port(host, port)
    except PortTakenError as error:
        raise LaunchError(
            f"{key}: {error}; leave {key} out for a free one, or end what listens there"
        ) from error
