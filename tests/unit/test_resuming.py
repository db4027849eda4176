"""The checkpoint that a start resumes from, with a store whose checkpoints are plain values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_dppo.config.schema import CheckpointConfig, RunConfig
from megatron_dppo.loop.resuming import resume
from megatron_dppo.loop.run_state import ResumeError, RunState
from megatron_dppo.metrics import records
from megatron_dppo.trainer.checkpoint.directory import (
    CheckpointSurvey,
    DamagedCheckpointError,
    StoredCheckpoint,
    UnusableCheckpoint,
)
from tests.messages import mentioning, mentions

pytestmark = pytest.mark.usefixtures("one_rank")

IDENTITY = {"run.seed": 1}


class Store:
    """A store of checkpoints, and the trainer that it loads them into.

    A checkpoint of step n says that its weights have the hash ``n``. ``loaded_digests``: step -> the hash that the
    trainer's weights have after a load. ``unusable_steps``: steps whose checkpoint can't be loaded.
    """

    def __init__(self, loaded_digests: Mapping[int, str], *unusable_steps: int) -> None:
        self._digest = ""
        self.trainer: Any = SimpleNamespace(
            weights_form=lambda: "form", weights_digest=lambda: self._digest
        )
        self.set_aside_names: list[str] = []
        self._loaded_digests = loaded_digests
        self._unusable_steps = unusable_steps

    def survey(self) -> CheckpointSurvey:
        complete = tuple(StoredCheckpoint(folder_of(n), n, n) for n in self._loaded_digests)
        unusable = tuple(
            UnusableCheckpoint(folder_of(n), n, f"step {n} lacks a file")
            for n in self._unusable_steps
        )
        return CheckpointSurvey(complete, unusable)

    def load(self, trainer: Any, checkpoint: StoredCheckpoint) -> dict[str, Any]:
        self._digest = self._loaded_digests[checkpoint.step]
        weights = {"form": str(checkpoint.step)}
        return RunState(checkpoint.step, {}, dict(IDENTITY), weights=weights).to_json()

    def set_aside(self, path: Path) -> None:
        self.set_aside_names.append(path.name)


def folder_of(step: int) -> Path:
    return Path(f"checkpoints/step_{step}")


def start(
    directory: Path,
    store: Store,
    *,
    resume_word: str = "auto",
    on_damage: str = "refuse",
    nonce: str = "lease",
) -> int | None:
    """Return the step that a start resumes from; None for a start at step 0."""
    run = RunConfig.model_validate({"directory": str(directory), "steps": 9, "resume": resume_word})
    checkpoints = CheckpointConfig.model_validate({"on_damage": on_damage})
    state = resume(
        run, checkpoints, store.trainer, cast(Any, store), IDENTITY, replays=False, nonce=nonce
    )
    return None if state is None else state.step


def write_records(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text('{"step": 0}\n')


def earlier_folders(directory: Path) -> int:
    return len(list(directory.glob("earlier-*")))


def test_the_newest_checkpoint_with_the_weights_of_its_step_is_resumed(tmp_path: Path) -> None:
    write_records(tmp_path)
    assert start(tmp_path, Store({1: "1", 2: "2"})) == 2
    altered = Store({1: "1", 2: "2", 3: "another"})
    with pytest.raises(DamagedCheckpointError) as caught:
        start(tmp_path, altered)
    # The way out names the checkpoint before the damaged one.
    assert mentions(str(caught.value), "step_3", "another", "on_damage=previous", "from step_2")
    assert altered.set_aside_names == []
    assert start(tmp_path, altered, on_damage="previous") == 2
    assert altered.set_aside_names == ["step_3"]
    # The records of the steps after it are dropped, and a copy is kept.
    assert earlier_folders(tmp_path) == 1


def test_every_checkpoint_that_was_passed_over_is_renamed(tmp_path: Path) -> None:
    write_records(tmp_path)
    store = Store({1: "1", 2: "another", 4: "another"}, 3, 5)
    assert start(tmp_path, store, on_damage="previous") == 1
    # A checkpoint that is older than the newest complete one stays as it is.
    assert sorted(store.set_aside_names) == ["step_2", "step_4", "step_5"]


@pytest.mark.parametrize("on_damage", ["refuse", "previous"])
def test_damaged_checkpoints_alone_refuse_a_start_at_step_0(tmp_path: Path, on_damage: str) -> None:
    """No older checkpoint is left, so the way out is to bring one back or to begin anew."""
    write_records(tmp_path)
    message = mentioning("1 checkpoint", "step 2 lacks a file", "run.resume=never")
    with pytest.raises(ResumeError, match=message) as caught:
        start(tmp_path, Store({}, 2), resume_word="required", on_damage=on_damage)
    # "no checkpoint" would contradict the damaged one.
    assert "no checkpoint" not in str(caught.value)


def test_restarted_ranks_do_not_begin_the_run_a_second_time(tmp_path: Path) -> None:
    """With ``run.resume: never`` a start sets earlier files aside. The ranks of this start may be restarted."""
    write_records(tmp_path)
    store = Store({})
    assert start(tmp_path, store, resume_word="never") is None
    assert earlier_folders(tmp_path) == 1
    write_records(tmp_path)
    assert start(tmp_path, store, resume_word="never") is None
    assert earlier_folders(tmp_path) == 1
    assert start(tmp_path, Store({1: "1"}), resume_word="never") == 1
    # Another start has another lease.
    assert start(tmp_path, Store({1: "1"}), resume_word="never", nonce="another lease") is None
    assert earlier_folders(tmp_path) == 2
    assert records.has_begun(tmp_path, "another lease")
