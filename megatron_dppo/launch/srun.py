"""Commands of a run inside a Slurm allocation: srun starts each command as a separate step.

To end a step, its srun gets SIGTERM: Slurm then kills the step's tasks at once. In its request to Slurm, srun names the
step by the job's id and the step's number, and a requeued job counts these numbers from 0 again. An srun that can't
reach Slurm retries for seconds, and could then kill a step of the next attempt. So if another start holds the run's
lease, srun gets SIGKILL, and ends without a request to Slurm.

A step shares its node with other steps (``--overlap``) and uses all of the node's cores and GPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from megatron_dppo.launch import node_ranks
from megatron_dppo.launch.host_ranks import HostRanks
from megatron_dppo.launch.placement import Host, Placement
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.slurm_client import CLIENT_VARIABLES, slurm
from megatron_dppo.launch.supervisor import RankFailure, failed_at, keep_previous
from megatron_dppo.system import processes
from megatron_dppo.system.lease import FencedError
from megatron_dppo.system.secret_variables import split_environment

_END_S = 15.0
"""Longest wait for the end of an srun after SIGTERM, before it gets SIGKILL."""
_PASSED_VARIABLES = frozenset(
    (
        *CLIENT_VARIABLES,
        "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_CLUSTER_NAME",
        "SLURM_GPUS_PER_NODE",
        "SLURM_HET_SIZE",
        "SLURM_JOBID",
        "SLURM_JOB_ACCOUNT",
        "SLURM_JOB_CPUS_PER_NODE",
        "SLURM_JOB_END_TIME",
        "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST",
        "SLURM_JOB_PARTITION",
        "SLURM_JOB_START_TIME",
        "SLURM_JOB_UID",
        "SLURM_JOB_USER",
        "SLURM_RESTART_COUNT",
        "SLURM_SUBMIT_DIR",
        "SLURM_SUBMIT_HOST",
    )
)
"""Slurm's variables that a step receives: settings of Slurm's programs, and facts about the job.

srun takes many other variables for options of a step: ``SLURM_CONSTRAINT``, ``SLURM_HOSTFILE``, ``SRUN_CPUS_PER_TASK``.
sbatch, a shell, or the allocation that sbatch runs in may have set them. A step needs no such options: it shares all
that the job has on its nodes. Some of the options make srun fail: memory per CPU together with memory per node, the
whole job's GPUs for a step of fewer nodes, or tasks per GPU together with tasks per node.
"""
_SLURM_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_")
_GROUP_SUFFIX = re.compile(r"_HET_GROUP_\d+$")
"""End of a variable's name about one group of a heterogeneous job; srun takes such variables for options, too."""


def _no_fence() -> None:
    """Accept this start as the newest of its run."""


