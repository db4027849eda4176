"""``submit``: check a recipe against the file system, the site file and the cluster's limits, print the job, and
submit it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dppo.cluster.known_models import read_model
from megatron_dppo.cluster.planner.devices import DEVICES, GIB, Cluster
from megatron_dppo.cluster.preflight import CHECKS
from megatron_dppo.cluster.rehearsal import RESULT
from megatron_dppo.cluster.slurm.commands import allocation_variables, fields
from megatron_dppo.cluster.slurm.site import ContainerConfig, SiteConfig, load_site, site_path
from megatron_dppo.config.checks import check_config
from megatron_dppo.config.data_files import data_files
from megatron_dppo.config.errors import ConfigError
from megatron_dppo.config.forwarded import SGLANG, LibraryMissingError
from megatron_dppo.config.loading import load_config, resolved_yaml
from megatron_dppo.config.machine import allocator_faults
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.server_arguments import table_faults_elsewhere
from megatron_dppo.launch.attempts import JOB_FILE
from megatron_dppo.launch.placement import (
    Allocation,
    Host,
    Placement,
    PlacementError,
    hosts_needed,
    place,
)
from megatron_dppo.launch.run_state import UNKNOWN, job_state
from megatron_dppo.launch.slurm_client import SlurmError, slurm
from megatron_dppo.launch.srun import literal
from megatron_dppo.logging import LOGS_FOLDER, say
from megatron_dppo.model.errors import ModelError
from megatron_dppo.spec import Roles
from megatron_dppo.system.files import folder_fault, rename_with_time, with_hash, write_atomically
from megatron_dppo.system.processes import held_back

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNLIMITED = ("INFINITE", "UNLIMITED")


def seconds_of(text: str) -> float | None:
    """Return a Slurm time (``90``, ``1:30:00``, ``2-12``) in seconds; None for a time without an end (UNLIMITED).

    Raises ValueError for a text that is no time.
    """
    if text.upper() in _UNLIMITED:
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"got {text!r}, expected a Slurm time such as 1-00:00:00 or 90 (minutes)")
    days, *texts = match.groups()
    first, second, third = (int(text or 0) for text in texts)
    # The forms are days-hours:minutes:seconds, hours:minutes:seconds, and minutes:seconds.
    begins_with_hours = days is not None or texts[2] is not None
    if begins_with_hours:
        hours, minutes, seconds = first, second, third
    else:
        hours, minutes, seconds = 0, first, second
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)


def directory_faults(directory: Path) -> Iterator[str]:
    """Report a run's folder that can't be created or written, or that Slurm can't write output to."""
    # In a file pattern of Slurm, a backslash disables all symbols, so that the job's id would be missing.
    if "\\" in str(directory):
        yield f"run.directory: {directory} has a backslash, expected a path without one"
    if fault := folder_fault(directory):
        yield f"run.directory: {fault}, expected a folder of your own that all nodes share"


@dataclass(frozen=True)
class FlagForm:
    """The forms of the options that a program of Slurm accepts.

    Attributes:
        key: where the user sets the flags: a key of the site file, or an option of ``submit``.
        with_value: letters of the short options with a value. The value is the rest of the word, or else the next word.
        refused: letters of the short options that are not allowed. With these options, the program starts nothing, or
            returns only at the job's end.
        alone: long options without a value; all other long options are written ``--name=value``.
    """

    key: str
    with_value: str
    refused: str
    alone: frozenset[str]


_ALONE = frozenset(
    (
        *("contiguous", "exclusive", "get-user-env", "no-kill", "overcommit", "oversubscribe"),
        *("propagate", "quiet", "reboot", "spread-job", "use-min-nodes", "verbose"),
    )
)
SBATCH = FlagForm(
    "sbatch_flags",
    "aAbBcCdDeFGiJLmMnNopqStwx",
    "hVW",
    _ALONE | {"export", "hold", "ignore-pbs", "nice", "no-requeue", "parsable", "requeue"},
)
SRUN = FlagForm(
    "srun_flags",
    "AbBcCdDeFGiJLmMnNopqrStTwWx",
    "hV",
    _ALONE | {"disable-status", "exact", "label", "overlap", "preserve-env", "unbuffered", "whole"},
)


def flag_faults(flags: Sequence[str], form: FlagForm) -> Iterator[str]:
    """Report words that are not options, and options that lack their value.

    Slurm would take a word that is not an option for the script or the command that follows the options. It would take
    the script for the value that an option lacks.
    """
    words = iter(flags)
    for word in words:
        if complaint := _flag_complaint(word, words, form):
            yield f"{form.key}: got {word!r}, {complaint}"


