"""Commands of a run inside a Slurm allocation: each is a step of its own, started by srun.

SIGTERM to srun has Slurm kill the step's tasks at once, so that is how a step is ended. srun names the
step by the job's id and the step's number, which a requeued job counts from 0 again: an srun that can't
reach Slurm tries anew for seconds, and would then kill a step of the attempt that succeeded it. So where
the run's lease is another's, srun itself is killed, and says nothing.

A step shares its node with the others (``--overlap``) and gets all of the node's cores and GPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dppo.launch.placement import Host, Placement
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.supervisor import RankFailure, failed_at, keep_previous
from megatron_dppo.system import processes
from megatron_dppo.system.lease import FencedError
from megatron_dppo.system.secret_variables import split_environment

_END_S = 15.0
# Variables that sbatch, or an allocation around it, sets and srun takes for options of a step. A step asks for none of
# them: it shares all that the job has of its nodes. Two ways to count memory together, the whole job's GPUs for a step
# of fewer nodes, or tasks by GPU beside tasks by node would end srun.
_OPTION_VARIABLES = (
    "SLURM_CPUS_PER_GPU",
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_EXACT",
    "SLURM_EXCLUSIVE",
    "SLURM_EXPORT_ENV",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_HINT",
    "SLURM_MEM_BIND",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_THREADS_PER_CORE",
    "SLURM_TRES_PER_TASK",
)


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
        """The srun command line of a step, whose tasks all run ``command``.

        ``hosts``: in Slurm's order, all of one group; tasks of one host are neighbours in rank. ``output``: a
        file that is appended to; ``%t`` is the task. ``stdin``: whether the tasks read srun's standard input.
        ``tolerant``: a task that ends with an error leaves the others running.
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


class SrunLauncher(processes.Launcher):
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
    ) -> processes.StartedProcess:
        srun = self._form.command(
            command,
            name=self._name,
            hosts=self._hosts,
            tasks_per_host=1,
            output=literal(log),
            stdin=True,
        )
        return SrunProcess(
            processes.start_fed(
                srun, environment=step_environment(environment), log=log, stdin=stdin
            ),
            self._form.fence,
        )

    def require_free_port(self, address: str, port: int) -> None:
        """Ports of another host can't be asked for from here: the command finds out there."""


class SrunProcess(processes.StartedProcess):
    """A step, by its srun, whose exit code is the highest of the tasks'. ``fence``: see StepForm.

    Either way of ending it is SIGTERM to srun, by which Slurm kills the tasks: a server whose run is over
    has no request to finish.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], fence: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(process)
        self._fence = fence

    def stop(self, grace_s: float) -> None:
        self.kill()

    def kill(self) -> None:
        """Have Slurm kill the tasks; returns when srun is gone."""
        # Where another start has taken over the run, this job's steps of these numbers are that start's: the tasks
        # are left to Slurm, which ended this attempt, and to their own fences.
        try:
            self._fence()
        except FencedError:
            super().kill()
        else:
            super().stop(_END_S)


# --- a task of a step as a rank of torch.distributed, without torchrun

RANKS_VARIABLE = "MEGATRON_DPPO_RANKS"
"""``slurm`` in the environment of steps whose tasks are ranks, however few."""
# Ids from here on are the batch script, its extern step, an interactive shell.
_SPECIAL_STEPS = 2**32 - 16
_FIRST_PORT, _PORTS = 21_000, 9_000
_HOSTNAMES_S = 30


def adopt_slurm_rank(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK and the other variables of torch.distributed where this process is a task of a step.

    Leaves them alone where RANK is set already. MASTER_ADDR and MASTER_PORT of the environment are
    kept; without them the ranks meet on the step's first host, at a port that follows from the job.
    """
    if "RANK" in environment or not _is_rank(environment):
        return
    node = int(environment.get("SLURM_NODEID", "0"))
    local = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))[node]
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["LOCAL_WORLD_SIZE"] = str(local)
    if "MASTER_ADDR" not in environment:
        environment["MASTER_ADDR"] = hostnames(environment["SLURM_STEP_NODELIST"])[0]
    environment.setdefault("MASTER_PORT", str(port_base(environment["SLURM_JOB_ID"])))
    threads = max(1, len(os.sched_getaffinity(0)) // local)
    environment.setdefault("OMP_NUM_THREADS", str(threads))


def port_base(job: str) -> int:
    """First of the ports of a Slurm job: below those that systems give to outgoing connections, and
    rarely those of another job."""
    return _FIRST_PORT + int(job) * 97 % _PORTS


def hostnames(nodes: str) -> list[str]:
    """The names in Slurm's short form of a list, ``n[1-3]``, in order."""
    command = ["scontrol", "show", "hostnames", nodes]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_HOSTNAMES_S)
    return done.stdout.split()


