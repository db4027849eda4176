"""What the file system, the site file and the cluster's own limits say against a submission."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.config.forwarded import SGLANG, LibraryMissingError
from megatron_dppo.config.machine import allocator_faults
from megatron_dppo.engine.options import ServerSections, table_faults_elsewhere
from megatron_dppo.logging import say
from megatron_dppo.preflight import CHECKS
from megatron_dppo.slurm.commands import SlurmError, fields, slurm
from megatron_dppo.slurm.site import ContainerConfig, SiteConfig
from megatron_dppo.system.files import unwritable

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNLIMITED = ("INFINITE", "UNLIMITED")


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


def directory_faults(directory: Path) -> Iterator[str]:
    """A run's folder that can't be made, or written in, or that Slurm writes no output in."""
    # A backslash turns the symbols of its patterns off.
    if "\\" in str(directory):
        yield f"run.directory: {directory} has a backslash, expected a path without one"
    if fault := unwritable(directory):
        yield f"run.directory: {fault}, expected a folder of your own that all nodes share"


@dataclass(frozen=True)
class FlagForm:
    """Options of a program of Slurm. ``with_value``: letters that take the next word where nothing is joined
    to them. ``refused``: letters after which nothing is started, or only at the job's end. ``alone``: long
    options that need no value; all others are written ``--name=value``."""

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
    _ALONE
    | frozenset(["export", "hold", "ignore-pbs", "nice", "no-requeue", "parsable", "requeue"]),
)
SRUN = FlagForm(
    "srun_flags",
    "AbBcCdDeFGiJLmMnNopqrStTwWx",
    "hV",
    _ALONE
    | frozenset(
        ["disable-status", "exact", "label", "overlap", "preserve-env", "unbuffered", "whole"]
    ),
)


def flag_faults(flags: Sequence[str], form: FlagForm) -> Iterator[str]:
    """Words that are no option, or that lack their value: they would take the place of the script or the
    command that follows, or have one of its words for their value."""
    remaining = iter(flags)
    for word in remaining:
        if complaint := _flag_complaint(word, remaining, form):
            yield f"{form.key}: got {word!r}, {complaint}"


def _flag_complaint(word: str, following: Iterator[str], form: FlagForm) -> str | None:
    if word.startswith("--") and len(word) > 2:
        if "=" in word or word[2:] in form.alone:
            return None
        return f"expected --name=value in one word, or --{', --'.join(sorted(form.alone))}"
    if not re.fullmatch(r"-[a-zA-Z].*", word, re.DOTALL):
        return "expected an option such as --constraint=h100"
    for end, letter in enumerate(word[1:], start=2):
        if letter in form.refused:
            return f"after -{letter} no job could be told of"
        if letter in form.with_value:
            has_value = end < len(word) or next(following, "")
            return None if has_value else "which lacks its value"
    return None


def partition_of(name: str | None) -> dict[str, str] | None:
    """What Slurm says of a partition, None: of the default one. None where it can't be asked, or knows
    none of that name: sbatch then says so."""
    try:
        shown = slurm("scontrol", "-o", "show", "partition", *([name] if name else []))
    except SlurmError:
        return None
    records = [fields(line) for line in shown.splitlines()]
    return next((r for r in records if name is not None or r.get("Default") == "YES"), None)


def time_faults(site: SiteConfig, partition: Mapping[str, str] | None) -> Iterator[str]:
    """A time limit that is none, that the partition does not give, or that leaves no time for a step.

    Without one of our own the partition's counts.
    """
    limits = partition or {}
    most = limits.get("MaxTime", "UNLIMITED")
    default = limits.get("DefaultTime", "NONE")
    inherited = most if default == "NONE" else default
    try:
        limit = seconds_of(inherited if site.time is None else str(site.time))
    except ValueError as error:
        yield f"time: {error}"
        return
    least = site.start_s + site.checkpoint_margin_s
    if limit is not None and limit < least:
        given = f"none, partition {limits.get('PartitionName')} gives {inherited}"
        yield (
            f"time: got {given if site.time is None else site.time}, {limit:.0f} s, expected at least "
            f"{least} s: a start and a step (start_s {site.start_s}), and what is kept to save a "
            f"checkpoint (checkpoint_margin_s {site.checkpoint_margin_s})"
        )
    if (
        not site.qos
        and (bound := seconds_of(most)) is not None
        and (limit is None or limit > bound)
    ):
        yield (
            f"time: got {site.time}, expected at most {most}, the limit of partition "
            f"{limits['PartitionName']}: the job would wait for ever"
        )


def node_faults(nodes: int, partition: Mapping[str, str] | None) -> Iterator[str]:
    total = (partition or {}).get("TotalNodes", "")
    if partition is not None and total.isdigit() and nodes > int(total):
        yield (
            f"nodes: got {nodes}, expected at most {total}, those of partition "
            f"{partition['PartitionName']}: the job would wait for ever"
        )


def environment_faults(
    strategy: str, site: SiteConfig, flags: Sequence[str], environment: Mapping[str, str]
) -> Iterator[str]:
    """Variables of the steps on GPUs that the run can't work with: the site file's, and those of ``environment`` that
    sbatch hands on, which is all unless ``flags`` or a variable of its own say what."""
    if not site.gpus_per_node:
        return
    chosen = "SBATCH_EXPORT" in environment or any(f.startswith("--export") for f in flags)
    variables = {**({} if chosen else environment), **site.environment}
    for fault in allocator_faults(strategy, variables):
        yield f"{fault}; the job would have it from the site file's environment, or this shell's"


def site_faults(site: SiteConfig, python: str | None, paths: Mapping[str, Path]) -> Iterator[str]:
    """Names in the site file that nothing has, a container that lacks something."""
    if unknown := [name for name in site.preflight_skip if name not in CHECKS]:
        yield f"preflight_skip: got {unknown[0]!r}, expected some of {', '.join(CHECKS)}"
    yield from _shell_faults(site)
    for name in site.environment:
        if not _VARIABLE.fullmatch(name):
            yield f"environment: got the name {name!r}, expected letters, digits and _ alone"
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
    """A prologue that is no shell, a ``gres`` of another number of GPUs than the roles are placed on."""
    if site.prologue:
        command = ["bash", "-n"]
        parsed = subprocess.run(
            command, input=site.prologue, capture_output=True, text=True, check=False
        )
        if parsed.returncode:
            message = parsed.stderr.strip().splitlines()[0]
            yield f"prologue: {message}; expected lines that bash can run"
    if site.gres is None:
        return
    gpus = [entry.split("(")[0].split(":") for entry in site.gres.split(",")]
    count = sum(int(e[-1]) if e[-1].isdigit() else 1 for e in gpus if e[0] == "gpu")
    if count != site.gpus_per_node:
        yield (
            f"gres: got {site.gres!r}, {count} GPUs, expected gpus_per_node = {site.gpus_per_node}: such as "
            f"gpu:{site.gpus_per_node}"
        )


def server_option_faults(sections: ServerSections | None, site: SiteConfig) -> Iterator[str]:
    """Values of the ``sglang:`` table that the servers would end over, by the Python that they get.

    Nothing where the run starts no server (``sections``: None where it generates nothing), and where that Python
    can't be asked from here: the job's own
    check on its first node asks it then.
    """
    if sections is None or not sections.engine.started or not SGLANG.free(sections.sglang):
        return
    container = site.container
    if container.kind != "none":
        say("sglang: checked in the job alone, by the Python of its container")
        return
    python = sections.engine.python or container.interpreter
    say(f"sglang: {python} is asked whether SGLang takes the table's values (seconds)")
    try:
        yield from table_faults_elsewhere(sections.sglang, python)
    except LibraryMissingError as error:
        say(f"sglang: checked in the job alone: {error}")


def _mount_faults(paths: Mapping[str, Path], container: ContainerConfig) -> Iterator[str]:
    """``paths`` of the run, by key, that its ranks and servers would not find inside."""
    folders = container.seen_inside(str(Path.cwd()))
    for key, path in paths.items():
        if not any(path.absolute().is_relative_to(folder) for folder in folders):
            yield (
                f"container.mounts: {key} is in none of them under its own path, expected such as "
                f"{path.absolute().parent}:{path.absolute().parent}"
            )
