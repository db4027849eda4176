"""The record of a run's servers: kept by one process, which offers it over HTTP to ranks and commands.

The supervisor keeps it; rank 0 where a launcher such as torchrun started the ranks. It is that process's memory. What
is on the disk is for those that come after it, and for those that only look:

    <run.directory>/engine/
      fleet.json      servers, router, weight version and states as they were written last; servers that were
                      attached by command are in the next start's record too
      endpoint.json   where the record is offered while the run runs

The folder is its owner's alone. A file appears by a rename, so that a reader sees a whole file or none. One that is
damaged all the same, or that another user owns or could write, is renamed to ``*.json.damaged``, with a warning, and
counts as none. No key is in any file: keys of servers started here reach the ranks through their environment. Loads no
torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter

from megatron_dppo.system import files
from megatron_dppo.system.lease import FencedError
from megatron_dppo.system.network import url_fault

log = logging.getLogger(__name__)

ROUTER = "router"
"""The router's name, where servers have theirs."""
NOT_EXAMINED = "not yet examined"
"""The state of an attached server of which the trainer has made nothing yet."""
API_KEY_VARIABLE = "MEGATRON_DPPO_API_KEY"
ADMIN_KEY_VARIABLE = "MEGATRON_DPPO_ADMIN_API_KEY"
STARTED_KEYS_VARIABLE = "MEGATRON_DPPO_STARTED_KEYS"
"""Holds the keys of servers started here, as JSON, in the environment of the trainer's ranks."""
Origin = Literal["started", "config", "command"]
Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Server:
    """Where a server is. ``origin``: started by this run's supervisor, named in ``engine.urls``, or attached by
    command.

    ``incarnation`` grows by one with each restart by the supervisor, and is another one for each attachment by command.
    """

    name: str
    url: str
    incarnation: int = 0
    pid: int | None = None
    origin: Origin = "started"
    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def replaceable(self) -> bool:
        """Whether the supervisor restarts it when it is reported lost."""
        return self.origin == "started"


