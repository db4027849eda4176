"""A process's private place on its machine: temporary files, sockets, names in shared memory.

    <TMPDIR, or /tmp>/mdppo-<user>-<pid namespace>-<pid>-<start>-<random>/     mode 0700
    /dev/shm/mdppo-<the same>*, /dev/shm/sem.mdppo-<the same>*

The name says whose it is, so that whoever comes next can remove what a killed process left. Not under
XDG_RUNTIME_DIR, which the system removes when its user logs out, while the run may go on.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_dppo.system.lease_files import process_start

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"(?:sem\.)?mdppo-(\d+)-(\d+)-(\d+)-(\d+)-.*")
_LONGEST = 73
"""Bytes of the folder's path: sockets in it have up to 34 more, and may have 107 in all."""
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
    """Remove tensors that processes, all ended, shared through torch's files in shared memory."""
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
    """The namespace of process ids that this process is in: an id of it means nothing elsewhere."""
    return os.stat("/proc/self/ns/pid").st_ino
