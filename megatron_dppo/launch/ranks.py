"""The trainer's processes: started together, watched together, ended together; here, those of a run on
one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_dppo.logging import TERMINAL_VARIABLE, failure_mark
from megatron_dppo.system.processes import describe_exit, kill_families, quote, start_process, tail
from megatron_dppo.system.runtime_directory import remove_shared_tensors

LOOPBACK = "127.0.0.1"
_ENDING_S = 10.0


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended with an error; None: one that nobody can name. ``failed_at``: when, in epoch
    seconds."""

    rank: int | None
    code: int
    output: Path
    failed_at: float

    def report(self) -> str:
        """What happened to it, and the end of what it said."""
        who = "the ranks' step" if self.rank is None else f"rank {self.rank}"
        return (
            f"{who} {describe_exit(self.code)}; the end of {self.output}:\n"
            f"{quote(tail(self.output))}"
        )

    @property
    def stopped_early(self) -> bool:
        """Whether it ended by the request to stop, which it did not handle yet."""
        return self.code in (-signal.SIGTERM, 128 + signal.SIGTERM)


class Ranks(Protocol):
    """All ranks of a run, wherever they are."""

    def start(self) -> None:
        """Start every rank; call from the main thread."""

    def ended(self) -> bool:
        """Whether all have ended without an error."""

    def failures(self, grace_s: float) -> list[RankFailure]:
        """Ranks that ended with an error, the likely cause first; empty while there is none.

        Others that fail because of it have ``grace_s`` seconds to do so.
        """

    def ask_to_stop(self) -> None:
        """Ask each to end its step and save a checkpoint."""

    def kill(self) -> None:
        """End ranks and their descendants by force; returns when they are gone."""


class RankGroup:
    """``world_size`` copies of ``command``, told apart by torch.distributed's environment
    variables.

    ``outputs``: one file a rank, for its standard output and error. Rank 0 also gets this process's
    standard output, to write its log and draw its progress on. ``variables``: of the environment of
    every rank, beside those of this process. ``master_host``: the address on which rank 0 listens.
    """

    def __init__(
        self,
        command: Sequence[str],
        outputs: Sequence[Path],
        master_port: int,
        variables: Mapping[str, str] | None = None,
        *,
        master_host: str = LOOPBACK,
    ) -> None:
        self._command = command
        self._outputs = outputs
        self._master_port = master_port
        self._variables = {"MASTER_ADDR": master_host, **(variables or {})}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start every rank; call from the main thread."""
        for rank, path in enumerate(self._outputs):
            keep_previous(path)
            torch_variables = rank_environment(rank, len(self._outputs), self._master_port)
            environment = {**torch_variables, **self._variables}
            with path.open("wb") as file, _terminal_of(rank) as terminal:
                if terminal is not None:
                    environment[TERMINAL_VARIABLE] = str(terminal)
                process = start_process(
                    self._command,
                    output=file.fileno(),
                    environment=environment,
                    inherited=() if terminal is None else (terminal,),
                )
            self._processes.append(process)

    def codes(self) -> list[int | None]:
        """Exit codes by rank; None while one runs."""
        return [process.poll() for process in self._processes]

    def failures(self, grace_s: float) -> list[RankFailure]:
        """Ranks that ended with an error, the likely cause first; empty while there is none.

        A rank's end makes the others fail in their collectives, and they may be faster to exit. So
        the others have ``grace_s`` to fail too, those that have failed already have longer to end, and
        the cause is the one that failed first.
        """
        if not any(self.codes()):
            return []
        deadline = time.monotonic() + grace_s
        while None in self.codes() and time.monotonic() < deadline:
            time.sleep(0.05)
        while self._ending() and time.monotonic() < deadline + _ENDING_S:
            time.sleep(0.05)
        failures = [
            RankFailure(rank, code, path, failed_at(path))
            for rank, (code, path) in enumerate(zip(self.codes(), self._outputs, strict=True))
            if code
        ]
        return sorted(failures, key=lambda failure: failure.failed_at)

    def _ending(self) -> bool:
        """Whether a rank that failed has not ended yet."""
        both = zip(self.codes(), self._outputs, strict=True)
        return any(code is None and failure_mark(path).exists() for code, path in both)

    def ended(self) -> bool:
        """See Ranks."""
        return None not in self.codes()

    def ask_to_stop(self) -> None:
        """SIGTERM to each rank that still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL ranks and their descendants; returns when they are gone."""
        kill_families([process for process in self._processes if process.poll() is None])
        remove_shared_tensors(process.pid for process in self._processes)


def keep_previous(path: Path) -> None:
    """Give the output of an earlier start another name, and forget its failure."""
    failure_mark(path).unlink(missing_ok=True)
    if path.exists():
        path.replace(path.with_suffix(".previous.out"))


@contextmanager
def _terminal_of(rank: int) -> Iterator[int | None]:
    """A copy of this process's standard output for rank 0, nothing for the others."""
    if rank > 0 or sys.stdout is None:
        yield None
        return
    descriptor = os.dup(sys.stdout.fileno())
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def rank_environment(rank: int, world_size: int, master_port: int) -> dict[str, str]:
    """This process's environment plus what torch.distributed reads; threads share the cores
    fairly."""
    fixed: Mapping[str, str] = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(master_port),
        "PYTHONUNBUFFERED": "1",
    }
    threads = max(1, len(os.sched_getaffinity(0)) // world_size)
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **fixed}


def failed_at(path: Path) -> float:
    """When the rank with this output failed, in epoch seconds, by its own word; else, as for one that
    was killed, when it last wrote something; 0 where it never did."""
    try:
        return float(failure_mark(path).read_text())
    except (OSError, ValueError):
        pass
    return path.stat().st_mtime if path.exists() else 0.0
