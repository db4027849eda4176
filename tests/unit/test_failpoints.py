"""Failpoints of files: a reader sees the old content or the new one, whatever fails and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.system.failpoints import KINDS, TORN, VARIABLE
from megatron_dppo.system.files import remove_unfinished
from tests.patience import run_patiently

WRITER = """
import sys
from pathlib import Path
from megatron_dppo.system.files import write_atomically
from megatron_dppo.metrics.records import StepLines
path = Path(sys.argv[1])
if path.suffix == ".jsonl":
    for step in range(1, 4):
        StepLines(path, step).write([{"step": step, "text": "x" * 100}])
else:
    for content in ("first", "second", "third"):
        write_atomically(path, content * 100)
"""
ATOMIC = ("create", "write", "rename", "renamed")


def write_with(path: Path, failure: str) -> subprocess.CompletedProcess[str]:
    return run_patiently(
        [sys.executable, "-c", WRITER, str(path)], env=os.environ | {VARIABLE: failure}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_atomic_file_is_always_whole(tmp_path: Path, kind: str) -> None:
    """The second of three writes fails, at each of its stages in turn."""
    for stage in ATOMIC:
        path = tmp_path / stage / "state7.json"
        path.parent.mkdir()
        writer = write_with(path, f"{stage}/state#.json,{kind},2")
        if kind == "delay":
            assert (writer.returncode, path.read_text()) == (0, "third" * 100)
            continue
        is_killed = kind in ("kill", "torn")
        assert writer.returncode == (-signal.SIGKILL if is_killed else 1)
        assert path.read_text() == ("second" if stage == "renamed" else "first") * 100
        files = sorted(p.name for p in path.parent.iterdir())
        # Only a process that is killed before the rename is complete leaves its temporary file behind.
        assert (files == ["state7.json"]) == (not is_killed or stage == "renamed")


def test_a_torn_line_is_dropped_by_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert write_with(path, "append/rows.jsonl,torn,2").returncode == -signal.SIGKILL
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 2
    assert not lines[-1].endswith("\n")
    assert write_with(path, "-,kill,1").returncode == 0
    assert [line[:10] for line in path.read_text().splitlines()] == [
        '{"step": 1',
        '{"step": 2',
        '{"step": 3',
    ]


def test_points_are_recorded_and_counted(tmp_path: Path) -> None:
    listing = tmp_path / "points"
    assert write_with(tmp_path / "state.json", f"-,record,{listing}").returncode == 0
    points = listing.read_text().splitlines()
    expected = ["create/state.json", f"write/state.json{TORN}", "rename/state.json"]
    assert points[:3] == expected
    assert points.count("renamed/state.json") == 3


def test_a_failure_notes_itself_first_and_several_may_be_planned(tmp_path: Path) -> None:
    note = tmp_path / "note"
    delays = [f"{stage}/state.json,delay,1,{note}" for stage in ("create", "rename")]
    kill = f"write/state.json,kill,2,{note}"
    writer = write_with(tmp_path / "state.json", ";".join([*delays, kill]))
    assert writer.returncode == -signal.SIGKILL
    assert note.read_text().splitlines() == [*delays, kill]


def test_the_next_start_of_a_run_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "state.json"
    path.parent.mkdir()
    assert write_with(path, "rename/state.json,kill,1").returncode == -signal.SIGKILL
    # Neither temporary files of this process nor other hidden files are removed.
    own = tmp_path / f".own.json.{os.getpid()}-1"
    own.write_text("of this process")
    (tmp_path / ".hidden").write_text("of a user")
    assert len(list(path.parent.iterdir())) == 1
    remove_unfinished(tmp_path)
    assert list(path.parent.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([".hidden", own.name, "rollouts"])
