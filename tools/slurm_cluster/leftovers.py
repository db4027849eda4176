"""Find and end the processes and control groups that a cluster has left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_TREES = ("freezer", "devices", "memory", "cpuset", "cpuacct")
_END_S = 5.0


def is_running(pid: int) -> bool:
    """Whether a process runs. A zombie, which only waits for its parent, does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def end_process(pid_file: Path, number: int = signal.SIGTERM) -> None:
    """End the daemon whose process id is in ``pid_file``: by ``number``, and after five seconds by SIGKILL."""
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text())
    for sent in (number, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sent)
        deadline = time.monotonic() + _END_S
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
    pid_file.unlink(missing_ok=True)


def processes_of(configuration: Path) -> list[int]:
    """Processes of a cluster: all processes with its ``slurm.conf`` in their environment, except this
    process and its parents."""
    mark = f"SLURM_CONF={configuration}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # the process ended, or belongs to another user
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if is_running(pid)]


def cgroups_of(node: str) -> list[Path]:
    """Control groups that a node's daemon made."""
    paths = [_CGROUPS / tree / f"slurm_{node}" for tree in _TREES]
    return [path for path in paths if path.exists()]


def remove_cgroups(node: str) -> None:
    """Kill the processes in a node's control groups, and remove the control groups."""
    deadline = time.monotonic() + _END_S
    while (left := cgroups_of(node)) and time.monotonic() < deadline:
        for group in left:
            _remove_tree(group)
        time.sleep(0.01)


def _remove_tree(group: Path) -> None:
    folders = [group, *(path for path in group.rglob("*") if path.is_dir())]
    for folder in reversed(sorted(folders)):
        # An OSError means that a process is still ending, or that the kernel has removed the folder.
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                # 0 is a process of another pid namespace. kill(0) would kill this process's group.
                if int(pid):
                    os.kill(int(pid), signal.SIGKILL)
            folder.rmdir()
