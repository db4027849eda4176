"""Slurm's own programs, run against one cluster."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Collection, Mapping
from pathlib import Path

_FINAL = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"} | {
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}


class SubmitError(RuntimeError):
    """``sbatch`` refused a job; the message is its error output."""


class Client:
    """Runs ``sbatch``, ``scontrol`` and the rest with a cluster's environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)

    def run(
        self,
        *command: object,
        check: bool = True,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command``, and return it with its output. With ``check``, raises CalledProcessError if it failed."""
        return subprocess.run(
            [str(word) for word in command],
            env=self.environment | dict(environment or {}),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=check,
            timeout=timeout_s,
        )

    def submit(self, *words: object, environment: Mapping[str, str] | None = None) -> int:
        """Run ``sbatch``, and return the job's id. Raises SubmitError if the job is refused."""
        done = self.run("sbatch", "--parsable", *words, check=False, environment=environment)
        if done.returncode:
            raise SubmitError(done.stderr.strip())
        return int(done.stdout.split(";")[0])

    def job(self, job: int) -> list[dict[str, str]]:
        """The output of ``scontrol show job``: one dictionary for each part of a heterogeneous job."""
        shown = self.run("scontrol", "-o", "show", "job", job, check=False).stdout
        lines = [line for line in shown.splitlines() if "JobState=" in line]
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines]

    def states(self, job: int) -> set[str]:
        """States of all parts of a job."""
        return {part["JobState"] for part in self.job(job)}

    def wait(
        self, job: int, states: Collection[str] = _FINAL, timeout_s: float = 120.0
    ) -> dict[str, str]:
        """Wait until all parts of the job are in one of ``states`` (default: ended); return the first part's record.

        Raises TimeoutError.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            parts = self.job(job)
            if parts and {part["JobState"] for part in parts} <= set(states):
                return parts[0]
            time.sleep(0.1)
        raise TimeoutError(f"job {job} after {timeout_s:.0f} s: {self.job(job)}")

    def node_states(self) -> dict[str, str]:
        """The state of each node by its name. A node in ``idle*`` doesn't answer."""
        shown = self.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%N %T", check=False).stdout
        return dict(line.split() for line in shown.splitlines())

    def gpus_in_use(self) -> int:
        """Number of GPUs that the controller counts as used by jobs."""
        shown = self.run("scontrol", "--details", "show", "node").stdout
        return sum(map(int, re.findall(r"GresUsed=gpu:[^:()]*:?(\d+)", shown)))

    def cancel_all(self) -> None:
        """Cancel every job, and wait at most 15 seconds until no job is left."""
        for state in ("PENDING", "RUNNING", "SUSPENDED"):
            self.run("scancel", f"--state={state}", check=False)
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            if not self.run("squeue", "-h", check=False).stdout.strip():
                return
            time.sleep(0.05)