def _flag_complaint(word: str, following: Iterator[str], form: FlagForm) -> str | None:
    """Return what is wrong with an option, or None. A short option may take its value from ``following``."""
    if word.startswith("--") and len(word) > 2:
        if "=" in word or word[2:] in form.alone:
            return None
        return f"expected --name=value in one word, or --{', --'.join(sorted(form.alone))}"
    if not re.fullmatch(r"-[a-zA-Z].*", word, re.DOTALL):
        return "expected an option such as --constraint=h100"
    # One word may have several short options. ``word[end:]`` is the text after ``letter``.
    for end, letter in enumerate(word[1:], start=2):
        if letter in form.refused:
            return f"with -{letter} the program starts nothing, or returns only at the job's end"
        if letter in form.with_value:
            value = word[end:] or next(following, "")
            return None if value else "which lacks its value"
    return None


def partition_of(name: str | None) -> dict[str, str] | None:
    """Return Slurm's fields of the partition ``name``, or of the default partition without a name.

    The result is None if Slurm does not answer, or if it does not have the partition: sbatch then reports the fault.
    """
    query = ["partition"]
    if name:
        query.append(name)
    try:
        description = slurm("scontrol", "-o", "show", *query)
    except SlurmError:
        return None
    for line in description.splitlines():
        partition = fields(line)
        if name is not None or partition.get("Default") == "YES":
            return partition
    return None


def time_faults(site: SiteConfig, partition: Mapping[str, str] | None) -> Iterator[str]:
    """Report a time limit that Slurm can't read, that exceeds the partition's limit, or that is too short for a step.

    Without a time limit in the site file, the job has the time limit of the partition.
    """
    limits = partition or {}
    max_time = limits.get("MaxTime", "UNLIMITED")
    inherited = limits.get("DefaultTime", "NONE")
    if inherited == "NONE":
        inherited = max_time
    if site.time is None:
        time_text = inherited
        given_limit = f"none, partition {limits.get('PartitionName')} gives {inherited}"
    else:
        time_text = given_limit = str(site.time)
    try:
        limit = seconds_of(time_text)
    except ValueError as error:
        yield f"time: {error}"
        return
    least_seconds = site.start_s + site.checkpoint_margin_s
    if limit is not None and limit < least_seconds:
        yield (
            f"time: got {given_limit}, {limit:.0f} s, expected at least "
            f"{least_seconds} s: a start and a step (start_s {site.start_s}), and what is kept to save a "
            f"checkpoint (checkpoint_margin_s {site.checkpoint_margin_s})"
        )
    # A quality of service may allow more than the partition.
    if site.qos:
        return
    bound = seconds_of(max_time)
    if bound is not None and (limit is None or limit > bound):
        yield (
            f"time: got {site.time}, expected at most {max_time}, the limit of partition "
            f"{limits['PartitionName']}: the job would wait for ever"
        )


def node_faults(nodes: int, partition: Mapping[str, str] | None) -> Iterator[str]:
    """Report more nodes than the partition has."""
    total = (partition or {}).get("TotalNodes", "")
    if partition is not None and total.isdigit() and nodes > int(total):
        yield (
            f"nodes: got {nodes}, expected at most {total}, the nodes of partition "
            f"{partition['PartitionName']}: the job would wait for ever"
        )


def environment_faults(
    strategy: str, site: SiteConfig, flags: Sequence[str], environment: Mapping[str, str]
) -> Iterator[str]:
    """Report environment variables with which the run's steps on GPUs can't work.

    The function checks the variables of the site file and of ``environment``, which sbatch passes on. If ``flags`` or
    SBATCH_EXPORT select variables, the function checks only the site file.
    """
    if not site.gpus_per_node:
        return
    is_export_set = "SBATCH_EXPORT" in environment or any(f.startswith("--export") for f in flags)
    variables = dict(site.environment)
    if not is_export_set:
        variables = {**environment, **site.environment}
    for fault in allocator_faults(strategy, variables):
        yield f"{fault}; the job would have it from the site file's environment, or this shell's"


