"""Asynchronous client of one SGLang server: kept-alive connections, and three kinds of failure.

EngineRequestError (4xx): the request is wrong; EngineLostError (5xx, a broken connection, no answer
in time): the server is; AbortedError: only this response is. Nothing is retried here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Self

import aiohttp
import orjson

from megatron_dppo.engine.errors import EngineLostError, EngineRequestError
from megatron_dppo.engine.protocol import parse_answers, request_body, request_ids
from megatron_dppo.engine.requests import GenerationRequest, GenerationResult

Method = Literal["GET", "POST", "DELETE"]
PauseMode = Literal["abort", "retract", "in_place"]

_KEEP_ALIVE_SECONDS = 3.0  # below the 5 s after which a stock SGLang closes an idle connection
_CONTROL_TIMEOUT_SECONDS = 60.0
_CONNECT_SECONDS = 30.0
_WATCH_SECONDS = 5.0
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Answer:
    """What a server answered, whatever its status."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def reason(self) -> str:
        """The server's message, out of one of the shapes in which it comes, or else the text."""
        error = self._error()
        if error is None:
            return self.body[:500].decode(errors="replace")
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]

    @property
    def code(self) -> str:
        """The word by which a router says what is wrong; empty where there is none."""
        error = self._error()
        return str(error.get("code", "")) if isinstance(error, dict) else ""

    def _error(self) -> Any:
        try:
            answer = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None
        return answer.get("error", answer) if isinstance(answer, dict) else answer


