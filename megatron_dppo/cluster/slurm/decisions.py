"""The decision after a start of a run on Slurm: whether the run is over, and whether its job starts again.

An exit code is no evidence: Slurm may report 0 for a step whose node died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.launch.attempts import Attempt
from megatron_dppo.launch.supervisor import Outcome

CANCELLED_CODE = 143
"""Exit code of a batch process that received SIGTERM, as a shell reports it: 128 + 15."""
_STOPPED_FOR_GOOD = {"asked": 0, "cancelled": CANCELLED_CODE}
"""Reasons of a stop after which the job does not start again, each with the exit code."""


def count_fruitless_starts(attempts: Sequence[Attempt]) -> int:
    """Return how many of the last attempts in a row ended without a newer checkpoint.

    An attempt that was stopped by request, or that finished the run, is not fruitless.
    """
    count = 0
    for attempt in reversed(attempts):
        if attempt.progressed or attempt.why in ("asked", "cancelled", "done"):
            break
        count += 1
    return count


@dataclass(frozen=True)
class Decision:
    """The decision after a start.

    Attributes:
        why, detail: reason and text of the start's end, as in an Attempt.
        code: the job's exit code unless the job is requeued.
        requeue: whether the job starts again.
        exclude: nodes that the job's next start avoids.
    """

    why: str
    detail: str
    code: int
    requeue: bool
    exclude: tuple[str, ...] = ()


def decide(
    outcome: Outcome, *, finished: bool, cancelled: bool, fruitless_starts: int, max_failures: int
) -> Decision:
    """Decide whether the run is over after a start, and whether its job starts again.

    Args:
        outcome: the end of the start as the supervisor saw it. Steps that ended without an error do not prove that the
            run is finished.
        finished: whether the run's folder says that the run has nothing left to do.
        cancelled: whether Slurm ended the job (scancel, or Slurm's own requeue). Slurm ends the steps at the same time,
            so the supervisor may see the steps end first, and report a failure.
        fruitless_starts: number of starts in a row without a newer checkpoint, including this start.
        max_failures: number of fruitless starts after which the run is given up.
    """
    if finished:
        return Decision("done", "", 0, requeue=False)
    # "succeeded" is no success: another start of the run has taken the place of this start.
    if outcome.ending in ("succeeded", "refused"):
        return Decision(outcome.ending, outcome.detail, outcome.code, requeue=False)
    # Check this before the failures: steps that Slurm ended along with the job look like failed steps.
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
    # Do not return 0 for a run that is not finished, even if its steps returned 0.
    code = outcome.code or 1
    if fruitless_starts >= max_failures:
        end = f"gave up after {fruitless_starts} starts without a new checkpoint (max_failures)"
        return Decision(reason, f"{detail}\n{end}".strip(), code, requeue=False)
    return Decision(reason, detail, code, requeue=True)
