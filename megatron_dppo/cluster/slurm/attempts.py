"""The starts of a run on Slurm, ``<run.directory>/attempts/<job>-<n>.json``, and the decision after each start.

An exit code is no evidence: Slurm may report 0 for a step whose node died. The supervisor writes the file when a start
begins and again when it ends. A start that is still ``running`` when the next begins, or whose job has ended, vanished:
its node died, or Slurm killed it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_dppo.launch.supervisor import Outcome
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
        job, attempt: Slurm's job, and the number of its earlier starts.
        node: node of the supervisor.
        hosts: all nodes.
        started, ended: epoch seconds.
        why: ``running``, ``done``, ``time`` (limit near), ``overtime`` (limit near, no checkpoint in time),
            ``asked``, ``cancelled``, ``failed``, ``refused``, ``succeeded``, ``vanished``.
        detail: text for the user.
        first_saved, saved: step of the newest checkpoint at its start and at its end.
        recorded: last step with metrics.
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
    def __init__(self, directory: str | Path) -> None:
        self._run = Path(directory)
        self._folder = self._run / "attempts"

    def all(self) -> list[Attempt]:
        """Return the starts in the order in which they began, without unreadable files."""
        attempts = [a for path in self._folder.glob("*-*.json") if (a := _read(path)) is not None]
        return sorted(attempts, key=attrgetter("started", "attempt"))

    def begin(self, attempt: Attempt) -> Attempt:
        """Record that ``attempt`` begins, and that earlier ones without an end vanished."""
        # Only the next start can record this: a supervisor that is killed with its node writes nothing.
        for unfinished_attempt in self.all():
            if unfinished_attempt.why == RUNNING:
                self.end(replace(unfinished_attempt, why=VANISHED, ended=attempt.started))
        started_attempt = replace(attempt, first_saved=self.reached(attempt).saved)
        self._write(started_attempt)
        return started_attempt

    def end(self, attempt: Attempt) -> Attempt:
        ended = self.reached(attempt)
        self._write(ended)
        return ended

    def reached(self, attempt: Attempt) -> Attempt:
        history = read_history(self._run)
        return replace(attempt, saved=history.saved or 0, recorded=history.recorded or 0)

    def _write(self, attempt: Attempt) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{attempt.job}-{attempt.attempt}.json"
        write_atomically(path, json.dumps(asdict(attempt), indent=1) + "\n")


def fruitless(attempts: Sequence[Attempt]) -> int:
    """Return how many of the last attempts in a row ended without a newer checkpoint."""
    count = 0
    for attempt in reversed(attempts):
        if attempt.progressed or attempt.why in ("asked", "cancelled", "done"):
            break
        count += 1
    return count


def _read(path: Path) -> Attempt | None:
    try:
        return TypeAdapter(Attempt).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def one_line(text: str, max_characters: int = 300) -> str:
    flat = re.sub(r"\s+", " ", text).strip()
    return flat if len(flat) <= max_characters else flat[: max_characters - 3] + "..."


CANCELLED_CODE = 143
_STOPPED_FOR_GOOD = {"asked": 0, "cancelled": CANCELLED_CODE}


@dataclass(frozen=True)
class Decision:
    """The decision after a start.

    ``why`` and ``detail`` are those of an Attempt. ``code`` is the job's exit code unless it is requeued. ``exclude``
    are nodes that its next start avoids.
    """

    why: str
    detail: str
    code: int
    requeue: bool
    exclude: tuple[str, ...] = ()


def decide(
    outcome: Outcome, *, finished: bool, cancelled: bool, fruitless: int, max_failures: int
) -> Decision:
    """Decide whether the run is over after a start, and whether its job starts again. Pure.

    Args:
        outcome: the end of the start as the supervisor saw it; a success alone is not sufficient.
        finished: whether the run's folder says that the run has nothing left to do.
        cancelled: whether Slurm ended the job (scancel, its own requeue). Slurm ends the steps at the same time, so
            their end may be seen first and look like a failure.
        fruitless: starts in a row without a newer checkpoint, this one included.
        max_failures: number of those after which the run is given up.
    """
    if finished:
        return Decision("done", "", 0, requeue=False)
    if outcome.ending in ("succeeded", "refused"):
        return Decision(outcome.ending, outcome.detail, outcome.code, requeue=False)
    # Check this before the ending: steps that were ended along with the job look like failures.
    if cancelled:
        return Decision("cancelled", "", CANCELLED_CODE, requeue=False)
    if outcome.ending == "stopped" and outcome.detail in _STOPPED_FOR_GOOD:
        code = _STOPPED_FOR_GOOD[outcome.detail]
        return Decision(outcome.detail, "", code, requeue=False)
    reason, detail = "failed", outcome.detail
    if outcome.ending == "stopped":
        reason, detail = outcome.detail, ""
    elif outcome.ending == "ended":
        detail = "the ranks ended without an error, and the run is not finished: a node was lost"
    if fruitless >= max_failures:
        end = f"gave up after {fruitless} starts without a new checkpoint (max_failures)"
        return Decision(reason, f"{detail}\n{end}".strip(), outcome.code or 1, requeue=False)
    return Decision(reason, detail, outcome.code or 1, requeue=True)
