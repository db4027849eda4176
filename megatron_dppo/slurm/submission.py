"""What a submission comes to, and everything that can be refused before anything queues. Pure but for
looks at the file system and the path."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.launch.placement import Roles, place
from megatron_dppo.launch.places import Allocation, Host, Placement
from megatron_dppo.slurm.site import SiteConfig

SCRIPT = Path(__file__).with_name("run.sbatch")
CONFIG_FILE = "submitted.yaml"
SITE_FILE = "site.yaml"
JOB_FILE = "job"
"""Holds the id of the job that was submitted last."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_UNLIMITED = ("INFINITE", "UNLIMITED")


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
        roles, devices = Roles.of(config), site.devices({})
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
        devices = (
            f"--gpus-per-node={site.gpus_per_node}"
            if site.gpus_per_node
            else f"--ntasks-per-node={site.processes_per_node}"
        )
        first, *others = self._nodes_by_group
        return [
            "sbatch",
            "--parsable",
            f"--job-name={self.directory.parent.name}-{self.directory.name}",
            f"--nodes={first}",
            devices,
            *(f"--{name}={value}" for name, value in named.items() if value is not None),
            f"--signal=B:USR1@{site.checkpoint_margin_s}",
            f"--chdir={Path.cwd()}",
            f"--output={self.directory}/logs/slurm-%j.out",
            *(["--no-kill"] if site.spares_servers else []),
            *site.sbatch_flags,
            *extra,
            *self._second_group(others, devices),
            str(SCRIPT),
            str(self.directory / CONFIG_FILE),
            f"--site={self.directory / SITE_FILE}",
        ]

    def _second_group(self, others: Sequence[int], devices: str) -> list[str]:
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
                devices,
                f"--partition={site.server_partition}",
                "--exclusive",
                *told,
                *site.sbatch_flags,
            )
        ]

    def problems(self) -> Iterator[str]:
        """Why the job could not work, apart from what ``check_config`` and the placement say."""
        if shutil.which("sbatch") is None:
            yield "sbatch: not on the path, expected a login node of a Slurm cluster"
        yield from _directory_problems(self.directory)
        yield from _time_problems(self.site)
        yield from _container_problems(self.site)


def seconds_of(text: str) -> float | None:
    """A Slurm time (``90``, ``1:30:00``, ``2-12``) in seconds; None where it has no end.

    Raises ValueError for what is no time.
    """
    if text.upper() in _UNLIMITED:
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"got {text!r}, expected a Slurm time such as 1-00:00:00 or 90 (minutes)")
    days, first, second, third = match.groups()
    numbers = [int(first), int(second or 0), int(third or 0)]
    if days is not None:  # days-hours:minutes:seconds
        return int(days) * 86400.0 + numbers[0] * 3600 + numbers[1] * 60 + numbers[2]
    if third is not None:  # hours:minutes:seconds
        return numbers[0] * 3600.0 + numbers[1] * 60 + numbers[2]
    return numbers[0] * 60.0 + numbers[1]  # minutes:seconds


def _directory_problems(directory: Path) -> Iterator[str]:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        yield (
            f"run.directory: {existing} can't be written ({error.strerror}), expected a folder of your "
            "own that all nodes share"
        )


def _time_problems(site: SiteConfig) -> Iterator[str]:
    if site.time is None:
        return
    try:
        limit = seconds_of(str(site.time))
    except ValueError as error:
        yield f"time: {error}"
        return
    least = site.start_s + site.checkpoint_margin_s
    if limit is not None and limit < least:
        yield (
            f"time: got {site.time}, {limit:.0f} s, expected at least {least} s: a start and a step "
            f"(start_s {site.start_s}), and what is kept to save a checkpoint "
            f"(checkpoint_margin_s {site.checkpoint_margin_s})"
        )


def _container_problems(site: SiteConfig) -> Iterator[str]:
    container = site.container
    if container.kind != "none" and container.image is None:
        yield f"container.image: missing, expected the image that {container.kind} starts"
    if container.kind == "none" and (container.image or container.server_image):
        yield "container.kind: got 'none' with an image, expected pyxis or apptainer"
