"""Queries and commands of Slurm for a job: addresses and states of its nodes, its time limit, its next start."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime

from megatron_dppo.launch.slurm_client import CLIENT_VARIABLES, SlurmError, slurm
from megatron_dppo.system.network import mutual_addresses

log = logging.getLogger(__name__)

_BAD_STATES = ("DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "UNKNOWN")


def record(*query: str) -> dict[str, str]:
    """Return the fields in the first line of ``scontrol -o show QUERY``. Raises SlurmError."""
    return fields(slurm("scontrol", "-o", "show", *query))


def fields(line: str) -> dict[str, str]:
    """Return the ``KEY=VALUE`` fields of the first line of a text of scontrol."""
    first_line, _, _ = line.partition("\n")
    return dict(re.findall(r"(\S+?)=(\S*)", first_line))


def end_time(job: str) -> float | None:
    """Return when Slurm will end the job, in epoch seconds; None for a job without a time limit."""
    text = record("job", job).get("EndTime", "")
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def addresses(names: Sequence[str]) -> list[str]:
    """Return the addresses at which other nodes reach the named nodes. Raises SlurmError for an unknown node."""
    return mutual_addresses(
        [_resolve(record("node", name).get("NodeAddr", name)) for name in names]
    )


def _resolve(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise SlurmError(f"the address of node {name} can't be found: {error}") from error


def bad_nodes(names: Sequence[str]) -> dict[str, str]:
    """Return the nodes that Slurm can't use any more, with their state; no nodes if Slurm does not answer."""
    states_of_bad_nodes = {}
    try:
        for name in names:
            # A state may have flags, as in IDLE+DRAIN.
            state = record("node", name).get("State", "UNKNOWN")
            if any(bad_state in state for bad_state in _BAD_STATES):
                states_of_bad_nodes[name] = state
    except SlurmError as error:
        log.warning("%s", error)
        return {}
    return states_of_bad_nodes


def requeue(job: str) -> None:
    slurm("scontrol", "requeue", job)


def exclude(job: str, nodes: Sequence[str]) -> None:
    """Exclude ``nodes`` from a waiting job, and from each group of a heterogeneous job. Raises SlurmError.

    Nodes that are excluded already stay excluded.
    """
    # scontrol shows one line for each group of a heterogeneous job.
    for group in map(fields, slurm("scontrol", "-o", "show", "job", job).splitlines()):
        if "JobId" not in group:
            continue
        excluded_before = group.get("ExcNodeList", "(null)")
        excluded_nodes = list(nodes)
        if excluded_before not in ("(null)", ""):
            excluded_nodes.insert(0, excluded_before)
        excluded = ",".join(excluded_nodes)
        slurm("scontrol", "update", f"JobId={group['JobId']}", f"ExcNodeList={excluded}")


def allocation_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that describe the allocation of this process; none outside of an allocation.

    sbatch passes its variables to the new job. The job would take these variables for a description of its own
    allocation, so ``submit`` deletes them first.
    """
    if "SLURM_JOB_ID" not in environment:
        return []
    names = (name for name in environment if name.startswith("SLURM_"))
    return [name for name in names if name not in CLIENT_VARIABLES]


def job_environment(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the job's id and the number of its earlier starts. Raises SlurmError outside of a job."""
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        raise SlurmError("SLURM_JOB_ID is not set, expected a process in a job that sbatch started")
    return job, int(environment.get("SLURM_RESTART_COUNT", "0"))
