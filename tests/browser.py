"""A real browser without a window, driven over the Chrome DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from megatron_dppo.system.processes import kill_families
from tests.patience import Patience, family_of, own_patience

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def browser_program() -> str:
    """The browser's path; without one the test is skipped, or fails where ``CI`` is set."""
    for name in PROGRAMS:
        if path := shutil.which(name):
            return path
    reason = f"needs a browser, one of {', '.join(PROGRAMS)} (Debian: apt install chromium-headless-shell)"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class Tab:
    """One page of the browser. ``errors``: the exceptions that the page did not catch."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.errors: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async for message in self._socket:
            answer = message.json()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
        raise AssertionError("the browser has gone")

    async def open(self, url: str, width: int, height: int) -> None:
        """Load ``url`` in a window of ``width`` x ``height`` CSS pixels."""
        await self.call("Runtime.enable")
        phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        await self.call("Page.navigate", url=url)

    async def ask(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 60) -> None:
        """Wait until ``expression`` is true in the page."""
        patience = own_patience(seconds)
        # The expression raises an error before the page is loaded. That counts as false.
        asked = f"(() => {{ try {{ return !!({expression}) }} catch (_) {{ return false }} }})()"
        while not await self.ask(asked):
            assert not patience.is_exhausted(), f"never: {expression}; {self.errors}"
            await asyncio.sleep(0.1)

    async def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser_tab(folder: Path) -> AsyncIterator[Tab]:
    """A tab of a browser that keeps its files in ``folder`` and ends with the block."""
    command = [browser_program(), "--headless", "--disable-gpu", "--remote-debugging-port=0"]
    command += [f"--user-data-dir={folder}", "--no-first-run", "about:blank"]
    if os.getuid() == 0:
        command.insert(1, "--no-sandbox")
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        port_file = folder / "DevToolsActivePort"
        patience = Patience(60.0, lambda: family_of(process.pid))
        while not port_file.is_file() or "\n" not in port_file.read_text():
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            assert not patience.is_exhausted(), f"{command[0]} does not start"
            await asyncio.sleep(0.1)
        address = f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{address}/json/list") as answer:
                (page,) = [t for t in await answer.json() if t["type"] == "page"]
            url = page["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        kill_families([process])  # Debian's program is a shell script around the browser
