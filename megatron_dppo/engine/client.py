"""Asynchronous HTTP clients: HttpClient for any server, EngineClient for generation and state of one SGLang server.

EngineRequestError (4xx) means that the request is wrong. EngineLostError (5xx, a broken connection, no answer in time)
means that the server failed. AbortedError means that the server ended a single response. The clients retry nothing.
Blocking code calls the clients' coroutines through ``system.async_runner.AsyncRunner``. The module loads neither torch
nor sglang.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Self

import aiohttp
import orjson

from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.answer_parsing import AnswerParser, ReceivedAnswer
from megatron_dppo.engine.errors import EngineAnswerError, EngineLostError, EngineRequestError
from megatron_dppo.engine.protocol import GenerationRequest, request_body, request_ids
from megatron_dppo.engine.server.recordings import ROUTE, Notice, Way, gone_error
from megatron_dppo.system.secret_variables import redact

Method = Literal["GET", "POST", "DELETE"]

CONTROL_TIMEOUT_S = 60.0
"""Longest wait for an answer that needs neither weights nor generation."""
_KEEP_ALIVE_SECONDS = 3.0
"""An idle connection is kept for this time. It is less than 5 s, because a stock SGLang closes it after 5 s."""
_CONNECT_SECONDS = 30.0
_READY_S = 10.0
_PIECE_BYTES = 1 << 20
"""Bytes of a download that are read at once."""
_FIRST_ERROR = 300
"""The lowest status that is an error. The clients follow no redirects, so 3xx is an error too."""
_JSON = {"Content-Type": "application/json"}
_DOWNLOAD_S = 120.0
_WATCH_SECONDS = 5.0
"""Longest pause between two checks of ``watch``."""
_LATE_SECONDS = 1.5
"""If a timer is this late, this process was stopped in between; on a busy machine timers are less late."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """A server's whole answer to one request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_error(self) -> bool:
        """Whether the status is 300 or more."""
        return self.status >= _FIRST_ERROR

    @property
    def reason(self) -> str:
        """The error message in the body, in any of the forms that servers use, or else the body's text."""
        error = self._error()
        if error is None:
            return self.body[:500].decode(errors="replace")
        if isinstance(error, dict):
            error = error.get("message", error)
        return str(error)[:500]

    @property
    def code(self) -> str:
        """The error code in a router's answer; empty if the answer has no code."""
        error = self._error()
        if isinstance(error, dict):
            return str(error.get("code", ""))
        return ""

    def _error(self) -> Any:
        """Return the entry ``error`` of the body's JSON object, or else the body's JSON; None for other bodies."""
        try:
            answer = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None
        if isinstance(answer, dict):
            return answer.get("error", answer)
        return answer


