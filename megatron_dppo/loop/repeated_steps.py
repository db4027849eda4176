"""The steps that a start of a run repeats: earlier ranks trained on them after the checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.seal import text_digest
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.loop.ownership import own_positions
from megatron_dppo.loop.run_identity import identity_of
from megatron_dppo.loop.run_state import settings_of
from megatron_dppo.loop.spool import OwnShare, ResponseSpool, settings_of_responses
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import (
    SPOOL_FOLDER,
    RecordsError,
    mean_accuracy,
    read_records,
    step_of,
)
from megatron_dppo.trainer.collectives import on_rank_0
from megatron_dppo.trainer.topology import Topology

log = logging.getLogger(__name__)


class RepeatedSteps:
    """The repeated steps, with their responses and their metrics rows.

    Earlier ranks are the ranks before a restart, or the ranks of an earlier start. The constructor is collective.

    Args:
        spool: the responses since the checkpoint; it is open.
        directory: folder of the run.
        step: step of the checkpoint; 0 without a checkpoint.
    """

    def __init__(self, spool: ResponseSpool, directory: str, step: int) -> None:
        self.spool = spool
        self._rows: dict[str, Any] = on_rank_0(partial(_stored_rows, spool, directory, step))
        """Metrics rows that earlier ranks wrote, by the step as text."""

    def has(self, step: int) -> bool:
        """Return whether earlier ranks have trained on ``step`` already, and the spool has all its responses."""
        return _repeats(self.spool, step)

    def has_accuracy(self, step: int) -> bool:
        """Return whether earlier ranks recorded the result of an evaluation after ``step``."""
        return mean_accuracy(self._rows.get(str(step), {})) is not None

    def row(self, step: int, measured: Mapping[str, float]) -> dict[str, float] | None:
        """Return the metrics row of a repeated step; None if ``step`` is not repeated, or if its row is lost.

        The row is the one of the earlier ranks, because only their row has the times of generation, and the accuracies
        of ``measured`` are added to it.
        """
        earlier_row = self._rows.get(str(step)) if self.has(step) else None
        if earlier_row is None:
            return None
        values: dict[str, float] = {}
        for name, value in measured.items():
            if metric_names.accuracy_set(name) is not None:
                values[name] = value
        for name, earlier_value in earlier_row.items():
            if name not in ("step", "weight_version"):
                # The file has null for NaN.
                values[name] = math.nan if earlier_value is None else earlier_value
        return values


def open_spool(
    config: TrainConfig, data: RunData, topology: Topology, step: int, *, is_fresh: bool
) -> ResponseSpool:
    """Open the spool of the responses since the checkpoint of ``step``. Collective.

    ``is_fresh``: whether the run begins at step 0 now, so that the responses of earlier starts are removed.
    """
    rollout = config.rollout
    folder = None
    if config.checkpoint.keep_responses and not rollout.replays:
        folder = Path(config.run.directory) / SPOOL_FOLDER

    def oldest_version(step: int) -> int:
        """Return the oldest weight version that may sample the batch of ``step``."""
        return max(0, step - 1 - rollout.max_staleness)

    spool = ResponseSpool(folder, topology.rank, oldest_version)
    identity = identity_of(config, data.train.sha256)
    settings_digest = text_digest(settings_of_responses(settings_of(config)), identity)
    own_groups = partial(own_positions, topology=topology)
    share = OwnShare(own_groups, rollout.group_size, data.train.problems)
    spool.open(settings_digest, step, share, is_fresh=is_fresh)
    repeated_steps = spool.last_trained - step
    if repeated_steps > 0:
        log.info("repeating %d steps from the responses of earlier ranks", repeated_steps)
    return spool


def _repeats(spool: ResponseSpool, step: int) -> bool:
    return step <= spool.last_trained


def _stored_rows(spool: ResponseSpool, directory: str, step: int) -> dict[str, Any]:
    """Return the metrics rows of the repeated steps after ``step``. Called on rank 0.

    The recorder drops these rows from the records. So store them in the spool: another restart may come before all of
    them are written again.
    """
    # A row of the records is newer than a row of the spool.
    rows = spool.read_rows() | _rows_after(directory, step)
    repeated_rows: dict[str, Any] = {}
    for number, row in rows.items():
        if (step == 0 or int(number) > step) and _repeats(spool, int(number)):
            repeated_rows[number] = row
    spool.keep_rows(repeated_rows)
    return repeated_rows


def _rows_after(directory: str, step: int) -> dict[str, Any]:
    """Return the metrics rows of the steps after ``step``, by the step as text, because JSON has no integer keys.

    If ``step`` is 0, the row of step 0 is included.
    """
    try:
        rows = read_records(directory)
    except RecordsError:
        return {}
    first_step = step + 1 if step > 0 else 0
    rows_after: dict[str, Any] = {}
    for row in rows:
        if step_of(row) >= first_step:
            rows_after[str(step_of(row))] = row
    return rows_after
