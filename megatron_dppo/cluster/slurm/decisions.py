"""The decision after a start of a run on Slurm: whether the run is over, and whether its job starts again.

An exit code is no evidence: Slurm may report 0 for a step whose node died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.launch.attempts import Attempt
from megatron_dppo.launch.supervisor import Outcome

CANCELLED_CODE = 143
_STOPPED_FOR_GOOD = {"asked": 0, "cancelled": CANCELLED_CODE}


def fruitless(attempts: Sequence[Attempt]) -> int:
    """Return how many of the last attempts in a row ended without a newer checkpoint."""
    count = 0
    for attempt in reversed(attempts):
        if attempt.progressed or attempt.why in ("asked", "cancelled", "done"):
            break
        count += 1
    return count


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
    outcome: Outcome,
    *,
    finished: bool,
    cancelled: bool,
    fruitless: int,
    max_failures: int,
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
