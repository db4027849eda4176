"""Where a start continues: from a checkpoint, or at step 0 where nothing would be lost by it."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.loop.fresh_start import (
    newer_unusable,
    refuse_damage,
    refuse_fresh_start,
    refused_damage,
)
from megatron_dppo.loop.state import RunState
from megatron_dppo.metrics.history import History, keep_copy, read_history, set_aside
from megatron_dppo.trainer.checkpoint.directory import DamagedCheckpointError
from megatron_dppo.trainer.checkpoint.store import CheckpointStore
from megatron_dppo.trainer.collectives import on_rank_0
from megatron_dppo.trainer.trainer import Trainer

log = logging.getLogger(__name__)


def resume(
    config: TrainConfig, trainer: Trainer, store: CheckpointStore, identity: dict[str, Any]
) -> RunState | None:
    """The state of the checkpoint that the run goes on from, loaded into ``trainer``. Collective.

    None: the run begins at step 0, and what earlier starts recorded lies in a folder of its own.
    Raises ResumeError where it can't go on although it should, DamagedCheckpointError where its
    checkpoint is damaged and ``checkpoint.on_damage`` does not let it fall back.
    """
    directory = config.run.directory
    if config.run.resume == "never":
        _set_aside(config)
        return None
    survey = store.survey()
    refuse_damage(config, survey)
    passed = {unusable.path: unusable.reason for unusable in newer_unusable(survey)}
    for checkpoint in reversed(survey.complete):
        try:
            state = RunState.from_json(store.load(trainer, checkpoint))
        except DamagedCheckpointError as error:
            if config.checkpoint.on_damage == "refuse":
                raise refused_damage(str(error), survey.complete[:-1]) from error
            passed[checkpoint.path] = str(error)
            continue
        state.check_identity(identity, str(checkpoint.path))
        if passed:
            _leave_behind(directory, store, passed, state.step)
        log.info("resumed from %s", checkpoint.path)
        return state
    history = History(**on_rank_0(lambda: asdict(read_history(directory))))
    damage = passed | {unusable.path: unusable.reason for unusable in survey.unusable}
    refuse_fresh_start(config, list(damage.values()), history)
    _set_aside(config)
    return None


def _leave_behind(
    directory: str, store: CheckpointStore, passed: dict[Path, str], step: int
) -> None:
    """Before a start that falls back to ``step``: rename what it passed, copy the records that it drops."""
    copy = on_rank_0(lambda: str(keep_copy(directory)))
    for path, reason in passed.items():
        store.set_aside(path)
        log.warning("damaged checkpoint, renamed and passed over: %s", reason)
    log.warning("records after step %d are dropped; a copy with them is in %s", step, copy)


def _set_aside(config: TrainConfig) -> None:
    """Before a start at step 0. Rollouts that this run replays stay where they are."""
    directory = config.run.directory
    rollouts = config.rollout.replay_from is None

    def act() -> str | None:
        folder = set_aside(directory, rollouts=rollouts)
        return None if folder is None else str(folder)

    folder = on_rank_0(act)
    if folder is not None:
        log.info("beginning anew; what earlier starts left is in %s", folder)
