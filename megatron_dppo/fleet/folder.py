"""The files that name a run's servers: written and read by the supervisor, the ranks and the user's
command.

    <run.directory>/engine/
      servers/<name>.json   one healthy server; attached ones are there whatever their health
      router.json           the router, while it is healthy
      lost/<name>.json      {incarnation}: a rank wants that one replaced, for it no longer answers
      endpoint.json         {url, host, key_file}: where the run's own process answers; fleet/endpoint.py
      status.json           what the ranks make of it: weight version, servers that serve or not

The folder is its owner's alone. Files appear by a rename, so that a reader sees a whole file or none. One
that is damaged all the same is renamed to ``*.json.damaged``, with a warning, and counts as none; so does
one that another user owns, or could write, which stays where it is. No key is in any file: keys of servers
started here reach the ranks through their environment. Loads no torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from megatron_dppo.system.files import UnsafeFileError, make_private_folder, read_own, write_private
from megatron_dppo.system.network import url_problem

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


@dataclass(frozen=True)
class Server:
    """Where a server is. ``origin``: started by this run's supervisor, named in ``engine.urls``, or
    attached by command.

    ``incarnation`` grows by one with each restart by the supervisor, and is another one for each
    attachment by command.
    """

    name: str
    url: str
    incarnation: int = 0
    pid: int | None = None
    origin: Origin = "started"

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
        """The environment in which ``handed_down`` finds these keys."""
        return {STARTED_KEYS_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def handed_down(cls) -> Keys:
        """Those that the supervisor gave this process; its own children don't inherit them."""
        told = os.environ.pop(STARTED_KEYS_VARIABLE, None)
        return cls() if told is None else cls(**json.loads(told))


@dataclass(frozen=True)
class EndpointPlace:
    """Where the record is offered while the run runs. ``key_file``: on ``host``, holds the admin key."""

    url: str
    host: str
    key_file: str


