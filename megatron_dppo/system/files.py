"""Files that appear whole or not at all, also if the process or the machine dies while they are written."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import BinaryIO, Self

from megatron_dppo.system.failpoints import file_failpoint, keep_half, write_whole


@contextmanager
def atomic_file(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a new file that replaces ``path`` when the block ends without an error.

    The bytes are on the disk before the file gets its name. After an error, or a crash, ``path`` is unchanged. Several
    processes and threads may replace one path: the last replacement stays.

    Args:
        path: path of the file; its folder must exist.
        mode: permissions; the umask applies. The file never has wider permissions, not even while it is written.
    """
    # Two threads, or processes, that replace one path must not write into one temporary file.
    writer = f"{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f".{path.name}.{writer}")
    temporary.unlink(missing_ok=True)
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w+b") as file:
            file_failpoint("create", path.name)
            yield file
            file_failpoint("write", path.name, lambda: keep_half(file))
            file.flush()
            os.fsync(file.fileno())
        file_failpoint("rename", path.name)
        os.replace(temporary, path)
        file_failpoint("renamed", path.name)
    finally:
        temporary.unlink(missing_ok=True)
    # A rename is durable only when the folder's list of names is on the disk too.
    sync_to_disk(path.parent)


_TEMPORARY_NAME = re.compile(r"\..+\.(\d+)-\d+")
"""Name of a temporary file of ``atomic_file``: ``.NAME.PROCESS-THREAD``, with the id of the process as a group."""


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files of ``atomic_file`` that killed processes left in ``folder`` and its direct subfolders.

    Call this only when no other process writes in these folders. Files of this process are kept.
    """
    children = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    for parent in (folder, *children):
        for path in parent.glob(".*"):
            match = _TEMPORARY_NAME.fullmatch(path.name)
            if match is None or not path.is_file():
                continue
            writer_pid = int(match[1])
            if writer_pid != os.getpid():
                path.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's bytes. Raises OSError."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


_HASH_LINE = "# SHA-256 of the lines below: "


def with_hash(text: str) -> str:
    """Return ``text`` with its SHA-256 as a comment in a line above it, for a format whose comments begin with #."""
    return f"{_HASH_LINE}{_text_hash(text)}\n{text}"


def hash_fault(text: str) -> str | None:
    """Return an error if the first line of ``text`` has a hash and the lines below have another; otherwise None."""
    first_line, _, rest = text.partition("\n")
    if not first_line.startswith(_HASH_LINE):
        return None
    recorded_hash = first_line.removeprefix(_HASH_LINE)
    present_hash = _text_hash(rest)
    if recorded_hash == present_hash:
        return None
    return (
        f"its first line says that the lines below have the SHA-256 {recorded_hash}, they have {present_hash}; if they "
        "were changed on purpose, remove that line"
    )


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def unused_path(path: Path) -> Path:
    """Return the first of ``path``, ``path-2``, ``path-3``, ... that does not exist."""
    candidate = path
    for number in count(2):
        if not candidate.exists():
            break
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def rename_with_time(folder: Path, seconds: float | None = None) -> Path:
    """Rename ``folder`` to ``<name>-<local time>``, so that its name is free, and return its new path.

    ``seconds``: the time, in epoch seconds; None: now.
    """
    time_text = time.strftime("%Y%m%d-%H%M%S", time.localtime(seconds))
    renamed = unused_path(folder.with_name(f"{folder.name}-{time_text}"))
    folder.rename(renamed)
    return renamed


def write_atomically(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Replace ``path`` by ``content`` (text as UTF-8); see ``atomic_file``."""
    if isinstance(content, str):
        content = content.encode()
    with atomic_file(path, mode) as file:
        file.write(content)


def write_synced(path: Path, content: str) -> None:
    """Write a text file in place and sync it to the disk. Call this in a folder that gets its final name later."""
    with open(path, "w", encoding="utf-8") as file:
        write_whole("write", path.name, file, content)
        file.flush()
        os.fsync(file.fileno())
    file_failpoint("synced", path.name)


def folder_fault(folder: Path) -> str | None:
    """Return why ``folder`` can't be created or written; None if it can. The text begins with the folder at fault."""
    try:
        candidates = [folder.absolute(), *folder.absolute().parents]
        nearest_folder = next(path for path in candidates if path.exists())
    except OSError as error:
        return f"{folder} can't be read ({error.strerror})"
    try:
        # Write a file: permission bits don't show a read-only mount, a quota, or root squashing on NFS.
        tempfile.TemporaryFile(dir=nearest_folder).close()
    except OSError as error:
        return f"{nearest_folder} can't be written ({error.strerror})"
    return None


def sync_to_disk(path: Path) -> None:
    """Put a file's content, or a folder's list of names, on the disk."""
    file_failpoint("sync", path.name)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Put a folder and everything below it on the disk."""
    for path in folder.iterdir():
        if path.is_dir():
            sync_folder(path)
        else:
            sync_to_disk(path)
    sync_to_disk(folder)


def write_private(path: Path, content: str) -> None:
    """Write a file as ``write_atomically`` does, readable only by its owner."""
    write_atomically(path, content, 0o600)


class Closing(ABC):
    """A context manager that closes itself at the end of the block, also after an error."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def empty_folder(folder: Path) -> None:
    """Remove everything in ``folder``, but not the folder, which may be locked, a link or a mount. Raises OSError."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
