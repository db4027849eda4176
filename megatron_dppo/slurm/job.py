"""The job that this process is the batch process of."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_dppo.launch.placement import Host
from megatron_dppo.launch.srun import hostnames
from megatron_dppo.launch.supervisor import OVERTIME, TIME, Stop, StopRequests
from megatron_dppo.slurm import commands
from megatron_dppo.slurm.commands import SlurmError
from megatron_dppo.slurm.decisions import CANCELLED_CODE
from megatron_dppo.slurm.site import SiteConfig

log = logging.getLogger(__name__)

_LEAST_TO_END_S = 60.0
_ASK_EVERY_S = 60.0


@dataclass(frozen=True)
class Job:
    """The job that this process is the batch process of.

    ``attempt``: how often Slurm has started it before. ``ends``: epoch seconds, None without a limit.
    ``gpus``: of a node.
    """

    id: str
    attempt: int
    hosts: tuple[Host, ...]
    ends: float | None
    gpus: int

    @classmethod
    def of_environment(cls, site: SiteConfig) -> Job:
        """Raises SlurmError outside of a job."""
        job, attempt = commands.job_environment(os.environ)
        groups = job_groups(os.environ)
        names = [name for nodes in groups.values() for name in hostnames(nodes)]
        group_of = {name: g for g, nodes in groups.items() for name in hostnames(nodes)}
        devices = site.devices(os.environ)
        places = zip(names, commands.addresses(names), strict=True)
        hosts = tuple(Host(name, at, devices, group_of[name]) for name, at in places)
        return cls(
            job, attempt, hosts, commands.end_time(job), devices if site.gpus_per_node else 0
        )

    def stops(self, margin_s: float) -> StopRequests:
        """What asks this start to end."""
        signals: dict[int, Stop] = {
            signal.SIGUSR1: TIME,
            signal.SIGUSR2: Stop("asked", 0),
            signal.SIGTERM: Stop("cancelled", CANCELLED_CODE, insists=True),
        }
        return StopRequests(signals, deadlines(self.ends, margin_s))

    def follow_time_limit(self, stops: StopRequests, margin_s: float) -> None:
        """Ask Slurm now and then when the job ends, which an operator may change; from a thread."""

        def follow() -> None:
            while True:
                time.sleep(_ASK_EVERY_S)
                try:
                    stops.move_deadlines(deadlines(commands.end_time(self.id), margin_s))
                except SlurmError as error:
                    log.warning("the job's time limit is not known anew: %s", error)

        threading.Thread(target=follow, name="time limit", daemon=True).start()


def job_groups(environment: Mapping[str, str]) -> dict[int | None, str]:
    """Slurm's lists of nodes by group of a heterogeneous job; under None that of any other job."""
    count = int(environment.get("SLURM_HET_SIZE", "0"))
    if not count:
        return {None: environment["SLURM_JOB_NODELIST"]}
    return {g: environment[f"SLURM_JOB_NODELIST_HET_GROUP_{g}"] for g in range(count)}


def deadlines(ends: float | None, margin_s: float) -> dict[Stop, float]:
    """When a job that ends at ``ends`` is to save a checkpoint, and when it is too late for one."""
    if ends is None:
        return {}
    return {TIME: ends - margin_s, OVERTIME: ends - min(_LEAST_TO_END_S, margin_s / 3)}
