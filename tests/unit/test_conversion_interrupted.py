"""A full disk, a kill, or a second conversion to the same folder: none of them leaves a folder that loads."""

from __future__ import annotations

import errno
import filecmp
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dppo.checkpoint_conversion import hf_folder
from megatron_dppo.checkpoint_conversion.tensor_store import SafetensorsFile
from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint
from megatron_dppo.convert.__main__ import main
from megatron_dppo.convert.streaming import hf_to_megatron, verify
from megatron_dppo.model.errors import CheckpointError, ModelConfigError
from megatron_dppo.model.families import load_model_shape
from tests.tiny_models import save_hollow_model


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Limit the size of the files that this process writes to 100 KB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("command", ["hf-to-megatron", "megatron-to-hf"])
def test_a_disk_that_fills_up_leaves_nothing(moe, tmp_path, request, capsys, command):
    hf_to_megatron(moe, tmp_path / "m")
    source = {
        "hf-to-megatron": ["--hf", str(moe)],
        "megatron-to-hf": ["--megatron", str(tmp_path / "m")],
    }
    request.getfixturevalue("small_disk")
    assert main([command, *source[command], "--out", str(tmp_path / "out")]) == 2
    assert os.strerror(errno.EFBIG) in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["m"]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(moe, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(hf_folder.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"1000 bytes"):
        hf_to_megatron(moe, tmp_path / "m")
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A model of 289 MB: its conversion lasts long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("large")
    return save_hollow_model(folder / "hf", hidden_size=1024, vocab_size=70_000)


def to_megatron(hf: Path, folder: Path) -> list[str]:
    return ["hf-to-megatron", "--hf", str(hf)]


def to_hf(hf: Path, folder: Path) -> list[str]:
    hf_to_megatron(hf, folder / "m")
    return ["megatron-to-hf", "--megatron", str(folder / "m")]


def bytes_on_disk(folder: Path) -> int:
    return sum(512 * p.stat().st_blocks for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("command", [to_megatron, to_hf], ids=lambda c: c.__name__)
def test_a_killed_command_leaves_nothing_that_loads_and_a_rerun_starts_clean(
    large, tmp_path, command
):
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    arguments = [*command(large, tmp_path), "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "megatron_dppo.convert", *arguments])
    try:
        while not partial.exists() or bytes_on_disk(partial) < 20e6:
            assert process.poll() is None, "ended before it could be killed"
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not out.exists()
    for path in partial.glob("*.safetensors"):
        with pytest.raises(CheckpointError, match="header"):
            SafetensorsFile(path)
    with pytest.raises(ModelConfigError, match=r"config\.json: "):
        load_model_shape(partial)
    with pytest.raises(CheckpointError):
        open_checkpoint(partial)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        verify(large, partial)
    assert main(arguments) == 0
    assert not partial.exists()
    if command is to_hf:
        assert filecmp.cmp(large / "model.safetensors", out / "model.safetensors", shallow=False)
    else:
        verify(large, out)


def test_two_conversions_do_not_write_to_one_place(moe, tmp_path):
    with (
        hf_folder.StagedFolder(tmp_path / "m", 0),
        pytest.raises(CheckpointError, match="another process"),
    ):
        hf_to_megatron(moe, tmp_path / "m")


@pytest.mark.parametrize("is_renamed_first", [True, False], ids=["before mkdir", "after mkdir"])
def test_a_folder_that_appears_while_another_process_begins_is_not_written_again(
    tmp_path, monkeypatch, is_renamed_first
):
    first_folder = hf_folder.StagedFolder(tmp_path / "m", 0)
    (first_folder.__enter__() / "weights").write_text("first")
    mkdir = Path.mkdir

    def rename_beside_mkdir(path: Path, **options: bool) -> None:
        monkeypatch.undo()
        if is_renamed_first:
            first_folder.__exit__(None)
            mkdir(path, **options)
        else:
            mkdir(path, **options)
            first_folder.__exit__(None)

    monkeypatch.setattr(Path, "mkdir", rename_beside_mkdir)
    with pytest.raises(CheckpointError):
        hf_folder.StagedFolder(tmp_path / "m", 0).__enter__()
    assert os.listdir(tmp_path) == ["m"]
    assert (tmp_path / "m" / "weights").read_text() == "first"


def test_a_staging_folder_that_another_process_makes_after_the_rename_is_kept(
    tmp_path, monkeypatch
):
    second_folder = hf_folder.StagedFolder(tmp_path / "m", 0)

    def begin_second(_: Path) -> None:
        (tmp_path / "m").rename(tmp_path / "moved away")
        (second_folder.__enter__() / "weights").write_text("second")

    with hf_folder.StagedFolder(tmp_path / "m", 0):
        # After the rename, the folder calls this function first.
        monkeypatch.setattr(hf_folder, "sync_to_disk", begin_second)
    monkeypatch.undo()
    second_folder.__exit__(None)
    assert (tmp_path / "m" / "weights").read_text() == "second"
