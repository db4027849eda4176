"""A rehearsal inside a Slurm job: the batch process of ``submit --rehearse``.

The process looks for the recipe's files on every node. The first node makes the tiny model and the rehearsal's
configuration. The process then runs this configuration twice under the supervisor of this job: the first run is
stopped, and the second run continues to its end. The verdict is printed to the job's output. A waiting ``submit`` shows
the output on its terminal.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dppo.cluster.rehearsal import paths
from megatron_dppo.cluster.rehearsal.__main__ import prepared_rehearsal
from megatron_dppo.cluster.rehearsal.attempts import RunForm
from megatron_dppo.cluster.slurm.site import load_site, site_path
from megatron_dppo.cluster.slurm.supervise import Job, Steps, rehearsed_roles
from megatron_dppo.config.loading import load_config
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.launch.placement import Allocation, Host, place
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.stops import StopRequests
from megatron_dppo.logging import configure_logging
from megatron_dppo.system.secret_variables import hide_secrets

MODULE = "megatron_dppo.cluster.rehearsal"
FAILED = 1


def rehearse_in_job(recipe: str, site_file: str | None, called: str) -> int:
    """Rehearse a recipe on this job's nodes and return the exit code of the batch process.

    Args:
        recipe: the submitted configuration, in the rehearsal's folder.
        site_file: the submitted site file.
        called: the recipe and its overrides as the user wrote them.

    Raises ConfigError, LaunchError, SlurmError.
    """
    # Slurm sends USR1 near the time limit. This process ignores USR1: each run's supervisor watches the clock.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # The job's output is a file; a waiting ``submit`` shows each line as soon as the file has it.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    path_of_site = site_path(site_file)
    site = load_site(path_of_site)
    hide_secrets()
    config = load_config(recipe)
    job = Job.of_environment(site)
    roles = rehearsed_roles(config, job.hosts[0].devices, on_gpus=job.gpus > 0)
    placement = place(roles, Allocation(job.hosts))
    with RunDirectory(Path(recipe).parent) as directory:
        configure_logging(directory.path, None)
        form = site.form(str(Path.cwd()), server=False)
        steps = Steps(directory, form, site.container.interpreter, StopRequests({}))
        hosts = tuple(dict.fromkeys((*placement.rank_hosts, *placement.server_hosts)))
        look_for_paths = [steps.python, "-m", paths.MODULE, *needed_paths(config)]
        if code := _run_step(steps, "paths", look_for_paths, hosts):
            return code
        device = "gpu" if job.gpus else "cpu"
        folder = f"--directory={directory.path}"
        words = [recipe, folder, f"--on-nodes={device}", f"--called={called}"]
        # Make the rehearsal's files on the first host.
        prepare = [steps.python, "-u", "-m", MODULE, *words]
        if code := _run_step(steps, "prepare", prepare, hosts[:1]):
            return code
        form_of_runs = _supervised(Path(recipe), path_of_site)
        return prepared_rehearsal(words, form_of_runs).run_prepared()


def _run_step(steps: Steps, name: str, command: Sequence[str], hosts: Sequence[Host]) -> int:
    """Run ``command`` on each of ``hosts``, print its output and return the exit code."""
    output = steps.directory.logs / f"{name}.out"
    code = steps.run(name, command, hosts, output, tolerant=True, needs_keys=True)
    if output.is_file():
        print(output.read_text(errors="replace"), end="", flush=True)
    return FAILED if code is None else code


def _supervised(recipe: Path, site: Path | None) -> RunForm:
    """Return the form of the runs: ``slurm supervise`` starts each run in this job, and SIGUSR2 stops the run.

    The ranks and servers of ``recipe`` are placed, because servers in the runs' configuration may be smaller.
    """
    flags = ["--once", f"--roles-of={recipe}"]
    if site is not None:
        flags.append(f"--site={site}")
    command = (sys.executable, "-m", "megatron_dppo", "slurm", "supervise", *flags)
    return RunForm(command, signal.SIGUSR2, {})


def needed_paths(config: TrainConfig) -> Iterator[str]:
    """Yield ``KEY=PATH`` for each file and folder that a run of the recipe reads on every node."""
    yield f"{paths.CHECKPOINT}={config.model.hf_checkpoint}"
    for file in config.data.train_files:
        yield f"data.train={file.path}"
    for name, evaluation_file in config.data.evaluation_files.items():
        yield f"data.evaluation.{name}={evaluation_file.path}"
