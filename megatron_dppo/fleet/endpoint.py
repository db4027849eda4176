"""The HTTP endpoint of a run's server registry (FleetRecord), and its client.

A question is a call of a method of the registry: one POST to ``/fleet/<name>`` with the arguments as a JSON object. So
ranks on other hosts and the user's command need no consistent view of the run's folder.

A question needs a key. The admin key opens all questions. The endpoint also makes a second key, the key of commands,
for commands on the run's own host. The key of commands opens only the questions of commands, and no SGLang server
accepts it. A command that attaches a server also needs the server's seal (``fleet/record.py``).
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from megatron_dppo.engine.errors import EngineError
from megatron_dppo.fleet.record import (
    ADMIN_KEY_VARIABLE,
    ENGINE_FOLDER,
    FleetRecord,
    Json,
    Keys,
    Server,
    read_own_json,
)
from megatron_dppo.system.files import write_private
from megatron_dppo.system.interfaces import interface_address
from megatron_dppo.system.lease import FencedError
from megatron_dppo.system.network import client_host, is_loopback
from megatron_dppo.system.private_files import UnsafeFileError, read_own
from megatron_dppo.system.scratch import make_runtime_directory

log = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "MEGATRON_DPPO_FLEET"
"""Variable with the endpoint's URL in the environment of the trainer's ranks."""
PATH = "/fleet/"
START_HEADER = "Megatron-Dppo-Start"
"""Header of a question from a rank. The starts of the ranks are numbered; the header has the number of this rank's."""
FENCED = 409
"""HTTP status of an answer to a rank of an earlier start."""
_ANSWER_S = 10.0
"""Longest time of an answer."""
_ATTEMPTS = 3
_PAUSE_S = 1.0
"""Pause between two attempts."""


class RecordLostError(EngineError):
    """The process that runs the server registry does not answer."""


@dataclass(frozen=True)
class EndpointAddress:
    """Address of the registry while the run runs. ``key_file``: file on ``host`` with the key of commands."""

    url: str
    host: str
    key_file: str

    @classmethod
    def read(cls, path: Path) -> EndpointAddress | None:
        return read_own_json(path, EndpointAddress)


def control_host(interface: str | None, address: str) -> str:
    """Return the address to listen on: the address of ``interface``, or ``address`` if ``interface`` is None.

    An ``address`` that stands for all addresses of the machine is replaced by loopback. Raises InterfaceError.
    """
    if interface is not None:
        return interface_address(interface)
    return client_host(address)


def admin_key() -> str:
    """Return the admin key in the environment, or else a new key.

    Only the processes of the run have a new key, so commands on other hosts can't ask the run's endpoint.
    """
    return os.environ.get(ADMIN_KEY_VARIABLE) or secrets.token_urlsafe(32)


