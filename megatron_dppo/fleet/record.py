"""The registry of a run's servers (FleetRecord). One process keeps it, and offers it over HTTP to ranks and commands.

The supervisor keeps the registry in its memory. If a launcher like torchrun started the ranks, rank 0 keeps it instead.
The files are for later starts and for readers:

    <run.directory>/engine/
      fleet.json      servers, router, weight version and states as of the last write; the next start keeps only the
                      attached servers
      endpoint.json   address of the registry while the run runs

Only the owner of the folder can read the folder. A file appears by a rename, so a reader sees a whole file or no file.
If a file is damaged in spite of this, or if another user owns or could write the file, it is renamed to
``*.json.damaged`` with a warning, and counts as missing. Neither file has API keys. For servers that the supervisor
started, the ranks receive the keys in environment variables. The module loads no torch.

The run sends its keys to attached servers. So a command that attaches one proves that it has the admin key: by the seal
of the server's URL (``attachment_seal``). A server in ``fleet.json`` without its seal is dropped.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter

from megatron_dppo.system import files, private_files
from megatron_dppo.system.lease import FencedError
from megatron_dppo.system.network import url_fault

log = logging.getLogger(__name__)

ENGINE_FOLDER = "engine"
"""Folder of the registry in the folder of a run."""
ROUTER = "router"
"""Name of the router in the registry."""
NOT_EXAMINED = "not yet examined"
"""State of an attached server that the trainer has not examined yet."""
API_KEY_VARIABLE = "MEGATRON_DPPO_API_KEY"
ADMIN_KEY_VARIABLE = "MEGATRON_DPPO_ADMIN_API_KEY"
STARTED_KEYS_VARIABLE = "MEGATRON_DPPO_STARTED_KEYS"
"""Variable with the keys of servers started here, as JSON, in the environment of the trainer's ranks."""
Origin = Literal["started", "config", "command"]
Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Server:
    """The address of a server and its origin: this run's supervisor, ``engine.urls``, or a command.

    ``incarnation`` grows by one with each restart by the supervisor. Each attachment by command has a new incarnation,
    and its ``seal``. ``teacher`` is the name of the teacher that the server serves; empty: it serves the policy.
    """

    name: str
    url: str
    incarnation: int = 0
    pid: int | None = None
    origin: Origin = "started"
    seal: str = ""
    teacher: str = ""
    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def replaceable(self) -> bool:
        """Whether the supervisor restarts the server when it is reported lost."""
        return self.origin == "started"


