"""The connection to the HTTP router: its list of servers, and calls through it.

After a restart by the supervisor, the router has another address and no servers. The connection finds the router again.
One client of the run registers the servers again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import orjson

from megatron_dppo.engine.client import Answer, HttpClient, Method
from megatron_dppo.engine.errors import EngineLostError, EngineRequestError
from megatron_dppo.fleet.record import Keys, Server

log = logging.getLogger(__name__)

ROUTED_MODEL = "policy"
"""Name of the model at the router. Each server names the model by a path, and paths may differ."""

SERVED_BY = "x-smg-routed-worker-id"
"""Header of an answer: the URL of the server that gave the answer."""

_REGISTRATION_SECONDS = 20.0
"""Longest time for the router to add all servers."""
_POLL_SECONDS = 0.05
_CONTROL_SECONDS = 10.0
"""Longest time of a control request."""
_RETRY_SECONDS = 1.0
"""Pause between two attempts to connect to a router that is not usable."""
_WATCH_SECONDS = 5.0
"""Pause between two health checks of a usable router."""


async def routed_servers(client: HttpClient) -> dict[str, str]:
    """Return the router's id of each server that it sends requests to, by URL."""
    answer = await client.request("GET", "/workers", admin=True, timeout_s=_CONTROL_SECONDS)
    return {worker["url"].rstrip("/"): worker["id"] for worker in orjson.loads(answer)["workers"]}


async def set_servers(client: HttpClient, servers: Mapping[str, str | None]) -> None:
    """Make the router's list of servers equal to ``servers``: a mapping of URLs to API keys.

    Returns when the lists are equal. The router adds only servers that answer its requests. Raises EngineLostError if
    the router does not add a server in time.
    """
    routed = await routed_servers(client)
    await remove_servers(client, [url for url in routed if url not in servers])
    for url in servers.keys() - routed.keys():
        body = {"url": url, "api_key": servers[url], "models": [{"id": ROUTED_MODEL}]}
        await _control_once(client, "POST", "/workers", orjson.dumps(body), done_status=409)
    clock = asyncio.get_running_loop().time
    deadline = clock() + _REGISTRATION_SECONDS
    while True:
        routed = await routed_servers(client)
        if routed.keys() == servers.keys():
            return
        if clock() > deadline:
            raise EngineLostError(
                f"{client.url}: the router serves from {sorted(routed)} after {_REGISTRATION_SECONDS:.0f} s"
            )
        await asyncio.sleep(_POLL_SECONDS)


async def remove_servers(client: HttpClient, urls: Sequence[str]) -> None:
    """Make the router send no more requests to these servers; their running requests continue."""
    ids = await routed_servers(client)
    for url in urls:
        if url in ids:
            await _control_once(client, "DELETE", f"/workers/{ids[url]}", done_status=404)


async def _control_once(
    client: HttpClient, method: Method, path: str, body: bytes | None = None, *, done_status: int
) -> None:
    """Send a control request. The router answers with the error ``done_status`` if another rank has made the change
    already."""
    try:
        await client.request(method, path, body, admin=True, timeout_s=_CONTROL_SECONDS)
    except EngineRequestError as error:
        if error.status != done_status:
            raise


class HttpRouterLink:
    """A connection that finds the HTTP router, keeps the router's list of servers current, and notices a lost router.

    ``is_usable`` tells whether calls may go through the router.

    Args:
        find: returns the published router and its keys; None while no router is published.
        registers: whether this client registers the servers with the router. Exactly one client of the run registers
            them. Every other client waits until the router has the servers.
    """

    def __init__(self, find: Callable[[], tuple[Server, Keys] | None], *, registers: bool) -> None:
        self._find = find
        self._registers = registers
        self._client: HttpClient | None = None
        # URL -> API key of the servers that the router is to have.
        self._routed: dict[str, str | None] = {}
        # The router that the log has reported as in use.
        self._announced: Server | None = None
        self.server: Server | None = None
        self.is_usable = False

    @property
    def url(self) -> str:
        if self.server is not None:
            return self.server.url
        return "the router"

    async def serve(self, servers: Mapping[str, str | None]) -> None:
        """Make the router send calls to ``servers``: a mapping of URLs to API keys.

        Afterwards ``is_usable`` tells whether the router sends calls to them.
        """
        self._routed = dict(servers)
        self.is_usable = False
        await self._connect()

    async def remove(self, url: str) -> None:
        """Make the router send no more calls to the server at ``url``; log a failure."""
        self._routed.pop(url, None)
        if self._client is not None:
            try:
                await remove_servers(self._client, [url])
            except (EngineLostError, EngineRequestError) as error:
                log.info("the router was not told of a lost server: %s", error)

    async def generate(self, body: bytes) -> Answer:
        """Return the answer of the server that the router chose, or of the router itself. Raises EngineLostError."""
        if self._client is None:
            raise EngineLostError("there is no router")
        return await self._client.exchange("POST", "/generate", body, timeout_s=None)

    def mark_down(self, reason: str) -> bool:
        """Stop using the router until ``watch`` or ``serve`` finds it healthy; return whether it was usable."""
        was_usable = self.is_usable
        self.is_usable = False
        self._announced = None
        if was_usable:
            log.warning("the router is lost, generating directly: %s", reason)
        return was_usable

    async def watch(
        self, hang_timeout_s: float, on_lost: Callable[[HttpRouterLink, str], None]
    ) -> None:
        """Call ``on_lost`` for a router that hangs, and use a router that came back; runs until it is cancelled."""
        clock = asyncio.get_running_loop().time
        pause = min(_WATCH_SECONDS, hang_timeout_s / 4)
        last_check_s = clock()
        last_answer_s = last_check_s
        while True:
            # Health checks are ``pause`` apart, but a router that is not usable is tried after each sleep.
            await asyncio.sleep(min(_RETRY_SECONDS, pause))
            if not self.is_usable:
                await self._connect()
                last_check_s = clock()
                last_answer_s = last_check_s
            elif clock() >= last_check_s + pause and self._client is not None:
                last_check_s = clock()
                if await self._client.is_ok("/liveness", hang_timeout_s / 2):
                    last_answer_s = clock()
                elif clock() - last_answer_s > hang_timeout_s:
                    on_lost(self, f"{self.url}: silent for {clock() - last_answer_s:.0f} s")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None
        self.is_usable = False

    async def _connect(self) -> None:
        """Find the router and register the servers; ``is_usable`` tells whether both succeeded."""
        router = self._find()
        if router is None:
            return
        server, keys = router
        if server != self.server or self._client is None:
            await self.close()
            self.server = server
            self._client = HttpClient(server.url, keys.api, keys.admin)
        try:
            if self._registers:
                await set_servers(self._client, self._routed)
            self.is_usable = self._routed.keys() == (await routed_servers(self._client)).keys()
        except (EngineLostError, EngineRequestError) as error:
            log.info("the router at %s is not in order yet: %s", server.url, error)
        if self.is_usable and server != self._announced:
            self._announced = server
            log.info("generating through the router at %s", server.url)
