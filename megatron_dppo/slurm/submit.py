"""``submit``: check a recipe, show what it comes to, hand it to sbatch."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dppo.config.checks import check_config
from megatron_dppo.config.errors import ConfigError
from megatron_dppo.config.loading import load_config, resolved_yaml
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.options import ServerSections
from megatron_dppo.launch.placement import Allocation, Host, Placement, PlacementError, Roles, place
from megatron_dppo.launch.srun import literal
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.planner.devices import DEVICES, GIB, Cluster
from megatron_dppo.slurm import refusals
from megatron_dppo.slurm.attempts import JOB_FILE
from megatron_dppo.slurm.commands import SlurmError, slurm
from megatron_dppo.slurm.site import SiteConfig, load_site, site_path
from megatron_dppo.slurm.status import UNKNOWN, job_state
from megatron_dppo.system.files import write_atomically
from megatron_dppo.system.processes import held_back

# What the planner says of a submission: whether its memory suffices.

_UNKNOWN = "memory: not planned, as the site file's gpu names none of {names}"


def memory_verdict(submission: Submission) -> tuple[str, list[str]]:
    """A line for people, and what speaks against the run.

    Its configuration must have passed its checks. Nothing is planned where the site does not name its GPUs,
    or has none.
    """
    config, site, nodes = submission.config, submission.site, submission.nodes
    if not site.gpus_per_node:
        return "memory: not planned, the nodes have no GPUs", []
    if site.gpu is None:
        return _UNKNOWN.format(names=", ".join(DEVICES)), []
    # Loads numpy.
    from megatron_dppo.planner.facts import facts_of
    from megatron_dppo.planner.run_plan import plan_run

    device = DEVICES[site.gpu]
    memory = device.host_memory if site.host_memory_gib is None else site.host_memory_gib * GIB
    cluster = Cluster(device, nodes, site.gpus_per_node, memory)
    shape = load_model_shape(config.model.hf_checkpoint)
    plan = plan_run(facts_of(config, shape), cluster)
    rank = plan.fullest.total / GIB
    fits = "fits" if plan.fits else "does not fit"
    line = (
        f"memory: {fits} on {nodes} x {site.gpus_per_node} {device.name}; the fullest rank takes "
        f"{rank:.1f} GiB; {plan.memory_limit}"
    )
    return line, list(plan.faults)


# What a submission comes to, and everything that can be refused before anything queues.

SCRIPT = Path(__file__).with_name("run.sbatch")
CONFIG_FILE = "submitted.yaml"
SITE_FILE = "site.yaml"
MOST_NODES = 2**16
_OWN_LIMITS = ("-p", "--partition", "-t", "--time")


@dataclass(frozen=True)
class Submission:
    """A run as it would be submitted, placed on ``nodes`` nodes of expected names."""

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
            Roles.of(config.parallel.world_size, ServerSections.of(config).where_generated),
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
        placement = self.placement
        hosts = dict.fromkeys((*placement.rank_hosts, *placement.server_hosts, *placement.unused))
        return [len(group) for group in Allocation(tuple(hosts)).groups]

    @property
    def directory(self) -> Path:
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
        flags = [f"--{name}={value}" for name, value in named.items() if value is not None]
        return [
            word
            for nodes in others
            for word in (
                ":",
                f"--nodes={nodes}",
                site.device_flag,
                f"--partition={site.server_partition}",
                "--exclusive",
                *flags,
                *site.sbatch_flags,
            )
        ]

    def faults(self, extra: Sequence[str] = ()) -> Iterator[str]:
        """Why the job could not work, apart from what ``check_config`` and the placement say.

        ``extra``: as for ``command``. Flags that name a partition or a time are left to sbatch.
        """
        if shutil.which("sbatch") is None:
            yield "sbatch: not on the path, expected a login node of a Slurm cluster"
        yield from refusals.directory_faults(self.directory)
        yield from refusals.flag_faults(self.site.sbatch_flags, refusals.SBATCH)
        yield from refusals.flag_faults(extra, replace(refusals.SBATCH, key="--sbatch"))
        partitions: list[dict[str, str] | None] = [None]
        flags = (*self.site.sbatch_flags, *extra)
        if not any(flag.startswith(_OWN_LIMITS) for flag in flags):
            names = [self.site.partition, *filter(None, [self.site.server_partition])]
            partitions = [refusals.partition_of(name) for name in names]
        yield from dict.fromkeys(
            p for part in partitions for p in refusals.time_faults(self.site, part)
        )
        for nodes, partition in zip(self._nodes_by_group, partitions, strict=False):
            yield from refusals.node_faults(nodes, partition)
        config, data = self.config, self.config.data
        yield from refusals.environment_faults(
            config.weight_sync.strategy, self.site, flags, os.environ
        )
        files = (*data.train_files, *data.evaluation_files.values())
        paths = {
            "run.directory": self.directory,
            "model.hf_checkpoint": Path(config.model.hf_checkpoint),
        }
        paths |= {f"data: {file.path}": Path(file.path) for file in files}
        yield from refusals.site_faults(self.site, config.engine.python, paths)


PYTHON_VARIABLE = "MEGATRON_DPPO_PYTHON"
"""Names the interpreter of the batch process."""


def submit(options: argparse.Namespace) -> int:
    """Submit what the command line says, or only show it; the exit code. Raises ConfigError, SlurmError."""
    site = load_site(site_path(options.site), options.set)
    config = load_config(options.recipe, options.overrides)
    submission, memory, faults = _checked(config, site, options)
    if faults and not options.dry_run:
        raise ConfigError(faults, options.recipe)
    if submission is not None:
        print(f"run directory: {submission.directory}\n")
        print(f"{submission.placement.table()}\n\n{memory}\n")
    if options.dry_run:
        print(f"# {CONFIG_FILE}\n{resolved_yaml(config)}")
        print(f"# {SITE_FILE}\n{resolved_yaml(site)}")
    if submission is not None and options.dry_run:
        print(shlex.join(submission.command(options.sbatch)), flush=True)
    if faults:
        raise ConfigError(faults, f"{options.recipe} would be refused")
    assert submission is not None
    return 0 if options.dry_run else _hand_over(submission, options.sbatch)


def _hand_over(submission: Submission, flags: Sequence[str]) -> int:
    """Freeze the configuration in the run's directory and give the job to sbatch."""
    directory, command = submission.directory, submission.command(flags)
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    write_atomically(directory / CONFIG_FILE, resolved_yaml(submission.config))
    write_atomically(directory / SITE_FILE, resolved_yaml(submission.site))
    print(f"configuration: {directory / CONFIG_FILE}, {directory / SITE_FILE}")
    print(shlex.join(command), flush=True)
    # The supervisor must run under this interpreter, whichever the batch script's PATH finds first.
    os.environ.setdefault(PYTHON_VARIABLE, sys.executable)
    # Or a job could be in the queue that the run directory does not name.
    with held_back():
        answer = slurm(*command).strip()
        # In a federation --parsable adds the cluster's name.
        job = answer.partition(";")[0]
        if not job.isdigit():
            raise SlurmError(f"sbatch answered {answer[:200]!r}, expected the id of a job")
        write_atomically(directory / JOB_FILE, f"{job}\n")
    print(f"\nsubmitted as job {job}; megatron-dppo slurm status {directory} tells of it")
    return 0


