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
    """``sbatch`` refused; the message is what it said."""


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
        """``command`` with its output; raises CalledProcessError where ``check`` and it failed."""
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
        """``sbatch``; the job's id. Raises SubmitError where it is refused."""
        done = self.run("sbatch", "--parsable", *words, check=False, environment=environment)
        if done.returncode:
            raise SubmitError(done.stderr.strip())
        return int(done.stdout.split(";")[0])

    def job(self, job: int) -> list[dict[str, str]]:
        """What ``scontrol show job`` tells; one dictionary for each part of a heterogeneous job."""
        shown = self.run("scontrol", "-o", "show", "job", job, check=False).stdout
        lines = [line for line in shown.splitlines() if "JobState=" in line]
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines]

    def states(self, job: int) -> set[str]:
        """States of all parts of a job."""
        return {part["JobState"] for part in self.job(job)}

    def wait(
        self, job: int, states: Collection[str] = _FINAL, timeout_s: float = 120.0
    ) -> dict[str, str]:
        """The job's (first) record, when all its parts are in one of ``states``: by default, ended.

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
        """State by node's name; ``idle*`` doesn't answer."""
        shown = self.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%N %T", check=False).stdout
        return dict(line.split() for line in shown.splitlines())

    def gpus_in_use(self) -> int:
        """GPUs of all nodes that the controller counts as a job's."""
        shown = self.run("scontrol", "--details", "show", "node").stdout
        return sum(map(int, re.findall(r"GresUsed=gpu:[^:()]*:?(\d+)", shown)))

    def cancel_all(self) -> None:
        """Cancel every job and wait, at most 15 seconds, until none is left."""
        for state in ("PENDING", "RUNNING", "SUSPENDED"):
            self.run("scancel", f"--state={state}", check=False)
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            if not self.run("squeue", "-h", check=False).stdout.strip():
                return
            time.sleep(0.05)
