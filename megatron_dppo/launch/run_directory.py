"""The files by which the supervisor and the trainer ranks know of each other.

    <run.directory>/
      config.yaml            the configuration as it was resolved; ranks read this one
      lock                   held (flock) by the supervisor; holds its process id
      engine/keys.json       {api_key, admin_api_key}, readable by the owner alone
      engine/endpoint.json   {url, incarnation, pid}: there only while the engine is healthy
      engine/lost.json       {incarnation}: of the engine that rank 0 wants replaced, as it hangs
      starts                 how often the run was started, for the engine's seed
      logs/rank<N>.out       what rank N wrote to its standard output and error
      logs/engine<I>.log     the engine's output in its I-th incarnation

Files appear by a rename, so that a reader sees the whole file or none.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_dppo.launch.errors import LaunchError


class RunDirectory:
    """Paths of one run, and the lock on them: a context manager that holds the lock.

    Entering makes the folders and removes what a killed supervisor left published.
    Raises LaunchError where another supervisor holds the lock.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.keys = self.path / "engine" / "keys.json"
        self.endpoint = self.path / "engine" / "endpoint.json"
        self.lost = self.path / "engine" / "lost.json"
        self._lock = self.path / "lock"
        self._lock_descriptor: int | None = None

    def rank_output(self, rank: int) -> Path:
        """Standard output and error of a rank."""
        return self.path / "logs" / f"rank{rank}.out"

    def engine_log(self, incarnation: int) -> Path:
        """Output of the engine's ``incarnation``-th start in this run, counted from 1."""
        return self.path / "logs" / f"engine{incarnation}.log"

    def __enter__(self) -> RunDirectory:
        try:
            for folder in (self.path / "logs", self.path / "engine"):
                folder.mkdir(parents=True, exist_ok=True)
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
        self.withdraw_endpoint()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.withdraw_endpoint()
        self.keys.unlink(missing_ok=True)
        assert self._lock_descriptor is not None
        os.close(self._lock_descriptor)
        self._lock_descriptor = None

    def count_start(self) -> int:
        """How many supervisors have started this run before; counts this one."""
        path = self.path / "starts"
        before = int(path.read_text()) if path.exists() else 0
        _publish(path, f"{before + 1}\n", 0o644)
        return before

    def write_config(self, text: str) -> None:
        """Put ``config.yaml`` there."""
        _publish(self.config, text, 0o644)

    def publish_keys(self, keys: dict[str, str | None]) -> None:
        """Put ``keys.json`` there, for the owner's eyes only."""
        _publish(self.keys, json.dumps(keys), 0o600)

    def publish_endpoint(self, endpoint: dict[str, Any]) -> None:
        """Put ``endpoint.json`` there."""
        _publish(self.endpoint, json.dumps(endpoint), 0o644)

    def withdraw_endpoint(self) -> None:
        """Remove ``endpoint.json``, no engine is healthy, and what was reported of that one."""
        self.endpoint.unlink(missing_ok=True)
        self.lost.unlink(missing_ok=True)

    def take_lost_report(self) -> int | None:
        """Remove ``lost.json``; the incarnation that it named, None where there was none."""
        try:
            report = json.loads(self.lost.read_text())
        except FileNotFoundError:
            return None
        self.lost.unlink()
        return int(report["incarnation"])


def _publish(path: Path, text: str, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)