def _waiting_faults(directory: Path) -> Iterator[str]:
    """A second job on one run's directory could only wait for the first one's lease, and end."""
    job = job_state(directory, [])
    if job.state not in (None, UNKNOWN):
        yield (
            f"run.directory: {directory} is that of job {job.job}, which is {str(job.state).lower()}; end "
            f"it (megatron-dppo slurm stop), or give this run another one"
        )


def _checked(
    config: TrainConfig, site: SiteConfig, options: argparse.Namespace
) -> tuple[Submission | None, str, list[str]]:
    """The submission, None where the roles have no place; the verdict on its memory in a line; all that speaks against
    it."""
    faults: list[str] = []
    submission, memory = None, "memory: not planned, for the configuration can't be used"
    try:
        check_config(config, options.recipe)
    except ConfigError as error:
        faults += error.faults
    fits = not faults
    try:
        submission = Submission.plan(config, site, options.nodes)
    except PlacementError as error:
        faults.append(str(error))
    if submission is not None:
        faults += submission.faults(options.sbatch)
        faults += _waiting_faults(submission.directory)
    if submission is not None and fits:
        memory, lacking = memory_verdict(submission)
        faults += lacking
    faults += refusals.server_option_faults(ServerSections.of(config).where_generated, site)
    return submission, memory, faults