def site_faults(site: SiteConfig, python: str | None, paths: Mapping[str, Path]) -> Iterator[str]:
    """Report unknown names in the site file, and missing parts of a container.

    ``python``: the servers' interpreter, ``engine.python``. ``paths``: the run's paths by the key that has them.
    """
    unknown = [name for name in site.preflight_skip if name not in CHECKS]
    if unknown:
        yield f"preflight_skip: got {unknown[0]!r}, expected some of {', '.join(CHECKS)}"
    yield from _shell_faults(site)
    for name in site.environment:
        if not _VARIABLE.fullmatch(name):
            yield f"environment: got the name {name!r}, expected only letters, digits and _"
    yield from flag_faults(site.srun_flags, SRUN)
    container = site.container
    if container.kind == "none":
        if container.image or container.server_image:
            yield "container.kind: got 'none' with an image, expected pyxis or apptainer"
        if python is not None and shutil.which(python) is None:
            yield f"engine.python: got {python!r}, expected a Python interpreter"
        return
    if container.image is None:
        yield f"container.image: missing, expected the image that {container.kind} starts"
    for image in (container.image, container.server_image):
        if image is not None and image.startswith("/") and not Path(image).exists():
            yield f"container.image: got {image!r}, which is not there"
    yield from _mount_faults(paths, container)


def _shell_faults(site: SiteConfig) -> Iterator[str]:
    """Report a prologue that is not shell code, and a ``gres`` whose number of GPUs differs from ``gpus_per_node``."""
    if site.prologue:
        command = ["bash", "-n"]
        # With -n, bash parses the lines without running them.
        parsed = subprocess.run(
            command, input=site.prologue, capture_output=True, text=True, check=False
        )
        if parsed.returncode:
            message = parsed.stderr.strip().splitlines()[0]
            yield f"prologue: {message}; expected lines that bash can run"
    if site.gres is None:
        return
    count = 0
    for entry in site.gres.split(","):
        # An entry is name[:type][:count], for example gpu:h100:8(S:0-1). The brackets name sockets.
        kind, *words = entry.split("(")[0].split(":")
        if kind == "gpu":
            has_number = bool(words) and words[-1].isdigit()
            count += int(words[-1]) if has_number else 1
    if count != site.gpus_per_node:
        yield (
            f"gres: got {site.gres!r}, {count} GPUs, expected gpus_per_node = {site.gpus_per_node}: such as "
            f"gpu:{site.gpus_per_node}"
        )


def server_option_faults(config: TrainConfig, site: SiteConfig) -> Iterator[str]:
    """Report values of the ``sglang:`` table that the SGLang in the servers' Python refuses.

    The result is empty if the run starts no server, or if the
    servers' Python can't be asked on this machine. In the second case, the job's check on its first node finds faults.
    """
    if not Roles.of(config).servers or not SGLANG.free(config.sglang):
        return
    container = site.container
    if container.kind != "none":
        say("sglang: checked only in the job, by the Python of its container")
        return
    python = config.engine.python or container.interpreter
    say(f"sglang: {python} is asked whether SGLang takes the table's values (seconds)")
    try:
        yield from table_faults_elsewhere(config.sglang, python)
    except LibraryMissingError as error:
        say(f"sglang: checked only in the job: {error}")


def _mount_faults(paths: Mapping[str, Path], container: ContainerConfig) -> Iterator[str]:
    """Report paths of the run that a container does not see under the same path. ``paths``: path by key."""
    folders = container.seen_inside(str(Path.cwd()))
    for key, path in paths.items():
        if not any(path.absolute().is_relative_to(folder) for folder in folders):
            yield (
                f"container.mounts: {key} is in no mount that has one path outside and inside, expected such as "
                f"{path.absolute().parent}:{path.absolute().parent}"
            )


def memory_verdict(submission: Submission) -> tuple[str, list[str]]:
    """Return a line about the planned memory, and reasons against the run.

    The plan needs no weights, only the layout and a config.json: the checkpoint's file, or the file of a known model
    with the checkpoint's name. Nothing is planned if the site file does not name the kind of GPU, or if the nodes have
    no GPUs.
    """
    config = submission.config
    site = submission.site
    nodes = submission.nodes
    if not site.gpus_per_node:
        return "memory: not planned, the nodes have no GPUs", []
    if site.gpu is None:
        names = ", ".join(DEVICES)
        return f"memory: not planned, as the site file's gpu names none of {names}", []
    # Import lazily: it loads numpy.
    from megatron_dppo.cluster.planner.search import Question

    device = DEVICES[site.gpu]
    memory = device.host_memory if site.host_memory_gib is None else site.host_memory_gib * GIB
    cluster = Cluster(device, nodes, site.gpus_per_node, memory)
    try:
        shape = read_model(config.model.hf_checkpoint).shape
    except ModelError as error:
        return f"memory: not planned: {error}", []
    question = Question(config, shape, cluster)
    if layout_faults := question.layout_faults():
        return f"memory: not planned: {layout_faults[0]}", []
    plan = question.plan()
    fullest_gib = plan.fullest.total / GIB
    verdict = "fits" if plan.fits else "does not fit"
    line = (
        f"memory: {verdict} on {nodes} x {site.gpus_per_node} {device.name}; the fullest rank takes "
        f"{fullest_gib:.1f} GiB; {plan.memory_limit}"
    )
    return line, list(plan.faults)


