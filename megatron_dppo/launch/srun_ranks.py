"""The trainer's ranks inside a Slurm allocation: one step, a task for each rank."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

from megatron_dppo.launch.places import Placement
from megatron_dppo.launch.ranks import RankFailure, failed_at, keep_previous
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.slurm_rank import RANKS_VARIABLE
from megatron_dppo.launch.srun import SrunProcess, StepForm, step_environment
from megatron_dppo.system.processes import start_process
from megatron_dppo.system.stop_file import STOP_FILE_VARIABLE, ask_to_stop, withdraw_stop

_ENDED = re.compile(r"^srun: error: (\S+): tasks? ([\d,\- ]+): (.*)$", re.MULTILINE)
_CODE = re.compile(r"Exited with exit code (\d+)")
_KILLED = 137
"""The code of a task whose end srun tells in other words: most were killed after the first one."""


class SrunRanks:
    """The ranks of a run as one step; see Ranks.

    Args:
        command: of every rank; it finds its number in Slurm's variables.
        directory: of the run.
        placement: says which hosts, and where the ranks meet.
        form: of the step.
        variables: of the environment of every rank, beside those of this process.
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
        self._words = form.command(
            command,
            name="trainer",
            hosts=placement.rank_hosts,
            tasks_per_host=placement.ranks_per_host,
            output=directory.rank_outputs,
            stdin=False,
        )
        self._variables = {
            "MASTER_ADDR": placement.master_address,
            "MASTER_PORT": str(placement.master_port),
            "PYTHONUNBUFFERED": "1",
            RANKS_VARIABLE: "slurm",
            STOP_FILE_VARIABLE: str(directory.stop_file),
            **variables,
        }
        self._count = len(placement.ranks)
        self._fence = form.fence
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """See Ranks."""
        for rank in range(self._count):
            keep_previous(self._directory.rank_output(rank))
        keep_previous(self._messages)
        withdraw_stop(self._directory.stop_file)
        with self._messages.open("wb") as file:
            self._popen = start_process(
                self._words,
                environment=step_environment({**os.environ, **self._variables}),
                output=file.fileno(),
            )

    def ended(self) -> bool:
        """See Ranks. Slurm may give 0 for a step whose node died: what the run left behind tells."""
        return self._code() == 0

    def failures(self, grace_s: float) -> list[RankFailure]:
        """See Ranks. srun ends the others itself, and says whose end it saw in which order."""
        code = self._code()
        if not code:
            return []
        time.sleep(min(grace_s, 0.2))  # its last words
        text = self._messages.read_text(errors="replace") if self._messages.exists() else ""
        found = [self._failure(rank, ended) for rank, ended in ended_tasks(text)]
        by_itself = [failure for failure in found if failure.code != _KILLED]
        others = [failure for failure in found if failure.code == _KILLED]
        by_itself.sort(key=lambda failure: failure.failed_at)
        unknown = RankFailure(None, code, self._messages, failed_at(self._messages))
        return [*by_itself, *others] or [unknown]

    def ask_to_stop(self) -> None:
        """By a file, which rank 0 reads: a signal through srun reaches their child processes too."""
        ask_to_stop(self._directory.stop_file)

    def kill(self) -> None:
        """See Ranks."""
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
