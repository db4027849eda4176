"""The HTTP router, smg, which spreads generation over the servers: its process, its client, a connection to it.

Light: imports neither torch nor smg.

``python -m megatron_dppo.fleet.http_router`` is the router's process, with one JSON object on standard input:
``{"options": {field of smg's RouterArgs: value}, "api_key": str, "admin_api_key": str}``. smg takes its keys only as
command-line flags, where ``ps`` shows them; here they come through a pipe.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from megatron_dppo.config.schema import EngineConfig
from megatron_dppo.engine.errors import EngineLostError, EngineRequestError
from megatron_dppo.engine.process import ChildServer, Runtime
from megatron_dppo.fleet.record import Keys, Server
from megatron_dppo.system.secret_variables import hide_secrets, without_secrets

if TYPE_CHECKING:
    from megatron_dppo.engine.client import Answer, HttpClient, Method

OPEN_PATHS = (
    "/health",
    "/health_generate",
    "/liveness",
    "/readiness",
    "/v1/models",
    "/get_model_info",
    "/get_server_info",
    "/engine_metrics",
)
"""What smg answers to anybody, whatever its options: whether it serves, and what is told of the servers."""
ROUTED_MODEL = "policy"
"""The model's name at the router; the servers' own may differ (a path each)."""

_FOREVER_S = 7 * 24 * 3600


class HttpRouterProcess(ChildServer):
    """One HTTP router, without servers until ``set_servers`` names them.

    ``api_key`` opens generation, ``admin_api_key`` the list of servers. ``runtime``: where it runs, and with which
    Python.
    """

    title = "the router"

    def __init__(
        self,
        engine: EngineConfig,
        *,
        host: str,
        port: int,
        metrics_port: int,
        log_path: Path,
        api_key: str,
        admin_api_key: str,
        runtime: Runtime | None = None,
    ) -> None:
        # Its option ca_cert_paths does not reach the connections to its servers.
        authority = {} if engine.ca_file is None else {"SSL_CERT_FILE": engine.ca_file}
        options = http_router_options(host, port, metrics_port, engine.router_policy)
        super().__init__(
            host,
            port,
            log_path,
            engine.start_timeout_s,
            runtime,
            command=["-m", __name__],
            environment={**without_secrets(os.environ), **authority},
            secrets={"options": options, "api_key": api_key, "admin_api_key": admin_api_key},
            probe=("/workers", admin_api_key),
        )


def http_router_options(host: str, port: int, metrics_port: int, policy: str) -> dict[str, Any]:
    # Retries, deadlines and health are the client's business: it knows which weights a server has, and
    # counts a response once. So the router tries once, waits, and judges nobody.
    return {
        "host": host,
        "port": port,
        "policy": policy,
        "power_of_two_load_metric": "least_requests",
        # The only mode in which every policy may begin without servers.
        "enable_igw": True,
        # smg's metrics know no key; without a host it takes all addresses.
        "prometheus_host": "127.0.0.1",
        "prometheus_port": metrics_port,
        "disable_retries": True,
        "disable_circuit_breaker": True,
        "disable_health_check": True,
        "worker_overload_protection": False,
        "max_concurrent_requests": 0,
        "request_timeout_secs": _FOREVER_S,
        "shutdown_grace_period_secs": 1,
        "disable_tokenizer_autoload": True,
        "history_backend": "none",
        "log_level": "warn",
    }


# --- its list of servers

SERVED_BY = "x-smg-routed-worker-id"
"""Header of an answer: the URL of the server that gave it."""

_REGISTRATION_SECONDS = 20.0
_POLL_SECONDS = 0.05
_CONTROL_SECONDS = 10.0


async def routed_servers(client: HttpClient) -> dict[str, str]:
    """The router's id of each server that it sends requests to, by URL."""
    answer = await client.request("GET", "/workers", admin=True, timeout_s=_CONTROL_SECONDS)
    return {worker["url"].rstrip("/"): worker["id"] for worker in orjson.loads(answer)["workers"]}


async def set_servers(client: HttpClient, wanted: Mapping[str, str | None]) -> None:
    """Make the router's list of servers equal to ``wanted``, URLs with their API keys; returns when it is.

    Raises EngineLostError where a server doesn't get on the list in time, which needs its answer to the router.
    """
    present = await routed_servers(client)
    await remove_servers(client, [url for url in present if url not in wanted])
    for url in wanted.keys() - present.keys():
        body = {"url": url, "api_key": wanted[url], "models": [{"id": ROUTED_MODEL}]}
        await _control_once(client, "POST", "/workers", orjson.dumps(body), done=409)
    clock = asyncio.get_running_loop().time
    deadline = clock() + _REGISTRATION_SECONDS
    while (present := await routed_servers(client)).keys() != wanted.keys():
        if clock() > deadline:
            raise EngineLostError(
                f"{client.url}: the router serves from {sorted(present)} after {_REGISTRATION_SECONDS:.0f} s"
            )
        await asyncio.sleep(_POLL_SECONDS)