SCRIPT = Path(__file__).with_name("run.sbatch")
CONFIG_FILE = "submitted.yaml"
SITE_FILE = "site.yaml"
MOST_NODES = 2**16
"""Bound of ``--nodes``, so that a mistyped number is refused before a host is made for each node."""
_LIMIT_FLAGS = ("-p", "--partition", "-t", "--time")
"""Flags of sbatch that replace the site file's partition and time limit."""


@dataclass(frozen=True)
class Submission:
    """A run before its submission, placed on ``nodes`` nodes with provisional names."""

    config: TrainConfig
    site: SiteConfig
    nodes: int
    placement: Placement
    rehearses: str = ""
    """The recipe and its overrides as the user wrote them, if the job is a rehearsal; otherwise empty."""

    @classmethod
    def plan(cls, config: TrainConfig, site: SiteConfig, nodes: int | None) -> Submission:
        """Place the run on ``nodes`` nodes; None: on as many nodes as the roles fill. Raises PlacementError."""
        if nodes is not None and nodes > MOST_NODES:
            raise PlacementError(f"nodes: got {nodes}, expected at most {MOST_NODES}")
        roles = Roles.of(config)
        devices = site.devices({})
        rank_nodes = 0
        filled_roles = roles
        if site.server_partition is not None and roles.servers:
            # The servers begin on the first node of the second group.
            rank_nodes = hosts_needed(replace(roles, servers=0), devices)
            filled_roles = replace(roles, first_device=rank_nodes * devices)
        count = hosts_needed(filled_roles, devices) if nodes is None else nodes
        hosts = []
        for i in range(count):
            name = f"node{i + 1}"
            # Group 0 has the nodes of the ranks, group 1 the nodes of the servers.
            group = int(i >= rank_nodes) if rank_nodes else None
            hosts.append(Host(name, name, devices, group))
        return cls(config, site, count, place(roles, Allocation(tuple(hosts))))

    @property
    def _nodes_by_group(self) -> list[int]:
        """Number of nodes in each group of the job; one number unless the job is heterogeneous."""
        placement = self.placement
        hosts = dict.fromkeys((*placement.rank_hosts, *placement.server_hosts, *placement.unused))
        return [len(group) for group in Allocation(tuple(hosts)).groups]

    @property
    def directory(self) -> Path:
        """The run's folder. The folder of a rehearsal is beside the folder of the recipe's run."""
        directory = Path(self.config.run.directory).resolve()
        if self.rehearses:
            return directory.with_name(f"{directory.name}-rehearsal")
        return directory

    def command(self, extra: Sequence[str] = ()) -> list[str]:
        """Return the sbatch command line, with the further flags ``extra``.

        Options precede the script: sbatch passes the words after the script to the script.
        """
        site = self.site
        first_count, *other_counts = self._nodes_by_group
        command = [
            "sbatch",
            "--parsable",
            f"--job-name={self.directory.parent.name}-{self.directory.name}",
            f"--nodes={first_count}",
            site.device_flag,
            *site.job_flags,
            f"--signal=B:USR1@{site.checkpoint_margin_s}",
            f"--chdir={Path.cwd()}",
            f"--output={literal(self.directory)}/logs/slurm-%j.out",
        ]
        if site.spares_servers:
            command.append("--no-kill")
        command += site.sbatch_flags
        if self.rehearses:
            command.append("--no-requeue")
        command += [*extra, *self._second_group(other_counts), str(SCRIPT)]
        command += [str(self.directory / CONFIG_FILE), f"--site={self.directory / SITE_FILE}"]
        if self.rehearses:
            command.append(f"--rehearse={self.rehearses}")
        return command

    def _second_group(self, node_counts: Sequence[int]) -> list[str]:
        """Return the options of the servers' nodes, the second group of a heterogeneous job.

        These options are complete: sbatch applies the script's #SBATCH lines only to the first group.
        """
        site = self.site
        options = {"account": site.account, "qos": site.qos, "time": site.time}
        flags = [f"--{name}={value}" for name, value in options.items() if value is not None]
        flag_words: list[str] = []
        for nodes in node_counts:
            flag_words += [
                ":",
                f"--nodes={nodes}",
                site.device_flag,
                f"--partition={site.server_partition}",
                "--exclusive",
                *flags,
                *site.sbatch_flags,
            ]
        return flag_words

    def faults(self, extra: Sequence[str] = ()) -> Iterator[str]:
        """Report why the job could not work, apart from faults that ``check_config`` and the placement report.

        ``extra``: as for ``command``. If a flag of sbatch sets a partition or a time, only sbatch compares the job
        with the limits of the partition.
        """
        if shutil.which("sbatch") is None:
            yield "sbatch: not on the path, expected a login node of a Slurm cluster"
        yield from directory_faults(self.directory)
        yield from flag_faults(self.site.sbatch_flags, SBATCH)
        yield from flag_faults(extra, replace(SBATCH, key="--sbatch"))
        partitions: list[dict[str, str] | None] = [None]
        flags = (*self.site.sbatch_flags, *extra)
        if not any(flag.startswith(_LIMIT_FLAGS) for flag in flags):
            partitions = [partition_of(self.site.partition)]
            if self.site.server_partition:
                partitions.append(partition_of(self.site.server_partition))
        # Both partitions may have the same fault: report it once.
        time_limit_faults: dict[str, None] = {}
        for partition in partitions:
            time_limit_faults |= dict.fromkeys(time_faults(self.site, partition))
        yield from time_limit_faults
        # A run without servers has one group, even if ``server_partition`` is set.
        for nodes, partition in zip(self._nodes_by_group, partitions, strict=False):
            yield from node_faults(nodes, partition)
        config = self.config
        data = self.config.data
        yield from environment_faults(config.weight_sync.strategy, self.site, flags, os.environ)
        files = (*data.train_files, *data.evaluation_files.values())
        paths = {
            "run.directory": self.directory,
            "model.hf_checkpoint": Path(config.model.hf_checkpoint),
        }
        for file in files:
            paths |= _paths_of_data(file.path)
        yield from site_faults(self.site, config.engine.python, paths)


