"""Files that appear whole or not at all, and only once their bytes are on the disk."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from megatron_dppo.system.files import atomic_file, sync_folder, write_atomically, write_synced


@pytest.mark.parametrize("content", ["über", "über".encode()])
def test_text_and_bytes_replace_what_was_there(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "summary.json"
    path.write_text("a longer old content")
    write_atomically(path, content)
    assert path.read_bytes() == "über".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_are_never_wider_than_asked(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with atomic_file(path, 0o600) as file:
        [temporary] = tmp_path.iterdir()
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        file.write(b"secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failed_replacement_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")

    def fail_with_full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megatron_dppo.system.files.os.fsync", fail_with_full_disk)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_in_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_text("old")

    def write_half() -> None:
        with atomic_file(path) as file:
            file.write(b"new")
            raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_are_on_the_disk_before_the_name_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(("sync", path.name))
        if path.is_file():
            assert path.read_text() == "new"
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        events.append(("name", target.name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    write_atomically(tmp_path / "file", "new")
    assert [event for event, _ in events] == ["sync", "name", "sync"]
    assert events[0][1].startswith(".file.")
    assert events[1:] == [("name", "file"), ("sync", tmp_path.name)]


def test_threads_that_write_one_path_do_not_meet(tmp_path: Path) -> None:
    path, texts = tmp_path / "status", [letter * 10_000 for letter in "abcd"]

    def write(text: str) -> None:
        for _ in range(10):
            write_atomically(path, text)

    threads = [threading.Thread(target=write, args=[text]) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


def test_a_whole_folder_is_put_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    write_synced(tmp_path / "below" / "a", "1")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    sync_folder(tmp_path)
    below = tmp_path / "below"
    assert synced == [str(below / "a"), str(below), str(tmp_path)]
