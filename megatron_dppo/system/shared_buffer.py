"""A buffer that processes of one host have in common: a file in shared memory that has no name for long."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np

from megatron_dppo.system.runtime_directory import SHARED_MEMORY, private_name

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def memory_name() -> str:
    """Equal for processes that see the same shared memory, and for no others."""
    try:
        return f"{_BOOT.read_text().strip()}-{os.stat(SHARED_MEMORY).st_dev}"
    except OSError:
        return f"none-{os.uname().nodename}-{os.getpid()}"


def free_bytes(folder: Path = SHARED_MEMORY) -> int:
    """Bytes that may be taken of the memory that ``folder`` is in: half of all is left to others, such
    as NCCL; 0 where there is none."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return 0
    return max(0, space.f_bavail - space.f_blocks // 2) * space.f_frsize


class SharedBuffer:
    """``size`` bytes, uint8, that others of this user on this host may map by ``path``; ``hide`` it then.

    The memory goes with the last process that has it mapped.
    """

    def __init__(self, size: int) -> None:
        """Raises OSError where there is no room (``free_bytes``)."""
        if size > free_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(SHARED_MEMORY))
        descriptor, name = tempfile.mkstemp(prefix=f"{private_name()}buffer-", dir=SHARED_MEMORY)
        self.path = Path(name)
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)  # else a full memory is a SIGBUS later
            self.array = _mapped(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            self.hide()
            raise
        finally:
            os.close(descriptor)

    def hide(self) -> None:
        """Take away the name; those that have it mapped keep it. Harmless twice."""
        self.path.unlink(missing_ok=True)


def mapped(path: str, size: int) -> np.ndarray:
    """Another process's buffer, to read. Raises OSError, and ValueError for another size."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        found = os.fstat(descriptor).st_size
        if found != size:
            raise ValueError(f"{path}: {found} bytes, expected {size}")
        return _mapped(descriptor, size, mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size: int, protection: int) -> np.ndarray:
    """With all its pages at once: one by one they would take longer than the copies."""
    if not size:
        return np.empty(0, np.uint8)
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return np.frombuffer(mmap.mmap(descriptor, size, flags, protection), np.uint8)