def _paths_of_data(path: str) -> dict[str, Path]:
    """Return one file of each folder in which the data path has files, by the file's name in messages."""
    expanded = data_files(path)
    if not expanded.is_several:
        return {f"data: {path}": Path(path)}
    first_files: dict[Path, Path] = {}
    for file in expanded.files:
        first_files.setdefault(file.parent, file)
    return {f"data: {file}": file for file in first_files.values()}


PYTHON_VARIABLE = "MEGATRON_DPPO_PYTHON"
"""Variable with the interpreter of the batch process."""


def submit(options: argparse.Namespace) -> int:
    """Submit the job of the command line, or only print it; return the exit code. Raises ConfigError, SlurmError."""
    site = load_site(site_path(options.site), options.set)
    config = load_config(options.recipe, options.overrides)
    submission, memory, faults = _checked(config, site, options)
    if faults and not options.dry_run:
        raise ConfigError(faults, options.recipe)
    if submission is not None:
        print(f"run directory: {submission.directory}\n")
        print(f"{submission.placement.table()}\n\n{memory}\n")
    if options.print_config:
        print(f"# {CONFIG_FILE}\n{resolved_yaml(config)}")
        print(f"# {SITE_FILE}\n{resolved_yaml(site)}")
    if submission is not None and options.dry_run:
        print(shlex.join(submission.command(options.sbatch)), flush=True)
    if options.dry_run and not faults:
        print("verdict: would be submitted", flush=True)
    # The faults come last, below everything else on the screen.
    if faults:
        raise ConfigError(faults, f"{options.recipe} would be refused")
    assert submission is not None
    if options.dry_run:
        return 0
    if options.rehearse:
        set_aside(submission.directory)
    job = _hand_over(submission, options.sbatch)
    print(f"\nsubmitted as job {job}; {_hint(submission)}", flush=True)
    if options.rehearse and not options.detach:
        return follow(submission.directory, job)
    return 0


