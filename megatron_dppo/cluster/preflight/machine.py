"""Checks of a single node except for its GPUs: host name, memory, disk, open files, ports, and Python environments.

In the environments of trainer and engine, packages must have the pinned versions. Packages and NCCL must have the same
versions on all nodes.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from megatron_dppo.cluster.preflight.evidence import (
    EVERYWHERE,
    CheckError,
    EvidenceByHost,
    Finding,
    Needs,
    Site,
    outlier_findings,
    too_little,
)
from megatron_dppo.system.ports import PortTakenError, free_port, require_free_port
from megatron_dppo.system.programs import ProgramError, output_of
from megatron_dppo.system.toolkit import toolkit_home

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ANY_ADDRESS = "0.0.0.0"


def collect_host(site: Site) -> dict[str, Any]:
    """Collect names, kernel, processor cores, clock, and how the node's own name resolves."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except socket.gaierror:
        addresses = []
    return {
        "name": site.meeting.host,
        "host_name": name,
        "resolves_to": addresses,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "time": time.time(),
    }


def judge_host(evidence: EvidenceByHost, needs: Needs) -> Iterator[Finding]:
    """Report a host name that resolves to no address or only to loopback, unless there is only one node."""
    if len(evidence) < 2:
        return
    for host, entry in evidence.items():
        addresses = entry["resolves_to"]
        if all(address.startswith("127.") or address == "::1" for address in addresses):
            text = ", ".join(addresses) or "no address"
            subject = f"address of its own host name {entry['host_name']}"
            yield Finding(host, subject, text, "one that other nodes can reach")


def collect_memory(site: Site) -> dict[str, Any]:
    """Collect the bytes of total memory, of available memory, and of free shared memory (``/dev/shm``)."""
    memory = psutil.virtual_memory()
    shm_free = shutil.disk_usage("/dev/shm").free
    return {"total": memory.total, "available": memory.available, "shm_free": shm_free}


def judge_memory(evidence: EvidenceByHost, needs: Needs) -> Iterator[Finding]:
    """Report too little available memory, and too little shared memory."""
    available = _by_host(evidence, "available")
    shm = _by_host(evidence, "shm_free")
    yield from too_little("free memory", available, needs.memory_bytes, "GiB")
    yield from too_little("free space in /dev/shm", shm, needs.shm_bytes, "GiB")


def collect_disk(site: Site) -> dict[str, Any]:
    """Collect free bytes in the run directory and in the node's own folder for temporary files."""
    # A folder with free space may still be read-only: writing to it then raises OSError.
    with tempfile.TemporaryFile() as file:
        file.write(b"\0")
    folder = tempfile.gettempdir()
    return {
        "run_directory_free": shutil.disk_usage(site.needs.run_directory).free,
        "temporary": folder,
        "temporary_free": shutil.disk_usage(folder).free,
    }


def judge_disk(evidence: EvidenceByHost, needs: Needs) -> Iterator[Finding]:
    """Report too little free space in the run directory and in a node's folder for temporary files."""
    free = _by_host(evidence, "run_directory_free")
    yield from too_little(f"free space in {needs.run_directory}", free, needs.disk_bytes, "GiB")
    for host, entry in evidence.items():
        # The folder for temporary files may have another path on each node.
        temporary_free = {host: entry["temporary_free"]}
        subject = f"free space in {entry['temporary']}"
        yield from too_little(subject, temporary_free, needs.temporary_bytes, "GiB")


def collect_open_files(site: Site) -> dict[str, Any]:
    """Collect the soft and the hard limit on the open files and sockets of one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"soft": soft, "hard": hard}


def judge_open_files(evidence: EvidenceByHost, needs: Needs) -> Iterator[Finding]:
    """Report a soft limit that is too low. The hard limit does not matter: a run does not raise its soft limit."""
    soft = _by_host(evidence, "soft")
    yield from too_little("open files (ulimit -n)", soft, needs.open_files, "files")


def collect_ports(site: Site) -> dict[str, Any]:
    """Collect TCP ports of the run that can't be bound, one free port, and the system's range of free ports."""
    return {
        "taken": [port for port in site.needs.ports if not _is_free(port)],
        "free": free_port(_ANY_ADDRESS),
        "range": _PORT_RANGE.read_text().split() if _PORT_RANGE.exists() else [],
    }


def judge_ports(evidence: EvidenceByHost, needs: Needs) -> Iterator[Finding]:
    """Report ports of the run that other processes use."""
    for host, entry in evidence.items():
        for port in entry["taken"]:
            yield Finding(host, f"port {port}", "taken", "free")


def _is_free(port: int) -> bool:
    try:
        require_free_port(_ANY_ADDRESS, port)
    except PortTakenError:
        return False
    return True


def _by_host(evidence: EvidenceByHost, key: str) -> dict[str, int]:
    return {host: entry[key] for host, entry in evidence.items()}


_INSPECTION = Path(__file__).with_name("inspection.py")
_TIMEOUT_S = 60.0


def collect_pythons(site: Site) -> dict[str, Any]:
    """Collect the versions in the Python environments of trainer and engine (``inspection.py``)."""
    packages = {"torch"}
    for pins in site.needs.requirements.values():
        packages |= {Requirement(pin).name for pin in pins}
    pythons = site.needs.pythons
    inspections = {}
    # Trainer and engine often share an interpreter: inspect it once.
    for python in set(pythons.values()):
        inspections[python] = inspect_python(python, sorted(packages))
    return {role: inspections[python] for role, python in pythons.items()}


def inspect_python(python: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return what ``inspection.py`` prints in the interpreter ``python``. Raises CheckError if the program fails."""
    command = [python, str(_INSPECTION), *packages]
    environment = dict(os.environ)
    # Use the CUDA_HOME of ranks and servers: the variable selects the library of cuDNN.
    if (home := toolkit_home(environment)) is not None:
        environment["CUDA_HOME"] = str(home)
    try:
        output = output_of(command, _TIMEOUT_S, environment=environment)
    except ProgramError as error:
        raise CheckError(f"{python}: {error}") from error
    return {"python": python, **json.loads(output)}


