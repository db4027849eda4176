"""When a run may begin at step 0, and when that would lose what earlier starts trained."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.loop.state import ResumeError
from megatron_dppo.metrics.history import CHECKPOINTS_FOLDER, History
from megatron_dppo.trainer.checkpoint.directory import (
    CheckpointSurvey,
    DamagedCheckpointError,
    StoredCheckpoint,
    UnusableCheckpoint,
)

_SHOWN = 3


def newer_unusable(survey: CheckpointSurvey) -> list[UnusableCheckpoint]:
    """Unusable checkpoints of later steps than the last written usable one's."""
    last = survey.complete[-1].step if survey.complete else -1
    return [unusable for unusable in survey.unusable if unusable.step > last]


def refuse_damage(config: TrainConfig, survey: CheckpointSurvey) -> None:
    """Let a run fall back past an unusable newest checkpoint only where the configuration says so.

    Raises DamagedCheckpointError otherwise. Without any usable one see :func:`refuse_fresh_start`.
    """
    newer = newer_unusable(survey)
    if survey.complete and newer and config.checkpoint.on_damage == "refuse":
        raise refused_damage(newer[0].reason, survey.complete)


def refused_damage(reason: str, older: Sequence[StoredCheckpoint]) -> DamagedCheckpointError:
    """The error for a damaged newest checkpoint. ``older``: usable ones before it, the last at the end."""
    back = f"checkpoint.on_damage=previous goes on from {older[-1].path.name}, " if older else ""
    return DamagedCheckpointError(f"{reason}; {back}run.resume=never begins anew")


def refuse_fresh_start(config: TrainConfig, unusable: Sequence[str], history: History) -> None:
    """Raise ResumeError where a start at step 0 would begin a trained run anew.

    A run that ended before its first checkpoint was due has nothing to go on from and may begin
    anew. ``unusable``: what is wrong with each checkpoint that is there.
    """
    directory = config.run.directory
    found = []
    if unusable:
        shown = "; ".join(unusable[:_SHOWN]) + ("; ..." if len(unusable) > _SHOWN else "")
        found.append(f"{len(unusable)} checkpoint(s) that can't be used ({shown})")
    elif history.saved is not None:
        found.append(f"no checkpoint, though one of step {history.saved} was written")
    elif (history.recorded or 0) >= config.checkpoint.every:
        found.append("no checkpoint, though one was due")
    if history.damage is not None:
        found.append(f"records that can't be read ({history.damage})")
    if not found and config.run.resume == "required":
        found.append("no checkpoint")
    if not found:
        return
    if history.recorded is not None:
        found.append(f"records up to step {history.recorded}")
    raise ResumeError(
        f"{directory} holds {' and '.join(found)}; run.resume: {config.run.resume} would begin anew "
        f"at step 0. Bring the checkpoints back (is {directory}/{CHECKPOINTS_FOLDER} mounted?), or "
        "begin anew with run.resume=never, which sets aside what is there"
    )