def _hint(submission: Submission) -> str:
    if submission.rehearses:
        verdict = submission.directory / RESULT
        return f"its verdict will be in {verdict}; scancel ends it"
    return f"megatron-dppo status {submission.directory} shows its state"


def set_aside(directory: Path) -> None:
    """Rename the folder of an earlier rehearsal, and print its new name."""
    if directory.exists():
        print(f"the earlier rehearsal is now {rename_with_time(directory)}")


def follow(directory: Path, job: str) -> int:
    """Print a rehearsal's output until its job has ended, and return the exit code: 0 if it passed, else 1.

    Ctrl-C ends this function and leaves the job as it is.
    """
    output = directory / LOGS_FOLDER / f"slurm-{job}.out"
    shown_bytes = 0
    print(f"its output follows; Ctrl-C leaves the job running and {output} has it\n", flush=True)
    has_ended = False
    while True:
        text = output.read_bytes() if output.exists() else b""
        sys.stdout.write(text[shown_bytes:].decode(errors="replace"))
        sys.stdout.flush()
        shown_bytes = len(text)
        if has_ended:
            break
        # Read once more after the job's end: its last lines may follow the last read.
        has_ended = job_state(directory, []).state in (None, *_ENDED_STATES)
        time.sleep(_FOLLOW_EVERY_S)
    try:
        result = json.loads((directory / RESULT).read_bytes())
    except OSError:
        result = {"passed": False}
    return 0 if result["passed"] else 1


_FOLLOW_EVERY_S = 1.0
_ENDED_STATES = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "DEADLINE",
)


def _hand_over(submission: Submission, flags: Sequence[str]) -> str:
    """Save the configuration in the run's directory, submit the job, and return its id."""
    directory = submission.directory
    command = submission.command(flags)
    (directory / LOGS_FOLDER).mkdir(parents=True, exist_ok=True)
    write_atomically(directory / CONFIG_FILE, with_hash(resolved_yaml(submission.config)))
    write_atomically(directory / SITE_FILE, resolved_yaml(submission.site))
    print(f"configuration: {directory / CONFIG_FILE}, {directory / SITE_FILE}")
    print(shlex.join(command), flush=True)
    # The supervisor must run under this interpreter, not under the default of ``run.sbatch``.
    os.environ.setdefault(PYTHON_VARIABLE, sys.executable)
    for name in allocation_variables(os.environ):
        del os.environ[name]
    # Delay signals, so that no job can be in the queue without its id in the run directory.
    with held_back():
        answer = slurm(*command).strip()
        # In a federation --parsable adds the cluster's name.
        job = answer.partition(";")[0]
        if not job.isdigit():
            raise SlurmError(f"sbatch answered {answer[:200]!r}, expected the id of a job")
        write_atomically(directory / JOB_FILE, f"{job}\n")
    return job


def _waiting_faults(directory: Path) -> Iterator[str]:
    """Report a job that uses the run's directory already: a new job could only wait for the run's lease, and end."""
    job = job_state(directory, [])
    if job.state not in (None, UNKNOWN):
        yield (
            f"run.directory: {directory} is the folder of job {job.job}, which is {str(job.state).lower()}; end "
            f"it (megatron-dppo stop), or give this run another folder"
        )


def _checked(
    config: TrainConfig, site: SiteConfig, options: argparse.Namespace
) -> tuple[Submission | None, str, list[str]]:
    """Return the submission, a line about its memory, and every fault.

    The submission is None if the roles do not fit on the nodes.
    """
    faults: list[str] = []
    submission, memory = None, "memory: not planned, as the roles have no place"
    rehearses = options.rehearse
    try:
        # A rehearsal makes its own weights, so the checkpoint's weights need not exist.
        check_config(config, options.recipe, weights=not rehearses)
    except ConfigError as error:
        faults += error.faults
    try:
        submission = Submission.plan(config, site, options.nodes)
    except PlacementError as error:
        faults.append(str(error))
    if submission is not None and rehearses:
        called = shlex.join([options.recipe, *options.overrides])
        submission = replace(submission, rehearses=called)
    if submission is not None:
        faults += submission.faults(options.sbatch)
        faults += _waiting_faults(submission.directory)
        memory, memory_faults = memory_verdict(submission)
        # The rehearsal's model is tiny: the memory of the recipe's model does not matter.
        if not rehearses:
            faults += memory_faults
    faults += server_option_faults(config, site)
    return submission, memory, faults
