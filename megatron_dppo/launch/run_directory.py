"""The files by which the supervisor and the trainer ranks know of each other.

    <run.directory>/
      config.yaml            the configuration as it was resolved; ranks read this one
      lock                   held (flock) by the supervisor; holds its process id
      engine/...             the servers; see megatron_dppo/fleet/folder.py
      starts                 how often the run was started, for the engine's seed
      logs/rank<N>.out       what rank N wrote to its standard output and error
      logs/<server>-<I>.log  a server's, or the router's, output in its I-th incarnation

Files appear by a rename, so that a reader sees the whole file or none.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from megatron_dppo.fleet.folder import FleetFolder
from megatron_dppo.launch.errors import LaunchError
from megatron_dppo.system.files import write_atomically


class RunDirectory:
    """Paths of one run, and the lock on them: a context manager that holds the lock.

    Entering makes the folders and removes what a killed supervisor left published.
    Raises LaunchError where another supervisor holds the lock.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self._lock = self.path / "lock"
        self._lock_descriptor: int | None = None

    def rank_output(self, rank: int) -> Path:
        """Standard output and error of a rank."""
        return self.path / "logs" / f"rank{rank}.out"

    def server_log(self, name: str, incarnation: int) -> Path:
        """Output of the ``incarnation``-th start of a server in this run, counted from 1."""
        return self.path / "logs" / f"{name}-{incarnation}.log"

    @property
    def fleet(self) -> FleetFolder:
        """Where servers are published."""
        return FleetFolder(self.path)

    def __enter__(self) -> RunDirectory:
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            fleet = self.fleet
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise LaunchError(f"run.directory: can't write in {self.path}: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 64).decode().strip() or "unknown"
            os.close(descriptor)
            raise LaunchError(
                f"run.directory: {self.path} is in use by the run of process {holder}; "
                "end that one, or give this one another run.directory"
            ) from error
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._lock_descriptor = descriptor
        fleet.withdraw_started()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.fleet.withdraw_started()
        assert self._lock_descriptor is not None
        os.close(self._lock_descriptor)
        self._lock_descriptor = None

    def count_start(self) -> int:
        """How many supervisors have started this run before; counts this one."""
        path = self.path / "starts"
        before = int(path.read_text()) if path.exists() else 0
        write_atomically(path, f"{before + 1}\n")
        return before

    def write_config(self, text: str) -> None:
        """Put ``config.yaml`` there."""
        write_atomically(self.config, text)