async def remove_servers(client: HttpClient, urls: Sequence[str]) -> None:
    """Have the router send nothing more to these servers. What they have in work goes on."""
    present = await routed_servers(client)
    for url in urls:
        if url in present:
            await _control_once(client, "DELETE", f"/workers/{present[url]}", done=404)


async def _control_once(
    client: HttpClient, method: Method, path: str, body: bytes | None = None, *, done: int
) -> None:
    """``done``: what the router answers where another rank was faster."""
    try:
        await client.request(method, path, body, admin=True, timeout_s=_CONTROL_SECONDS)
    except EngineRequestError as error:
        if error.status != done:
            raise


# --- a connection that survives it: it may come back at another address without servers

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_WATCH_SECONDS = 5.0


class HttpRouterLink:
    """Finds the HTTP router, keeps its list of servers current, and notices when it is lost.

    Args:
        find: where the router is published now, and its keys; None while there is none.
        registers: this client tells the router of the servers; other clients of a run wait until it knows them.

    ``usable``: calls may go through it.
    """

    def __init__(self, find: Callable[[], tuple[Server, Keys] | None], *, registers: bool) -> None:
        self._find = find
        self._registers = registers
        self._client: HttpClient | None = None
        self._wanted: dict[str, str | None] = {}
        self._announced: Server | None = None
        self.server: Server | None = None
        self.usable = False

    @property
    def url(self) -> str:
        return self.server.url if self.server is not None else "the router"

    async def serve(self, servers: Mapping[str, str | None]) -> None:
        """Have it send calls to ``servers``, URLs with their API keys; it is ``usable`` where that worked."""
        self._wanted = dict(servers)
        self.usable = False
        await self._connect()

    async def remove(self, url: str) -> None:
        self._wanted.pop(url, None)
        if self._client is not None:
            try:
                await remove_servers(self._client, [url])
            except (EngineLostError, EngineRequestError) as error:
                log.info("the router was not told of a lost server: %s", error)

    async def generate(self, body: bytes) -> Answer:
        """The answer of the server that the router chose, or the router's own. Raises EngineLostError."""
        if self._client is None:
            raise EngineLostError("there is no router")
        return await self._client.exchange("POST", "/generate", body, timeout_s=None)

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
        asked_s = last_life = clock()
        while True:
            await asyncio.sleep(min(_RETRY_SECONDS, pause))
            if not self.usable:
                await self._connect()
                asked_s = last_life = clock()
            elif clock() >= asked_s + pause and self._client is not None:
                asked_s = clock()
                if await self._client.is_ok("/liveness", hang_timeout_s / 2):
                    last_life = clock()
                elif clock() - last_life > hang_timeout_s:
                    on_lost(self, f"{self.url}: silent for {clock() - last_life:.0f} s")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None
        self.usable = False

    async def _connect(self) -> None:
        """Find the router and have it know our servers; ``usable`` where both worked."""
        # The supervisor, which starts the router, needs none of numpy, which this module loads.
        from megatron_dppo.engine.client import HttpClient

        router = self._find()
        if router is None:
            return
        server, keys = router
        if server != self.server or self._client is None:
            await self.close()
            self.server, self._client = server, HttpClient(server.url, keys.api, keys.admin)
        try:
            if self._registers:
                await set_servers(self._client, self._wanted)
            self.usable = self._wanted.keys() == (await routed_servers(self._client)).keys()
        except (EngineLostError, EngineRequestError) as error:
            log.info("the router at %s is not in order yet: %s", server.url, error)
        if self.usable and server != self._announced:
            self._announced = server
            log.info("generating through the router at %s", server.url)


def main() -> None:
    """Be the router; dies with the parent's thread that started it."""
    from smg.launch_router import launch_router
    from smg.router_args import RouterArgs

    hide_secrets()
    start = json.load(sys.stdin)
    print(json.dumps(start["options"]), flush=True)
    admin = ("trainer", "trainer", start["admin_api_key"], "admin")
    launch_router(
        RouterArgs(**start["options"], api_key=start["api_key"], control_plane_api_keys=[admin])
    )


if __name__ == "__main__":
    main()
