"""Asynchronous HTTP client of an SGLang server, or of the HTTP router before several.

It keeps connections open between calls, bounds each call in time, and retries nothing. Code that
blocks calls it through ``system.async_runner.AsyncRunner``. Loads neither torch nor sglang.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Self

import aiohttp
import orjson

from megatron_dppo.engine.errors import EngineAnswerError, EngineLostError, EngineRequestError

Method = Literal["GET", "POST", "DELETE"]

CONTROL_TIMEOUT_S = 60.0
"""Longest wait for an answer that needs neither weights nor generation."""
_KEEP_ALIVE_SECONDS = 3.0  # below the 5 s after which a stock SGLang closes an idle connection
_CONNECT_SECONDS = 30.0
_PIECE_BYTES = 1 << 20
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


class HttpClient:
    """Requests to the server at ``url``, from one event loop; ``close`` it, or use ``async with``.

    Args:
        url: base URL; a path in it comes before the path of every request.
        api_key: opens generation and information.
        admin_api_key: opens whatever changes the server (SGLang refuses the API key there once an
            admin key is set). A server without one takes the API key for both.
        ca_file: PEM file of the authorities whose certificates are trusted, where ``url`` has https;
            None: the system's.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._api_headers = _bearer(api_key)
        self._admin_headers = _bearer(admin_api_key or api_key)
        self._ca_file = ca_file
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the server aborts what was in flight on them."""
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
                allow_redirects=False,
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
        timeout_s: float | None = CONTROL_TIMEOUT_S,
    ) -> bytes:
        """The body of a 2xx answer.

        Raises:
            EngineLostError: no answer in time, or a 5xx.
            EngineRequestError: any other status, with the server's reason.
        """
        answer = await self.exchange(method, path, body, admin=admin, timeout_s=timeout_s)
        if answer.status >= 300:
            self._raise(path, answer)
        return answer.body

    async def download(self, path: str, size: int, *, timeout_s: float) -> bytes:
        """The ``size`` bytes that a GET answers, read in pieces and no further.

        Raises what ``request`` raises, and EngineAnswerError for another number of bytes.
        """
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._open_session().get(
                self.url + path, headers=self._api_headers, timeout=limits, allow_redirects=False
            ) as answer:
                if answer.status >= 300:
                    reason = Answer(answer.status, answer.headers, await answer.read())
                    self._raise(path, reason)
                content = bytearray()
                async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                    content += piece
                    if len(content) > size:
                        break
        except TimeoutError as error:
            raise EngineLostError(f"{self.url}{path}: no answer within {timeout_s} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineLostError(f"{self.url}{path}: {error or type(error).__name__}") from error
        if len(content) != size:
            found = "more" if len(content) > size else str(len(content))
            raise EngineAnswerError(f"{self.url}{path}: {found} bytes, expected {size}")
        return bytes(content)

    def _raise(self, path: str, answer: Answer) -> NoReturn:
        """The error for an answer that is no 2xx."""
        what = f"{self.url}{path} answered {answer.status}: {answer.reason}"
        if answer.status >= 500:
            raise EngineLostError(what)
        raise EngineRequestError(answer.status, what)

    async def get_json(self, path: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """The JSON object that an information endpoint answers.

        Raises what ``request`` raises, and EngineAnswerError for anything but a JSON object.
        """
        return self._object(path, await self.request("GET", path, timeout_s=timeout_s))

    async def control(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = CONTROL_TIMEOUT_S,
    ) -> bytes:
        """The raw answer of an endpoint that changes the server: POST, under the admin key."""
        return await self.request(
            "POST", path, orjson.dumps(body or {}), admin=True, timeout_s=timeout_s
        )

    async def control_json(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> dict[str, Any]:
        """As ``control``, where the answer must be a JSON object."""
        return self._object(path, await self.control(path, body, timeout_s=timeout_s))

    async def answers(self, timeout_s: float = 10.0) -> bool:
        """Whether an SGLang server answers at all in time, be it with a refusal.

        A stock server's ``/health`` generates a token, so that a paused one fails it.
        """
        try:
            await self.request("GET", "/model_info", timeout_s=timeout_s)
        except EngineRequestError:
            return True
        except EngineLostError:
            return False
        return True

    async def schedules(self, timeout_s: float = 10.0) -> bool:
        """Whether a server's scheduler answers in time, which ``answers`` can't tell: the process that
        speaks HTTP answers it by itself. A paused scheduler does, a stopped or hung one doesn't.
        """
        try:
            await self.request("GET", "/server_info", timeout_s=timeout_s)
        except EngineRequestError:
            return True
        except EngineLostError:
            return False
        return True

    def _object(self, path: str, text: bytes) -> dict[str, Any]:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            shown = text[:200].decode(errors="replace")
            raise EngineAnswerError(f"{self.url}{path}: answered no JSON object: {shown!r}")
        return value

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=_KEEP_ALIVE_SECONDS,
                ssl=ssl.create_default_context(cafile=self._ca_file)
                if self.url.startswith("https:")
                else True,
            )
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}
