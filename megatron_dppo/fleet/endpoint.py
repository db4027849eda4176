"""The record of a run's servers, offered over HTTP by the process that keeps it.

Ranks on other hosts and the user's command thus need no fresh view of the run's folder; its files are
this process's own record. One POST a question, ``/fleet/<name>`` with a JSON object, under the admin key.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from megatron_dppo.fleet.folder import ADMIN_KEY_VARIABLE, EndpointPlace, FleetFolder
from megatron_dppo.system.files import write_private
from megatron_dppo.system.network import interface_address
from megatron_dppo.system.scratch import make_runtime_directory

log = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "MEGATRON_DPPO_FLEET"
"""Names the endpoint's URL in the environment of the trainer's ranks."""
PATH = "/fleet/"
_LONGEST = 1 << 20
_READ_S = 10
_POLL_S = 0.05

Told = dict[str, Any]


def control_host(interface: str | None, address: str) -> str:
    """Where to listen: on ``interface``, else on ``address``, but never on every address of the machine.

    Raises InterfaceError.
    """
    if interface is not None:
        return interface_address(interface)
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def admin_key() -> str:
    """The environment's, where it has one, so that it is known on other hosts; else a new one."""
    return os.environ.get(ADMIN_KEY_VARIABLE) or secrets.token_urlsafe(32)


class FleetEndpoint:
    """Offers ``folder`` on a free port of ``host`` to whoever has ``key``, from ``start`` to ``stop``.

    The user's command finds URL and key by ``engine/endpoint.json`` and a file on this machine that its
    user alone can read.
    """

    def __init__(self, folder: FleetFolder, key: str, host: str) -> None:
        self._folder = folder
        self._key = key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = _Server((host, 0), folder, key, family)
        port = self._server.server_address[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._private = make_runtime_directory()
        self._place = EndpointPlace(self.url, socket.gethostname(), str(self._private / "key"))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="fleet", daemon=True
        )

    @property
    def variables(self) -> dict[str, str]:
        """The environment in which ranks find the endpoint."""
        return {ENDPOINT_VARIABLE: self.url}

    def start(self) -> None:
        """Answer, from a thread of its own, and be found."""
        self._thread.start()
        write_private(self._private / "key", self._key)
        self._folder.publish_endpoint(self._place)

    def stop(self) -> None:
        """Answer no more. Harmless without a start."""
        if self._folder.endpoint() == self._place:  # not where another start has taken over
            self._folder.withdraw_endpoint()
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        shutil.rmtree(self._private, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], folder: FleetFolder, key: str, family: int
    ) -> None:
        self.address_family = socket.AddressFamily(family)
        self.folder = folder
        self.expected = f"Bearer {key}".encode()
        self.lock = threading.Lock()
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = _READ_S
    server: _Server

    def do_POST(self) -> None:
        """Check the key, then the question, then answer it."""
        given = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, self.server.expected):
            self._answer(401, {"error": "the admin key is missing or wrong"})
            return
        question = _QUESTIONS.get(self.path.removeprefix(PATH))
        try:
            told = self._told()
            if question is None:
                raise ValueError(f"{self.path}: no such question")
            with self.server.lock:
                answer = question(self.server.folder, told)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._answer(400, {"error": str(error)})
        except OSError as error:
            self._answer(500, {"error": str(error)})
        else:
            self._answer(200, {"answer": answer})

    def _told(self) -> Told:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _LONGEST:
            raise ValueError(f"Content-Length: got {length!r}, expected at most {_LONGEST}")
        told = json.loads(self.rfile.read(int(length)))
        if not isinstance(told, dict):
            raise ValueError("expected a JSON object")
        return told

    def _answer(self, status: int, content: Told) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Questions come every second; only refusals are worth a line."""
        if str(args[1:2]) != "('200',)":
            log.info("fleet endpoint, asked by %s: %s", self.client_address[0], format % args)


# --- the questions


def _servers(folder: FleetFolder, told: Told) -> list[Told]:
    return [asdict(server) for server in folder.servers()]


def _router(folder: FleetFolder, told: Told) -> Told | None:
    router = folder.router()
    return None if router is None else asdict(router)


def _status(folder: FleetFolder, told: Told) -> Told:
    return folder.status()


def _attach(folder: FleetFolder, told: Told) -> Told:
    return asdict(folder.attach(_text(told, "url")))


def _detach(folder: FleetFolder, told: Told) -> Told:
    return asdict(folder.detach(_text(told, "url")))


def _sync_configured(folder: FleetFolder, told: Told) -> None:
    folder.sync_configured([str(url) for url in told["urls"]])


def _report_lost(folder: FleetFolder, told: Told) -> None:
    name, incarnation = _text(told, "name"), told["incarnation"]
    for server in folder.servers():
        if (server.name, server.incarnation) == (name, incarnation):
            folder.report_lost(server)


def _publish_status(folder: FleetFolder, told: Told) -> None:
    version = told["version"]
    states = {str(name): str(state) for name, state in dict(told["states"]).items()}
    folder.publish_status(None if version is None else int(version), states)


def _text(told: Told, name: str) -> str:
    if not isinstance(told.get(name), str):
        raise ValueError(f"{name}: expected a text")
    return str(told[name])


_QUESTIONS: dict[str, Callable[[FleetFolder, Told], Any]] = {
    "servers": _servers,
    "router": _router,
    "status": _status,
    "attach": _attach,
    "detach": _detach,
    "sync_configured": _sync_configured,
    "report_lost": _report_lost,
    "publish_status": _publish_status,
}
