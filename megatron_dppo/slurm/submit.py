"""``submit``: check a recipe, show what it comes to, hand it to sbatch."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.config.checks import check_config
from megatron_dppo.config.errors import ConfigError
from megatron_dppo.config.loading import load_config, resolved_yaml
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.launch.placement import PlacementError
from megatron_dppo.slurm.commands import SlurmError, slurm
from megatron_dppo.slurm.memory import memory_verdict
from megatron_dppo.slurm.refusals import server_option_problems
from megatron_dppo.slurm.site import SiteConfig, load_site, site_path
from megatron_dppo.slurm.status import UNKNOWN, job_state
from megatron_dppo.slurm.submission import CONFIG_FILE, JOB_FILE, SITE_FILE, Submission
from megatron_dppo.system.files import write_atomically
from megatron_dppo.system.processes import held_back

PYTHON_VARIABLE = "MEGATRON_DPPO_PYTHON"
"""Names the interpreter of the batch process."""


@dataclass(frozen=True)
class Request:
    """What a command line asks for."""

    recipe: str
    overrides: Sequence[str]
    site_file: str | None = None
    site_overrides: Sequence[str] = ()
    nodes: int | None = None
    sbatch_flags: Sequence[str] = ()
    dry_run: bool = False


def submit(request: Request) -> int:
    """Submit it, or only show it; the exit code. Raises ConfigError, SlurmError."""
    site = load_site(site_path(request.site_file), request.site_overrides)
    config = load_config(request.recipe, request.overrides)
    findings = _checked(config, site, request)
    if findings.problems and not request.dry_run:
        raise ConfigError(findings.problems, request.recipe)
    if (submission := findings.submission) is not None:
        print(f"run directory: {submission.directory}\n")
        print(f"{submission.placement.table()}\n\n{findings.memory}\n")
    if request.dry_run:
        print(f"# {CONFIG_FILE}\n{resolved_yaml(config)}")
        print(f"# {SITE_FILE}\n{resolved_yaml(site)}")
    if submission is not None and request.dry_run:
        print(shlex.join(submission.command(request.sbatch_flags)), flush=True)
    if findings.problems:
        raise ConfigError(findings.problems, f"{request.recipe} would be refused")
    assert submission is not None
    return 0 if request.dry_run else _hand_over(submission, request.sbatch_flags)


def _hand_over(submission: Submission, flags: Sequence[str]) -> int:
    """Freeze the configuration in the run's directory and give the job to sbatch."""
    directory, command = submission.directory, submission.command(flags)
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    write_atomically(directory / CONFIG_FILE, resolved_yaml(submission.config))
    write_atomically(directory / SITE_FILE, resolved_yaml(submission.site))
    print(f"configuration: {directory / CONFIG_FILE}, {directory / SITE_FILE}")
    print(shlex.join(command), flush=True)
    os.environ.setdefault(PYTHON_VARIABLE, sys.executable)
    with held_back():  # or a job could be in the queue that the run directory does not name
        answer = slurm(*command).strip()
        job = answer.partition(";")[0]
        if not job.isdigit():
            raise SlurmError(f"sbatch answered {answer[:200]!r}, expected the id of a job")
        write_atomically(directory / JOB_FILE, f"{job}\n")
    print(f"\nsubmitted as job {job}; megatron-dppo slurm status {directory} tells of it")
    return 0


def _waiting_problems(directory: Path) -> Iterator[str]:
    """A second job on one run's directory could only wait for the first one's lease, and end."""
    job = job_state(directory, [])
    if job.state not in (None, UNKNOWN):
        yield (
            f"run.directory: {directory} is that of job {job.job}, which is {str(job.state).lower()}; end "
            f"it (megatron-dppo slurm stop), or give this run another one"
        )


@dataclass(frozen=True)
class _Findings:
    """``submission``: None where the roles have no place; ``memory``: its verdict in a line; ``problems``: all that
    speaks against it."""

    submission: Submission | None
    memory: str
    problems: list[str]


def _checked(config: TrainConfig, site: SiteConfig, request: Request) -> _Findings:
    problems: list[str] = []
    submission, memory = None, "memory: not planned, for the configuration can't be used"
    try:
        check_config(config, request.recipe)
    except ConfigError as error:
        problems += error.problems
    fits = not problems
    try:
        submission = Submission.plan(config, site, request.nodes)
    except PlacementError as error:
        problems.append(str(error))
    if submission is not None:
        problems += [
            *submission.problems(request.sbatch_flags),
            *_waiting_problems(submission.directory),
        ]
    if submission is not None and fits:
        memory, lacking = memory_verdict(config, site, submission.nodes)
        problems += lacking
    problems += server_option_problems(config, site)
    return _Findings(submission, memory, problems)
