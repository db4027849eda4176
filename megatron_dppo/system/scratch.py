"""Temporary resources of a process on its machine: files, sockets, shared memory.

    <TMPDIR, or /tmp>/NAME<random>/                    a folder of mode 0700
    /dev/shm/NAME*, /dev/shm/sem.NAME*                 shared memory and semaphores

NAME is mdppo-<user>-<pid namespace>-<pid>-<start time>-. It identifies the process, so that a later process can remove
the resources of a killed process. XDG_RUNTIME_DIR is unsuitable: the system removes it when its user logs out, although
the run may continue.
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
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.system.processes import process_start

if TYPE_CHECKING:
    import numpy as np

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64
"""Alignment in bytes: a cache line, and a multiple of the size of every element type and vector load."""
_NAME = re.compile(r"(?:sem\.)?mdppo-(\d+)-(\d+)-(\d+)-(\d+)-.*")
# Linux allows 107 bytes for the path of a socket, and names of sockets in the folder have up to 34.
_MAX_FOLDER_BYTES = 107 - 34
# Characters that mkdtemp appends.
_RANDOM_CHARACTERS = 8


def private_name() -> str:
    """Return the prefix of the names of this process's resources; it ends in a hyphen."""
    start = process_start(os.getpid())
    return f"mdppo-{os.getuid()}-{_namespace()}-{os.getpid()}-{start}-"


def make_runtime_directory() -> Path:
    """Create a new folder that only its user can enter. Raises OSError."""
    name = private_name()
    parent = tempfile.gettempdir()
    if len(os.path.join(parent, name)) + _RANDOM_CHARACTERS > _MAX_FOLDER_BYTES:
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix=name, dir=parent))


def use_as_temporary(directory: Path) -> None:
    """Make this process, and its children, put temporary files into ``directory``."""
    # Keep the cache of compiled kernels in its usual folder: later runs use it too.
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.environ.get('USER') or os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    os.environ["TMPDIR"] = str(directory)
    tempfile.tempdir = str(directory)


def remove_left_behind() -> None:
    """Remove the temporary resources of this user's ended processes from this machine."""
    for folder in {Path(tempfile.gettempdir()), Path("/tmp"), SHARED_MEMORY}:
        for path in _left_behind(folder):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def remove_shared_tensors(pids: Iterable[int]) -> None:
    """Remove the shared memory of torch's tensors that the ended processes ``pids`` have left."""
    for pid in pids:
        for path in SHARED_MEMORY.glob(f"torch_{pid}_*"):
            with contextlib.suppress(OSError):
                path.unlink()


def _left_behind(folder: Path) -> Iterator[Path]:
    """Yield the resources in ``folder`` of this user's ended processes."""
    if not folder.is_dir():
        return
    for entry in os.scandir(folder):
        match = _NAME.fullmatch(entry.name)
        if match is None:
            continue
        user, namespace, pid, start = map(int, match.groups())
        if user != os.getuid() or namespace != _namespace():
            continue
        is_running = process_start(pid) == start
        if is_running:
            continue
        try:
            owner = entry.stat(follow_symlinks=False).st_uid
        except FileNotFoundError:
            # Another process has removed it.
            continue
        # Another user may have made an entry with this user's number in its name.
        if owner == user:
            yield Path(entry.path)


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


_BOOT = Path("/proc/sys/kernel/random/boot_id")


def memory_name() -> str:
    """Return a name of this machine's shared memory. Two processes get equal names if and only if they share memory."""
    try:
        return f"{_BOOT.read_text().strip()}-{os.stat(SHARED_MEMORY).st_dev}"
    except OSError:
        return f"none-{os.uname().nodename}-{os.getpid()}"


def free_bytes(folder: Path = SHARED_MEMORY) -> int:
    """Return the bytes that this run may use in ``folder``, a file system in memory; 0 if the folder is missing.

    Half of the file system is left to other programs, for example NCCL.
    """
    try:
        space = os.statvfs(folder)
    except OSError:
        return 0
    reserved_blocks = space.f_blocks // 2
    return max(0, space.f_bavail - reserved_blocks) * space.f_frsize


class SharedBuffer:
    """A uint8 array of ``size`` bytes in shared memory. Other processes of this user map it by ``path``.

    Call ``hide`` when they have mapped it. The memory is freed when the last process that has mapped it ends.
    """

    def __init__(self, size: int) -> None:
        """Create the buffer. Raises OSError if ``free_bytes`` returns fewer than ``size`` bytes."""
        if size > free_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(SHARED_MEMORY))
        descriptor, name = tempfile.mkstemp(prefix=f"{private_name()}buffer-", dir=SHARED_MEMORY)
        self.path = Path(name)
        try:
            if size:
                # Allocate now: otherwise a write into full memory would end the process by SIGBUS later.
                os.posix_fallocate(descriptor, 0, size)
            self.array = _map_file(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            self.hide()
            raise
        finally:
            os.close(descriptor)

    def hide(self) -> None:
        """Remove the name of the memory; processes that have mapped it keep it. A second call has no effect."""
        self.path.unlink(missing_ok=True)


class FileBuffer:
    """A uint8 array of ``size`` bytes in a file without a name in the temporary folder.

    Written data is in the system's file cache. The system writes it to the disk and frees the memory when other
    programs need memory. After ``release_memory`` the data does not count as memory of the process.
    """

    def __init__(self, size: int) -> None:
        """Create the buffer. Raises OSError if the disk is full."""
        import numpy as np

        self._map: mmap.mmap | None = None
        self.array = np.empty(0, np.uint8)
        if size:
            with tempfile.TemporaryFile() as file:
                # Allocate now: otherwise a write to a full disk would end the process by SIGBUS later.
                os.posix_fallocate(file.fileno(), 0, size)
                self._map = mmap.mmap(file.fileno(), size)
            self.array = np.frombuffer(self._map, np.uint8)

    def release_memory(self) -> None:
        """Release the memory; a later access reads the file."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


def aligned_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of arrays with these ``sizes`` (bytes) in one buffer, and the buffer's size.

    Each offset is a multiple of ``ALIGNMENT``. Every buffer that holds several arrays has this layout: a parser's
    reply, a rank's share of a batch, the copy of a checkpoint.
    """
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += ceil(size / ALIGNMENT) * ALIGNMENT
    return offsets, end


def map_buffer(path: str, size: int) -> np.ndarray:
    """Map the ``SharedBuffer`` of another process for reading. Raises OSError, and ValueError for another size."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        file_size = os.fstat(descriptor).st_size
        if file_size != size:
            raise ValueError(f"{path}: {file_size} bytes, expected {size}")
        return _map_file(descriptor, size, mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _map_file(descriptor: int, size: int, protection: int) -> np.ndarray:
    """Return the memory of an open file as a uint8 array."""
    # Import lazily: a rank imports this module before it sets OMP_NUM_THREADS, and numpy reads the variable when it is
    # imported.
    import numpy as np

    if not size:
        return np.empty(0, np.uint8)
    # MAP_POPULATE maps all pages at once: page faults one by one would take longer than the copy of the data.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return np.frombuffer(mmap.mmap(descriptor, size, flags, protection), np.uint8)
