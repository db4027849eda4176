"""Small real HTTP servers with the routes of SGLang and smg that a FleetClient calls."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import Counter
from collections.abc import Callable

import aiohttp
from aiohttp import web

from megatron_dppo.fleet.membership import Member
from megatron_dppo.fleet.record import Keys, Server

KEYS = Keys("user", "admin")


class SmallServer:
    """Answers every request with the first token of its prompt. Tests change its behaviour by attributes.

    ``silent``: the server receives requests and does not answer them, as a stopped process. Only an abort of all
    requests ends them, with two tokens each. ``deaf``: the paths that are silent, as those of an HTTP process whose
    scheduler or detokenizer is stopped. ``refuses``: generation is answered with 400. ``info``: status and text of
    ``/server_info`` and ``/model_info``. ``versions``: the weight versions of first tokens for which it is not
    ``version``. ``dies_of``: whether a prompt with this first token ends the server. ``asked`` counts calls by path,
    ``answered`` counts answers by first token, and ``adapters`` has the adapters that requests named."""

    def __init__(self, name: str, version: int = 1, delay_s: float = 0.0) -> None:
        self.name = name
        self.version = version
        self.versions: dict[int, str] = {}
        self.delay_s = delay_s
        self.silent = False
        self.refuses = False
        self.dies_of: Callable[[int], bool] = lambda token: False
        self._dying: asyncio.Task[None] | None = None
        self.deaf: set[str] = set()
        self.info: dict[str, tuple[int, str]] = {}
        self.asked: Counter[str] = Counter()
        self.answered: Counter[int] = Counter()
        self.adapters: set[str | None] = set()
        self.aborted: list[str] = []
        self.aborts = 0
        self._runner: web.AppRunner | None = None

    @property
    def member(self) -> Member:
        return Member(Server(self.name, self.url, 1, 17), KEYS)

    async def start(self) -> SmallServer:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_get("/health_generate", self._health)
        app.router.add_post("/continue_generation", self._receive_order)
        app.router.add_post("/pause_generation", self._receive_order)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/model_info", self._info)
        await self._serve(app)
        return self

    async def _receive_order(self, request: web.Request) -> web.Response:
        await self._wait_while_silent(request.path)
        self.asked[request.path] += 1
        return web.json_response({})

    async def _info(self, request: web.Request) -> web.Response:
        await self._wait_while_silent(request.path)
        self.asked[request.path] += 1
        status, text = self.info.get(request.path, (404, "not found"))
        return web.Response(status=status, text=text)

    async def _serve(self, app: web.Application) -> None:
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def die(self) -> None:
        """Abort every connection and stop listening."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            for connection in list(runner.server.connections if runner.server else []):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    async def _wait_while_silent(self, path: str = "") -> None:
        while self.silent or path in self.deaf:
            await asyncio.sleep(0.01)

    async def _health(self, request: web.Request) -> web.Response:
        await self._wait_while_silent(request.path)
        self.asked[request.path] += 1
        return web.Response()

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all"):
            while request.path in self.deaf:
                await asyncio.sleep(0.01)
            self.aborts += 1
            return web.json_response({})
        await self._wait_while_silent()
        self.aborted.append(body["rid"])
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        if request.headers["Authorization"] != f"Bearer {KEYS.api}":
            return web.json_response({"error": "no"}, status=401)
        if self.refuses:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        body = await request.json()
        self.adapters.add(body.get("lora_path"))
        shared = isinstance(body["input_ids"][0], list)
        prompts = body["input_ids"] if shared else [body["input_ids"]]
        if any(self.dies_of(prompt[0]) for prompt in prompts):
            self._dying = self._dying or asyncio.create_task(self.die())
            await asyncio.sleep(60)
        await asyncio.sleep(self.delay_s)
        before = self.aborts
        while self.silent and self.aborts == before:
            await asyncio.sleep(0.01)
        self.answered.update(prompt[0] for prompt in prompts)
        answers = [self._answer(prompt[0], aborted=self.aborts > before) for prompt in prompts]
        return web.json_response(answers if shared else answers[0])

    def _answer(self, token: int, *, aborted: bool = False) -> dict:
        count = 2 if aborted else 1
        version = self.versions.get(token, str(self.version))
        meta = {
            "finish_reason": {"type": "abort" if aborted else "stop"},
            "output_token_logprobs": [[-1.0, token, None]] * count,
            "weight_versions": [{"version": version, "start": 0, "end": count}],
        }
        return {"text": self.name, "output_ids": [token] * count, "meta_info": meta}


class SmallRouter(SmallServer):
    """Sends requests to its servers in turn, and answers with smg's errors for servers that are gone."""

    def __init__(self, incarnation: int = 1) -> None:
        super().__init__("router")
        self.incarnation = incarnation
        self.workers: dict[str, str] = {}
        self._turns = itertools.count()

    @property
    def server(self) -> Server:
        return Server("router", self.url, self.incarnation, 18)

    async def start(self) -> SmallRouter:
        app = web.Application()
        app.router.add_post("/generate", self._route)
        app.router.add_get("/liveness", self._health)
        app.router.add_get("/workers", self._list)
        app.router.add_post("/workers", self._add)
        app.router.add_delete("/workers/{id}", self._remove)
        await self._serve(app)
        return self

    async def _route(self, request: web.Request) -> web.Response:
        await self._wait_while_silent()
        body = await request.read()
        if (await request.json())["model"] != "policy":
            return web.json_response({"error": {"code": "missing_model"}}, status=400)
        if not self.workers:
            error = {"code": "no_available_workers", "message": "All workers are unavailable"}
            return web.json_response({"error": error}, status=503)
        url = list(self.workers.values())[next(self._turns) % len(self.workers)]
        headers = {"Authorization": f"Bearer {KEYS.api}"}
        try:
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.post(f"{url}/generate", data=body) as answer,
            ):
                text, status = await answer.read(), answer.status
        except aiohttp.ClientError:
            message = f"error sending request for url ({url}/generate)"
            error = {"code": "call_upstream_connection_failed", "message": message}
            return web.json_response({"error": error}, status=500)
        worker_header = {"x-smg-routed-worker-id": url}
        return web.Response(
            body=text, status=status, headers=worker_header, content_type="application/json"
        )

    async def _list(self, request: web.Request) -> web.Response:
        workers = [{"id": i, "url": url} for i, url in self.workers.items()]
        return web.json_response({"workers": workers})

    async def _add(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["models"] == [{"id": "policy"}]
        assert body["api_key"] == KEYS.api
        assert request.headers["Authorization"] == f"Bearer {KEYS.admin}"
        if body["url"] in self.workers.values():
            return web.json_response({"code": "WORKER_ALREADY_EXISTS"}, status=409)
        self.workers[uuid.uuid4().hex] = body["url"]
        return web.json_response({}, status=202)

    async def _remove(self, request: web.Request) -> web.Response:
        url = self.workers.pop(request.match_info["id"], None)
        return web.json_response({}, status=404 if url is None else 202)
