"""What follows from how a start ended: is the run over, and does its job start again? Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.launch.supervisor import Outcome

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
