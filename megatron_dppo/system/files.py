"""Files that appear whole or not at all, also when the process or the machine dies meanwhile."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` when the block ends without an error.

    Its bytes are on the disk before it gets its name. After an error, or a crash, ``path`` is as it
    was before. Several processes and threads may replace one path: the last one stays.

    Args:
        path: where the file will be; its folder must exist.
        mode: permissions, less the umask. The file never had wider ones.
    """
    owner = f"{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f".{path.name}.{owner}")
    temporary.unlink(missing_ok=True)
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_to_disk(path.parent)


def write_atomically(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Replace ``path`` by ``content`` (text as UTF-8); see ``atomic_file``."""
    with atomic_file(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_synced(path: Path, content: str) -> None:
    """Write a text file in place and put it on the disk, for a folder that has no name yet."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def unwritable(folder: Path) -> str | None:
    """Why ``folder`` can't be made, or written in: in words that begin with the folder at fault; else None."""
    try:
        existing = next(
            path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
        )
    except OSError as error:
        return f"{folder} can't be looked at ({error.strerror})"
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return f"{existing} can't be written ({error.strerror})"
    return None


def sync_to_disk(path: Path) -> None:
    """Put a file's content, or a folder's list of names, on the disk."""
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
