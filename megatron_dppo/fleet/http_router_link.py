"""A client's connection to the HTTP router, which may come back at another address without servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from megatron_dppo.engine.errors import EngineLostError, EngineRequestError
from megatron_dppo.engine.http_client import Answer
from megatron_dppo.fleet.folder import Keys, Server
from megatron_dppo.fleet.http_router_client import HttpRouterClient

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_WATCH_SECONDS = 5.0


class HttpRouterLink:
    """Finds the HTTP router, keeps its list of servers current, and notices when it is lost.

    Args:
        find: where the router is published now, and its keys; None while there is none.
        registers: this client tells the router of the servers; other clients of a run wait until
            it knows them.

    ``usable``: calls may go through it.
    """

    def __init__(self, find: Callable[[], tuple[Server, Keys] | None], *, registers: bool) -> None:
        self._find = find
        self._registers = registers
        self._client: HttpRouterClient | None = None
        self._wanted: dict[str, str | None] = {}
        self._announced: Server | None = None
        self.server: Server | None = None
        self.usable = False

    @property
    def url(self) -> str:
        """Where it was found last."""
        return self.server.url if self.server is not None else "the router"

    async def serve(self, servers: Mapping[str, str | None]) -> None:
        """Have it send calls to ``servers``, URLs with their API keys; it is ``usable`` where that
        worked."""
        self._wanted = dict(servers)
        self.usable = False
        await self._connect()

    async def remove(self, url: str) -> None:
        """Have it send nothing more to this server."""
        self._wanted.pop(url, None)
        if self._client is not None:
            try:
                await self._client.remove([url])
            except (EngineLostError, EngineRequestError) as error:
                log.info("the router was not told of a lost server: %s", error)

    async def generate(self, body: bytes) -> Answer:
        """As HttpRouterClient's. Raises EngineLostError where the router breaks off."""
        if self._client is None:
            raise EngineLostError("there is no router")
        return await self._client.generate(body)

    def mark_down(self, reason: str) -> bool:
        """Not usable until ``watch`` or ``serve`` finds it in order; whether it was, before."""
        was_usable, self.usable, self._announced = self.usable, False, None
        if was_usable:
            log.warning("the router is lost, generating directly: %s", reason)
        return was_usable

    async def watch(
        self, hang_timeout_s: float, on_lost: Callable[[HttpRouterLink, str], None]
    ) -> None:
        """Tell ``on_lost`` of a router that hangs, and use one again that came back; for ever."""
        clock = asyncio.get_running_loop().time
        pause = min(_WATCH_SECONDS, hang_timeout_s / 4)
        asked = last_life = clock()
        while True:
            await asyncio.sleep(min(_RETRY_SECONDS, pause))
            if not self.usable:
                await self._connect()
                asked = last_life = clock()
            elif clock() >= asked + pause and self._client is not None:
                asked = clock()
                if await self._client.alive(hang_timeout_s / 2):
                    last_life = clock()
                elif clock() - last_life > hang_timeout_s:
                    on_lost(self, f"{self.url}: silent for {clock() - last_life:.0f} s")

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        self.usable = False

    async def _connect(self) -> None:
        """Find the router and have it know our servers; ``usable`` where both worked."""
        found = self._find()
        if found is None:
            return
        server, keys = found
        if server != self.server or self._client is None:
            await self.close()
            self.server, self._client = server, HttpRouterClient(server.url, keys)
        try:
            self.usable = await self._knows_servers(self._client)
        except (EngineLostError, EngineRequestError) as error:
            log.info("the router at %s is not in order yet: %s", server.url, error)
        if self.usable and server != self._announced:
            self._announced = server
            log.info("generating through the router at %s", server.url)

    async def _knows_servers(self, client: HttpRouterClient) -> bool:
        if self._registers:
            await client.set_servers(self._wanted)
            return True
        return self._wanted.keys() == (await client.servers()).keys()
