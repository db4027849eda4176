"""Blocking calls of one SGLang server's control endpoints, each bounded in time."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from megatron_dppo.engine.errors import EngineAnswerError, EngineLostError, EngineRequestError

CONTROL_TIMEOUT_S = 60.0
_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
"""By the URL's scheme: an https engine never sees a key in clear text."""
_CONNECTION_SLACK_S = 10.0


class EngineControl:
    """A server at ``url``. GET calls carry ``api_key``, POST calls ``admin_api_key`` if there is one.

    Every method raises EngineLostError where the server doesn't answer in time, EngineRequestError
    where it refuses, and EngineAnswerError where the answer is no JSON object.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, admin_api_key: str | None = None
    ) -> None:
        self.url = url
        self._keys = {"GET": api_key, "POST": admin_api_key or api_key}
        self._user_key = api_key

    def get(self, path: str, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """The answer to GET ``path``."""
        return self._object(path, self.call("GET", path, None, timeout_s))

    def post(
        self, path: str, body: Mapping[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        """The answer to POST ``path``."""
        return self._object(path, self.call("POST", path, body, timeout_s))

    def ask(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        """The JSON answer to a POST that any user may make, not only an administrator."""
        text = self.call("POST", path, body, timeout_s, key=self._user_key)
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise EngineAnswerError(f"{self.url}{path}: no JSON: {text[:200]!r}") from error

    def answers(self, timeout_s: float) -> bool:
        """Whether the server answers at all within ``timeout_s``."""
        try:
            self.call("GET", "/model_info", None, timeout_s, slack_s=0)
        except (EngineLostError, EngineRequestError):
            return False
        return True

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        *,
        slack_s: float = _CONNECTION_SLACK_S,
        key: str | None = None,
    ) -> str:
        """The text of a 200 answer."""
        place = urlsplit(self.url)
        connect = _CONNECTIONS[place.scheme]
        connection = connect(place.hostname or "", place.port, timeout=timeout_s + slack_s)
        headers = {"Content-Type": "application/json"}
        if key := key or self._keys[method]:
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(
                method,
                place.path.rstrip("/") + path,
                None if body is None else json.dumps(body),
                headers,
            )
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise EngineLostError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if answer.status >= 500:
            raise EngineLostError(f"{self.url}{path}: HTTP {answer.status}: {text[:500]}")
        if answer.status != 200:
            raise EngineRequestError(
                answer.status, f"{self.url}{path}: HTTP {answer.status}: {text[:500]}"
            )
        return text

    def _object(self, path: str, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise EngineAnswerError(f"{self.url}{path}: answered no JSON object: {text[:200]!r}")
        return value
