"""What a process has on its machine while it runs: temporary files, sockets, shared memory.

    <TMPDIR, or /tmp>/mdppo-<user>-<pid namespace>-<pid>-<start>-<random>/     mode 0700
    /dev/shm/mdppo-<the same>*, /dev/shm/sem.mdppo-<the same>*

The name says whose it is, so that whoever comes next can remove what a killed process left. Not under
XDG_RUNTIME_DIR, which the system removes when its user logs out, while the run may go on.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.system.processes import process_start

if TYPE_CHECKING:
    import numpy as np

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64
"""Bytes: a cache line, and what every element type and vector load divides."""
_NAME = re.compile(r"(?:sem\.)?mdppo-(\d+)-(\d+)-(\d+)-(\d+)-.*")
# Bytes of the folder's path: sockets in it have up to 34 more, and may have 107 in all.
_LONGEST = 73
_RANDOM = 8


def private_name() -> str:
    """The beginning of names that belong to this process; ends in a hyphen."""
    start = process_start(os.getpid())
    return f"mdppo-{os.getuid()}-{_namespace()}-{os.getpid()}-{start}-"


def make_runtime_directory() -> Path:
    """A new folder that its user alone can enter. Raises OSError."""
    name = private_name()
    given = tempfile.gettempdir()
    fits = len(os.path.join(given, name)) + _RANDOM <= _LONGEST
    return Path(tempfile.mkdtemp(prefix=name, dir=given if fits else "/tmp"))


def use_as_temporary(directory: Path) -> None:
    """Have this process, and those that it starts, put temporary files into ``directory``."""
    # Compiled kernels are worth keeping: they stay where they would be without this.
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.environ.get('USER') or os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    os.environ["TMPDIR"] = str(directory)
    tempfile.tempdir = str(directory)


def remove_left_behind() -> None:
    """Remove what processes of this user have left on this machine that are gone."""
    for base in {Path(tempfile.gettempdir()), Path("/tmp"), SHARED_MEMORY}:
        for path in _left_behind(base):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def remove_shared_tensors(pids: Iterable[int]) -> None:
    for pid in pids:
        for path in SHARED_MEMORY.glob(f"torch_{pid}_*"):
            with contextlib.suppress(OSError):
                path.unlink()


def _left_behind(base: Path) -> Iterator[Path]:
    for entry in os.scandir(base) if base.is_dir() else ():
        match = _NAME.fullmatch(entry.name)
        if match is None:
            continue
        user, namespace, pid, start = map(int, match.groups())
        if user != os.getuid() or namespace != _namespace() or process_start(pid) == start:
            continue
        try:
            owner = entry.stat(follow_symlinks=False).st_uid
        except FileNotFoundError:
            continue
        if owner == user:
            yield Path(entry.path)


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


# --- buffers that processes of one host have in common

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
                # Else a full memory is a SIGBUS later.
                os.posix_fallocate(descriptor, 0, size)
            self.array = _mapped(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            self.hide()
            raise
        finally:
            os.close(descriptor)

    def hide(self) -> None:
        """Take away the name; those that have it mapped keep it. Harmless twice."""
        self.path.unlink(missing_ok=True)


class FileBuffer:
    """``size`` bytes, uint8, of a file without a name in the temporary folder.

    What was written lies in the system's cache of files, which writes it to the disk and takes the memory back where
    it is needed; of the process it is no memory once it has been let go of.
    """

    def __init__(self, size: int) -> None:
        """Raises OSError where there is no room."""
        import numpy as np

        self._map: mmap.mmap | None = None
        self.array = np.empty(0, np.uint8)
        if size:
            with tempfile.TemporaryFile() as file:
                # Else a full disk is a SIGBUS later.
                os.posix_fallocate(file.fileno(), 0, size)
                self._map = mmap.mmap(file.fileno(), size)
            self.array = np.frombuffer(self._map, np.uint8)

    def let_go(self) -> None:
        """Hold none of it in memory; it is read from the file when it is used again."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


def aligned(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where arrays of these many bytes begin in one buffer, each at a multiple of 64, and the buffer's size.

    The one way in which arrays lie together: in a parser's reply, in a rank's share of a batch, in a save's copy.
    """
    starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    return starts[:-1], starts[-1]


def mapped(path: str, size: int) -> np.ndarray:
    """Another process's buffer, to read. Raises OSError, and ValueError for another size."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        file_size = os.fstat(descriptor).st_size
        if file_size != size:
            raise ValueError(f"{path}: {file_size} bytes, expected {size}")
        return _mapped(descriptor, size, mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size: int, protection: int) -> np.ndarray:
    """With all its pages at once: one by one they would take longer than the copies."""
    # The start of a rank passes here before it has set OMP_NUM_THREADS, which numpy reads when it is imported.
    import numpy as np

    if not size:
        return np.empty(0, np.uint8)
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return np.frombuffer(mmap.mmap(descriptor, size, flags, protection), np.uint8)
