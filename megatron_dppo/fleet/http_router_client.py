"""Client of the HTTP router: its list of servers, and generation through it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Set

import orjson

from megatron_dppo.engine.errors import EngineLostError, EngineRequestError
from megatron_dppo.engine.http_client import Answer, HttpClient, Method
from megatron_dppo.fleet.folder import Keys
from megatron_dppo.fleet.http_router_process import ROUTED_MODEL

SERVED_BY = "x-smg-routed-worker-id"
"""Header of an answer: the URL of the server that gave it."""

_REGISTRATION_SECONDS = 20.0
_POLL_SECONDS = 0.05
_CONTROL_SECONDS = 10.0


class HttpRouterClient:
    """The HTTP router at ``url``, from one event loop; ``close`` it. Its methods raise EngineLostError
    where it doesn't answer."""

    def __init__(self, url: str, keys: Keys) -> None:
        self.url = url
        self._client = HttpClient(url, keys.api, keys.admin)

    async def close(self) -> None:
        """Close the connections; the router breaks off what was in flight on them."""
        await self._client.close()

    async def generate(self, body: bytes) -> Answer:
        """The answer of the server that the router chose, or the router's own."""
        return await self._client.exchange("POST", "/generate", body, timeout_s=None)

    async def alive(self, timeout_s: float) -> bool:
        """Whether the router's process answers."""
        try:
            await self._client.request("GET", "/liveness", timeout_s=timeout_s)
        except (EngineLostError, EngineRequestError):
            return False
        return True

    async def servers(self) -> dict[str, str]:
        """The router's id of each server that it sends requests to, by URL."""
        answer = await self._control("GET", "/workers")
        workers = orjson.loads(answer)["workers"]
        return {worker["url"].rstrip("/"): worker["id"] for worker in workers}

    async def set_servers(self, wanted: Mapping[str, str | None]) -> None:
        """Make the router's list of servers equal to ``wanted``, URLs with their API keys.

        Returns when it does. Raises EngineLostError where a server doesn't get on the list in time,
        which needs its answer to the router.
        """
        present = await self.servers()
        for url in present.keys() - wanted.keys():
            await self._delete(present[url])
        for url in wanted.keys() - present.keys():
            await self._add(url, wanted[url])
        await self._wait(wanted.keys())

    async def remove(self, urls: Sequence[str]) -> None:
        """Send nothing more to these servers. What they have in work goes on."""
        present = await self.servers()
        for url in urls:
            if url in present:
                await self._delete(present[url])

    async def _wait(self, wanted: Set[str]) -> None:
        deadline = asyncio.get_running_loop().time() + _REGISTRATION_SECONDS
        while (present := (await self.servers()).keys()) != wanted:
            if asyncio.get_running_loop().time() > deadline:
                raise EngineLostError(
                    f"{self.url}: the router serves from {sorted(present)} after "
                    f"{_REGISTRATION_SECONDS:.0f} s"
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def _add(self, url: str, api_key: str | None) -> None:
        body = {"url": url, "api_key": api_key, "models": [{"id": ROUTED_MODEL}]}
        try:
            await self._control("POST", "/workers", orjson.dumps(body))
        except EngineRequestError as error:
            if error.status != 409:  # another rank was faster
                raise

    async def _delete(self, worker_id: str) -> None:
        try:
            await self._control("DELETE", f"/workers/{worker_id}")
        except EngineRequestError as error:
            if error.status != 404:  # another rank was faster
                raise

    async def _control(self, method: Method, path: str, body: bytes | None = None) -> bytes:
        return await self._client.request(
            method, path, body, admin=True, timeout_s=_CONTROL_SECONDS
        )