class EngineClient:
    """Requests to the server at ``url``, from one event loop; ``close`` it, or use ``async with``.

    ``api_key`` opens generation and information, ``admin_api_key`` whatever changes the server
    (SGLang refuses the API key there once an admin key is set). A server without an admin key takes
    the API key for both.
    """

    def __init__(
        self, url: str, api_key: str | None = None, admin_api_key: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._api_headers = _bearer(api_key)
        self._admin_headers = _bearer(admin_api_key or api_key)
        self._session: aiohttp.ClientSession | None = None
        self._last_life = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the server aborts what was in flight on them."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- transport

    async def exchange(
        self,
        method: Method,
        path: str,
        body: bytes | None = None,
        *,
        admin: bool = False,
        timeout_s: float | None = _CONTROL_TIMEOUT_SECONDS,
    ) -> Answer:
        """The answer of any status; ``timeout_s`` None waits for ever. Raises EngineLostError where
        none comes in time.
        """
        headers = self._admin_headers if admin else self._api_headers
        try:
            async with self._open_session().request(
                method,
                self.url + path,
                data=body,
                headers=headers | _JSON if body is not None else headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_SECONDS),
            ) as answer:
                return Answer(answer.status, answer.headers, await answer.read())
        except TimeoutError as error:
            limit = _CONNECT_SECONDS if timeout_s is None else timeout_s
            raise EngineLostError(f"{self.url}{path}: no answer within {limit} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineLostError(f"{self.url}{path}: {error or type(error).__name__}") from error

    async def request(
        self,
        method: Method,
        path: str,
        body: bytes | None = None,
        *,
        admin: bool = False,
        timeout_s: float | None = _CONTROL_TIMEOUT_SECONDS,
    ) -> bytes:
        """The body of a 2xx answer.

        Raises EngineRequestError for a 4xx, EngineLostError for a 5xx or none in time.
        """
        answer = await self.exchange(method, path, body, admin=admin, timeout_s=timeout_s)
        if answer.status >= 400:
            what = f"{self.url}{path} answered {answer.status}: {answer.reason}"
            if answer.status >= 500:
                raise EngineLostError(what)
            raise EngineRequestError(answer.status, what)
        return answer.body

    async def get_json(self, path: str, *, timeout_s: float = _CONTROL_TIMEOUT_SECONDS) -> Any:
        """Decoded answer of an information endpoint."""
        return orjson.loads(await self.request("GET", path, timeout_s=timeout_s))

    async def control(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = _CONTROL_TIMEOUT_SECONDS,
    ) -> bytes:
        """The raw answer of an endpoint that changes the server: POST, under the admin key."""
        return await self.request(
            "POST", path, orjson.dumps(body or {}), admin=True, timeout_s=timeout_s
        )

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    # --- generation

    async def generate(
        self, requests: Sequence[GenerationRequest], rid: str, version: int | None = None
    ) -> list[GenerationResult]:
        """Draw ``requests`` in one call under the id ``rid``, without a time limit.

        ``rid`` must be new, and not the beginning of another: SGLang aborts by prefix. ``version``:
        the weights that it must come from. Raises AbortedError, EngineAnswerError,
        StaleWeightsError and ``request``'s errors.
        """
        payload = await self.request(
            "POST", "/generate", request_body(requests, rid), timeout_s=None
        )
        self.note_life()
        return parse_answers(payload, requests, version)

    async def abort(self, rid: str, count: int = 1) -> None:
        """End the call ``rid`` of ``count`` requests early; it raises AbortedError then. Unknown
        ids are ignored."""
        ids = request_ids(rid, count)
        await asyncio.gather(*(self.control("/abort_request", {"rid": i}) for i in ids))

    async def abort_all(self) -> None:
        """End every request of every client of this server."""
        await self.control("/abort_request", {"abort_all": True})

    # --- state

    async def health(self, timeout_s: float = 10.0) -> bool:
        """Whether the server answers ``/health`` with 200 in time; it needs no key."""
        try:
            await self.request("GET", "/health", timeout_s=timeout_s)
        except (EngineLostError, EngineRequestError):
            return False
        return True

    async def generates(self, timeout_s: float = 30.0) -> bool:
        """Whether a token was generated in time, by whatever request; a server that is idle draws one.

        ``/health`` is answered by the process that speaks HTTP: it can't see that the scheduler
        behind it hangs. A paused server fails this.
        """
        try:
            await self.request("GET", "/health_generate", timeout_s=timeout_s)
        except (EngineLostError, EngineRequestError):
            return False
        return True

    def note_life(self) -> None:
        """Something was generated just now."""
        self._last_life = asyncio.get_running_loop().time()

    async def watch(self, hang_timeout_s: float) -> NoReturn:
        """Raises EngineLostError when nothing was generated for ``hang_timeout_s``.

        A stopped process keeps its connections open, so requests to it would wait for ever.
        """
        pause = min(_WATCH_SECONDS, hang_timeout_s / 4)
        clock = asyncio.get_running_loop().time
        self._last_life = clock()
        while True:
            await asyncio.sleep(pause)
            left = self._last_life + hang_timeout_s - clock()
            if left <= 0:
                raise EngineLostError(
                    f"{self.url}: nothing generated for {hang_timeout_s - left:.0f} s"
                )
            if left < hang_timeout_s - pause and await self.generates(timeout_s=left):
                self.note_life()

    async def ready(self, timeout_s: float = 10.0) -> bool:
        """Whether the server takes new requests: False while it is paused, and would hold them."""
        try:
            await self.request("GET", "/ready", timeout_s=timeout_s)
        except EngineLostError:
            return False
        return True

    async def answers(self, timeout_s: float = 10.0) -> bool:
        """Whether the server answers at all, be it with a refusal.

        A stock server's ``/health`` generates a token, so that a paused one fails it.
        """
        try:
            await self.request("GET", "/model_info", timeout_s=timeout_s)
        except EngineRequestError:
            return True
        except EngineLostError:
            return False
        return True

    async def wait_until_healthy(self, timeout_s: float, poll_s: float = 0.5) -> None:
        """Wait for ``health``. Raises EngineLostError after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not await self.health(timeout_s=min(10.0, timeout_s)):
            if loop.time() > deadline:
                raise EngineLostError(f"{self.url}: not healthy within {timeout_s:.0f} s")
            await asyncio.sleep(poll_s)

    async def server_info(self) -> dict[str, Any]:
        """The server's resolved arguments and its release (``version``)."""
        return await self.get_json("/server_info")

    async def model_info(self) -> dict[str, Any]:
        """``model_path``, ``weight_version``, ``architectures``, ..."""
        return await self.get_json("/model_info")

    async def flush_cache(self) -> None:
        """Drop every cached prefix. Raises EngineRequestError (400) while requests run."""
        await self.control("/flush_cache")

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. ``abort`` ends what runs; the others keep it for ``resume``."""
        await self.control("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after ``pause`` (SGLang's ``/continue_generation``)."""
        await self.control("/continue_generation")


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}
