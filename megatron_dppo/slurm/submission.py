"""What a submission comes to, and everything that can be refused before anything queues."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.options import ServerSections
from megatron_dppo.launch.placement import Allocation, Host, Placement, PlacementError, Roles, place
from megatron_dppo.launch.srun import literal
from megatron_dppo.slurm.refusals import (
    SBATCH,
    directory_problems,
    environment_problems,
    flag_problems,
    node_problems,
    partition_of,
    site_problems,
    time_problems,
)
from megatron_dppo.slurm.site import SiteConfig

SCRIPT = Path(__file__).with_name("run.sbatch")
CONFIG_FILE = "submitted.yaml"
SITE_FILE = "site.yaml"
JOB_FILE = "job"
"""Holds the id of the job that was submitted last."""
MOST_NODES = 2**16
_OWN_LIMITS = ("-p", "--partition", "-t", "--time")


@dataclass(frozen=True)
class Submission:
    """A run as it would be submitted.

    Attributes:
        config: of the run.
        site: of the cluster.
        nodes: to ask for.
        placement: on nodes of expected names.
    """

    config: TrainConfig
    site: SiteConfig
    nodes: int
    placement: Placement

    @classmethod
    def plan(cls, config: TrainConfig, site: SiteConfig, nodes: int | None) -> Submission:
        """``nodes``: None for as many as the roles fill. Raises PlacementError."""
        if nodes is not None and nodes > MOST_NODES:
            raise PlacementError(f"nodes: got {nodes}, expected at most {MOST_NODES}")
        roles, devices = (
            Roles.of(config.parallel.world_size, ServerSections.where_generated(config)),
            site.devices({}),
        )
        trainers, count = 0, roles.hosts_needed(devices) if nodes is None else nodes
        if site.server_partition is not None and roles.servers:
            trainers = replace(roles, servers=0).hosts_needed(devices)
            apart = replace(roles, first_device=trainers * devices)
            count = apart.hosts_needed(devices) if nodes is None else nodes
        groups = [None if not trainers else int(i >= trainers) for i in range(count)]
        names = [f"node{i}" for i in range(1, count + 1)]
        pairs = zip(names, groups, strict=True)
        hosts = tuple(Host(name, name, devices, group) for name, group in pairs)
        return cls(config, site, count, place(roles, Allocation(hosts)))

    @property
    def _nodes_by_group(self) -> list[int]:
        found = self.placement
        known = dict.fromkeys((*found.rank_hosts, *found.server_hosts, *found.unused))
        return [len(group) for group in Allocation(tuple(known)).groups]

    @property
    def directory(self) -> Path:
        """Of the run."""
        return Path(self.config.run.directory).resolve()

    def command(self, extra: Sequence[str] = ()) -> list[str]:
        """The sbatch command line. Options come before the script: after it they would be its own."""
        site = self.site
        named = {
            "partition": site.partition,
            "account": site.account,
            "qos": site.qos,
            "reservation": site.reservation,
            "time": site.time,
        }
        first, *others = self._nodes_by_group
        return [
            "sbatch",
            "--parsable",
            f"--job-name={self.directory.parent.name}-{self.directory.name}",
            f"--nodes={first}",
            site.device_flag,
            *(f"--{name}={value}" for name, value in named.items() if value is not None),
            f"--signal=B:USR1@{site.checkpoint_margin_s}",
            f"--chdir={Path.cwd()}",
            f"--output={literal(self.directory)}/logs/slurm-%j.out",
            *(["--no-kill"] if site.spares_servers else []),
            *site.sbatch_flags,
            *extra,
            *self._second_group(others),
            str(SCRIPT),
            str(self.directory / CONFIG_FILE),
            f"--site={self.directory / SITE_FILE}",
        ]

    def _second_group(self, others: Sequence[int]) -> list[str]:
        """Options of the servers' nodes in a heterogeneous job; the script's own hold for the first group."""
        site = self.site
        named = {"account": site.account, "qos": site.qos, "time": site.time}
        told = [f"--{name}={value}" for name, value in named.items() if value is not None]
        return [
            word
            for nodes in others
            for word in (
                ":",
                f"--nodes={nodes}",
                site.device_flag,
                f"--partition={site.server_partition}",
                "--exclusive",
                *told,
                *site.sbatch_flags,
            )
        ]

    def problems(self, extra: Sequence[str] = ()) -> Iterator[str]:
        """Why the job could not work, apart from what ``check_config`` and the placement say.

        ``extra``: as for ``command``. Flags that name a partition or a time are left to sbatch.
        """
        if shutil.which("sbatch") is None:
            yield "sbatch: not on the path, expected a login node of a Slurm cluster"
        yield from directory_problems(self.directory)
        yield from flag_problems(self.site.sbatch_flags, SBATCH)
        yield from flag_problems(extra, replace(SBATCH, key="--sbatch"))
        partitions: list[dict[str, str] | None] = [None]
        flags = (*self.site.sbatch_flags, *extra)
        if not any(flag.startswith(_OWN_LIMITS) for flag in flags):
            names = [self.site.partition, *filter(None, [self.site.server_partition])]
            partitions = [partition_of(name) for name in names]
        yield from dict.fromkeys(p for part in partitions for p in time_problems(self.site, part))
        for nodes, partition in zip(self._nodes_by_group, partitions, strict=False):
            yield from node_problems(nodes, partition)
        yield from environment_problems(self.config, self.site, flags, os.environ)
        yield from site_problems(self.config, self.site, self.directory)
