"""The trainer's processes on this machine: started together, watched together, ended together."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.launch.console import Tee
from megatron_dppo.system.processes import describe_exit, kill_families, quote, start_process, tail


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended with an error. ``silent_since``: when it last wrote something, in epoch
    seconds."""

    rank: int
    code: int
    output: Path
    silent_since: float

    def report(self) -> str:
        """What happened to it, and the end of what it said."""
        return (
            f"rank {self.rank} {describe_exit(self.code)}; the end of {self.output}:\n"
            f"{quote(tail(self.output))}"
        )


class RankGroup:
    """``world_size`` copies of ``command``, told apart by torch.distributed's environment
    variables.

    ``outputs``: one file a rank; rank 0's output goes to the console as well.
    """

    def __init__(self, command: Sequence[str], outputs: Sequence[Path], master_port: int) -> None:
        self._command = command
        self._outputs = outputs
        self._master_port = master_port
        self._processes: list[subprocess.Popen[bytes]] = []
        self._tee: Tee | None = None

    def start(self) -> None:
        """Start every rank; call from the main thread."""
        for rank, path in enumerate(self._outputs):
            if path.exists():
                path.replace(path.with_suffix(".previous.out"))
            environment = rank_environment(rank, len(self._outputs), self._master_port)
            self._processes.append(self._start_rank(rank, path, environment))

    def _start_rank(
        self, rank: int, path: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        if rank > 0:
            with path.open("wb") as file:
                return start_process(self._command, output=file.fileno(), environment=environment)
        tee = Tee(path)
        process = start_process(self._command, output=tee.descriptor, environment=environment)
        tee.start()
        self._tee = tee
        return process

    def codes(self) -> list[int | None]:
        """Exit codes by rank; None while one runs."""
        return [process.poll() for process in self._processes]

    def failures(self, grace_s: float) -> list[RankFailure]:
        """Ranks that ended with an error, the likely cause first; empty while there is none.

        A rank's end makes the others fail in their collectives, and they may be faster to exit. So
        the others have ``grace_s`` to fail too, and the cause is the one that fell silent first.
        """
        if not any(self.codes()):
            return []
        deadline = time.monotonic() + grace_s
        while None in self.codes() and time.monotonic() < deadline:
            time.sleep(0.05)
        failures = [
            RankFailure(rank, code, path, _modified(path))
            for rank, (code, path) in enumerate(zip(self.codes(), self._outputs, strict=True))
            if code
        ]
        return sorted(failures, key=lambda failure: failure.silent_since)

    def signal(self, number: int) -> None:
        """Send a signal to each rank that still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def resize(self) -> None:
        """The terminal has another size now."""
        if self._tee is not None:
            self._tee.match_size()

    def kill(self) -> None:
        """SIGKILL ranks and their descendants; returns when they are gone and their output is
        copied."""
        kill_families([process for process in self._processes if process.poll() is None])
        if self._tee is not None:
            self._tee.finish()


def rank_environment(rank: int, world_size: int, master_port: int) -> dict[str, str]:
    """This process's environment plus what torch.distributed reads; threads share the cores
    fairly."""
    fixed: Mapping[str, str] = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "PYTHONUNBUFFERED": "1",
    }
    threads = max(1, len(os.sched_getaffinity(0)) // world_size)
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **fixed}


def _modified(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0