class HttpClient:
    """Sends requests to one server, from one event loop; ``close`` it, or use ``async with``.

    Args:
        url: the server's address; its path is a prefix of the path of every request.
        api_key: key for generation and information.
        admin_api_key: key for requests that change the server. A server with an admin key rejects the API key for these
            requests. None: the API key is sent with all requests.
        ca_file: PEM file of the trusted certificate authorities for https; None: the system's authorities.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._keys = (api_key, admin_api_key)
        self._api_headers = _bearer(api_key)
        self._admin_headers = _bearer(admin_api_key or api_key)
        self._ca_file = ca_file
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the server aborts the requests in flight on them."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def exchange(
        self,
        method: Method,
        path: str,
        body: bytes | None = None,
        *,
        admin: bool = False,
        timeout_s: float | None = CONTROL_TIMEOUT_S,
    ) -> Answer:
        """Return the answer with any status. Raises EngineLostError after ``timeout_s``; None: no limit."""
        headers = self._admin_headers if admin else self._api_headers
        if body is not None:
            headers = headers | _JSON
        async with self._open(method, path, headers, timeout_s, body) as answer:
            return await self._read(answer)

    @asynccontextmanager
    async def _open(
        self,
        method: Method,
        path: str,
        headers: Mapping[str, str],
        timeout_s: float | None,
        body: bytes | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer after its headers. Raises EngineLostError if the connection breaks in the block."""
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._open_session().request(
                method,
                self.url + path,
                data=body,
                headers=headers,
                timeout=limits,
                allow_redirects=False,
            ) as answer:
                yield answer
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
        timeout_s: float | None = CONTROL_TIMEOUT_S,
    ) -> bytes:
        """Return the body of a 2xx answer.

        Raises:
            EngineLostError: no answer in time, or a 5xx.
            EngineRequestError: any other status, with the server's reason.
        """
        answer = await self.exchange(method, path, body, admin=admin, timeout_s=timeout_s)
        self._check(path, answer)
        return answer.body

    async def download(self, path: str, size: int, *, timeout_s: float) -> bytes:
        """Return the body of a GET. The body must have ``size`` bytes; a longer body is not read to its end.

        Raises the errors of ``request``, and EngineAnswerError for another number of bytes.
        """
        async with self._open("GET", path, self._api_headers, timeout_s) as answer:
            if answer.status >= _FIRST_ERROR:
                self._check(path, await self._read(answer))
            content = bytearray()
            async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                content += piece
                if len(content) > size:
                    break
        if len(content) != size:
            count = "more" if len(content) > size else str(len(content))
            raise EngineAnswerError(f"{self.url}{path}: {count} bytes, expected {size}")
        return bytes(content)

    async def _read(self, answer: aiohttp.ClientResponse) -> Answer:
        """Read the whole answer. Remove this client's keys from an error's body, because messages quote the body."""
        body = await answer.read()
        if answer.status >= _FIRST_ERROR:
            text = body.decode(errors="surrogateescape")
            body = redact(text, self._keys).encode(errors="surrogateescape")
        return Answer(answer.status, answer.headers, body)

    def _check(self, path: str, answer: Answer) -> None:
        """Raise EngineLostError for a 5xx, EngineRequestError for any other error status."""
        if not answer.is_error:
            return
        message = f"{self.url}{path} answered {answer.status}: {answer.reason}"
        if answer.status >= 500:
            raise EngineLostError(message)
        raise EngineRequestError(answer.status, message)

    async def get_json(self, path: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """Return the JSON object in an information endpoint's answer.

        Raises the errors of ``request``, and EngineAnswerError if the answer is no JSON object.
        """
        return self._json_object(path, await self.request("GET", path, timeout_s=timeout_s))

    async def control(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = CONTROL_TIMEOUT_S,
    ) -> bytes:
        """Send a POST with the admin key to an endpoint that changes the server; return the body of the answer."""
        content = orjson.dumps(body or {})
        return await self.request("POST", path, content, admin=True, timeout_s=timeout_s)

    async def control_json(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Send a POST as ``control`` does; return the JSON object in the answer."""
        return self._json_object(path, await self.control(path, body, timeout_s=timeout_s))

    async def is_answering(self, timeout_s: float = 10.0) -> bool:
        """Whether an SGLang server answers in time; an error status counts as an answer.

        ``/health`` is not suitable: on a stock server it generates a token, and a paused server generates no token.
        """
        return await self._is_answered("/model_info", timeout_s)

    async def is_scheduling(self, timeout_s: float = 10.0) -> bool:
        """Whether a server's scheduler answers in time.

        A paused scheduler answers. A stopped or hung scheduler does not answer. ``is_answering`` cannot find this out:
        the HTTP process answers its request without the scheduler.
        """
        return await self._is_answered("/server_info", timeout_s)

    async def is_ok(self, path: str, timeout_s: float) -> bool:
        """Whether a GET is answered with 2xx in time."""
        try:
            await self.request("GET", path, timeout_s=timeout_s)
        except (EngineLostError, EngineRequestError):
            return False
        return True

    async def _is_answered(self, path: str, timeout_s: float) -> bool:
        try:
            await self.request("GET", path, timeout_s=timeout_s)
        except EngineRequestError:
            return True
        except EngineLostError:
            return False
        return True

    def _json_object(self, path: str, text: bytes) -> dict[str, Any]:
        """Return the JSON object in an answer's ``text``. Raises EngineAnswerError for anything else."""
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            excerpt = text[:200].decode(errors="replace")
            raise EngineAnswerError(f"{self.url}{path}: answered no JSON object: {excerpt!r}")
        return value

    def _open_session(self) -> aiohttp.ClientSession:
        """Return the session, made at the first request: aiohttp makes sessions inside an event loop only."""
        if self._session is None:
            certificates: ssl.SSLContext | bool = True
            if self.url.startswith("https:"):
                certificates = ssl.create_default_context(cafile=self._ca_file)
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS, ssl=certificates
            )
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session


def _bearer(key: str | None) -> dict[str, str]:
    if key is None:
        return {}
    return {"Authorization": f"Bearer {key}"}


class EngineClient(HttpClient):
    """Generates on one SGLang server, and queries its state; see HttpClient for keys and errors.

    ``parser`` parses the server's answers.
    """

    _last_life = 0.0
    """The event loop's time when the server last showed life."""
    _has_answered = False
    """Whether the server has answered a request since this client was made."""
    first_answer_s: float = 0.0
    """Time limit in seconds of the first answer, if it is longer than the limit of later answers."""
    is_paused = False
    """Set by the code that pauses the server. ``watch`` does not test a paused server: it generates nothing."""
    _ways: frozenset[Way] = frozenset()
    """The ways in which recordings arrived, as last logged. A new way causes a new log message."""
    parser = AnswerParser(smallest=None)

    async def generate(
        self,
        requests: Sequence[GenerationRequest],
        rid: str,
        versions: range | None = None,
        adapter: str | None = None,
    ) -> list[Trajectory]:
        """Sample ``requests`` in one call with the id ``rid``, without a time limit.

        Raises AbortedError, EngineAnswerError, StaleWeightsError and the errors of ``request``.

        Args:
            requests: the requests of the call.
            rid: a new id that is no prefix of another id, because SGLang aborts all ids with a given prefix.
            versions: the weight versions that may have sampled the tokens; None: any.
            adapter: the name of the engine's adapters to sample with; None: the model without adapters.
        """
        return await self.parse(await self.answer(requests, rid, adapter), requests, versions)

    async def answer(
        self, requests: Sequence[GenerationRequest], rid: str, adapter: str | None = None
    ) -> bytes:
        """Return the body of the server's answer to a generate call. Raises the errors of ``request``."""
        body = request_body(requests, rid, adapter=adapter)
        payload = await self.request("POST", "/generate", body, timeout_s=None)
        self.note_answer()
        return payload

    async def parse(
        self, payload: bytes, requests: Sequence[GenerationRequest], versions: range | None = None
    ) -> list[Trajectory]:
        """Return the trajectories in an answer to one call. Download recordings that are not in this host's memory.

        Raises AbortedError, EngineAnswerError, StaleWeightsError and the errors of ``request``.
        """
        received = ReceivedAnswer(payload, requests, versions, {})
        parsed = await self.parser.parse(received)
        if parsed.missing:
            contents: dict[str, bytes] = {}
            for notice in parsed.missing:
                contents[notice.id] = await self.fetch_recording(notice)
            parsed = await self.parser.parse(received._replace(downloaded=contents))
        if parsed.ways - self._ways:
            self._ways = parsed.ways
            log.info("%s: recorded routing comes through %s", self.url, " and ".join(parsed.ways))
        return parsed.trajectories

    async def fetch_recording(self, notice: Notice) -> bytes:
        """Download a recording from the server's host, then have the server delete it.

        Raises AbortedError if it no longer exists, EngineAnswerError for another number of bytes, and the errors of
        ``request``.
        """
        path = f"{ROUTE}/{notice.id}"
        try:
            content = await self.download(path, notice.size, timeout_s=_DOWNLOAD_S)
        except EngineRequestError as error:
            if error.status == 404:
                raise gone_error(notice, self.url) from error
            raise
        with contextlib.suppress(EngineLostError, EngineRequestError):
            await self.request("DELETE", path)
        return content

    async def offers_recordings(self) -> bool:
        """Whether the server stores recordings in files. Such a server accepts the deletion of an unknown recording."""
        unknown_id = "0" * 32
        answer = await self.exchange("DELETE", f"{ROUTE}/{unknown_id}")
        return answer.status == 204

    async def abort(self, rid: str, count: int = 1) -> None:
        """Abort the call ``rid`` of ``count`` requests; its caller gets AbortedError. Unknown ids are ignored."""
        ids = request_ids(rid, count)
        await asyncio.gather(*(self.control("/abort_request", {"rid": i}) for i in ids))

    async def abort_all(self, timeout_s: float) -> None:
        """Abort every call of every client, except calls that have not reached the scheduler yet."""
        await self.control("/abort_request", {"abort_all": True}, timeout_s=timeout_s)

    async def health(self, timeout_s: float = 10.0) -> bool:
        """Whether the server answers ``/health`` with 200 in time. This request needs no key."""
        return await self.is_ok("/health", timeout_s)

    async def is_generating(self, timeout_s: float = 30.0) -> bool:
        """Whether the server generates a token in time, for any request. An idle server samples a token for this test.

        ``/health`` is not suitable: on the servers of ``launch_server`` the HTTP process answers it even if the
        scheduler hangs. A paused server fails the test of this method.
        """
        return await self.is_ok("/health_generate", timeout_s)

    def note_life(self) -> None:
        """Note that the server shows life now; ``watch`` measures its silence from here."""
        self._last_life = asyncio.get_running_loop().time()

    def note_answer(self) -> None:
        """Note that a request was answered now. From now on ``first_answer_s`` does not apply."""
        self._has_answered = True
        self.note_life()

    async def watch(self, hang_timeout_s: float) -> NoReturn:
        """Watch the server, and raise EngineLostError once it has generated nothing for ``hang_timeout_s``.

        Before the first answer the limit is the longer of ``hang_timeout_s`` and ``first_answer_s``. Requests
        themselves have no limit: a stopped process keeps its connections open, so that requests to it would wait for
        ever.
        """
        pause = min(_WATCH_SECONDS, hang_timeout_s / 4)
        clock = asyncio.get_running_loop().time

        def is_late(start: float, expected_s: float) -> bool:
            """Whether this process itself was stopped since ``start``: then silence says nothing about the server."""
            return clock() > start + expected_s + max(pause, _LATE_SECONDS)

        self._last_life = clock()
        while True:
            limit = hang_timeout_s
            if not self._has_answered:
                limit = max(hang_timeout_s, self.first_answer_s)
            sleep_start = clock()
            sleep_s = min(pause, max(self._last_life + limit - sleep_start, 0))
            await asyncio.sleep(sleep_s)
            if self.is_paused or is_late(sleep_start, sleep_s):
                self.note_life()
                continue
            silent_s = clock() - self._last_life
            if silent_s >= limit:
                raise EngineLostError(f"{self.url}: nothing generated for {silent_s:.0f} s")
            if silent_s > pause:
                # Request a token, to find out whether the server hangs or only has nothing to generate.
                probe_start = clock()
                # Before the first answer, ``limit`` may be longer than ``hang_timeout_s``. A probe waits at most
                # ``hang_timeout_s``.
                probe_s = min(limit - silent_s, hang_timeout_s)
                is_generating = await self.is_generating(probe_s)
                # The server may have been paused while the probe waited.
                if is_generating or self.is_paused or is_late(probe_start, probe_s):
                    self.note_life()

    async def generates_again(self, timeout_s: float) -> bool:
        """Resume a paused server, test whether it generates a token in time, and pause it again."""
        try:
            await self.control("/continue_generation", timeout_s=timeout_s)
            generated = await self.is_generating(timeout_s)
            await self.control("/pause_generation", {"mode": "in_place"}, timeout_s=timeout_s)
        except (EngineLostError, EngineRequestError):
            return False
        return generated

    async def ready(self) -> bool:
        """Whether the server processes new requests. A paused server holds new requests back."""
        try:
            await self.request("GET", "/ready", timeout_s=_READY_S)
        except EngineLostError:
            return False
        return True
