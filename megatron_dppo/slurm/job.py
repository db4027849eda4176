"""The job that this process is the batch process of."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from megatron_dppo.launch.placement import Host
from megatron_dppo.launch.slurm_rank import hostnames
from megatron_dppo.launch.stops import OVERTIME, TIME, Stop, StopRequests
from megatron_dppo.slurm import commands
from megatron_dppo.slurm.decisions import CANCELLED_CODE
from megatron_dppo.slurm.site import SiteConfig

_LEAST_TO_END_S = 60.0


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
        names = hostnames(os.environ["SLURM_JOB_NODELIST"])
        devices = site.devices(os.environ)
        places = zip(names, commands.addresses(names), strict=True)
        hosts = tuple(Host(name, address, devices) for name, address in places)
        return cls(
            job, attempt, hosts, commands.end_time(job), devices if site.gpus_per_node else 0
        )

    def stops(self, margin_s: float) -> StopRequests:
        """What asks this start to end."""
        deadlines = {}
        if self.ends is not None:
            deadlines[TIME] = self.ends - margin_s
            deadlines[OVERTIME] = self.ends - min(_LEAST_TO_END_S, margin_s / 3)
        signals: dict[int, Stop] = {
            signal.SIGUSR1: TIME,
            signal.SIGUSR2: Stop("asked", 0),
            signal.SIGTERM: Stop("cancelled", CANCELLED_CODE, insists=True),
        }
        return StopRequests(signals, deadlines)
