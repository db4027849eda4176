"""A start at step 0 in a folder with files of earlier starts: it is refused, or the files are set aside. No file is
overwritten."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.loop.resuming import check_damage, check_fresh_start, newer_unusable
from megatron_dppo.loop.run_state import ResumeError
from megatron_dppo.metrics.records import (
    History,
    keep_copy,
    read_history,
    remember_checkpoint,
    set_aside,
)
from megatron_dppo.trainer.checkpoint.directory import (
    CheckpointSurvey,
    DamagedCheckpointError,
    StoredCheckpoint,
    UnusableCheckpoint,
)
from tests.messages import mentioning, mentions
from tests.unit.config_files import minimal_config

REASON = "run/checkpoints/step_000040/manifest.json: damaged"


def config(tmp_path: Path, resume: str = "auto", **checkpoint: Any) -> TrainConfig:
    return minimal_config(tmp_path, run={"resume": resume}, checkpoint={"every": 5, **checkpoint})


def write_run(directory: Path, steps: int) -> None:
    """Write what a run of ``steps`` steps leaves in its folder."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step}) + "\n" for step in range(steps + 1)]
    (directory / "metrics.jsonl").write_text("".join(lines))
    (directory / "masked_tokens.jsonl").write_text('{"step": 1, "tokens": []}\n')
    (directory / "tensorboard").mkdir()
    (directory / "checkpoints" / "step_000005").mkdir(parents=True)
    (directory / "rollouts").mkdir()


@pytest.mark.parametrize(
    ("unusable", "history", "found"),
    [
        ([REASON], History(None, None), "1 checkpoint(s) that can't be used (" + REASON),
        ([REASON] * 9, History(None, None), "9 checkpoint(s)"),
        ([], History(3, 3), "no checkpoint, though one of step 3 was written and records up to"),
        (
            [],
            History(11, None, counts_checkpoint=True),
            "no checkpoint, though the metrics say that one was written and records up to step 11",
        ),
        (
            [],
            History(None, None, "metrics.jsonl: not UTF-8"),
            "records that can't be read (metrics",
        ),
    ],
)
def test_a_trained_run_is_not_begun_anew(tmp_path, unusable, history, found):
    with pytest.raises(ResumeError, match=re.escape(found)) as caught:
        check_fresh_start(config(tmp_path).run, unusable, history)
    assert "run.resume=never" in str(caught.value)
    assert "is " + str(tmp_path / "run" / "checkpoints") + " mounted?" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("recorded", [None, 0, 4, 5, 10, 50])
def test_a_run_that_ended_before_its_first_checkpoint_was_written_may_begin_anew(
    tmp_path, recorded
):
    """By the present ``checkpoint.every`` there should be checkpoints, but the value of the earlier start may have been
    larger."""
    check_fresh_start(config(tmp_path).run, [], History(recorded, None))
    with pytest.raises(ResumeError, match=mentioning("run.resume", "required")):
        check_fresh_start(config(tmp_path, "required").run, [], History(recorded, None))


def test_history_is_read_from_records_and_from_what_was_saved(tmp_path):
    assert read_history(tmp_path / "none") == History(None, None)
    write_run(tmp_path, 7)
    assert read_history(tmp_path) == History(7, None)
    remember_checkpoint(tmp_path, 5)
    assert read_history(tmp_path) == History(7, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "checkpoint/bytes": 9}\n')
    assert read_history(tmp_path) == History(8, 5, counts_checkpoint=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    assert "metrics.jsonl" in (read_history(tmp_path).damage or "")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "last_checkpoint.json").write_text("[]")
    assert "last_checkpoint.json: damaged" in (read_history(tmp_path).damage or "")


def test_everything_is_set_aside_and_nothing_written_over(tmp_path):
    write_run(tmp_path, 2)
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    first = set_aside(tmp_path, rollouts=True)
    assert [p for p in tmp_path.iterdir() if p.name != first.name] == []
    assert sorted(p.name for p in first.iterdir()) == [
        "checkpoints", "masked_tokens.jsonl", "metrics.jsonl", "rollouts", "tensorboard",
    ]  # fmt: skip
    assert (first / "metrics.jsonl").read_bytes() == metrics
    assert set_aside(tmp_path, rollouts=True) is None
    write_run(tmp_path, 3)
    second = set_aside(tmp_path, rollouts=False)
    assert second not in (None, first)
    assert (tmp_path / "rollouts").is_dir()
    assert (first / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("mounted", ["rollouts", "checkpoints", "tensorboard"])
def test_no_file_is_set_aside_if_a_folder_cannot_be_moved(tmp_path, monkeypatch, mounted):
    """The folders are moved before the files, because a mounted folder cannot be moved."""
    write_run(tmp_path, 2)
    rename = Path.rename

    def rename_unless_mounted(path: Path, target: Path) -> Path:
        if path.name == mounted:
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_unless_mounted)
    with pytest.raises(OSError, match="busy"):
        set_aside(tmp_path, rollouts=True)
    assert {"masked_tokens.jsonl", "metrics.jsonl"} <= {p.name for p in tmp_path.iterdir()}


def test_a_copy_keeps_the_records_that_a_fall_back_drops(tmp_path):
    write_run(tmp_path, 7)
    (tmp_path / "samples.jsonl").write_text("{}\n")
    copy = keep_copy(tmp_path)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (copy / name).read_text() == (tmp_path / name).read_text()
    assert re.fullmatch(r"earlier-\d{8}-\d{6}", copy.name)


def survey(*unusable_steps: int) -> CheckpointSurvey:
    complete = (StoredCheckpoint(Path("c/step_000020"), 20, 1),)
    unusable = [UnusableCheckpoint(Path(f"c/step_{s:06d}"), s, REASON) for s in unusable_steps]
    return CheckpointSurvey(complete, tuple(unusable))


def test_a_damaged_newest_checkpoint_is_passed_over_only_where_it_is_asked_for(tmp_path):
    check_damage("refuse", survey(10))
    check_damage("previous", survey(40))
    with pytest.raises(DamagedCheckpointError) as caught:
        check_damage("refuse", survey(10, 40))
    remedies = ("checkpoint.on_damage=previous", "step_000020", "run.resume=never")
    assert mentions(str(caught.value), REASON, *remedies)
    assert [u.step for u in newer_unusable(survey(10, 20, 40))] == [40]
    # Rank 0 sends its survey to the other ranks as JSON.
    adapter = TypeAdapter(CheckpointSurvey)
    assert adapter.validate_json(adapter.dump_json(survey(40))) == survey(40)
