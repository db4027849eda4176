"""Files that another user of the machine could have written, or could read, and ours that none can."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from megatron_dppo.system.files import write_atomically

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnsafeFileError(PermissionError):
    """A file or folder that somebody else owns, or may write; the message names it."""


def make_private_folder(path: Path) -> None:
    """Make ``path`` with its parents, or take it back from others: its user alone may enter it.

    Raises UnsafeFileError where it is another user's, or no folder; OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        _require_own(path, found)
        if not stat.S_ISDIR(found.st_mode):
            raise UnsafeFileError(f"{path}: expected a folder") from None
        if found.st_mode & _OTHERS:
            path.chmod(0o700)


def write_private(path: Path, content: str) -> None:
    """As ``write_atomically``, for the owner's eyes only."""
    write_atomically(path, content, 0o600)


def read_own(path: Path) -> str:
    """The text of a file that nobody else could have written.

    Raises UnsafeFileError for a file of another user, or one that a group or everybody may write;
    OSError, UnicodeDecodeError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UnsafeFileError(f"{path}: expected a file, not a symbolic link") from None
    with open(descriptor, encoding="utf-8") as file:
        found = os.fstat(descriptor)
        _require_own(path, found)
        if found.st_mode & _OTHERS_WRITE:
            mode = stat.filemode(found.st_mode)
            raise UnsafeFileError(f"{path}: others may write it ({mode}), expected the owner alone")
        return file.read()


def _require_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise UnsafeFileError(
            f"{path}: belongs to user {found.st_uid}, expected this run's, {os.geteuid()}"
        )