@dataclass(frozen=True)
class Keys:
    """What a server asks of its clients: ``api`` to generate, ``admin`` to change its weights."""

    api: str | None = None
    admin: str | None = None

    @classmethod
    def of_environment(cls) -> Keys:
        """Those of attached servers: they come with the trainer's environment, in no file."""
        return cls(os.environ.get(API_KEY_VARIABLE), os.environ.get(ADMIN_KEY_VARIABLE))

    def to_variables(self) -> dict[str, str]:
        return {STARTED_KEYS_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def handed_down(cls) -> Keys:
        """Those that the supervisor gave this process; its own children don't inherit them."""
        text = os.environ.pop(STARTED_KEYS_VARIABLE, None)
        return cls() if text is None else cls(**json.loads(text))


# --- what is kept


@dataclass(frozen=True)
class _Content:
    """``fleet.json``: everything that is published by name, and the ranks' view of it."""

    servers: dict[str, Server] = field(default_factory=dict)
    status: Json = field(default_factory=dict)


class FleetRecord:
    """The servers of the run in ``run_directory``, from any thread; its folder is made where it is missing.

    ``fence``: raises FencedError once another start has taken over the run, whose file it is then. ``runs``: this
    process keeps the record and goes on where the file can't be written; else that is an OSError.

    Raises UnsafeFileError where the folder is another user's.
    """

    def __init__(
        self,
        run_directory: str | Path,
        fence: Callable[[], None] = lambda: None,
        *,
        runs: bool = True,
    ) -> None:
        self.path = Path(run_directory) / "engine"
        files.make_private_folder(self.path)
        self._file = self.path / "fleet.json"
        self._fence = fence
        self._runs = runs
        self._lock = threading.RLock()
        self._reports: dict[str, int] = {}
        self._starts_allowed = True
        self._starting: set[str] = set()
        self._servers, self._status = self._read()

    def servers(self) -> list[Server]:
        """Every published server, by name with numbers in order."""
        with self._lock:
            servers = [s for name, s in self._servers.items() if name != ROUTER]
        return sorted(servers, key=lambda server: _natural(server.name))

    def router(self) -> Server | None:
        return self._servers.get(ROUTER)

    def publish(self, server: Server) -> None:
        with self._lock:
            self._servers[server.name] = server
            self._write()

    def withdraw(self, server: Server) -> None:
        with self._lock:
            self._servers.pop(server.name, None)
            self._reports.pop(server.name, None)
            self._write()

    def withdraw_started(self) -> None:
        """Take out everything that a supervisor published; attached servers stay."""
        with self._lock:
            self._servers = {name: s for name, s in self._servers.items() if not s.replaceable}
            self._reports, self._status = {}, {}
            self._write()

    # --- servers that run elsewhere

    def attach(self, url: str, origin: Origin = "command") -> Server:
        """Add a server that runs elsewhere. Raises ValueError for what is no URL, or is a member already."""
        # Another attachment of one URL is another server: what was made of the first is forgotten.
        number = time.time_ns() // 1_000_000 if origin == "command" else 0
        server = Server(attached_name(url), url.rstrip("/"), number, origin=origin)
        with self._lock:
            if any(other.url == server.url for other in self.servers()):
                raise ValueError(f"{server.url} belongs to the fleet already")
            self.publish(server)
        return server

    def detach(self, url: str) -> Server:
        """Take out an attached server. Raises ValueError where there is none, or it was started here."""
        with self._lock:
            for server in self.servers():
                if server.url == url.rstrip("/") and not server.replaceable:
                    self.withdraw(server)
                    return server
        raise ValueError(f"{url} is no attached server of this run")

    def sync_configured(self, urls: list[str]) -> None:
        """Attach what ``engine.urls`` names now, and detach what it named in an earlier start."""
        wanted = {url.rstrip("/") for url in urls}
        with self._lock:
            for server in self.servers():
                if server.origin == "config" and server.url not in wanted:
                    self.withdraw(server)
            for url in sorted(wanted - {server.url for server in self.servers()}):
                self.attach(url, "config")

    # --- reports, and the ranks' view

    def report_lost(self, name: str, incarnation: int) -> None:
        """Ask the supervisor to replace this incarnation, which runs on but doesn't answer.

        It sees by itself when one has exited; a report on another incarnation is dropped.
        """
        with self._lock:
            server = self._servers.get(name)
            if server is not None and server.incarnation == incarnation:
                self._reports[name] = incarnation

    def take_report(self, name: str) -> int | None:
        """Remove the report on ``name``; the incarnation that it is about, None where there is none."""
        with self._lock:
            return self._reports.pop(name, None)

    def allow_starts(self, allowed: bool) -> None:
        """Whether the supervisor may start servers now: colocated ones need devices that the trainer is not on."""
        self._starts_allowed = allowed

    def begin_start(self, name: str) -> bool:
        """Whether ``name`` may start now, or go on with it; it then counts as starting up to ``end_start``."""
        with self._lock:
            if self._starts_allowed:
                self._starting.add(name)
            return self._starts_allowed

    def end_start(self, name: str) -> None:
        """It is published, or its process is gone."""
        with self._lock:
            self._starting.discard(name)

    def starting(self) -> list[str]:
        with self._lock:
            return sorted(self._starting)

    def publish_status(self, version: int | None, states: Mapping[str, str]) -> None:
        """``states``: a word or a sentence on every server, by name."""
        with self._lock:
            self._status = {"version": version, "servers": dict(states)}
            self._write()

    def status(self) -> Json:
        """What ``publish_status`` recorded last; empty before that."""
        return self._status

    def read_attached(self) -> None:
        """Take in what commands have attached in the file since it was read, while there was no endpoint."""
        with self._lock:
            for name, server in self._read()[0].items():
                if server.origin == "command":
                    self._servers.setdefault(name, server)

    def _read(self) -> tuple[dict[str, Server], Json]:
        content = read_own_json(self._file, _Content) or _Content()
        return content.servers, content.status

    def _write(self) -> None:
        # The file is the successor's; the memory serves this start's ranks until they end.
        try:
            self._fence()
        except FencedError:
            return
        content = _Content(self._servers, self._status)
        try:
            files.write_private(self._file, json.dumps(asdict(content), indent=1))
        except OSError as error:
            if not self._runs:
                raise
            log.warning("%s is not up to date: %s", self._file, error)


def attached_name(url: str) -> str:
    """The name of a server that runs elsewhere. Raises ValueError for what is no URL."""
    if fault := url_fault(url):
        raise ValueError(fault)
    return re.sub(r"[^\w.]+", "-", url.rstrip("/"))


def read_own_json(path: Path, kind: type[T]) -> T | None:
    """The file's JSON as a ``kind``; None where there is no file, a damaged one, or one that is refused."""
    try:
        return TypeAdapter(kind).validate_json(files.read_own(path), strict=True)
    except FileNotFoundError:
        return None
    except files.UnsafeFileError as error:
        _set_aside(path, f"is refused ({error})")
    except ValueError:
        _set_aside(path, "is damaged")
    return None


def _set_aside(path: Path, why: str) -> None:
    """Rename a file that must not be read, which another reader may have done already."""
    aside = path.with_name(f"{path.name}.damaged")
    try:
        path.replace(aside)
    except FileNotFoundError:
        return
    log.warning("%s %s; it is now %s, and counts as missing", path, why, aside.name)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts ``engine2`` before ``engine10``."""
    parts = re.findall(r"\d+|\D+", name)
    return [(True, int(p), "") if p.isdigit() else (False, 0, p) for p in parts]
