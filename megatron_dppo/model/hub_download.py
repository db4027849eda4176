"""The SHA-256 that huggingface.co recorded for the files of a downloaded model, from huggingface_hub's metadata.

``hf download`` keeps a file's ETag. The ETag of a file in the hub's large-file storage (weights, tokenizer.json) is the
SHA-256 of the content. The shared cache keeps the ETag as the name of the blob that ``snapshots/<commit>/<file>`` links
to. With ``--local-dir`` the ETag is the second line of ``.cache/huggingface/download/<file>.metadata``. The ETag of a
smaller file is a git hash; this module ignores it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.system.files import sha256_of

_SHA256 = re.compile(r"[0-9a-f]{64}")
_TOLERANCE_S = 1.0
"""A file was changed after the download if it is newer than its metadata by more than this tolerance. huggingface_hub
has the same tolerance."""


def hub_hash(path: Path) -> str | None:
    """Return the SHA-256 (hex) that the hub has for a downloaded file.

    The result is None if the hash is unknown, or if the file was changed after it was downloaded.
    """
    if path.is_symlink():
        blob = path.resolve()
        if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
            return blob.name
    metadata = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    try:
        _, etag, time_text = metadata.read_text(encoding="utf-8").splitlines()[:3]
        is_changed = path.stat().st_mtime > float(time_text) + _TOLERANCE_S
    except (OSError, ValueError):
        return None
    if _SHA256.fullmatch(etag) and not is_changed:
        return etag
    return None


def check_download(hashes: Mapping[Path, str]) -> None:
    """Compare the SHA-256 of files with the hashes on the hub. A file whose hash on the hub is unknown passes.

    Args:
        hashes: SHA-256 (hex) of each file's current content.

    Raises:
        CheckpointError: some files differ. The message names all of them.
    """
    faults = []
    for path, digest in hashes.items():
        expected = hub_hash(path)
        if expected is not None and digest != expected:
            faults.append(f"{path}: its SHA-256 is {digest}, huggingface.co recorded {expected}")
    if faults:
        raise CheckpointError(
            f"{'; '.join(faults)}: the download is damaged; delete these files and download them again"
        )


def check_downloaded_files(paths: Iterable[Path]) -> None:
    """Hash each of the files whose SHA-256 on the hub is known, and compare the hashes. Raises CheckpointError."""
    hashes: dict[Path, str] = {}
    for path in paths:
        if hub_hash(path) is not None:
            hashes[path] = sha256_of(path)
    check_download(hashes)
