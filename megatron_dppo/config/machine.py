"""Checks of a machine's GPUs, cores and open files before a run starts on it. The planner checks memory."""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import subprocess
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from megatron_dppo.config.errors import given
from megatron_dppo.config.forwarded import SGLANG, OptionFact, is_blockwise
from megatron_dppo.config.schema import EngineConfig, TrainConfig
from megatron_dppo.model.engine_layout import server_ranks
from megatron_dppo.system.files import folder_fault
from megatron_dppo.system.gpus import has_hopper, visible_gpus
from megatron_dppo.system.interfaces import InterfaceError, interface_address
from megatron_dppo.system.network import resolve

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_faults(strategy: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Report expandable segments if ``weight_sync.strategy`` is tensor: CUDA IPC can't share them with SGLang."""
    variable = expandable_segments(environment)
    if variable is not None and strategy == "tensor":
        yield (
            f"{variable}: got {environment[variable]!r} with weight_sync.strategy tensor, expected no "
            "expandable_segments: an engine can't open such memory by a CUDA IPC handle"
        )


def set_allocator(strategy: str | None, environment: MutableMapping[str, str]) -> None:
    """Make a trainer rank's torch allocate expandable segments, unless the user has set one of ``ALLOCATOR_VARIABLES``
    or the weight strategy excludes expandable segments.

    Call it before torch is imported. ``strategy`` is ``weight_sync.strategy``, None without engines. The planner's
    estimate of unusable memory assumes expandable segments.
    """
    if strategy != "tensor" and not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def set_precision(megatron: Mapping[str, Any], environment: MutableMapping[str, str]) -> None:
    """Set environment variables that the ``megatron:`` table needs. Variables that the user has set keep their values.

    Call it before torch is imported. On Hopper, block FP8 gets fp32 scales, because the engine's block FP8 has fp32
    scales; Transformer Engine's default is powers of two. ``deterministic_mode`` needs Transformer Engine's
    deterministic attention. The variables were not yet tested on a GPU.
    """
    if is_blockwise(megatron) and has_hopper():
        environment.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    if megatron.get("deterministic_mode"):
        environment.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def expandable_segments(environment: Mapping[str, str]) -> str | None:
    """Return the name of the variable that makes torch allocate expandable segments; None without such a variable."""
    for name in ALLOCATOR_VARIABLES:
        settings = environment.get(name, "").lower().replace(" ", "").split(",")
        if "expandable_segments:true" in settings:
            return name
    return None


LEAST_OPEN_FILES = 128
"""Files and sockets that a process of a small run has open at the same time, plus a reserve."""

_PYTHON_TIMEOUT_S = 60.0
_MISSING_PACKAGES_PROGRAM = (
    "import importlib.util as u, json, sys;"
    "print(json.dumps([m for m in sys.argv[1:] if u.find_spec(m) is None]))"
)
"""Program that takes names of packages, and prints as JSON the names that its interpreter can't find."""


@dataclass(frozen=True)
class Machine:
    """Resources of a machine for a run. ``open_files``: limit of one process; ``memory_bytes``: memory of the host."""

    cores: int
    gpus: int
    memory_bytes: int
    open_files: int


def this_machine() -> Machine:
    """Return the resources of the machine that this process runs on, as far as the process may use them."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        gpus=visible_gpus(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def passed_variable_faults(config: TrainConfig) -> Iterator[str]:
    """Report variables that processes of the run should receive and that are not set here."""
    for key, names in config.passed_variables().items():
        for name in names:
            if name not in os.environ:
                yield f"{key}: got {given(name)}, which is not set, expected a variable of this environment"


def has_server_sizes(sglang: Mapping[str, Any]) -> bool:
    """Whether every size of a server in the ``sglang:`` table is a number, or left to SGLang."""
    return not any(server_size_faults(sglang))


def server_size_faults(sglang: Mapping[str, Any]) -> Iterator[str]:
    """Report sizes of a server in the ``sglang:`` table that are no numbers. A missing size is left to SGLang."""
    for key in SGLANG.options_with(OptionFact.NUMBER):
        size = sglang.get(key)
        is_share = key == "mem_fraction_static"
        has_fraction = isinstance(size, float)
        is_number = isinstance(size, int | float) and math.isfinite(size)
        if has_fraction and not is_share:
            is_number = False
        if size is not None and (isinstance(size, bool) or not is_number):
            kind = "a number" if is_share else "a whole number"
            yield f"sglang.{key}: got {given(size)}, expected {kind}"


def machine_faults(config: TrainConfig, machine: Machine) -> Iterator[str]:
    """Yield a line for each reason why a run with all its ranks and servers can't work on ``machine``."""
    engine = config.engine
    sync = config.weight_sync
    ranks = config.parallel.world_size
    generates = config.rollout.replay_from is None
    yield from _interface_faults(config.parallel.interface)
    folders = {"run.directory": config.run.directory}
    if generates:
        yield from _server_faults(engine)
        if sync.strategy == "disk":
            folders["weight_sync.directory"] = sync.directory or "/dev/shm"
    yield from passed_variable_faults(config)
    for key, folder in folders.items():
        if fault := folder_fault(Path(folder)):
            yield f"{key}: {fault}, expected a folder of your own"
    servers = engine.servers_to_start if generates else 0
    if machine.open_files < LEAST_OPEN_FILES:
        yield (
            f"open files: this process may have {machine.open_files}, expected at least "
            f"{LEAST_OPEN_FILES} (ulimit -n)"
        )
    if machine.gpus:
        if ranks > machine.gpus:
            yield f"GPUs: {ranks} ranks need one each, this machine has {machine.gpus}"
        # The limit for the processes of a core is for machines without GPUs.
        return
    processes = ranks + servers * server_ranks(config.sglang)
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


def _server_faults(engine: EngineConfig) -> Iterator[str]:
    """Report faults of ``engine.host`` and ``engine.python``, if the run starts servers or a router."""
    packages: list[str] = []
    if engine.servers_to_start:
        packages.append("sglang")
    if engine.uses_router:
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
        probe = subprocess.run(
            [python, "-c", _MISSING_PACKAGES_PROGRAM, *packages],
            capture_output=True,
            text=True,
            timeout=_PYTHON_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        missing_packages = json.loads(probe.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        yield f"engine.python: got {python!r}, expected a Python interpreter"
        return
    if missing_packages:
        yield f"engine.python: got {python!r}, which lacks {', '.join(missing_packages)}"
