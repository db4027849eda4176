"""The starts of a run on Slurm, ``<run.directory>/attempts/<job>-<n>.json``.

The supervisor writes the file when a start begins and again when it ends. If a file still says ``running`` when the
next start begins, or after its job has ended, the start vanished: its node died, or Slurm killed the supervisor.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_dppo.metrics.records import read_history
from megatron_dppo.system.files import write_atomically

JOB_FILE = "job"
"""File with the id of the job that was submitted last."""
RUNNING = "running"
VANISHED = "vanished"


@dataclass(frozen=True)
class Attempt:
    """One start.

    Attributes:
        job, attempt: Slurm's job, and the number of earlier starts of the job.
        node: node of the supervisor.
        hosts: all nodes.
        started, ended: epoch seconds.
        why: ``running``, or the way the start ended: ``done`` (the run is finished), ``time`` (limit near),
            ``overtime`` (limit near, no checkpoint in time), ``asked`` (``megatron-dppo stop``), ``cancelled`` (Slurm
            ended the job), ``failed``, ``refused`` (nothing was started), ``succeeded`` (by another start, which has
            taken over the run), ``vanished``.
        detail: text for the user.
        first_saved, saved: step of the newest checkpoint at the beginning and at the end of the start; 0 if no
            checkpoint exists.
        recorded: last step with metrics; 0 without metrics.
        requeued: whether the job waits to start again.
        excluded: nodes that the next start avoids, with the reason.
    """

    job: str
    attempt: int
    node: str
    hosts: tuple[str, ...]
    started: float
    first_saved: int = 0
    ended: float | None = None
    why: str = RUNNING
    detail: str = ""
    saved: int = 0
    recorded: int = 0
    requeued: bool = False
    excluded: tuple[tuple[str, str], ...] = ()
    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def progressed(self) -> bool:
        return self.saved > self.first_saved


class AttemptBook:
    """Reads and writes the files of all starts of the run in ``directory``."""

    def __init__(self, directory: str | Path) -> None:
        self._run = Path(directory)
        self._folder = self._run / "attempts"

    def all(self) -> list[Attempt]:
        """Return all starts, the earliest first, without unreadable files."""
        attempts = []
        for path in self._folder.glob("*-*.json"):
            attempt = _read(path)
            if attempt is not None:
                attempts.append(attempt)
        return sorted(attempts, key=attrgetter("started", "attempt"))

    def begin(self, attempt: Attempt) -> Attempt:
        """Record that ``attempt`` begins, and that earlier starts without an end vanished."""
        # Only the next start can record this: a supervisor that is killed with its node writes nothing.
        for unfinished_attempt in self.all():
            if unfinished_attempt.why == RUNNING:
                self.end(replace(unfinished_attempt, why=VANISHED, ended=attempt.started))
        started_attempt = replace(attempt, first_saved=self.reached(attempt).saved)
        self._write(started_attempt)
        return started_attempt

    def end(self, attempt: Attempt) -> Attempt:
        """Record the end of ``attempt``, with the steps that the run has reached; return what was recorded."""
        ended_attempt = self.reached(attempt)
        self._write(ended_attempt)
        return ended_attempt

    def reached(self, attempt: Attempt) -> Attempt:
        """Return ``attempt`` with the steps that the run has reached: ``saved`` and ``recorded``."""
        history = read_history(self._run)
        return replace(attempt, saved=history.saved_step or 0, recorded=history.last_step or 0)

    def _write(self, attempt: Attempt) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{attempt.job}-{attempt.attempt}.json"
        write_atomically(path, json.dumps(asdict(attempt), indent=1) + "\n")


def _read(path: Path) -> Attempt | None:
    try:
        return TypeAdapter(Attempt).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
