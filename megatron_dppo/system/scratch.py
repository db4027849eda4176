"""Temporary resources of a process on its machine: files, sockets, shared memory.

    <TMPDIR, or /tmp>/mdppo-<user>-<pid namespace>-<pid>-<start>-<random>/     mode 0700
    /dev/shm/mdppo-<the same>*, /dev/shm/sem.mdppo-<the same>*

The name identifies the owner, so that a later process can remove what a killed process left. XDG_RUNTIME_DIR is
unsuitable: the system removes it when its user logs out, while the run may continue.
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
"""Alignment in bytes: a cache line, and a multiple of every element type and vector load."""
_NAME = re.compile(r"(?:sem\.)?mdppo-(\d+)-(\d+)-(\d+)-(\d+)-.*")
# Longest path of the folder in bytes: sockets in it have up to 34 more, and may have 107 in total.
_LONGEST = 73
_RANDOM = 8


def private_name() -> str:
    """Return the prefix of names that belong to this process; it ends in a hyphen."""
    start = process_start(os.getpid())
    return f"mdppo-{os.getuid()}-{_namespace()}-{os.getpid()}-{start}-"


def make_runtime_directory() -> Path:
    """Create a new folder that only its user can enter. Raises OSError."""
    name = private_name()
    temporary_folder = tempfile.gettempdir()
    fits = len(os.path.join(temporary_folder, name)) + _RANDOM <= _LONGEST
    return Path(tempfile.mkdtemp(prefix=name, dir=temporary_folder if fits else "/tmp"))


def use_as_temporary(directory: Path) -> None:
    """Make this process, and its children, put temporary files into ``directory``."""
    # Compiled kernels are worth keeping, so they stay in the usual folder.
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.environ.get('USER') or os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    os.environ["TMPDIR"] = str(directory)
    tempfile.tempdir = str(directory)


def remove_left_behind() -> None:
    """Remove what ended processes of this user have left on this machine."""
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


_BOOT = Path("/proc/sys/kernel/random/boot_id")


def memory_name() -> str:
    """Return a name that is equal for processes with the same shared memory, and only for these."""
    try:
        return f"{_BOOT.read_text().strip()}-{os.stat(SHARED_MEMORY).st_dev}"
    except OSError:
        return f"none-{os.uname().nodename}-{os.getpid()}"


def free_bytes(folder: Path = SHARED_MEMORY) -> int:
    """Return how many bytes of the memory of ``folder`` may be used; 0 without any.

    Half of all is left to other users of the memory, such as NCCL.
    """
    try:
        space = os.statvfs(folder)
    except OSError:
        return 0
    return max(0, space.f_bavail - space.f_blocks // 2) * space.f_frsize


class SharedBuffer:
    """``size`` bytes, uint8, that this user's processes on this host may map by ``path``; call ``hide`` after that.

    The memory is freed with the last process that has it mapped.
    """

    def __init__(self, size: int) -> None:
        """Create the buffer. Raises OSError where there is no room (``free_bytes``)."""
        if size > free_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(SHARED_MEMORY))
        descriptor, name = tempfile.mkstemp(prefix=f"{private_name()}buffer-", dir=SHARED_MEMORY)
        self.path = Path(name)
        try:
            if size:
                # Allocate now: otherwise a full memory would raise SIGBUS later.
                os.posix_fallocate(descriptor, 0, size)
            self.array = _mapped(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            self.hide()
            raise
        finally:
            os.close(descriptor)

    def hide(self) -> None:
        """Remove the name; processes that have the memory mapped keep it. A second call has no effect."""
        self.path.unlink(missing_ok=True)


class FileBuffer:
    """``size`` bytes, uint8, of a file without a name in the temporary folder.

    Written data is in the system's file cache, which writes it to the disk and frees the memory where it is needed.
    After ``let_go`` it does not count as memory of the process.
    """

    def __init__(self, size: int) -> None:
        """Create the buffer. Raises OSError where there is no room."""
        import numpy as np

        self._map: mmap.mmap | None = None
        self.array = np.empty(0, np.uint8)
        if size:
            with tempfile.TemporaryFile() as file:
                # Allocate now: otherwise a full disk would raise SIGBUS later.
                os.posix_fallocate(file.fileno(), 0, size)
                self._map = mmap.mmap(file.fileno(), size)
            self.array = np.frombuffer(self._map, np.uint8)

    def let_go(self) -> None:
        """Release the memory; a later access reads the file."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


def aligned(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of arrays with these sizes in one buffer, each a multiple of 64, and the buffer's size.

    All arrays in one buffer use this layout: in a parser's reply, in a rank's share of a batch, in a save's copy.
    """
    starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    return starts[:-1], starts[-1]


def mapped(path: str, size: int) -> np.ndarray:
    """Map another process's buffer for reading. Raises OSError, and ValueError for another size."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        file_size = os.fstat(descriptor).st_size
        if file_size != size:
            raise ValueError(f"{path}: {file_size} bytes, expected {size}")
        return _mapped(descriptor, size, mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size: int, protection: int) -> np.ndarray:
    """Map all pages at once: one by one they would take longer than the copies."""
    # Import lazily: a rank runs this before it sets OMP_NUM_THREADS, which numpy reads at its import.
    import numpy as np

    if not size:
        return np.empty(0, np.uint8)
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return np.frombuffer(mmap.mmap(descriptor, size, flags, protection), np.uint8)
