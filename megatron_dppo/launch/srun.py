"""Commands of a run inside a Slurm allocation: each is a step of its own, started by srun.

SIGTERM to srun has Slurm kill the step's tasks at once, so that is how a step is ended. srun names the
step by the job's id and the step's number, which a requeued job counts from 0 again: an srun that can't
reach Slurm tries anew for seconds, and would then kill a step of the attempt that succeeded it. So where
the run's lease is another's, srun itself is killed, and says nothing.

A step shares its node with the others (``--overlap``) and gets all of the node's cores and GPUs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dppo.launch.places import Host
from megatron_dppo.system.fence import FencedError
from megatron_dppo.system.launching import LocalProcess, Running, start_fed

_END_S = 15.0
_OPTION_VARIABLES = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_EXPORT_ENV",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TRES_PER_TASK",
)
"""What sbatch sets and srun takes as options of a step."""


@dataclass(frozen=True)
class StepForm:
    """What every step of a run has in common.

    ``flags``: of srun. ``prefix``: words before the command, such as those that enter a container. ``fence``:
    raises FencedError once another start has taken over the run.
    """

    flags: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    fence: Callable[[], None] = lambda: None

    def command(
        self,
        command: Sequence[str],
        *,
        name: str,
        hosts: Sequence[Host],
        tasks_per_host: int,
        output: str,
        stdin: bool,
        tolerant: bool = False,
    ) -> list[str]:
        """The srun command line of a step.

        Args:
            command: of every task.
            name: of the step.
            hosts: in Slurm's order, all of one group.
            tasks_per_host: on each of them, neighbours in rank.
            output: file of the tasks' output, appended to; ``%t`` is the task.
            stdin: whether the tasks read srun's standard input.
            tolerant: a task that ends with an error leaves the others running.
        """
        groups = {host.group for host in hosts}
        assert len(groups) == 1, "a step is inside one group of a heterogeneous job"
        group = hosts[0].group
        return [
            "srun",
            *([] if group is None else [f"--het-group={group}"]),
            "--overlap",
            "--export=ALL",
            "--mpi=none",
            "--cpu-bind=none",
            f"--kill-on-bad-exit={0 if tolerant else 1}",
            "--wait=0",
            f"--job-name={name}",
            f"--nodes={len(hosts)}",
            f"--ntasks={len(hosts) * tasks_per_host}",
            f"--ntasks-per-node={tasks_per_host}",
            "--distribution=block",
            f"--nodelist={','.join(host.name for host in hosts)}",
            f"--input={'all' if stdin else 'none'}",
            f"--output={output}",
            "--open-mode=append",
            *self.flags,
            *self.prefix,
            *command,
        ]


def literal(path: Path) -> str:
    """``path`` in a pattern of an output file, which Slurm takes as it is (one without a backslash)."""
    return str(path).replace("%", "%%")


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` less what srun would take for options of the step."""
    return {name: value for name, value in environment.items() if name not in _OPTION_VARIABLES}


class SrunLauncher:
    """Starts commands at a host of the allocation, or one task on each of several; see Launcher.

    The tasks have one log, each of its lines begins with the task's number where there are several.
    """

    def __init__(self, hosts: Sequence[Host], name: str, form: StepForm) -> None:
        self._hosts = hosts
        self._name = name
        several = ("--label",) if len(hosts) > 1 else ()
        self._form = replace(form, flags=(*form.flags, *several))

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: bytes
    ) -> Running:
        """See Launcher."""
        words = self._form.command(
            command,
            name=self._name,
            hosts=self._hosts,
            tasks_per_host=1,
            output=literal(log),
            stdin=True,
        )
        return SrunProcess(
            start_fed(words, environment=step_environment(environment), log=log, stdin=stdin),
            self._form.fence,
        )

    def require_free_port(self, address: str, port: int) -> None:
        """Ports of another host can't be asked for from here: the command finds out there."""


class SrunProcess(LocalProcess):
    """A step, by its srun, whose exit code is the highest of the tasks'; see Running. ``fence``: see StepForm.

    Either way of ending it is SIGTERM to srun, by which Slurm kills the tasks: a server whose run is over
    has no request to finish.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], fence: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(process)
        self._fence = fence

    def stop(self, grace_s: float) -> None:
        """See ``kill``."""
        self.kill()

    def kill(self) -> None:
        """Have Slurm kill the tasks; returns when srun is gone.

        Where another start has taken over the run, this job's steps of these numbers are that start's: the tasks are
        left to Slurm, which ended this attempt, and to their own fences.
        """
        try:
            self._fence()
        except FencedError:
            super().kill()
        else:
            super().stop(_END_S)
