"""The start of a run: from its newest checkpoint, or at step 0 if this loses no training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_dppo.config.schema import PolicyConfig, RunConfig, StoredCheckpointsConfig
from megatron_dppo.data.sampling import Sampler
from megatron_dppo.loop.run_state import ResumeError, RunState, changes_of, settings_of
from megatron_dppo.metrics import records
from megatron_dppo.system.text import first_of
from megatron_dppo.trainer.checkpoint.directory import (
    CheckpointSurvey,
    DamagedCheckpointError,
    StoredCheckpoint,
    UnusableCheckpoint,
)
from megatron_dppo.trainer.checkpoint.store import CheckpointStore
from megatron_dppo.trainer.collectives import on_rank_0
from megatron_dppo.trainer.trainer import Trainer

log = logging.getLogger(__name__)

_SHOWN = 3
"""Largest number of unusable checkpoints whose faults an error message shows."""


def newer_unusable(survey: CheckpointSurvey) -> list[UnusableCheckpoint]:
    """Return the unusable checkpoints that are newer than the newest usable checkpoint."""
    last_step = survey.complete[-1].step if survey.complete else -1
    return [unusable for unusable in survey.unusable if unusable.step > last_step]


def check_damage(on_damage: str, survey: CheckpointSurvey) -> None:
    """Raise DamagedCheckpointError if the newest checkpoint is unusable and ``on_damage`` is "refuse".

    ``on_damage``: ``checkpoint.on_damage``. If no checkpoint is usable, ``check_fresh_start`` decides.
    """
    newer = newer_unusable(survey)
    if survey.complete and newer and on_damage == "refuse":
        raise damage_error(newer[0].reason, survey.complete)


def damage_error(reason: str, older: Sequence[StoredCheckpoint]) -> DamagedCheckpointError:
    """Return the error for a damaged newest checkpoint.

    ``older``: usable checkpoints before the damaged checkpoint, in the order of steps.
    """
    alternative = ""
    if older:
        alternative = f"checkpoint.on_damage=previous goes on from {older[-1].path.name}, "
    return DamagedCheckpointError(f"{reason}; {alternative}run.resume=never begins anew")


def check_fresh_start(run: RunConfig, unusable: Sequence[str], history: records.History) -> None:
    """Raise ResumeError if a start at step 0 would begin a trained run anew.

    A run that ended before its first checkpoint may begin anew. ``unusable``: the fault of each unusable checkpoint.
    ``history``: what the run's records tell about earlier starts.
    """
    directory = run.directory
    remains = []
    if unusable:
        reasons = first_of(unusable, _SHOWN)
        remains.append(f"{len(unusable)} checkpoint(s) that can't be used ({reasons})")
    elif history.saved_step is not None:
        remains.append(f"no checkpoint, though one of step {history.saved_step} was written")
    elif history.counts_checkpoint:
        remains.append("no checkpoint, though the metrics say that one was written")
    if history.damage is not None:
        remains.append(f"records that can't be read ({history.damage})")
    if not remains and run.resume == "required":
        remains.append("no checkpoint")
    if not remains:
        return
    if history.last_step is not None:
        remains.append(f"records up to step {history.last_step}")
    raise ResumeError(
        f"{directory} holds {' and '.join(remains)}; run.resume: {run.resume} would begin anew "
        f"at step 0. Bring the checkpoints back (is {directory}/{records.CHECKPOINTS_FOLDER} mounted?), or "
        "begin anew with run.resume=never, which sets aside what is there"
    )


def resume(
    run: RunConfig,
    checkpoints: StoredCheckpointsConfig,
    trainer: Trainer,
    store: CheckpointStore,
    identity: dict[str, Any],
    *,
    replays: bool,
    nonce: str,
) -> RunState | None:
    """Load the newest usable checkpoint into ``trainer`` and return its state. Collective.

    Returns None if the run begins at step 0. The records of earlier starts are then moved to another folder, except the
    rollouts of a run that ``replays`` them. ``nonce`` is the lease of this start of the run. If this start has begun at
    step 0 already and its ranks were restarted, the files are its own: the ranks then move nothing, even with
    ``run.resume: never``.

    Raises:
        ResumeError: the checkpoint belongs to another run, or a start at step 0 would lose training.
        DamagedCheckpointError: the checkpoint is damaged, and ``checkpoint.on_damage`` allows no older checkpoint.
    """
    # Whether this start has begun the run at step 0 already, before its ranks were restarted.
    has_begun = on_rank_0(partial(records.has_begun, run.directory, nonce))
    if run.resume == "never" and not has_begun:
        _begin(run.directory, nonce, rollouts=not replays)
        return None
    survey = store.survey()
    check_damage(checkpoints.on_damage, survey)
    passed_over = {unusable.path: unusable.reason for unusable in newer_unusable(survey)}
    # Load the newest checkpoint. Try an older one only if the newest is damaged and checkpoint.on_damage allows it.
    for checkpoint in reversed(survey.complete):
        try:
            state = RunState.from_json(store.load(trainer, checkpoint))
            state.check_weights(trainer.weights_form(), trainer.weights_digest(), checkpoint.path)
        except DamagedCheckpointError as error:
            if checkpoints.on_damage == "refuse":
                # The first damaged checkpoint ends the loop, so ``checkpoint`` is the last of ``survey.complete``.
                raise damage_error(str(error), survey.complete[:-1]) from error
            passed_over[checkpoint.path] = str(error)
            continue
        state.check_identity(identity, str(checkpoint.path))
        if passed_over:
            _set_aside_damaged(run.directory, store, passed_over, state.step)
        log.info("resumed from %s", checkpoint.path)
        return state
    # All ranks use rank 0's view: on NFS another rank may see another folder, and all ranks must decide alike.
    history = records.History(**on_rank_0(partial(_history_values, run.directory)))
    damage = passed_over | {unusable.path: unusable.reason for unusable in survey.unusable}
    check_fresh_start(run, list(damage.values()), history)
    if not has_begun:
        _begin(run.directory, nonce, rollouts=not replays)
    return None


def continue_sampler(sampler: Sampler, state: RunState, config: PolicyConfig) -> None:
    """Set ``sampler`` to its position in ``state``, and log on rank 0 what changed in the configuration since.

    Raises ResumeError if the position does not fit the data.
    """
    changes = changes_of(state, settings_of(config))
    if changes is not None and dist.get_rank() == 0:
        log.warning("%s", changes)
    try:
        sampler.load_state_dict(state.sampler)
    except ValueError as error:
        raise ResumeError(
            f"the checkpoint's position in the data does not fit: {error}; give back the settings "
            "of data, or start anew with run.resume=never"
        ) from error


def _history_values(directory: str) -> dict[str, Any]:
    return asdict(records.read_history(directory))


def _copy_records(directory: str) -> str:
    return str(records.keep_copy(directory))


def _set_aside_damaged(
    directory: str, store: CheckpointStore, passed_over: dict[Path, str], step: int
) -> None:
    """Rename the damaged checkpoints, and copy the records: a start from ``step`` drops the records of later steps.

    ``passed_over``: the fault of each damaged checkpoint, by its path.
    """
    copy = on_rank_0(partial(_copy_records, directory))
    for path, reason in passed_over.items():
        store.set_aside(path)
        log.warning("damaged checkpoint, renamed and passed over: %s", reason)
    log.warning("records after step %d are dropped; a copy with them is in %s", step, copy)


def _begin(directory: str, nonce: str, *, rollouts: bool) -> None:
    """Prepare a start at step 0: move the files of earlier starts to another folder, and store this start's lease.

    ``rollouts``: whether saved rollouts are moved too.
    """
    _set_aside(directory, rollouts=rollouts)
    on_rank_0(partial(records.remember_beginning, directory, nonce))


def _set_aside(directory: str, *, rollouts: bool) -> None:
    """Move the files of earlier starts to another folder."""

    def move() -> str | None:
        new_folder = records.set_aside(directory, rollouts=rollouts)
        if new_folder is None:
            return None
        return str(new_folder)

    folder = on_rank_0(move)
    if folder is not None:
        log.info("beginning anew; what earlier starts left is in %s", folder)
