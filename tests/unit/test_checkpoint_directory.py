"""Checkpoints are published and pruned on the disk without a trainer, also if a kill ends the process at any step."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.checkpoint_conversion.dist_writing import write_hashed
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.trainer.checkpoint.directory import (
    CheckpointDirectory,
    check_content,
    check_sizes,
    read_manifest,
    suspect_folder,
    suspect_folders,
)


def save(directory: CheckpointDirectory, step: int) -> Path:
    """Save a checkpoint of two files whose texts name the step."""
    partial = directory.begin(step)
    files = {
        name: write_hashed(partial.path / name, f"{name} of step {step}".encode())
        for name in ("a", "b")
    }
    path = directory.publish(partial, {"files": files, "state": {1: [0.1, None]}})
    directory.prune()
    return path


def steps(directory: CheckpointDirectory) -> list[int]:
    """Return the steps of the complete checkpoints, after a check of all their bytes."""
    checkpoints = directory.complete()
    for stored in checkpoints:
        check_content(stored.path, read_manifest(stored.path)["files"])
        assert (stored.path / "a").read_text() == f"a of step {stored.step}"
    return [stored.step for stored in checkpoints]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_written_stay(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "new" / "checkpoints", keep=2)
    assert directory.complete() == []
    for step in (20, 40, 60):
        save(directory, step)
    assert names(directory.directory) == ["step_000040", "step_000060"]
    assert read_manifest(directory.directory / "step_000060")["state"] == {"1": [0.1, None]}


def test_a_run_that_went_back_keeps_its_own(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    for step in (80, 100, 20, 100):
        save(directory, step)
    assert steps(directory) == [20, 100]
    assert directory.complete()[-1].serial == 4


def test_suspect_weights_are_no_checkpoint_until_they_are_renamed(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=1)
    save(directory, 20)
    for step in (30, 1_000_000, 31):
        partial = directory.begin(step)
        files = {"a": write_hashed(partial.path / "a", f"a of step {step}".encode())}
        directory.publish(partial, {"files": files}, suspect=True)
    assert steps(directory) == [20]
    assert suspect_folders(tmp_path) == [suspect_folder(tmp_path, 31)]
    assert names(tmp_path) == ["step_000020", "step_000031.suspect"]
    suspect_folder(tmp_path, 31).rename(tmp_path / "step_000031")
    assert steps(directory) == [20, 31]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ValueError, match=f"keep .*{keep}"):
        CheckpointDirectory(tmp_path, keep)


def cut_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:-20])


def edit_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"step": 2', '"step": 3'))


def set_newer_format(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, "format": 9}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), r"manifest.json: no such file"),
    "cut manifest": (cut_manifest, r"manifest.json: not a readable JSON file"),
    "edited manifest": (edit_manifest, r"manifest.json: altered"),
    "newer format": (set_newer_format, r"manifest.json: format is 9, this version reads 1"),
    "missing file": (lambda f: (f / "b").unlink(), r"step_000002/b: missing"),
    "cut file": (lambda f: os.truncate(f / "b", 3), r"step_000002/b: has 3 bytes, expected 11"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_damaged_checkpoint_is_passed_over_and_kept(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = CheckpointDirectory(tmp_path, keep=1)
    save(directory, 1)
    directory.keep = 3
    path = save(directory, 2)
    inflict, message = DAMAGES[damage]
    inflict(path)
    with pytest.raises(CheckpointError, match=message):
        check_sizes(path, read_manifest(path))
    assert steps(directory) == [1]
    assert "usable checkpoint" in caplog.text
    save(directory, 3)
    assert path.exists()
    save(directory, 2)
    assert steps(directory) == [1, 3, 2]


def test_altered_bytes_of_the_same_size_are_found(tmp_path: Path) -> None:
    path = save(CheckpointDirectory(tmp_path, keep=1), 2)
    (path / "b").write_text("b of step 3")
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    with pytest.raises(CheckpointError, match=r"step_000002/b: altered"):
        check_content(path, manifest["files"])


def die_at(call: int) -> None:
    """Make this process kill itself at its ``call``-th change of the disk; a deletion is half done by then."""
    count = 0

    def count_calls(
        function: Callable[..., Any], before: Callable[..., None]
    ) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                before(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    def delete_last_file(folder: Path, *_: Any) -> None:
        max(folder.iterdir()).unlink()

    for name in ("rename", "fsync", "mkdir"):
        setattr(os, name, count_calls(getattr(os, name), lambda *args: None))
    shutil.rmtree = count_calls(shutil.rmtree, delete_last_file)  # type: ignore[assignment]


def save_until_kill(directory: CheckpointDirectory, step: int, call: int) -> bool:
    """Save in a child that is killed at its ``call``-th change of the disk; return whether the kill came."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            die_at(call)
            save(directory, step)
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("step", [40, 60])
def test_killed_anywhere_a_complete_checkpoint_is_left(tmp_path: Path, step: int) -> None:
    """Step 60 is new; step 40 is written over an older checkpoint of the same step."""
    deaths = 0
    while True:
        directory = CheckpointDirectory(tmp_path / str(deaths), keep=2)
        save(directory, 20)
        save(directory, 40)
        if not save_until_kill(directory, step, deaths + 1):
            break
        deaths += 1
        kept_steps = steps(directory)
        # Between the two renames of a replacement the old checkpoint of the step is gone.
        assert kept_steps in ([20, 40], [20, 40, 60], [40, 60], [20]), (deaths, kept_steps)
        assert kept_steps != [20] or step == 40
        save(directory, 80)
        assert steps(directory)[-1] == 80
        assert all("." not in name for name in names(directory.directory))
    assert deaths >= 10
    assert steps(directory) == ([20, 40] if step == 40 else [40, 60])