class FleetEndpoint:
    """Serves ``record`` on a free port of ``host`` to clients with ``key``, from ``start`` to ``stop``.

    The user's command reads the URL from ``engine/endpoint.json``, and the key from a file on this machine that only
    the user can read. A model's response may contain code, and such code can read this file too if it runs outside a
    sandbox. Therefore the file has the key of commands, not the admin key.
    """

    def __init__(self, record: FleetRecord, key: str, host: str) -> None:
        self._record = record
        self._command_key = secrets.token_urlsafe(32)
        # Import lazily: commands that only read this module start without aiohttp.
        from megatron_dppo.fleet.registry_server import RegistryServer

        self._server = RegistryServer(record, key, self._command_key, host)
        self.url = self._server.url
        self._private = make_runtime_directory()
        self._file = record.path / "endpoint.json"
        self._address = EndpointAddress(self.url, socket.gethostname(), str(self._private / "key"))

    @property
    def variables(self) -> dict[str, str]:
        return {ENDPOINT_VARIABLE: self.url}

    def start(self) -> None:
        """Start to answer in a new thread, then publish the address."""
        self._server.start()
        write_private(self._private / "key", self._command_key)
        write_private(self._file, json.dumps(asdict(self._address)))
        # Commands use the endpoint from now on. Until now they wrote their attachments into fleet.json, so read it.
        self._record.read_attached()

    def stop(self) -> None:
        """Stop answering. Has no effect without a start."""
        # If another start has taken over, the file has that start's address.
        if EndpointAddress.read(self._file) == self._address:
            self._file.unlink(missing_ok=True)
        self._server.stop()
        shutil.rmtree(self._private, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class RecordClient:
    """Client of the registry at ``url``. If ranks of a newer start are running, every question raises FencedError.

    Args:
        url: the endpoint's URL.
        keys: keys of the servers that the run started. Their admin key opens the registry, too.
        start: number of the start of the ranks that this client belongs to; None for any other client.
    """

    def __init__(self, url: str, keys: Keys, start: int | None = None) -> None:
        self.url = url
        self._keys = keys
        self._start = start

    def check_start(self) -> None:
        """Raise FencedError once newer ranks run. If the registry does not answer, raise nothing."""
        if self._start is not None:
            with suppress(RecordLostError):
                # The registry checks the start in every question. The answer to this question is short.
                self._ask("starting", attempts=1)

    def keys(self, server: Server) -> Keys:
        if server.replaceable:
            return self._keys
        return Keys.of_environment()

    def servers(self) -> list[Server]:
        """Call ``FleetRecord.servers``. Raises RecordLostError."""
        return [Server(**server) for server in self._ask("servers")]

    def teachers(self) -> list[Server]:
        """Call ``FleetRecord.teachers``. Raises RecordLostError."""
        return [Server(**server) for server in self._ask("teachers")]

    def router(self) -> Server | None:
        """Call ``FleetRecord.router``. Return None if there is no router, or if the registry does not answer."""
        # Callers ask again in a second, so one attempt is enough.
        try:
            router = self._ask("router", attempts=1)
        except RecordLostError as error:
            log.warning("%s", error)
            return None
        return None if router is None else Server(**router)

    def reachable_router(self) -> tuple[Server, Keys] | None:
        """Return the router with its keys, as HttpRouterLink needs them."""
        router = self.router()
        if router is None:
            return None
        return (router, self.keys(router))

    def attach(self, url: str, seal: str) -> Server:
        """Call ``FleetRecord.attach``. Raises RecordLostError."""
        return Server(**self._ask("attach", url=url, seal=seal))

    def detach(self, url: str) -> Server:
        """Call ``FleetRecord.detach``. Raises RecordLostError."""
        return Server(**self._ask("detach", url=url))

    def sync_configured(self, urls: list[str]) -> None:
        """Call ``FleetRecord.sync_configured``. Raises RecordLostError."""
        self._ask("sync_configured", urls=urls)

    def report_lost(self, server: Server) -> None:
        """Ask the supervisor to replace a server that it started; do nothing for other servers."""
        if server.replaceable:
            self._tell("report_lost", name=server.name, incarnation=server.incarnation)

    def allow_starts(self, allowed: bool) -> None:
        """Call ``FleetRecord.allow_starts``. Raises RecordLostError."""
        self._ask("allow_starts", allowed=allowed)

    def starting(self) -> list[str]:
        """Call ``FleetRecord.starting``. Raises RecordLostError."""
        return list(self._ask("starting"))

    def publish_status(self, version: int | None, states: Mapping[str, str]) -> None:
        """Call ``FleetRecord.publish_status``; log a failure."""
        self._tell("publish_status", version=version, states=dict(states))

    def status(self) -> Json:
        """Call ``FleetRecord.status``. Raises RecordLostError."""
        return dict(self._ask("status"))

    def _tell(self, question: str, **arguments: Any) -> None:
        """Send a question that the run does not depend on; log a failure."""
        try:
            self._ask(question, **arguments)
        except RecordLostError as error:
            log.warning("%s", error)

    def _ask(self, question: str, *, attempts: int = _ATTEMPTS, **arguments: Any) -> Any:
        """Send a question and return the answer. Raises RecordLostError, and ValueError if the registry refuses."""
        for attempt in range(1, attempts + 1):
            try:
                status, content = self._exchange(question, arguments)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if attempt == attempts:
                    reason = str(error) or type(error).__name__
                    raise RecordLostError(f"{self.url}{PATH}{question}: {reason}") from error
                time.sleep(_PAUSE_S)
                continue
            if status == FENCED:
                raise FencedError(f"{self.url}{PATH}{question}: {content['error']}")
            if status != 200:
                raise ValueError(f"{self.url}{PATH}{question}: {content['error']}")
            return content["answer"]
        raise AssertionError("unreachable")

    def _exchange(self, question: str, arguments: Json) -> tuple[int, Json]:
        address = urlsplit(self.url)
        assert address.hostname is not None
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=_ANSWER_S)
        headers = {"Authorization": f"Bearer {self._keys.admin}"}
        if self._start is not None:
            headers[START_HEADER] = str(self._start)
        try:
            connection.request("POST", PATH + question, json.dumps(arguments), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


def record_of_command(run_directory: str) -> FleetRecord | RecordClient:
    """Return a client of the registry if the run is running, else a registry with the content of the run's folder.

    Raises ValueError if the run is running and its registry can't be reached from here.
    """
    endpoint = EndpointAddress.read(Path(run_directory) / ENGINE_FOLDER / "endpoint.json")
    if endpoint is None:
        return FleetRecord(run_directory, runs=False)
    address = urlsplit(endpoint.url)
    is_same_host = endpoint.host == socket.gethostname()
    if not is_same_host and is_loopback(address.hostname or ""):
        raise ValueError(
            f"{run_directory}: its run accepts commands only on its own host, {endpoint.host}; run this command "
            "there, or name a network interface in parallel.interface"
        )
    try:
        socket.create_connection((address.hostname, address.port), _ANSWER_S).close()
    except ConnectionRefusedError:
        # A killed run left its file behind.
        return FleetRecord(run_directory, runs=False)
    except OSError as error:
        raise ValueError(
            f"{run_directory}: its run at {endpoint.url} does not answer: {error}"
        ) from error
    return RecordClient(endpoint.url, Keys(admin=_key_of_command(endpoint)))


def _key_of_command(endpoint: EndpointAddress) -> str:
    """Return the key of commands from the file on the run's own host, else the admin key from the environment.

    Raises ValueError if neither exists.
    """
    try:
        return read_own(Path(endpoint.key_file))
    except UnsafeFileError as error:
        raise ValueError(str(error)) from error
    except OSError:
        key = os.environ.get(ADMIN_KEY_VARIABLE)
    if key is None:
        raise ValueError(
            f"the run on {endpoint.host} wants its admin key: run this there, or start the run with "
            f"{ADMIN_KEY_VARIABLE} set and set it here too"
        )
    return key
