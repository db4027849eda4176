"""A process's private directory: only its user can enter it, and it is removed after its process has ended."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dppo.system import scratch
from megatron_dppo.system.scratch import (
    make_runtime_directory,
    private_name,
    remove_left_behind,
    remove_shared_tensors,
    use_as_temporary,
)

ROOT = Path(__file__).resolve().parents[2]
PROCESS_CODE = """
import os, sys
from multiprocessing import get_context, shared_memory
from megatron_dppo.engine.launch_server import name_shared_memory, private_place
place = private_place()
directory = place.__enter__()
name_shared_memory()
lock = get_context("spawn").Lock()
memory = shared_memory.SharedMemory(create=True, size=10)
import tempfile
socket = tempfile.NamedTemporaryFile(delete=False)
print(directory, socket.name, memory.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, under a umask that lets a group write."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_MAX_FOLDER_BYTES", 4096)
    old_umask = os.umask(0o002)
    yield tmp_path
    os.umask(old_umask)


def test_its_user_alone_can_enter_it_whatever_the_umask(temporary: Path) -> None:
    directory = make_runtime_directory()
    assert directory.parent == temporary
    assert directory.name.startswith(f"mdppo-{os.getuid()}-")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert make_runtime_directory() != directory


def test_a_path_that_is_too_long_for_sockets_is_not_used(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_MAX_FOLDER_BYTES", 73)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / ("x" * 60)))
    directory = make_runtime_directory()
    directory.rmdir()
    assert directory.parent == Path("/tmp")
    assert len(str(directory)) <= 73


def test_temporary_files_go_there_but_compiled_kernels_stay(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("USER", "ada")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    place = temporary / "place"
    place.mkdir()
    use_as_temporary(place)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(temporary / "torchinductor_ada")
    with tempfile.NamedTemporaryFile() as file:
        assert Path(file.name).parent == place


def test_what_a_killed_process_leaves_is_removed_and_nothing_else(temporary: Path) -> None:
    """The process leaves a folder with a socket, shared memory and a semaphore. They stay as long as it lives."""
    environment = {**os.environ, "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS_CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    directory, socket, memory = process.stdout.readline().split()
    name = Path(directory).name[:-8]
    shared = Path("/dev/shm")
    left_paths = [*shared.glob(f"{name}*"), *shared.glob(f"sem.{name}*"), Path(directory)]
    assert len(left_paths) == 3
    assert shared / memory in left_paths
    assert Path(socket).parent == Path(directory)
    assert stat.S_IMODE(Path(directory).stat().st_mode) == 0o700
    assert stat.S_IMODE((shared / memory).stat().st_mode) == 0o600
    remove_left_behind()
    assert all(path.exists() for path in left_paths)
    os.killpg(process.pid, 9)  # this also kills its resource tracker, which would remove the files
    process.communicate()
    remove_left_behind()
    assert not any(path.exists() for path in left_paths)


def test_what_belongs_to_others_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = private_name()
    user, namespace, pid = own.split("-")[1:4]
    names = [
        f"mdppo-{int(user) + 1}-{namespace}-{pid}-1-abc",  # another user's name
        f"mdppo-{user}-{int(namespace) + 1}-{pid}-1-abc",  # a container's, whose process ids mean nothing here
        f"{own}abc",  # this process lives
        "mdppo-notes",
    ]
    gone = f"mdppo-{user}-{namespace}-{pid}-1-abc"  # an ended process that had this process's id
    for name in (*names, gone):
        (temporary / name).mkdir()
    target = temporary / "precious"
    target.mkdir()
    (target / "file").touch()
    (temporary / f"mdppo-{user}-{namespace}-{pid}-1-link").symlink_to(target)
    monkeypatch.setattr(scratch, "SHARED_MEMORY", temporary / "none")
    remove_left_behind()
    assert {p.name for p in temporary.iterdir()} == {*names, "precious"}
    assert (target / "file").exists()


def test_tensors_that_ended_ranks_shared_are_removed(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "SHARED_MEMORY", temporary)
    for name in ("torch_12_34_0", "torch_123_4_0", "torch_13_1_0", "other"):
        (temporary / name).touch()
    remove_shared_tensors([12, 13, 99])
    assert {p.name for p in temporary.iterdir()} == {"torch_123_4_0", "other"}


def test_what_another_user_planted_under_this_ones_name_stays(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """getuid is patched, so that this process's files belong to another user."""
    user, namespace, pid = private_name().split("-")[1:4]
    planted = temporary / f"mdppo-{int(user) + 1}-{namespace}-{pid}-1-abc"
    planted.mkdir()
    monkeypatch.setattr("megatron_dppo.system.scratch.os.getuid", lambda: int(user) + 1)
    monkeypatch.setattr(scratch, "SHARED_MEMORY", temporary / "none")
    remove_left_behind()
    assert planted.exists()
