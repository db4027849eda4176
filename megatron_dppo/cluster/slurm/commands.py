"""Facts and orders of Slurm that a job needs: addresses and states of nodes, its time limit, its next start."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime

from megatron_dppo.launch.slurm_client import SlurmError, slurm
from megatron_dppo.system.network import source_address

_BAD_STATES = ("DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "UNKNOWN")


def record(*query: str) -> dict[str, str]:
    """Return the first line of ``scontrol -o show WORDS`` as fields. Raises SlurmError."""
    return fields(slurm("scontrol", "-o", "show", *query))


def fields(line: str) -> dict[str, str]:
    first_line, _, _ = line.partition("\n")
    return dict(re.findall(r"(\S+?)=(\S*)", first_line))


def end_time(job: str) -> float | None:
    """Return when Slurm will end the job, in epoch seconds; None where it has no limit."""
    text = record("job", job).get("EndTime", "")
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def addresses(names: Sequence[str]) -> list[str]:
    """Return the addresses at which other nodes reach each of these. Raises SlurmError for an unknown one."""
    resolved = [_resolve(record("node", name).get("NodeAddr", name)) for name in names]
    reachable_addresses = [address for address in resolved if not address.startswith("127.")]
    # This node's own tables may map its name to 127.0.1.1.
    addresses: list[str] = []
    for address in resolved:
        if address.startswith("127.") and reachable_addresses:
            addresses.append(source_address(reachable_addresses[0]))
        else:
            addresses.append(address)
    return addresses


def _resolve(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise SlurmError(f"the address of node {name} can't be found: {error}") from error


def bad_nodes(names: Sequence[str]) -> dict[str, str]:
    states = {name: record("node", name).get("State", "UNKNOWN") for name in names}
    bad_state = re.compile("|".join(map(re.escape, _BAD_STATES)))
    return {name: state for name, state in states.items() if bad_state.search(state)}


def requeue(job: str) -> None:
    slurm("scontrol", "requeue", job)


def exclude(job: str, nodes: Sequence[str]) -> None:
    """Exclude ``nodes`` from a waiting job, and from each group of a heterogeneous one. Raises SlurmError.

    Nodes that are excluded already stay excluded.
    """
    for part in map(fields, slurm("scontrol", "-o", "show", "job", job).splitlines()):
        if "JobId" not in part:
            continue
        excluded_nodes = part.get("ExcNodeList", "(null)")
        excluded_before = []
        if excluded_nodes not in ("(null)", ""):
            excluded_before = [excluded_nodes]
        excluded = ",".join([*excluded_before, *nodes])
        slurm("scontrol", "update", f"JobId={part['JobId']}", f"ExcNodeList={excluded}")


_CLIENT_VARIABLES = (
    "SLURM_CLUSTERS",
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_JWT",
    "SLURM_TIME_FORMAT",
    "SLURM_UMASK",
)
"""Variables that tell how to reach Slurm, not what a job has."""


def allocation_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables in ``environment`` that describe the allocation around this process; none outside of one.

    sbatch passes them to a job that is submitted there, which would take them for its own.
    """
    if "SLURM_JOB_ID" not in environment:
        return []
    names = (name for name in environment if name.startswith("SLURM_"))
    return [name for name in names if name not in _CLIENT_VARIABLES]


def job_environment(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the job's id and the number of its earlier starts. Raises SlurmError outside of a job."""
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        raise SlurmError("SLURM_JOB_ID is not set: this runs inside a job, which sbatch starts")
    return job, int(environment.get("SLURM_RESTART_COUNT", "0"))
