"""Folders that only this user can enter, and files that only this user can write."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from megatron_dppo.system.errors import RunError

_ACCESS_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_WRITING_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class UnsafeFileError(RunError, PermissionError):
    """A path is no private file or folder: another user owns it or may write it, or it is of another kind."""


def make_private_folder(path: Path) -> None:
    """Create the folder ``path`` and its parents. Only this user can enter the folder ``path``.

    If the folder exists, its mode is changed. Raises UnsafeFileError if ``path`` belongs to another user or is not a
    folder, and OSError if it cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        # Use lstat to check the path itself: stat would follow a link.
        status = path.lstat()
        _require_own(path, status)
        if not stat.S_ISDIR(status.st_mode):
            raise UnsafeFileError(f"{path}: expected a folder") from None
        if status.st_mode & _ACCESS_OF_OTHERS:
            path.chmod(0o700)


def read_own(path: Path) -> str:
    """Return the text of a file that no other user can write.

    Raises UnsafeFileError if the file belongs to another user, if its group or everybody may write it, or if it is a
    symbolic link. Raises OSError or UnicodeDecodeError if it cannot be read.
    """
    # O_NOFOLLOW: do not open a symbolic link, which may lead to any file. O_NONBLOCK: do not wait for the writer of a
    # FIFO.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UnsafeFileError(f"{path}: expected a file, not a symbolic link") from None
    with open(descriptor, encoding="utf-8") as file:
        # Check the file that is open, because the path may lead to another file by now.
        status = os.fstat(descriptor)
        _require_own(path, status)
        if status.st_mode & _WRITING_BY_OTHERS:
            mode = stat.filemode(status.st_mode)
            raise UnsafeFileError(f"{path}: others may write it ({mode}), expected only the owner")
        return file.read()


def _require_own(path: Path, status: os.stat_result) -> None:
    """Raise UnsafeFileError if another user owns the file or folder ``path``, which has ``status``."""
    if status.st_uid != os.geteuid():
        raise UnsafeFileError(
            f"{path}: belongs to user {status.st_uid}, expected the user of this run, {os.geteuid()}"
        )
