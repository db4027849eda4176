"""ChildServer over a small HTTP server of its own: from the start to the end, and every way to fail."""

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
from megatron_dppo.system.network import free_port

SERVER = """
import http.server, json, sys
given = json.load(sys.stdin)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers["Authorization"] == "Bearer " + given["key"]
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"name": NAME}).encode())
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


class SmallServer(ChildServer):
    """Runs ``code`` with PORT and NAME set; it is the right one where it answers NAME "right"."""

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
        """Before it is started."""
        self.port = port
        self._command = ["-c", f"PORT = {port}\n{self._code}"]

    def _accepts(self, answer: Answer) -> bool:
        return answer.status == 200 and json.loads(answer.body)["name"] == "right"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., SmallServer]]:
    made: list[SmallServer] = []

    def make_one(*arguments: Any, **options: Any) -> SmallServer:
        made.append(SmallServer(tmp_path / "logs" / "small.log", *arguments, **options))
        return made[-1]

    yield make_one
    for server in made:
        server.kill()


def test_a_server_is_started_waited_for_and_ended(make: Callable[..., SmallServer]) -> None:
    server = make()
    server.start()
    seen: list[str] = []
    assert server.wait_healthy(lambda seconds, line: seen.append(line)) > 0
    assert server.poll() is None
    assert "serving" in server.log_tail(5)
    shown = " ".join(psutil.Process(server.pid).cmdline())
    assert "secret" not in shown
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
    with pytest.raises(EngineStartError) as raised:
        server.wait_healthy()
    reason = str(raised.value).splitlines()[0]
    assert "IndexError: " in reason
    assert "memory" not in reason


def test_an_exception_of_an_earlier_incarnation_explains_nothing(
    make: Callable[..., SmallServer],
) -> None:
    earlier, later = make(RAISE_AND_BE_KILLED), make("import os; os.kill(os.getpid(), 9)")
    for server in (earlier, later):
        server.start()
        with pytest.raises(EngineStartError) as raised:
            server.wait_healthy()
    reason = str(raised.value).splitlines()[0]
    assert "IndexError" not in reason
    assert "memory" in reason


class WarmedServer(SmallServer):
    """Healthy once it has answered as many requests as ``requests`` has, each of which takes so many seconds."""

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
def warmed(tmp_path: Path) -> Iterator[Callable[..., WarmedServer]]:
    made: list[WarmedServer] = []

    def make_one(*arguments: Any, **options: Any) -> WarmedServer:
        made.append(WarmedServer(tmp_path / "small.log", *arguments, **options))
        made[-1].start()
        return made[-1]

    yield make_one
    for server in made:
        server.kill()


def test_a_server_is_healthy_after_its_first_answers(warmed) -> None:
    server, stages = warmed([0.1, 1.2]), []
    assert server.wait_healthy(lambda seconds, stage: stages.append(stage)) > 1.3
    assert server.answered == 2
    assert stages[-1] == "answering its first requests"


def test_a_first_answer_that_fails_or_takes_too_long_fails_the_start(warmed) -> None:
    with pytest.raises(EngineStartError, match="first"):
        warmed([0.1, -1]).wait_healthy()
    with pytest.raises(EngineStartError, match=" 2 s"):
        warmed([60.0], limit=2).wait_healthy()


def test_another_one_on_the_port_is_not_taken_for_it(make: Callable[..., SmallServer]) -> None:
    server = make(name="wrong", limit=2)
    server.start()
    with pytest.raises(EngineStartError, match=" 2 s"):
        server.wait_healthy()
    assert server.poll() == -signal.SIGKILL


def foreign(port: int) -> http.server.ThreadingHTTPServer:
    """A web server that is none of ours; it answers 404 from a thread of its own."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", port), http.server.SimpleHTTPRequestHandler
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.parametrize("ends", [True, False], ids=["ours exits", "ours waits"])
def test_a_foreign_server_that_took_the_port_meanwhile_is_one_line(make, monkeypatch, ends):
    """Ours ends over it with pages of its own, or waits."""
    monkeypatch.setattr(process, "_FOREIGN_SECONDS", 0.5)
    server = make("import time; time.sleep(0.6)\n" + (SERVER if ends else "time.sleep(60)"))
    server.start()
    stranger = foreign(server.port)
    try:
        with pytest.raises(PortHeldError) as refusal:
            server.wait_healthy()
    finally:
        stranger.shutdown()
        stranger.server_close()
    where = f"small.port: 127.0.0.1:{server.port}/name is answered by another server (SimpleHTTP"
    assert str(refusal.value).startswith(where)
    assert "status 404" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert server.poll() is not None


def test_a_taken_port_is_told_by_its_key(make: Callable[..., SmallServer]) -> None:
    first = make()
    first.start()
    first.wait_healthy()
    second = make()
    second.port = first.port
    with pytest.raises(EngineStartError, match=rf"small.port: .*127.0.0.1:{first.port} "):
        second.start()
    assert second.poll() is None
