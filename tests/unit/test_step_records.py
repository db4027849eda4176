"""Records of repeated steps, and of a batch that the disk has no room for."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.batch_file import SavedBatch
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.loop.recorder import Recorder, RecordingError
from megatron_dppo.loop.repeated_steps import RepeatedSteps
from megatron_dppo.loop.spool import ResponseSpool
from megatron_dppo.loop.step_records import StepRecords
from megatron_dppo.metrics.records import encode_record, read_records
from megatron_dppo.metrics.summary import RunInfo
from tests.unit.config_files import minimal

pytestmark = pytest.mark.usefixtures("one_rank")

ROWS = {
    0: {"evaluation/sums/accuracy": 0.25},
    1: {"time/train_s": 1.0},
    2: {"time/train_s": 2.0},
    3: {"time/train_s": 3.0, "policy/kl": math.nan, "weight_version": 3},
    4: {"time/train_s": 4.0, "evaluation/sums/accuracy": 0.75},
    5: {"time/train_s": 5.0},
}


def write_rows(directory: Path, last_step: int) -> None:
    lines = [encode_record(step, row) + "\n" for step, row in ROWS.items() if step <= last_step]
    (directory / "metrics.jsonl").write_text("".join(lines))


def repeated_after(directory: Path, step: int) -> RepeatedSteps:
    """The steps after the checkpoint of ``step``, if earlier ranks have trained on steps 3 and 4."""
    spool = ResponseSpool(directory / "spool", 0, lambda step: step - 1)
    (directory / "spool").mkdir(exist_ok=True)
    spool.trained_digests = {3: "three", 4: "four"}
    repeats = RepeatedSteps(spool, str(directory), step)
    spool.close()
    return repeats


def test_a_repeated_step_keeps_its_row_and_gets_an_accuracy(tmp_path: Path) -> None:
    write_rows(tmp_path, 5)
    repeats = repeated_after(tmp_path, 2)
    assert [repeats.has(step) for step in (3, 4, 5)] == [True, True, False]
    measured = {"time/train_s": 9.0, "weights/updates": 1.0, "evaluation/sums/accuracy": 0.5}
    row = repeats.row(3, measured)
    assert row is not None
    assert math.isnan(row.pop("policy/kl"))
    assert row == {"time/train_s": 3.0, "evaluation/sums/accuracy": 0.5}
    assert repeats.row(5, measured) is None
    assert [repeats.has_accuracy(step) for step in (3, 4)] == [False, True]


def test_rows_of_repeated_steps_outlive_the_records(tmp_path: Path) -> None:
    """The first start has dropped the records after its checkpoint, and ended before it wrote them again."""
    write_rows(tmp_path, 5)
    repeated_after(tmp_path, 2)
    write_rows(tmp_path, 2)
    row = repeated_after(tmp_path, 2).row(4, {})
    assert row == {"time/train_s": 4.0, "evaluation/sums/accuracy": 0.75}


def config(folder: Path) -> TrainConfig:
    tree = minimal(folder)
    tree["run"] = {"directory": str(folder), "steps": 5}
    tree["rollout"]["save"] = True
    return TrainConfig.model_validate(tree)


def step_records(folder: Path, rank: int = 0) -> StepRecords:
    settings = config(folder)
    # The recorder drops the rows after the checkpoint, so they are read before.
    repeats = repeated_after(folder, 2)
    recorder = Recorder(
        settings.run, RunInfo.of_config(settings.model_dump()), rank, 2, evaluates=False
    )
    samples: Any = None
    return StepRecords(settings, rank, recorder, samples, repeats)


def test_a_repeated_step_is_written_with_its_earlier_row(tmp_path: Path) -> None:
    """The counts of the repeated step are added to the next row, because the repeated step keeps its own."""
    write_rows(tmp_path, 4)
    records = step_records(tmp_path)
    records.write_row(3, {"time/train_s": 9.0, "weights/updates": 1.0})
    records.write_row(5, {"time/train_s": 6.0, "weights/updates": 1.0})
    rows = {row["step"]: row for row in read_records(tmp_path)}
    assert (rows[3]["time/train_s"], rows[3].get("weights/updates")) == (3.0, None)
    assert (rows[5]["time/train_s"], rows[5]["weights/updates"]) == (6.0, 2.0)


BATCH = {
    0: Trajectory.of_response([1], [3, 4], columns={"rollout_log_probs": np.zeros(2, np.float32)})
}
LEARNER: Any = SimpleNamespace(loss_columns={0: {"loss_log_probs": np.array([1, 2], np.float32)}})


def test_a_batch_without_room_is_an_error_and_is_saved_later(tmp_path: Path) -> None:
    records = step_records(tmp_path)
    folder = tmp_path / "rollouts"
    folder.write_text("a file in the place of the folder")
    records.save_batch(1, BATCH, LEARNER, None)
    with pytest.raises(RecordingError, match=f"rollout.save: {folder}"):
        records.recorder.check()
    folder.unlink()
    records.save_lost_batch()
    (saved,) = SavedBatch(folder, 1).read([0])
    assert saved.columns["loss_log_probs"].tolist() == [1, 2]


def test_ranks_other_than_0_save_no_batch(tmp_path: Path) -> None:
    records = step_records(tmp_path, rank=1)
    records.save_batch(1, BATCH, LEARNER, None)
    records.recorder.check()
    records.save_lost_batch()
    assert not (tmp_path / "rollouts").exists()