def judge_pythons(evidence: EvidenceByHost, needs: Needs) -> Iterator[Finding]:
    """Report faults of the Python environments.

    - A package does not have its pinned version, or not the same version on all nodes.
    - The kernels for weight gradients differ between nodes.
    - NCCL differs between nodes, or between trainer and engine.
    - On GPUs: Triton lacks a tool, Transformer Engine lacks its extension, or it would load another version of cuDNN
      than torch.
    """
    for role, pins in needs.requirements.items():
        packages = {host: roles[role]["packages"] for host, roles in evidence.items()}
        for host, versions in packages.items():
            for pin in pins:
                yield from _judge_pin(host, role, versions, Requirement(pin))
        for name in sorted(set().union(*packages.values())):
            version_by_host = {host: versions.get(name) for host, versions in packages.items()}
            yield from outlier_findings(f"{role}'s {name}", version_by_host)
    yield from _judge_nccl(evidence)
    if needs.gpus:
        yield from _judge_triton_tools(evidence)
        yield from _judge_transformer_engine(evidence)
        yield from _judge_cudnn(evidence)
    kernels = {h: roles["trainer"].get("fused_weight_gradients") for h, roles in evidence.items()}
    yield from outlier_findings("kernels for weight gradients", kernels)


def _judge_pin(
    host: str, role: str, versions: Mapping[str, str | None], requirement: Requirement
) -> Iterator[Finding]:
    version = versions.get(requirement.name)
    subject = f"{role}'s {requirement.name}"
    specifier = str(requirement.specifier)
    if version is None:
        yield Finding(host, subject, "not installed", specifier)
    elif not requirement.specifier.contains(version, prereleases=True):
        yield Finding(host, subject, version, specifier)


def _judge_triton_tools(evidence: EvidenceByHost) -> Iterator[Finding]:
    expectation = "there: Triton compiles each kernel's launcher in C"
    for host, roles in evidence.items():
        for role, inspection in roles.items():
            missing_tools = " and ".join(inspection["missing_for_triton"])
            if missing_tools:
                yield Finding(host, f"{role}'s {missing_tools}", "not there", expectation)


def _judge_transformer_engine(evidence: EvidenceByHost) -> Iterator[Finding]:
    """Report an installation of Transformer Engine without its extension, in the trainer's and the engine's Python."""
    for host, roles in evidence.items():
        for role, inspection in roles.items():
            fault = inspection["transformer_engine"]
            if fault is not None:
                yield Finding(
                    host, f"{role}'s Transformer Engine", fault, "a complete installation"
                )


def _judge_cudnn(evidence: EvidenceByHost) -> Iterator[Finding]:
    """Report nodes on which Transformer Engine would load another cuDNN than torch: the first attention would fail."""
    for host, roles in evidence.items():
        cudnn = roles["trainer"].get("cudnn", {})
        version = cudnn.get("version")
        wheel = cudnn.get("wheel")
        if version and wheel and version != wheel:
            expectation = f"{wheel}, which torch loads: unset CUDNN_HOME and CUDNN_PATH, which modules of a site set"
            yield Finding(host, "trainer's cuDNN", f"{version} in {cudnn['library']}", expectation)


def _judge_nccl(evidence: EvidenceByHost) -> Iterator[Finding]:
    """Report versions of NCCL that differ between trainer and engine, or between nodes."""
    pairs: dict[str, tuple[Any, Any]] = {}
    unequal_pairs: dict[str, tuple[Any, Any]] = {}
    for host, roles in evidence.items():
        if "engine" not in roles:
            continue
        trainer_version = roles["trainer"]["nccl"]
        engine_version = roles["engine"]["nccl"]
        pairs[host] = (trainer_version, engine_version)
        if None not in pairs[host] and trainer_version != engine_version:
            unequal_pairs[host] = pairs[host]
    # If all nodes have the same two versions, the environments are at fault, and no node is better than another.
    is_everywhere = len(unequal_pairs) == len(pairs) and len(set(pairs.values())) == 1
    for host, (trainer_version, engine_version) in unequal_pairs.items():
        host_at_fault = EVERYWHERE if is_everywhere else host
        expectation = f"the trainer's {trainer_version}: they join one group for weight updates"
        yield Finding(host_at_fault, "engine's NCCL", str(engine_version), expectation)
    for role in sorted(set().union(*evidence.values())):
        versions = {host: roles[role]["nccl"] for host, roles in evidence.items() if role in roles}
        yield from outlier_findings(f"{role}'s NCCL", versions)
