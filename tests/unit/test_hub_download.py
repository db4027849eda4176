"""Downloaded files are compared with the hub's SHA-256, in both places where huggingface_hub keeps the hash."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from megatron_dppo.convert.streaming import hf_to_megatron
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.hub_download import check_downloaded_files, hub_hash
from tests.tiny_models import save_tiny_model


def flip_a_bit(path: Path) -> None:
    """Flip a bit of the last byte, and keep the file's times, as a faulty disk does."""
    times = path.stat().st_atime, path.stat().st_mtime
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, times)


def in_the_cache(folder: Path) -> Path:
    """Write ``weights.safetensors`` as ``hf download`` leaves it in the shared cache. Return its path."""
    digest = hashlib.sha256(b"weights").hexdigest()
    blob, link = folder / "blobs" / digest, folder / "snapshots" / "abc" / "weights.safetensors"
    for path in (blob, link):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(b"weights")
    link.symlink_to(blob)
    return link


def with_metadata(path: Path, etag: str | None = None) -> Path:
    """Write the metadata that ``hf download --local-dir`` keeps beside ``path``. Return ``path``."""
    etag = etag or hashlib.sha256(path.read_bytes()).hexdigest()
    metadata = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"{'0' * 40}\n{etag}\n{path.stat().st_mtime}\n")
    return path


def in_a_folder(folder: Path) -> Path:
    path = folder / "weights.safetensors"
    path.write_bytes(b"weights")
    return with_metadata(path)


@pytest.mark.parametrize("place", [in_the_cache, in_a_folder])
def test_a_damaged_download_is_named(tmp_path, place):
    path = place(tmp_path)
    assert hub_hash(path) == hashlib.sha256(b"weights").hexdigest()
    check_downloaded_files([path])
    flip_a_bit(path)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        check_downloaded_files([path])


def test_a_file_that_was_changed_on_purpose_is_accepted(tmp_path):
    path = in_a_folder(tmp_path)
    path.write_bytes(b"other")
    os.utime(path, (path.stat().st_mtime + 60,) * 2)
    assert hub_hash(path) is None
    check_downloaded_files([path])


def test_a_git_hash_or_no_metadata_is_not_compared(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert hub_hash(path) is None
    assert hub_hash(with_metadata(path, "0" * 40)) is None


def test_a_damaged_download_is_not_converted(tmp_path):
    hf = save_tiny_model(tmp_path / "hf", "qwen3")
    flip_a_bit(with_metadata(hf / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        hf_to_megatron(hf, tmp_path / "out")
    assert not (tmp_path / "out").exists()
