"""Checks of a machine before a run starts on it: GPUs, cores, open files, folders, and the servers' interpreter.

The planner checks memory.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path

from megatron_dppo.config.errors import given
from megatron_dppo.config.machine import Machine
from megatron_dppo.config.schema import EngineConfig, RolloutConfig, TrainConfig
from megatron_dppo.spec import Roles
from megatron_dppo.system.files import folder_fault
from megatron_dppo.system.interfaces import InterfaceError, interface_address
from megatron_dppo.system.network import resolve
from megatron_dppo.system.programs import ProgramError, output_of

_LEAST_OPEN_FILES = 128
"""Files and sockets that a process of a small run has open at the same time, plus a reserve."""

_PYTHON_TIMEOUT_S = 60.0
_MISSING_PACKAGES_PROGRAM = (
    "import importlib.util as u, json, sys;"
    "print(json.dumps([m for m in sys.argv[1:] if u.find_spec(m) is None]))"
)
"""Program that takes names of packages, and prints as JSON the names that its interpreter can't find."""


def passed_variable_faults(config: TrainConfig) -> Iterator[str]:
    """Report variables that processes of the run should receive and that are not set here."""
    for key, names in config.passed_variables().items():
        for name in names:
            if name not in os.environ:
                yield f"{key}: got {given(name)}, which is not set, expected a variable of this environment"


def least_open_files(rollout: RolloutConfig) -> int:
    """Return the files and sockets that a process needs: a rank that generates has one for each request in flight."""
    if rollout.replays:
        return _LEAST_OPEN_FILES
    return _LEAST_OPEN_FILES + rollout.max_concurrent_requests


def machine_faults(config: TrainConfig, roles: Roles, machine: Machine) -> Iterator[str]:
    """Yield a line for each reason why a run with all its ranks and servers can't work on ``machine``.

    ``roles``: the processes of the run.
    """
    update_folder = config.weight_sync.update_folder
    yield from _interface_faults(config.parallel.interface)
    folders = {"run.directory": Path(config.run.directory)}
    if not config.rollout.replays:
        yield from _server_faults(config.engine, roles)
        if update_folder is not None:
            folders["weight_sync.directory"] = update_folder
    yield from passed_variable_faults(config)
    for key, folder in folders.items():
        if fault := folder_fault(folder):
            yield f"{key}: {fault}, expected a folder of your own"
    least = least_open_files(config.rollout)
    if machine.open_files < least:
        yield (
            f"open files: this process may have {machine.open_files}, expected at least {least} (ulimit -n)"
        )
    if machine.gpus:
        if roles.ranks > machine.gpus:
            yield f"GPUs: {roles.ranks} ranks need one each, this machine has {machine.gpus}"
        # The limit for the processes of a core is for machines without GPUs.
        return
    processes = roles.ranks + roles.servers * roles.server_devices
    processes += sum(teacher.servers * teacher.server_devices for teacher in roles.teachers)
    max_per_core = config.run.processes_per_core
    if processes > max_per_core * machine.cores:
        yield (
            f"run.processes_per_core: got {max_per_core}, but {processes} processes of ranks and servers on "
            f"{machine.cores} cores are more, expected at least {ceil(processes / machine.cores)} or fewer ranks"
        )


def _interface_faults(interface: str | None) -> Iterator[str]:
    if interface is None:
        return
    try:
        interface_address(interface)
    except InterfaceError as error:
        yield f"parallel.interface: {error}"


def _server_faults(engine: EngineConfig, roles: Roles) -> Iterator[str]:
    """Report faults of ``engine.host`` and ``engine.python``, if the run starts servers or a router."""
    packages: list[str] = []
    if roles.servers:
        packages.append("sglang")
    if roles.router:
        packages.append("smg")
    if packages:
        yield from _host_faults(engine.host)
        yield from _python_faults(engine.python, ["megatron_dppo", *packages])


def _host_faults(host: str) -> Iterator[str]:
    """Report an address that servers and router can't listen on."""
    try:
        address = resolve(host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((address, 0))
    except OSError as error:
        yield f"engine.host: got {host!r}, expected an address of this machine ({error.strerror})"


def _python_faults(python: str | None, packages: Sequence[str]) -> Iterator[str]:
    """Report an interpreter of the servers that does not exist, or that lacks packages."""
    if python is None:
        return
    try:
        command = [python, "-c", _MISSING_PACKAGES_PROGRAM, *packages]
        missing_packages = json.loads(output_of(command, _PYTHON_TIMEOUT_S))
    except (ProgramError, ValueError):
        yield f"engine.python: got {python!r}, expected a Python interpreter"
        return
    if missing_packages:
        yield f"engine.python: got {python!r}, which lacks {', '.join(missing_packages)}"
