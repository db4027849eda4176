"""ChildServer with a small HTTP server as its child: from the start to the end, and every way to fail."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import re
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
    """A server that runs ``code`` with PORT and NAME set, and accepts only answers with the name "right".

    It answers a first request for each of ``requests``: the seconds that the answer takes, or -1 for a failure.
    """

    title = "the small server"
    port_key = "small.port"

    def __init__(self, log: Path, code: str = SERVER, name: str = "right", limit: float = 60,
                 requests: Sequence[float] = ()):  # fmt: skip
        super().__init__(
            "127.0.0.1", 0, log, limit, command=(), environment=os.environ,
            secrets={"key": "secret"}, probe=("/name", "secret"),
        )  # fmt: skip
        self._code = f"NAME = {name!r}\n{code}"
        self._requests = requests
        self.answered = 0
        self.set_port(free_port())

    def set_port(self, port: int) -> None:
        """Set the port, before the start."""
        self.port = port
        self._command = ["-c", f"PORT = {port}\n{self._code}"]

    def _accepts(self, answer: Answer) -> bool:
        return answer.status == 200 and json.loads(answer.body)["name"] == "right"

    async def _warm_up(self, client: HttpClient) -> None:
        for seconds in self._requests:
            await asyncio.sleep(seconds)
            if seconds < 0:
                raise EngineLostError("it is gone")
            self.answered += 1


Make = Callable[..., SmallServer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    servers: list[SmallServer] = []

    def make_server(*arguments: Any, **options: Any) -> SmallServer:
        servers.append(SmallServer(tmp_path / "logs" / "small.log", *arguments, **options))
        return servers[-1]

    yield make_server
    for server in servers:
        server.kill()


def failed_start(server: SmallServer) -> str:
    """Start a server that fails, and return the error."""
    server.start()
    with pytest.raises(EngineStartError) as caught:
        server.wait_healthy()
    return str(caught.value)


def test_a_server_is_started_waited_for_and_ended(make: Make) -> None:
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
def test_a_servers_url_is_one_that_can_be_called(make: Make, host: str, called: str) -> None:
    server = make()
    server.host = host
    assert server.url == f"http://{called}:{server.port}"


def test_a_server_that_exits_shows_its_log(make: Make) -> None:
    error = failed_start(make("import sys; sys.exit('no such flag')"))
    assert re.search(r"(?s)code 1.*    no", error)


RAISE_AND_BE_KILLED = """
import os, signal, traceback
try:
    [][512]
except IndexError:
    traceback.print_exc()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_that_a_python_error_ended_is_named_by_it(make: Make) -> None:
    """SGLang kills its own processes after an exception in one of them."""
    reason = failed_start(make(RAISE_AND_BE_KILLED)).splitlines()[0]
    assert "IndexError: " in reason
    assert "memory" not in reason


def test_an_exception_of_an_earlier_incarnation_explains_nothing(make: Make) -> None:
    failed_start(make(RAISE_AND_BE_KILLED))
    reason = failed_start(make("import os; os.kill(os.getpid(), 9)")).splitlines()[0]
    assert "IndexError" not in reason
    assert "memory" in reason


def test_a_server_is_healthy_after_its_first_answers(make: Make) -> None:
    server, stages = make(requests=[0.1, 1.2]), list[str]()
    server.start()
    assert server.wait_healthy(lambda seconds, stage: stages.append(stage)) > 1.3
    assert server.answered == 2
    assert stages[-1] == "answering its first requests"


def test_a_first_answer_that_fails_or_takes_too_long_fails_the_start(make: Make) -> None:
    assert "first" in failed_start(make(requests=[0.1, -1]))
    assert " 2 s" in failed_start(make(requests=[60.0], limit=2))


def test_another_server_on_the_port_is_not_taken_for_it(make: Make) -> None:
    server = make(name="wrong", limit=2)
    assert " 2 s" in failed_start(server)
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


def test_a_taken_port_is_told_by_its_key(make: Make) -> None:
    first_server = make()
    first_server.start()
    first_server.wait_healthy()
    second_server = make()
    second_server.port = first_server.port
    with pytest.raises(EngineStartError, match=rf"small.port: .*127.0.0.1:{first_server.port} "):
        second_server.start()
    assert second_server.poll() is None
