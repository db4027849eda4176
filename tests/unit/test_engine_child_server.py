"""ChildServer with a small HTTP server as its child: from the start to the end, and every way to fail."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_dppo.engine import process
from megatron_dppo.engine.client import Answer, HttpClient
from megatron_dppo.engine.errors import EngineLostError, EngineStartError, PortHeldError
from megatron_dppo.engine.process import ChildServer
from megatron_dppo.system.ports import free_port

SERVER = """
import http.server, json, sys
stdin_values = json.load(sys.stdin)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        has_key = self.headers["Authorization"] == "Bearer " + stdin_values["key"]
        self.send_response(200 if has_key else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"name": NAME}).encode())
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


class SmallServer(ChildServer):
    """A server that runs ``code`` with PORT and NAME set, and accepts only answers with the name "right"."""

    title = "the small server"
    port_key = "small.port"

    def __init__(self, log: Path, code: str = SERVER, name: str = "right", limit: float = 60):
        super().__init__(
            "127.0.0.1", 0, log, limit, command=(), environment=os.environ,
            secrets={"key": "secret"}, probe=("/name", "secret"),
        )  # fmt: skip
        self._code = f"NAME = {name!r}\n{code}"
        self.set_port(free_port())

    def set_port(self, port: int) -> None:
        """Set the port, before the start."""
        self.port = port
        self._command = ["-c", f"PORT = {port}\n{self._code}"]

    def _accepts(self, answer: Answer) -> bool:
        return answer.status == 200 and json.loads(answer.body)["name"] == "right"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., SmallServer]]:
    servers: list[SmallServer] = []

    def make_server(*arguments: Any, **options: Any) -> SmallServer:
        servers.append(SmallServer(tmp_path / "logs" / "small.log", *arguments, **options))
        return servers[-1]

    yield make_server
    for server in servers:
        server.kill()


def test_a_server_is_started_waited_for_and_ended(make: Callable[..., SmallServer]) -> None:
    server = make()
    server.start()
    lines: list[str] = []
    assert server.wait_healthy(lambda seconds, line: lines.append(line)) > 0
    assert server.poll() is None
    assert "serving" in server.log_tail(5)
    command_line = " ".join(psutil.Process(server.pid).cmdline())
    assert "secret" not in command_line
    server.stop()
    assert server.poll() == -signal.SIGTERM
    with pytest.raises(ValueError, match="started"):
        server.start()


@pytest.mark.parametrize(
    ("host", "called"),
    [("10.0.0.7", "10.0.0.7"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]")],
)
def test_its_url_is_one_that_can_be_called(
    make: Callable[..., SmallServer], host: str, called: str
) -> None:
    server = make()
    server.host = host
    assert server.url == f"http://{called}:{server.port}"


def test_one_that_exits_shows_its_log(make: Callable[..., SmallServer]) -> None:
    server = make("import sys; sys.exit('no such flag')")
    server.start()
    with pytest.raises(EngineStartError, match=r"(?s)code 1.*    no"):
        server.wait_healthy()


RAISE_AND_BE_KILLED = """
import os, signal, traceback
try:
    [][512]
except IndexError:
    traceback.print_exc()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_one_that_a_python_error_ended_is_named_by_it(make: Callable[..., SmallServer]) -> None:
    """SGLang kills its own processes after an exception in one of them."""
    server = make(RAISE_AND_BE_KILLED)
    server.start()
    with pytest.raises(EngineStartError) as caught:
        server.wait_healthy()
    reason = str(caught.value).splitlines()[0]
    assert "IndexError: " in reason
    assert "memory" not in reason


def test_an_exception_of_an_earlier_incarnation_explains_nothing(
    make: Callable[..., SmallServer],
) -> None:
    servers = [make(RAISE_AND_BE_KILLED), make("import os; os.kill(os.getpid(), 9)")]
    for server in servers:
        server.start()
        with pytest.raises(EngineStartError) as caught:
            server.wait_healthy()
    reason = str(caught.value).splitlines()[0]
    assert "IndexError" not in reason
    assert "memory" in reason


class WarmedServer(SmallServer):
    """A server that answers a first request for each of ``requests``: its seconds, or -1 for a failure."""

    def __init__(self, log: Path, requests: Sequence[float], **options: Any):
        super().__init__(log, **options)
        self._requests = requests
        self.answered = 0

    async def _warm_up(self, client: HttpClient) -> None:
        for seconds in self._requests:
            await asyncio.sleep(seconds)
            if seconds < 0:
                raise EngineLostError("it is gone")
            self.answered += 1


@pytest.fixture
def make_warmed(tmp_path: Path) -> Iterator[Callable[..., WarmedServer]]:
    servers: list[WarmedServer] = []

    def make_server(*arguments: Any, **options: Any) -> WarmedServer:
        servers.append(WarmedServer(tmp_path / "small.log", *arguments, **options))
        servers[-1].start()
        return servers[-1]

    yield make_server
    for server in servers:
        server.kill()


def test_a_server_is_healthy_after_its_first_answers(make_warmed) -> None:
    server, stages = make_warmed([0.1, 1.2]), []
    assert server.wait_healthy(lambda seconds, stage: stages.append(stage)) > 1.3
    assert server.answered == 2
    assert stages[-1] == "answering its first requests"


def test_a_first_answer_that_fails_or_takes_too_long_fails_the_start(make_warmed) -> None:
    with pytest.raises(EngineStartError, match="first"):
        make_warmed([0.1, -1]).wait_healthy()
    with pytest.raises(EngineStartError, match=" 2 s"):
        make_warmed([60.0], limit=2).wait_healthy()


def test_another_one_on_the_port_is_not_taken_for_it(make: Callable[..., SmallServer]) -> None:
    server = make(name="wrong", limit=2)
    server.start()
    with pytest.raises(EngineStartError, match=" 2 s"):
        server.wait_healthy()
    assert server.poll() == -signal.SIGKILL


def start_foreign_server(port: int) -> http.server.ThreadingHTTPServer:
    """Start a web server that no ChildServer started; it answers 404 from a thread of its own."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", port), http.server.SimpleHTTPRequestHandler
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.parametrize("ends", [True, False], ids=["ours exits", "ours waits"])
def test_a_foreign_server_that_took_the_port_meanwhile_is_one_line(make, monkeypatch, ends):
    """The child fails to bind the port and exits with a traceback, or it never binds the port."""
    monkeypatch.setattr(process, "_FOREIGN_SECONDS", 0.5)
    server = make("import time; time.sleep(0.6)\n" + (SERVER if ends else "time.sleep(60)"))
    server.start()
    foreign_server = start_foreign_server(server.port)
    try:
        with pytest.raises(PortHeldError) as refusal:
            server.wait_healthy()
    finally:
        foreign_server.shutdown()
        foreign_server.server_close()
    place = f"small.port: 127.0.0.1:{server.port}/name"
    assert str(refusal.value).startswith(f"{place} is answered by another server (SimpleHTTP")
    assert "status 404" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert server.poll() is not None


def test_a_taken_port_is_told_by_its_key(make: Callable[..., SmallServer]) -> None:
    first_server = make()
    first_server.start()
    first_server.wait_healthy()
    second_server = make()
    second_server.port = first_server.port
    with pytest.raises(EngineStartError, match=rf"small.port: .*127.0.0.1:{first_server.port} "):
        second_server.start()
    assert second_server.poll() is None