def tasks_per_node(text: str) -> list[int]:
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _is_rank(environment: MutableMapping[str, str]) -> bool:
    # Only a numbered step counts: in a batch script, and in the shell of ``salloc``, SLURM_PROCID is 0 too.
    # A step of one task may be an interactive shell, so it counts where our own supervisor started it.
    step, tasks = environment.get("SLURM_STEP_ID", ""), environment.get("SLURM_STEP_NUM_TASKS", "")
    if not step.isdigit() or int(step) >= _SPECIAL_STEPS or not tasks.isdigit():
        return False
    return environment.get(RANKS_VARIABLE) == "slurm" or int(tasks) > 1


# --- the trainer's ranks: one step, a task for each rank

_ENDED = re.compile(r"^srun: error: (\S+): tasks? ([\d,\- ]+): (.*)$", re.MULTILINE)
_CODE = re.compile(r"Exited with exit code (\d+)")
# The code of a task whose end srun tells in other words: most were killed after the first one.
_KILLED = 137


class SrunRanks:
    """The ranks of a run as one step; see Ranks.

    ``command``: of every rank, which finds its number in Slurm's variables. ``variables``: of the environment
    of every rank, beside those of this process; those that hold keys come on its standard input.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: RunDirectory,
        placement: Placement,
        form: StepForm,
        variables: Mapping[str, str],
    ) -> None:
        self._directory = directory
        self._messages = directory.step_messages
        self._command = form.command(
            command,
            name="trainer",
            hosts=placement.rank_hosts,
            tasks_per_host=placement.ranks_per_host,
            output=f"{literal(directory.path / 'logs')}/rank%t.out",
            stdin=True,
        )
        self._variables = {
            "MASTER_ADDR": placement.master_address,
            "MASTER_PORT": str(placement.master_port),
            "PYTHONUNBUFFERED": "1",
            RANKS_VARIABLE: "slurm",
            processes.STOP_FILE_VARIABLE: str(directory.stop_file),
            **variables,
        }
        self._count = len(placement.ranks)
        self._fence = form.fence
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        for rank in range(self._count):
            keep_previous(self._directory.rank_output(rank))
        keep_previous(self._messages)
        processes.withdraw_stop(self._directory.stop_file)
        plain, secrets = split_environment({**os.environ, **self._variables})
        with self._messages.open("wb") as file:
            self._popen = processes.start_process(
                self._command,
                environment=step_environment(plain),
                output=file.fileno(),
                stdin=subprocess.PIPE,
            )
        processes.feed(self._popen, secrets)

    def ended(self) -> bool:
        # Slurm may give 0 for a step whose node died: what the run left behind tells.
        return self._code() == 0

    def failures(self, grace_s: float) -> list[RankFailure]:
        """See Ranks. srun ends the others itself, and says whose end it saw in which order."""
        code = self._code()
        if not code:
            return []
        # Its last words.
        time.sleep(min(grace_s, 0.2))
        text = self._messages.read_text(errors="replace") if self._messages.exists() else ""
        failures = [self._failure(rank, ended) for rank, ended in ended_tasks(text)]
        by_itself = [failure for failure in failures if failure.code != _KILLED]
        others = [failure for failure in failures if failure.code == _KILLED]
        by_itself.sort(key=lambda failure: failure.failed_at)
        unknown = RankFailure(None, code, self._messages, failed_at(self._messages))
        return [*by_itself, *others] or [unknown]

    def ask_to_stop(self) -> None:
        # By a file, which rank 0 reads: a signal through srun reaches their child processes too.
        processes.ask_to_stop(self._directory.stop_file)

    def kill(self) -> None:
        if self._popen is not None:
            SrunProcess(self._popen, self._fence).kill()

    def _code(self) -> int | None:
        assert self._popen is not None
        return self._popen.poll()

    def _failure(self, rank: int, code: int) -> RankFailure:
        output = self._directory.rank_output(rank)
        return RankFailure(rank, code, output, failed_at(output))


def ended_tasks(messages: str) -> Iterator[tuple[int, int]]:
    """Each task that srun saw end with an error, in order, with its exit code."""
    for _, tasks, how in _ENDED.findall(messages):
        code = _CODE.search(how)
        for task in _numbers(tasks):
            yield task, int(code[1]) if code else _KILLED


def _numbers(text: str) -> Iterator[int]:
    """Numbers of a list such as ``0,2-4``."""
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
