"""What became of each start of a run on Slurm, ``<run.directory>/attempts/<job>-<n>.json``, and what follows from it.

An exit code is no evidence: Slurm may give 0 for a step whose node died. Written by the supervisor when
a start begins and again when it ends; one that is still ``running`` when the next begins, or whose job
is gone, ended without a word: its node died, or Slurm killed it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_dppo.launch.supervisor import Outcome
from megatron_dppo.metrics.records import read_history
from megatron_dppo.system.files import write_atomically

JOB_FILE = "job"
"""Holds the id of the job that was submitted last."""
RUNNING = "running"
VANISHED = "vanished"


@dataclass(frozen=True)
class Attempt:
    """One start.

    Attributes:
        job, attempt: Slurm's job, and how often it was started before.
        node: where the supervisor ran.
        hosts: all nodes.
        started, ended: epoch seconds.
        why: ``running``, ``done``, ``time`` (limit near), ``overtime`` (limit near, no checkpoint in
            time), ``asked``, ``cancelled``, ``failed``, ``refused``, ``succeeded``, ``vanished``.
        detail: for people.
        first_saved, saved: step of the newest checkpoint at its start and at its end.
        recorded: last step with metrics.
        requeued: whether the job waits to start again.
        excluded: nodes that the next start keeps off, with the reason.
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
        """In the order in which they began. Files that can't be read are left out."""
        attempts = [a for path in self._folder.glob("*-*.json") if (a := _read(path)) is not None]
        return sorted(attempts, key=lambda attempt: (attempt.started, attempt.attempt))

    def begin(self, attempt: Attempt) -> Attempt:
        """Note that ``attempt`` begins, and that earlier ones without an end vanished."""
        # Only now is it known: whoever is killed with its node writes nothing.
        for earlier in self.all():
            if earlier.why == RUNNING:
                self.end(replace(earlier, why=VANISHED, ended=attempt.started))
        begun = replace(attempt, first_saved=self.reached(attempt).saved)
        self._write(begun)
        return begun

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
    """How many of the last attempts in a row ended without a newer checkpoint."""
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


def one_line(text: str, longest: int = 300) -> str:
    flat = re.sub(r"\s+", " ", text).strip()
    return flat if len(flat) <= longest else flat[: longest - 3] + "..."


# What follows from how a start ended: is the run over, and does its job start again? Pure.

CANCELLED_CODE = 143
_STOPPED_FOR_GOOD = {"asked": 0, "cancelled": CANCELLED_CODE}


@dataclass(frozen=True)
class Decision:
    """``why`` and ``detail`` as an Attempt has them; ``code``: the job's exit code unless it is
    requeued; ``exclude``: nodes that its next start keeps off."""

    why: str
    detail: str
    code: int
    requeue: bool
    exclude: tuple[str, ...] = ()


def decide(
    outcome: Outcome, *, finished: bool, cancelled: bool, fruitless: int, max_failures: int
) -> Decision:
    """What to do after a start.

    Args:
        outcome: how the supervisor saw it end; its word on success does not count alone.
        finished: whether the run's folder says that it has nothing left to do.
        cancelled: whether Slurm ended the job (scancel, its own requeue). It ends the steps at the
            same time, so that their end may be seen first and look like a failure.
        fruitless: starts in a row without a newer checkpoint, this one included.
        max_failures: how many of those are too many.
    """
    if finished:
        return Decision("done", "", 0, requeue=False)
    if outcome.ending in ("succeeded", "refused"):
        return Decision(outcome.ending, outcome.detail, outcome.code, requeue=False)
    # Before the ending is looked at: the steps were ended along with the job, and look as if they had failed.
    if cancelled:
        return Decision("cancelled", "", CANCELLED_CODE, requeue=False)
    if outcome.ending == "stopped" and outcome.detail in _STOPPED_FOR_GOOD:
        code = _STOPPED_FOR_GOOD[outcome.detail]
        return Decision(outcome.detail, "", code, requeue=False)
    why, detail = "failed", outcome.detail
    if outcome.ending == "stopped":
        why, detail = outcome.detail, ""
    elif outcome.ending == "ended":
        detail = "the ranks ended without an error, and the run is not finished: a node was lost"
    if fruitless >= max_failures:
        end = f"gave up after {fruitless} starts without a new checkpoint (max_failures)"
        return Decision(why, f"{detail}\n{end}".strip(), outcome.code or 1, requeue=False)
    return Decision(why, detail, outcome.code or 1, requeue=True)