@dataclass(frozen=True)
class Keys:
    """Keys of a server: ``api`` to generate, ``admin`` to change its weights."""

    api: str | None = None
    admin: str | None = None

    @classmethod
    def of_environment(cls) -> Keys:
        """Return the keys of attached servers, from the trainer's environment; no file has them."""
        return cls(os.environ.get(API_KEY_VARIABLE), os.environ.get(ADMIN_KEY_VARIABLE))

    def to_variables(self) -> dict[str, str]:
        return {STARTED_KEYS_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def handed_down(cls) -> Keys:
        """Return the keys that the supervisor passed to this process, and hide them from this process's children."""
        text = os.environ.pop(STARTED_KEYS_VARIABLE, None)
        if text is None:
            return cls()
        return cls(**json.loads(text))


@dataclass(frozen=True)
class _Content:
    """Content of ``fleet.json``: the published servers by name, the ranks' view of the servers, and the number of the
    ranks' newest start."""

    servers: dict[str, Server] = field(default_factory=dict)
    status: Json = field(default_factory=dict)
    ranks_start: int | None = None


class FleetRecord:
    """The servers of the run in ``run_directory``, usable from any thread. A missing folder is created.

    Raises UnsafeFileError if the folder belongs to another user.

    Args:
        run_directory: the run's folder.
        fence: raises FencedError once another start has taken over the run. Then the file belongs to that start, and
            this process does not write it.
        runs: true in the run's process, false in a command. If a file can't be written, the run's process logs the
            failure and goes on, and a command raises OSError.
    """

    def __init__(
        self,
        run_directory: str | Path,
        fence: Callable[[], None] | None = None,
        *,
        runs: bool = True,
    ) -> None:
        self.path = Path(run_directory) / ENGINE_FOLDER
        private_files.make_private_folder(self.path)
        self._file = self.path / "fleet.json"
        self._fence = fence or _no_fence
        self._runs = runs
        self._lock = threading.RLock()
        self._reports: dict[str, int] = {}
        self._starts_allowed = True
        self._starting: set[str] = set()
        content = self._read()
        self._servers = content.servers
        self._status = content.status
        self.ranks_start = content.ranks_start
        """The number of the ranks' newest start; None if no supervisor starts them."""

    def servers(self) -> list[Server]:
        """Return every published server of the policy, sorted by name: engine2 before engine10."""
        return [server for server in self._sorted_servers() if not server.teacher]

    def teachers(self) -> list[Server]:
        """Return every published server of a teacher, sorted by name."""
        return [server for server in self._sorted_servers() if server.teacher]

    def _sorted_servers(self) -> list[Server]:
        with self._lock:
            servers = [s for name, s in self._servers.items() if name != ROUTER]
        return sorted(servers, key=_natural_order)

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
        """Remove all servers that a supervisor published; attached servers stay."""
        with self._lock:
            self._servers = {name: s for name, s in self._servers.items() if not s.replaceable}
            self._reports = {}
            self._status = {}
            self.ranks_start = None
            self._write()

    def attach(self, url: str, seal: str) -> Server:
        """Add a server that runs elsewhere, for a command.

        Raises ValueError for a bad URL, for a URL already in the registry, and for another ``seal`` than
        ``attachment_seal``'s in the run's own environment.
        """
        name = attached_name(url)
        if not _is_sealed(url, seal):
            raise ValueError(
                f"{url}: attaching a server needs the run's admin key, because the run sends its keys to the server: "
                f"expected the {ADMIN_KEY_VARIABLE} with which the run was started. A run that was started without one "
                "uses the servers of engine.urls only"
            )
        # A second attachment of a URL has a new incarnation, so it counts as another server: states of the first
        # attachment do not apply to it.
        incarnation = time.time_ns() // 1_000_000
        return self._add(Server(name, url.rstrip("/"), incarnation, origin="command", seal=seal))

    def _add(self, server: Server) -> Server:
        with self._lock:
            if any(other.url == server.url for other in self.servers()):
                raise ValueError(f"{server.url} belongs to the fleet already")
            self.publish(server)
        return server

    def detach(self, url: str) -> Server:
        """Remove an attached server. Raises ValueError if no server is at ``url``, or if the run started the server."""
        with self._lock:
            for server in self.servers():
                if server.url == url.rstrip("/") and not server.replaceable:
                    self.withdraw(server)
                    return server
        raise ValueError(f"{url} is no attached server of this run")

    def sync_configured(self, urls: list[str]) -> None:
        """Attach the servers of ``engine.urls``. Detach servers that were in ``engine.urls`` only at earlier starts."""
        configured_urls = {url.rstrip("/") for url in urls}
        with self._lock:
            for server in self.servers():
                if server.origin == "config" and server.url not in configured_urls:
                    self.withdraw(server)
            for url in sorted(configured_urls - {server.url for server in self.servers()}):
                self._add(Server(attached_name(url), url, origin="config"))

    def report_lost(self, name: str, incarnation: int) -> None:
        """Ask the supervisor to replace this incarnation of a server, which runs but doesn't answer.

        A server that has exited needs no report: the supervisor watches the process. A report on another incarnation is
        dropped.
        """
        with self._lock:
            server = self._servers.get(name)
            if server is not None and server.incarnation == incarnation:
                self._reports[name] = incarnation

    def take_report(self, name: str) -> int | None:
        """Remove the report on ``name`` and return the reported incarnation; None if there is no report."""
        with self._lock:
            return self._reports.pop(name, None)

    def allow_starts(self, allowed: bool) -> None:
        """Allow or forbid the supervisor's starts. A colocated server may start only while the trainer is off the
        devices."""
        self._starts_allowed = allowed

    def begin_ranks(self, number: int) -> None:
        """From now on answer only ranks of start ``number``."""
        with self._lock:
            self.ranks_start = number
            self._write()

    def begin_start(self, name: str) -> bool:
        """Return whether the server ``name`` may start now, or continue its start. If it may, the server counts as
        starting until ``end_start``."""
        with self._lock:
            if self._starts_allowed:
                self._starting.add(name)
            return self._starts_allowed

    def end_start(self, name: str) -> None:
        """End the start of a server that is published, or whose process is gone."""
        with self._lock:
            self._starting.discard(name)

    def starting(self) -> list[str]:
        with self._lock:
            return sorted(self._starting)

    def publish_status(self, version: int | None, states: Mapping[str, str]) -> None:
        """Store the weight version, and a text about the state of every server, by the server's name."""
        with self._lock:
            self._status = {"version": version, "servers": dict(states)}
            self._write()

    def status(self) -> Json:
        """Return the arguments of the last ``publish_status``; empty before the first call."""
        return self._status

    def read_attached(self) -> None:
        """Add the servers that commands wrote into the file while there was no endpoint. Drop servers without a seal of
        this run's admin key: their addresses must not receive keys."""
        with self._lock:
            for name, server in self._read().servers.items():
                if server.origin == "command":
                    self._servers.setdefault(name, server)
            for server in self.servers():
                if server.origin == "command" and not _is_sealed(server.url, server.seal):
                    log.warning(
                        "%s: detached: %s does not show that it was attached with this start's %s; attach it again",
                        server.url,
                        self._file,
                        ADMIN_KEY_VARIABLE,
                    )
                    self.withdraw(server)

    def _read(self) -> _Content:
        return read_own_json(self._file, _Content) or _Content()

    def _write(self) -> None:
        # After a takeover the file belongs to the new start. This start's ranks use the registry in this process's
        # memory until they end.
        try:
            self._fence()
        except FencedError:
            return
        content = _Content(self._servers, self._status, self.ranks_start)
        try:
            files.write_private(self._file, json.dumps(asdict(content), indent=1))
        except OSError as error:
            if not self._runs:
                raise
            log.warning("%s is not up to date: %s", self._file, error)


def states_of(servers: Iterable[Server], status: Json) -> Iterator[tuple[Server, str]]:
    """Yield each server with its state in words: ``status`` is the registry's."""
    states = status.get("servers", {})
    for server in servers:
        state = f"serves the teacher {server.teacher}"
        if not server.teacher:
            state = states.get(server.name, "not yet seen")
        yield server, state


def attachment_seal(url: str) -> str:
    """Return the seal of a server's URL: its HMAC-SHA256 under the admin key in this process's environment.

    Unlike the key, the seal may be sent and stored: it attaches this URL only. Raises ValueError for a bad URL, and
    without the key.
    """
    attached_name(url)
    key = os.environ.get(ADMIN_KEY_VARIABLE)
    if not key:
        raise ValueError(
            f"{url}: attaching a server needs {ADMIN_KEY_VARIABLE}, as the run is started with it: the run sends its "
            "keys to the server. Set it here too, or name the server in engine.urls"
        )
    return hmac.new(key.encode(), f"attach {url.rstrip('/')}".encode(), "sha256").hexdigest()


def _is_sealed(url: str, seal: str) -> bool:
    """Whether ``seal`` was made with the admin key of this process's environment."""
    has_key = bool(os.environ.get(ADMIN_KEY_VARIABLE))
    return has_key and hmac.compare_digest(seal.encode(), attachment_seal(url).encode())


def attached_name(url: str) -> str:
    """Return the name of a server that runs elsewhere. Raises ValueError for a bad URL."""
    if fault := url_fault(url):
        raise ValueError(fault)
    return re.sub(r"[^\w.]+", "-", url.rstrip("/"))


def read_own_json(path: Path, kind: type[T]) -> T | None:
    """Return the file's JSON as a ``kind``; None if the file is missing or damaged, or another user may have written
    it."""
    try:
        return TypeAdapter(kind).validate_json(private_files.read_own(path), strict=True)
    except FileNotFoundError:
        return None
    except private_files.UnsafeFileError as error:
        _set_aside(path, f"is refused ({error})")
    except ValueError:
        _set_aside(path, "is damaged")
    return None


def _set_aside(path: Path, reason: str) -> None:
    """Rename a file that must not be read. Another reader may have renamed it already."""
    aside = path.with_name(f"{path.name}.damaged")
    try:
        path.replace(aside)
    except FileNotFoundError:
        return
    log.warning("%s %s; it is now %s, and counts as missing", path, reason, aside.name)


def _no_fence() -> None:
    """Accept this start as the newest of its run."""


def _natural_order(server: Server) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts ``engine2`` before ``engine10``: (is a number, number, text) of each part."""
    key: list[tuple[bool, int, str]] = []
    for part in re.findall(r"\d+|\D+", server.name):
        if part.isdigit():
            key.append((True, int(part), ""))
        else:
            key.append((False, 0, part))
    return key