@dataclass(frozen=True)
class StepForm:
    """The common part of every step of a run.

    Attributes:
        flags: flags of srun.
        prefix: words before the command, for example to run it in a container.
        fence: raises FencedError once another start has taken over the run.
    """

    flags: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    fence: Callable[[], None] = _no_fence

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
        """Return the srun command line of a step. All tasks of the step run ``command``.

        Args:
            command: the command of each task.
            name: name of the step.
            hosts: hosts in Slurm's order, all of one group; tasks of one host have adjacent ranks.
            tasks_per_host: number of tasks on each host.
            output: file that is appended to; ``%t`` is the task.
            stdin: whether the tasks read srun's standard input.
            tolerant: whether the other tasks continue after the error of one task.
        """
        groups = {host.group for host in hosts}
        assert len(groups) == 1, "a step is inside one group of a heterogeneous job"
        group = hosts[0].group
        group_flags = [] if group is None else [f"--het-group={group}"]
        return [
            "srun",
            *group_flags,
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
    """Return srun's pattern for the output file ``path``, without placeholders. The path must have no backslash."""
    return str(path).replace("%", "%%")


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` for srun; of Slurm's variables only those in ``_PASSED_VARIABLES``."""
    passed_variables: dict[str, str] = {}
    for name, value in environment.items():
        is_passed = _GROUP_SUFFIX.sub("", name) in _PASSED_VARIABLES
        if is_passed or not name.startswith(_SLURM_PREFIXES):
            passed_variables[name] = value
    return passed_variables


class SrunLauncher(processes.Launcher):
    """Starts commands at a host of the allocation, or one task on each of several hosts; see Launcher.

    The tasks have one log. With several tasks, each line of the log begins with the task's number.
    """

    def __init__(self, hosts: Sequence[Host], name: str, form: StepForm) -> None:
        self._hosts = hosts
        self._name = name
        label_flags = ("--label",) if len(hosts) > 1 else ()
        self._form = replace(form, flags=(*form.flags, *label_flags))

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
        """Do nothing: ports of another host can't be tested from here, so the command reports a used port."""


class SrunProcess(processes.StartedProcess):
    """The srun of a step. Its exit code is the highest exit code of the tasks. ``fence``: see StepForm.

    ``stop`` kills the tasks like ``kill``: the tasks are servers, and servers have no request to finish when the run
    ends.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], fence: Callable[[], None] = _no_fence
    ) -> None:
        super().__init__(process)
        self._fence = fence

    def stop(self, grace_s: float) -> None:
        self.kill()

    def kill(self) -> None:
        """Make Slurm kill the tasks; returns when srun has ended."""
        # After a takeover, the step with this srun's number may be a step of the other start. So kill only srun. The
        # tasks end without a request: Slurm has ended this attempt, and the tasks have fences of their own.
        try:
            self._fence()
        except FencedError:
            super().kill()
        else:
            super().stop(_END_S)


RANKS_VARIABLE = "MEGATRON_DPPO_RANKS"
"""Environment variable with the value ``slurm`` in steps whose tasks are ranks, even if a step has only one task."""
_FIRST_SPECIAL_STEP = 2**32 - 16
"""From here on, step ids stand for the batch script, the job's extern step and an interactive shell."""
_FIRST_PORT = 21_000
_PORT_COUNT = 9_000


def adopt_slurm_rank(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK and the other variables of torch.distributed if this process is a task of a step.

    If RANK is set already, change nothing. Keep MASTER_ADDR and MASTER_PORT if they are set. By default the ranks meet
    on the step's first host, at a port that the job's id determines.
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
    """Return the first port of a Slurm job, below the ports of outgoing connections.

    The ports of jobs with adjacent ids are 97 apart, so two jobs on one host rarely have a port in common.
    """
    return _FIRST_PORT + int(job) * 97 % _PORT_COUNT


def hostnames(nodes: str) -> list[str]:
    """Return the names in Slurm's short form of a list, ``n[1-3]``, in order. Raises SlurmError."""
    return slurm("scontrol", "show", "hostnames", nodes).split()


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node from Slurm's short form, such as ``8(x2),4``."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _is_rank(environment: MutableMapping[str, str]) -> bool:
    # Only a task of a numbered step is a rank: SLURM_PROCID is 0 in a batch script and in the shell of ``salloc`` too.
    # A step of one task may be an interactive shell, so its task is a rank only if our supervisor started the step.
    step = environment.get("SLURM_STEP_ID", "")
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    if not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP or not tasks.isdigit():
        return False
    return environment.get(RANKS_VARIABLE) == "slurm" or int(tasks) > 1


_ENDED = re.compile(r"^srun: error: (\S+): tasks? ([\d,\- ]+): (.*)$", re.MULTILINE)
"""Message of srun about tasks that ended with an error: node, tasks, description."""
_CODE = re.compile(r"Exited with exit code (\d+)")
_KILLED = 137
"""Exit code of tasks that Slurm killed after the first failure."""


class SrunRanks(HostRanks):
    """The ranks of a run as one step; see Ranks.

    Args:
        command: command of every rank. A rank finds its number in Slurm's variables.
        directory: the run's directory.
        placement: the run's placement.
        form: the common part of steps.
        variables: environment variables for every rank, added to this process's variables. Variables with keys come
            on the rank's standard input.
        forks: whether one process on each host forks the host's ranks, so that the ranks share their imports.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: RunDirectory,
        placement: Placement,
        form: StepForm,
        variables: Mapping[str, str],
        *,
        forks: bool = False,
    ) -> None:
        super().__init__(directory, placement, {RANKS_VARIABLE: "slurm", **variables})
        self._messages = directory.step_messages
        self._ranks_per_task = placement.ranks_per_host if forks else 1
        # With ``forks``, a task forks all ranks of a node. Otherwise a task is a rank.
        self._output_prefix = "node" if forks else "rank"
        logs = directory.logs
        if forks:
            command = node_command(command, self._ranks_per_task, logs)
        self._command = form.command(
            command,
            name="trainer",
            hosts=placement.rank_hosts,
            tasks_per_host=placement.ranks_per_host // self._ranks_per_task,
            output=f"{literal(logs)}/{self._output_prefix}%t.out",
            stdin=True,
        )
        self._fence = form.fence
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self, number: int = 1) -> None:
        plain, secrets = split_environment(self._begin(number))
        keep_previous(self._messages)
        with self._messages.open("wb") as file:
            self._popen = processes.start_process(
                self._command,
                environment=step_environment(plain),
                output=file.fileno(),
                stdin=subprocess.PIPE,
            )
        processes.feed(self._popen, secrets)

    def ended(self) -> bool:
        # Slurm may report 0 for a step whose node died. So ``cluster.slurm.decisions`` also uses the run's files to
        # tell whether the run has finished.
        return self._code() == 0

    def failures(self, grace_s: float) -> list[RankFailure]:
        """See Ranks. srun itself ends the other tasks after a failure, and reports tasks in the order of their ends."""
        code = self._code()
        if not code:
            return []
        # Wait for the last messages of srun.
        time.sleep(min(grace_s, 0.2))
        text = ""
        if self._messages.exists():
            text = self._messages.read_text(errors="replace")
        failures = []
        for task, task_code in ended_tasks(text):
            output = self._directory.logs / f"{self._output_prefix}{task}.out"
            failures.append(self._failure(task, self._ranks_per_task, task_code, output))
        if not failures:
            return [RankFailure(None, code, self._messages, failed_at(self._messages))]
        # Tasks that Slurm killed are not the cause.
        killed_ranks = [failure for failure in failures if failure.code == _KILLED]
        failed_ranks = [failure for failure in failures if failure.code != _KILLED]
        failed_ranks.sort(key=attrgetter("failed_at"))
        return [*failed_ranks, *killed_ranks]

    def kill(self) -> None:
        if self._popen is not None:
            SrunProcess(self._popen, self._fence).kill()

    def _code(self) -> int | None:
        assert self._popen is not None
        return self._popen.poll()


def node_command(command: Sequence[str], ranks: int, logs: Path) -> list[str]:
    """Return the command that forks ``ranks`` ranks of one host, from the ``command`` that would run one rank."""
    python, option, *module_and_config = command
    return [python, option, node_ranks.MODULE, str(ranks), *module_and_config, str(logs)]


def ended_tasks(messages: str) -> Iterator[tuple[int, int]]:
    """Yield each task that srun saw end with an error, in order, with its exit code."""
    for _, tasks, description in _ENDED.findall(messages):
        match = _CODE.search(description)
        code = int(match[1]) if match else _KILLED
        for task in _numbers(tasks):
            yield task, code


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as ``0,2-4``."""
    for part in text.replace(" ", "").split(","):
        first_number, _, last_number = part.partition("-")
        yield from range(int(first_number), int(last_number or first_number) + 1)
