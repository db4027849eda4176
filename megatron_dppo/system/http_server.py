"""An HTTP server in a separate thread: an aiohttp application on one address."""

from __future__ import annotations

import logging
import socket
from typing import Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.network import url_host

READ_S = 10.0
"""A connection that is silent for this time, between requests or within a body, is closed."""

log = logging.getLogger(__name__)


def _shorten_bad_request(record: logging.LogRecord) -> bool:
    """Log a request that is not HTTP as one line of level INFO, because any program may send it."""
    error = None
    if record.exc_info:
        error = record.exc_info[1]
    if isinstance(error, HttpProcessingError):
        record.levelno = logging.INFO
        record.levelname = "INFO"
        record.exc_info = None
    # True: the log keeps the record.
    return True


log.addFilter(_shorten_bad_request)


class HttpServer:
    """Serves ``application`` on ``host``. A separate thread answers requests between ``start`` and ``stop``.

    With ``port`` 0 the server takes a free port; ``url`` has the number. Raises OSError if the port is taken.
    """

    def __init__(self, application: web.Application, host: str, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.url = f"http://{url_host(host)}:{self._socket.getsockname()[1]}"
        self._application = application
        self._running: tuple[AsyncRunner, web.AppRunner] | None = None

    def start(self) -> None:
        runner = web.AppRunner(
            self._application,
            access_log=None,
            keepalive_timeout=READ_S,
            lingering_time=READ_S,
            logger=log,
            shutdown_timeout=0.1,
        )
        loop = AsyncRunner()
        self._running = (loop, runner)
        loop.run(self._serve(runner))

    def stop(self) -> None:
        """Stop answering and close the port, also if the server was never started. A second call has no effect."""
        if self._running is not None:
            loop, runner = self._running
            self._running = None
            loop.run(runner.cleanup())
            loop.close()
        self._socket.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _serve(self, runner: web.AppRunner) -> None:
        await runner.setup()
        await web.SockSite(runner, self._socket).start()
