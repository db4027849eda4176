"""The record of a run's servers, asked over HTTP of the process that keeps it; see ``fleet.endpoint``."""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_dppo.engine.errors import EngineError
from megatron_dppo.fleet.endpoint import ENDPOINT_VARIABLE, PATH
from megatron_dppo.fleet.folder import (
    ADMIN_KEY_VARIABLE,
    EndpointPlace,
    FleetFolder,
    Keys,
    Origin,
    Server,
)
from megatron_dppo.fleet.record import FleetRecord
from megatron_dppo.system.files import UnsafeFileError, read_own
from megatron_dppo.system.network import is_loopback

log = logging.getLogger(__name__)

_ANSWER_S = 10.0
_ATTEMPTS = 3
_PAUSE_S = 1.0


class RecordLostError(EngineError):
    """The process that keeps the record of the servers does not answer."""


class RemoteRecord:
    """See FleetRecord. ``keys``: of the servers that the run started; the admin key opens the record."""

    def __init__(self, url: str, keys: Keys) -> None:
        self.url = url
        self._keys = keys

    def servers(self) -> list[Server]:
        """Raises RecordLostError."""
        return [Server(**server) for server in self._ask("servers")]

    def router(self) -> Server | None:
        """None too where the record can't be asked: callers look again in a second."""
        try:
            found = self._ask("router", attempts=1)
        except RecordLostError as error:
            log.warning("%s", error)
            return None
        return None if found is None else Server(**found)

    def keys(self, server: Server) -> Keys:
        """See FleetRecord."""
        return self._keys if server.replaceable else Keys.of_environment()

    def attach(self, url: str, origin: Origin = "command") -> Server:
        """See FleetRecord; ``engine.urls`` go through ``sync_configured``. Raises RecordLostError."""
        if origin != "command":
            raise ValueError(f"origin: got {origin}, expected command")
        return Server(**self._ask("attach", url=url))

    def detach(self, url: str) -> Server:
        """See FleetRecord. Raises RecordLostError."""
        return Server(**self._ask("detach", url=url))

    def sync_configured(self, urls: list[str]) -> None:
        """See FleetRecord. Raises RecordLostError."""
        self._ask("sync_configured", urls=urls)

    def report_lost(self, server: Server) -> None:
        """See FleetRecord."""
        self._tell("report_lost", name=server.name, incarnation=server.incarnation)

    def publish_status(self, version: int | None, states: Mapping[str, str]) -> None:
        """See FleetRecord."""
        self._tell("publish_status", version=version, states=dict(states))

    def status(self) -> dict[str, Any]:
        """See FleetRecord. Raises RecordLostError."""
        return dict(self._ask("status"))

    def _tell(self, question: str, **told: Any) -> None:
        """As ``_ask``, of what a run can do without."""
        try:
            self._ask(question, **told)
        except RecordLostError as error:
            log.warning("%s", error)

    def _ask(self, question: str, *, attempts: int = _ATTEMPTS, **told: Any) -> Any:
        """Raises RecordLostError, and ValueError for what the record refuses."""
        for attempt in range(1, attempts + 1):
            try:
                status, content = self._exchange(question, told)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if attempt == attempts:
                    reason = str(error) or type(error).__name__
                    raise RecordLostError(f"{self.url}{PATH}{question}: {reason}") from error
                time.sleep(_PAUSE_S)
                continue
            if status != 200:
                raise ValueError(f"{self.url}{PATH}{question}: {content['error']}")
            return content["answer"]
        raise AssertionError("unreachable")

    def _exchange(self, question: str, told: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        place = urlsplit(self.url)
        assert place.hostname is not None
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=_ANSWER_S)
        headers = {"Authorization": f"Bearer {self._keys.admin}"}
        try:
            connection.request("POST", PATH + question, json.dumps(told), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


def record_of_rank(run_directory: str) -> FleetRecord:
    """The record that the supervisor offers this rank; the run's folder where there is no supervisor."""
    keys = Keys.handed_down()
    url = os.environ.get(ENDPOINT_VARIABLE)
    return FleetFolder(run_directory, keys) if url is None else RemoteRecord(url, keys)


def record_of_command(run_directory: str) -> FleetRecord:
    """The record that the running run offers; its folder where it does not run.

    Raises ValueError where it runs and can't be asked from here.
    """
    folder = FleetFolder(run_directory)
    place = folder.endpoint()
    if place is None:
        return folder
    address = urlsplit(place.url)
    here = place.host == socket.gethostname()
    if not here and is_loopback(address.hostname or ""):
        raise ValueError(
            f"{run_directory}: its run listens on {place.host} for commands from there alone; run this "
            "there, or name a network interface in parallel.interface"
        )
    try:
        socket.create_connection((address.hostname, address.port), _ANSWER_S).close()
    except ConnectionRefusedError:  # a killed run left its file
        return folder
    except OSError as error:
        raise ValueError(
            f"{run_directory}: its run at {place.url} does not answer: {error}"
        ) from error
    return RemoteRecord(place.url, Keys(admin=_admin_key(place)))


def _admin_key(place: EndpointPlace) -> str:
    """From the file on the run's own host, else from the environment. Raises ValueError."""
    try:
        return read_own(Path(place.key_file))
    except UnsafeFileError as error:
        raise ValueError(str(error)) from error
    except OSError:
        key = os.environ.get(ADMIN_KEY_VARIABLE)
    if key is None:
        raise ValueError(
            f"the run on {place.host} wants its admin key: run this there, or start the run with "
            f"{ADMIN_KEY_VARIABLE} set and set it here too"
        )
    return key
