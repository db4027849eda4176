"""The check on nodes of a Slurm cluster: ``megatron-dppo gpu-check --nodes N``.

The command submits a job and waits for it. The job's batch process, ``python -m`` of this module, runs ``gpu-check`` as
a step of its own on each node, all at the same time, and writes the results of all nodes to one JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.cluster.slurm.commands import allocation_variables
from megatron_dppo.cluster.slurm.site import SiteConfig, load_site, site_path
from megatron_dppo.cluster.slurm.submit import SBATCH, directory_faults, flag_faults, site_faults
from megatron_dppo.config import ConfigError, resolved_yaml
from megatron_dppo.diagnostics.gpu_check.__main__ import JSON_FILE, fresh_folder
from megatron_dppo.launch.placement import Host
from megatron_dppo.launch.srun import hostnames, literal, step_environment
from megatron_dppo.logging import INTERRUPTED, fatal
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import write_atomically
from megatron_dppo.system.processes import start_process, tail
from megatron_dppo.system.secret_variables import without_secrets

MODULE = "megatron_dppo.diagnostics.gpu_check.nodes"
COMMAND = "megatron_dppo.diagnostics.gpu_check"
SITE_FILE = "site.yaml"
_COLLECT_S = 5.0
_OWN_OPTIONS = ("--nodes", "--site", "--directory")
"""Options of the submitting command that the commands on the nodes do not get."""


def check_nodes(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Submit the job for ``words``, the arguments of ``gpu-check``, wait for it, and return its exit code.

    ``options``: the parsed ``words``.
    """
    try:
        site = load_site(site_path(options.site))
        if faults := list(_faults(site, options.directory.resolve())):
            raise ConfigError(faults, "gpu-check --nodes")
    except RunError as error:
        fatal(str(error))
    directory = fresh_folder(options.directory.resolve())
    write_atomically(directory / SITE_FILE, resolved_yaml(site))
    command = job_command(site, options.nodes, directory, node_words(words))
    print(shlex.join(command), flush=True)
    for name in allocation_variables(os.environ):
        del os.environ[name]
    try:
        code = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        print(f"\nthe job continues; its results will be in {directory}")
        return INTERRUPTED
    output = directory / "job.out"
    if output.exists():
        print(output.read_text(errors="replace"), end="")
    if (directory / JSON_FILE).exists():
        print(f"every number of every node is in {directory / JSON_FILE}")
    return code


def _faults(site: SiteConfig, directory: Path) -> Iterator[str]:
    if shutil.which("sbatch") is None:
        yield "sbatch: not on the path, expected a login node of a Slurm cluster"
    yield from directory_faults(directory)
    yield from flag_faults(site.sbatch_flags, SBATCH)
    yield from site_faults(site, None, {"--directory": directory})


def node_words(words: Sequence[str]) -> list[str]:
    """Return ``words`` without the options that only the submitting command has."""
    kept_words: list[str] = []
    is_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_value:
            is_value = False
        elif name in _OWN_OPTIONS:
            is_value = not equals
        else:
            kept_words.append(word)
    return kept_words


def job_command(site: SiteConfig, nodes: int, directory: Path, words: Sequence[str]) -> list[str]:
    """Return the sbatch command line that runs ``gpu-check`` with ``words`` on each of ``nodes`` nodes."""
    batch_process = [sys.executable, "-m", MODULE, str(directory), *words]
    return [
        "sbatch",
        "--parsable",
        "--wait",
        "--job-name=gpu-check",
        f"--nodes={nodes}",
        "--exclusive",
        "--no-requeue",
        site.device_flag,
        *site.job_flags,
        f"--chdir={Path.cwd()}",
        f"--output={literal(directory)}/job.out",
        *site.sbatch_flags,
        f"--wrap=exec {shlex.join(batch_process)}",
    ]


def run_on_nodes(directory: Path, words: Sequence[str], names: Sequence[str]) -> int:
    """Run ``gpu-check`` with ``words`` on the named nodes of this job, write one JSON, and return the highest code."""
    site = load_site(directory / SITE_FILE)
    form = site.form(str(Path.cwd()), server=False)
    environment = step_environment({**without_secrets(os.environ), **site.environment})
    processes = {}
    for name in names:
        command = [site.container.interpreter, "-u", "-m", COMMAND, *words]
        step = form.command(
            [*command, f"--directory={directory / name}"],
            name=f"gpu-check-{name}",
            hosts=[Host(name, name, site.devices(os.environ))],
            tasks_per_host=1,
            output=f"{literal(directory)}/{literal(Path(name))}.out",
            stdin=False,
        )
        output = sys.stdout.fileno()
        processes[name] = start_process(step, environment=environment, output=output)
    codes = {name: process.poll() for name, process in processes.items()}
    while None in codes.values():
        # Write the file again and again: at its time limit, Slurm ends this process without a warning.
        write_collected(directory, codes)
        time.sleep(_COLLECT_S)
        codes = {name: process.poll() for name, process in processes.items()}
    write_collected(directory, codes)
    for name, code in codes.items():
        print(f"{name}: exit code {code}\n{tail(directory / f'{name}.out', 4)}", flush=True)
    return max(code or 0 for code in codes.values())


def write_collected(directory: Path, codes: Mapping[str, int | None]) -> None:
    """Write the file with the results of all nodes."""
    text = json.dumps(collected(directory, codes), indent=1)
    write_atomically(directory / JSON_FILE, f"{text}\n")


def collected(directory: Path, codes: Mapping[str, int | None]) -> dict[str, Any]:
    """Return the results of each node by name.

    A node without results has its exit code (None: it still runs) and the end of its output instead.
    """
    nodes: dict[str, Any] = {}
    for name, code in codes.items():
        result = directory / name / JSON_FILE
        if result.exists():
            nodes[name] = json.loads(result.read_bytes())
        else:
            nodes[name] = {"exit_code": code, "output": tail(directory / f"{name}.out")}
    return {"nodes": nodes}


if __name__ == "__main__":
    sys.exit(
        run_on_nodes(Path(sys.argv[1]), sys.argv[2:], hostnames(os.environ["SLURM_JOB_NODELIST"]))
    )