class FleetFolder:
    """``<run.directory>/engine``; made where it is missing. ``keys``: of the servers started here.

    Raises UnsafeFileError where the folder is another user's.
    """

    def __init__(self, run_directory: str | Path, keys: Keys | None = None) -> None:
        self.path = Path(run_directory) / "engine"
        self._started_keys = Keys() if keys is None else keys
        self._refused: set[Path] = set()
        self._servers = self.path / "servers"
        self._lost = self.path / "lost"
        self._endpoint = self.path / "endpoint.json"
        self._status = self.path / "status.json"
        for folder in (self.path, self._servers, self._lost):
            make_private_folder(folder)

    # --- servers and the router

    def servers(self) -> list[Server]:
        """Every published server, by name with numbers in order."""
        found = [s for path in self._servers.glob("*.json") if (s := self._read_server(path))]
        return sorted(found, key=lambda server: _natural(server.name))

    def router(self) -> Server | None:
        """The router, while it is healthy."""
        return self._read_server(self._place(ROUTER))

    def publish(self, server: Server) -> None:
        """Write the file of a server, or of the HTTP router."""
        write_private(self._place(server.name), json.dumps(asdict(server)))

    def withdraw(self, name: str) -> None:
        """Remove the file of a server, or of the HTTP router, and the report on it."""
        self._place(name).unlink(missing_ok=True)
        (self._lost / f"{name}.json").unlink(missing_ok=True)

    def withdraw_own(self, server: Server) -> None:
        """``withdraw`` it unless something else was published under its name meanwhile."""
        if self._read_server(self._place(server.name)) == server:
            self.withdraw(server.name)

    def withdraw_started(self) -> None:
        """Remove everything that a supervisor published; attached servers stay."""
        for server in self.servers():
            if server.replaceable:
                self.withdraw(server.name)
        self.withdraw(ROUTER)
        for path in self._lost.glob("*.json"):
            path.unlink(missing_ok=True)
        self._status.unlink(missing_ok=True)
        self.withdraw_endpoint()

    def _place(self, name: str) -> Path:
        return (self.path if name == ROUTER else self._servers) / f"{name}.json"

    # --- servers that run elsewhere

    def attach(self, url: str, origin: Origin = "command") -> Server:
        """Add a server that runs elsewhere. Raises ValueError for what is no URL, or is a member
        already."""
        number = time.time_ns() // 1_000_000 if origin == "command" else 0
        server = Server(attached_name(url), url.rstrip("/"), number, origin=origin)
        if any(other.url == server.url for other in self.servers()):
            raise ValueError(f"{server.url} belongs to the fleet already")
        self.publish(server)
        return server

    def detach(self, url: str) -> Server:
        """Take out an attached server. Raises ValueError where there is none, or it was started
        here."""
        for server in self.servers():
            if server.url == url.rstrip("/") and not server.replaceable:
                self.withdraw(server.name)
                return server
        raise ValueError(f"{url} is no attached server of this run")

    def sync_configured(self, urls: list[str]) -> None:
        """Attach what ``engine.urls`` names now, and detach what it named in an earlier start."""
        wanted = {url.rstrip("/") for url in urls}
        for server in self.servers():
            if server.origin == "config" and server.url not in wanted:
                self.withdraw(server.name)
        for url in sorted(wanted - {server.url for server in self.servers()}):
            self.attach(url, "config")

    # --- the endpoint

    def publish_endpoint(self, place: EndpointPlace) -> None:
        """Say where this record is offered over HTTP."""
        write_private(self._endpoint, json.dumps(asdict(place)))

    def endpoint(self) -> EndpointPlace | None:
        """Where it is offered; None where no process does."""
        found = self._read(self._endpoint)
        if found is None:
            return None
        try:
            return EndpointPlace(**{name: str(value) for name, value in found.items()})
        except TypeError:
            _set_aside(self._endpoint)
            return None

    def withdraw_endpoint(self) -> None:
        """It is offered no more."""
        self._endpoint.unlink(missing_ok=True)

    # --- keys

    def keys(self, server: Server) -> Keys:
        """The keys that ``server`` takes."""
        return self._started_keys if server.replaceable else Keys.of_environment()

    # --- reports

    def report_lost(self, server: Server) -> None:
        """Ask the supervisor to replace this incarnation, which runs on but doesn't answer.

        It sees by itself when one has exited, and drops a report on an earlier incarnation.
        """
        report = {"incarnation": server.incarnation}
        write_private(self._lost / f"{server.name}.json", json.dumps(report))

    def take_report(self, name: str) -> int | None:
        """Remove the report on ``name``; the incarnation that it is about, None where there is
        none."""
        path = self._lost / f"{name}.json"
        report = self._read(path)
        if report is None:
            return None
        path.unlink(missing_ok=True)
        incarnation = report.get("incarnation")
        return incarnation if isinstance(incarnation, int) else None

    # --- the ranks' view

    def publish_status(self, version: int | None, states: Mapping[str, str]) -> None:
        """``states``: a word or a sentence on every server, by name."""
        status = {"version": version, "servers": dict(states)}
        write_private(self._status, json.dumps(status, indent=1))

    def status(self) -> dict[str, Any]:
        """What ``publish_status`` wrote last; empty before that."""
        return self._read(self._status) or {}

    # --- reading

    def _read(self, path: Path) -> dict[str, Any] | None:
        """The object in a file; None where there is no file, a damaged one, or one that is refused."""
        try:
            found = json.loads(read_own(path))
        except FileNotFoundError:
            return None
        except UnsafeFileError as error:
            if path not in self._refused:
                self._refused.add(path)
                log.warning("refused: %s", error)
            return None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            _set_aside(path)
            return None
        return found

    def _read_server(self, path: Path) -> Server | None:
        found = self._read(path)
        if found is None:
            return None
        known = {field.name for field in fields(Server)}
        named = all(isinstance(found.get(k), str) for k in ("name", "url"))
        if not (found.keys() <= known and named):
            _set_aside(path)
            return None
        return Server(**found)


def attached_name(url: str) -> str:
    """A file's name for a server that runs elsewhere. Raises ValueError for what is no URL."""
    if problem := url_problem(url):
        raise ValueError(problem)
    return re.sub(r"[^\w.]+", "-", url.rstrip("/"))


def _set_aside(path: Path) -> None:
    """Rename a damaged file, which another reader may have done already."""
    aside = path.with_name(f"{path.name}.damaged")
    try:
        path.replace(aside)
    except FileNotFoundError:
        return
    log.warning("%s is damaged; it is now %s, and counts as missing", path, aside.name)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return list(_parts(name))


def _parts(name: str) -> Iterator[tuple[bool, int, str]]:
    for part in re.findall(r"\d+|\D+", name):
        yield (True, int(part), "") if part.isdigit() else (False, 0, part)
