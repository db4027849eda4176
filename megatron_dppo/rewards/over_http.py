"""Rewards that a server computes: a reward model behind SGLang's ``/classify``, or a judge behind chat completions.

Both rewards are asynchronous. The verifier bounds the number of concurrent requests, applies the time limit and
retries. This module sends requests, and parses and caches the answers. The responses of a group are often equal, so a
worker sends only one request for equal responses, even while the answer is pending. A broken connection, a status of
408, 429 or 5xx, and an invalid answer are RewardUnavailableErrors. Any other status means that the request itself is
wrong, and ends the run. A redirect also ends the run: its target is not the configured address, and must not set
rewards.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from megatron_dppo.data.chat import render
from megatron_dppo.data.control_tokens import ControlTokens
from megatron_dppo.data.records import DataError
from megatron_dppo.data.tokenizer import load_named_tokenizer
from megatron_dppo.rewards import RewardInput, RewardUnavailableError
from megatron_dppo.rewards.result import USABLE_NUMBER, RewardResult, is_usable
from megatron_dppo.system.network import url_fault
from megatron_dppo.system.secret_variables import redact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPORARY_STATUS = (408, 429)
_REDIRECT_STATUS = range(300, 400)
_MAX_SHOWN = 300
"""Largest number of characters of an answer or error in a message."""
_PRESENCE_S = 10.0
"""Longest wait for an answer in the check whether a server runs."""
_MAX_ANSWER_BYTES = 1 << 24
_CACHE_SIZE = 65536
"""Largest number of scores or judgements in a worker's cache."""
_PLACEHOLDER = re.compile(r"\{(prompt|response|answer)\}")
JUDGE_TEMPLATE = """\
Judge the response to the request below by how correct, helpful and honest it is.

Request:
{prompt}

Response:
{response}

Explain in one sentence, then end with a line "Score: N", N being a whole number from 0 (worthless) to 10 (perfect)."""


class JsonEndpoint:
    """A server that receives POST requests with JSON.

    ``api_key_variable`` is the environment variable with its key; None: the server needs no key. Raises ValueError for
    an invalid URL, and if the variable is not set.
    """

    def __init__(self, url: str, api_key_variable: str | None) -> None:
        fault = url_fault(url)
        if fault:
            raise ValueError(f"url: {fault}")
        self._url = url.rstrip("/")
        self._headers = {}
        self._key = ""
        if api_key_variable is not None:
            key = os.environ.get(api_key_variable)
            if not key:
                raise ValueError(
                    f"api_key_variable: {api_key_variable} is not set in the environment, expected the server's key"
                )
            self._key = key
            self._headers["Authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request and return the JSON of its answer.

        Raises ValueError if the server refuses the request, and RewardUnavailableError if there is no valid answer.
        """
        address = f"{self._url}{path}"
        if self._session is None:
            # The verifier applies the time limit.
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        try:
            async with self._session.post(address, json=body, allow_redirects=False) as answer:
                content = bytearray()
                async for piece in answer.content.iter_any():
                    content += piece
                    if len(content) > _MAX_ANSWER_BYTES:
                        raise RewardUnavailableError(
                            f"{address}: more than {_MAX_ANSWER_BYTES} bytes, expected an answer of fewer"
                        )
        except aiohttp.ClientError as error:
            raise RewardUnavailableError(
                f"{address}: {str(error) or type(error).__name__}"
            ) from error
        excerpt = self.excerpt(content.decode(errors="replace"))
        if answer.status >= 500 or answer.status in _TEMPORARY_STATUS:
            raise RewardUnavailableError(f"{address}: status {answer.status}: {excerpt}")
        if answer.status in _REDIRECT_STATUS:
            target = self.excerpt(answer.headers.get("Location", ""))
            raise ValueError(
                f"{address}: status {answer.status}, a redirect to {target!r}, which is not followed; expected the "
                "server's own address as url"
            )
        if answer.status != 200:
            raise ValueError(f"{address}: status {answer.status}: {excerpt}")
        try:
            return json.loads(content)
        # json raises RecursionError for deeply nested brackets.
        except (ValueError, RecursionError) as error:
            raise RewardUnavailableError(f"{address}: no JSON: {excerpt}") from error

    async def absence(self) -> str | None:
        """Describe why no server answers at the address within some seconds; None if a server sends any answer."""
        timeout = aiohttp.ClientTimeout(total=_PRESENCE_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self._url, allow_redirects=False),
            ):
                return None
        except TimeoutError:
            return f"no answer from {self._url} within {_PRESENCE_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"no answer from {self._url}: {str(error) or type(error).__name__}"

    def excerpt(self, answer: Any) -> str:
        """The beginning of a server's answer, for a message. A server may echo the key, so the key is replaced."""
        return self.without_key(_text_of(answer))[:_MAX_SHOWN]

    def without_key(self, text: str) -> str:
        """``text`` with the server's key replaced."""
        return redact(text, [self._key])

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _text_of(answer: Any) -> str:
    try:
        return str(answer)
    # str() fails for values that are nested too deeply, and for integers of thousands of digits.
    except (RecursionError, ValueError):
        return f"a {type(answer).__name__} that can't be shown"


class _Cache(OrderedDict[Hashable, Any]):
    """The values of the ``size`` keys that were used last, as futures: a value may be pending."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    async def values_of(
        self,
        keys: Sequence[Hashable],
        compute: Callable[[list[Hashable]], Awaitable[Sequence[Any]]],
    ) -> list[Any]:
        """The value of each key.

        ``compute`` returns the values of the keys that are not in the cache, in order. Its exception is raised in every
        caller that waits for these keys, and is not cached.
        """
        new_keys = [key for key in dict.fromkeys(keys) if key not in self]
        for key in keys:
            self[key] = self.get(key) or asyncio.get_running_loop().create_future()
            self.move_to_end(key)
        # Keep the futures of this call: the cache may drop their keys.
        futures = {key: self[key] for key in keys}
        while len(self) > self._size:
            self.popitem(last=False)
        if new_keys:
            try:
                values = dict(zip(new_keys, await compute(new_keys), strict=True))
            # Catch every exception, cancellation too: other callers must not wait for a value that never comes.
            except BaseException as error:
                failure: Exception = RewardUnavailableError("an equal request was given up")
                if isinstance(error, Exception):
                    failure = error
                for key in new_keys:
                    self.pop(key, None)
                    futures[key].set_exception(failure)
                    # Read the exception: asyncio logs an error about an exception that was never read.
                    futures[key].exception()
                raise
            for key, value in values.items():
                futures[key].set_result(value)
        # The shield keeps the future for other callers if this caller is cancelled.
        return [await asyncio.shield(futures[key]) for key in keys]


async def service_faults(services: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List the servers that do not answer now, as ``KEY.url: no answer from URL ...``.

    Args:
        services: Key of an options table in the configuration -> its options. Only the option ``url`` is read. Invalid
            URLs are skipped, because the check of the options reports them.
    """
    endpoints: dict[str, JsonEndpoint] = {}
    for key, options in services.items():
        try:
            endpoints[key] = JsonEndpoint(str(options.get("url")), None)
        except ValueError:
            continue
    absences = await asyncio.gather(*(endpoint.absence() for endpoint in endpoints.values()))
    faults: list[str] = []
    for key, absence in zip(endpoints, absences, strict=True):
        if absence is not None:
            faults.append(f"{key}.url: {absence}; expected a server that runs before the start")
    return faults


class RewardModel:
    """The score of a sequence classifier with one label, as SGLang serves it (``--is-embedding``).

    The reward model reads the conversation, rendered by its own chat template with the response as the last turn. One
    request has all responses of a call that are not in the cache.

    Args:
        url: URL of the server.
        tokenizer: Folder, or name on the hub, of the reward model's tokenizer with its chat template.
        api_key_variable: Environment variable with the server's key; None: the server needs no key.
    """

    def __init__(self, *, url: str, tokenizer: str, api_key_variable: str | None = None) -> None:
        self._endpoint = JsonEndpoint(url, api_key_variable)
        # Load the tokenizer now: in the first call, loading would count towards the time limit of the call.
        self._tokenizer = _loaded_tokenizer(tokenizer)
        self._control_tokens = ControlTokens(self._tokenizer)
        self._cache = _Cache(_CACHE_SIZE)

    async def __call__(self, records: Sequence[RewardInput]) -> list[float]:
        """Score responses. Raises ValueError and RewardUnavailableError."""
        keys: list[Hashable] = []
        ids_of_key: dict[Hashable, list[int]] = {}
        for record in records:
            token_ids = self._token_ids(record)
            key = hashlib.blake2b(repr(token_ids).encode()).digest()
            keys.append(key)
            ids_of_key[key] = token_ids

        async def compute(new_keys: Sequence[Hashable]) -> list[float]:
            body = {"input_ids": [ids_of_key[key] for key in new_keys]}
            answer = await self._endpoint.post("/classify", body)
            try:
                return _labels_of(answer, len(new_keys))
            except TypeError as error:
                raise RewardUnavailableError(
                    f"/classify answered {self._endpoint.excerpt(answer)}: {error}"
                ) from error

        return await self._cache.values_of(keys, compute)

    def _token_ids(self, record: RewardInput) -> list[int]:
        # A response may contain the characters <|im_end|>. Encode them as ordinary text. Otherwise the text after them
        # would look like another turn, and this turn could praise the response.
        content = self._control_tokens.hold(record.turn, self._control_tokens.special)
        turns = [*record.messages, {"role": "assistant", "content": content}]
        # Render to text and encode it without adding special tokens: the template has written them already.
        return self._control_tokens.encode(
            render(self._tokenizer, turns, add_generation_prompt=False)
        )


def _loaded_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Load a reward model's tokenizer. Raises ValueError if it can't be loaded, or has no chat template."""
    # Import lazily: the import takes seconds, and a judge does not need the library.
    try:
        tokenizer = load_named_tokenizer(folder)
    except DataError as error:
        raise ValueError(
            f"tokenizer: got {folder!r}, expected the folder or the hub's name of a tokenizer: {error}"
        ) from error
    if tokenizer.chat_template is None:
        raise ValueError(f"tokenizer: got {folder!r}, expected one with a chat template")
    return tokenizer


def _labels_of(answer: Any, count: int) -> list[float]:
    """The number for each sequence.

    Raises TypeError if the answer is invalid, and ValueError if the model has several labels.
    """
    rows = answer if isinstance(answer, list) else [answer]
    if len(rows) != count:
        raise TypeError(f"{len(rows)} results, expected {count}, one for each sequence")
    return [_only_label(row) for row in rows]


def _only_label(row: Any) -> float:
    labels = None
    if isinstance(row, dict):
        labels = row.get("embedding")
    if not isinstance(labels, list) or not labels:
        raise TypeError("expected objects with a list of numbers as embedding")
    if len(labels) > 1:
        raise ValueError(
            f"/classify answered {len(labels)} numbers for a sequence, expected one label"
        )
    number = labels[0]
    if type(number) not in (int, float) or not is_usable(number):
        raise TypeError(f"expected {USABLE_NUMBER} as the label of each sequence")
    return float(number)


class Judge:
    """A language model that judges a response and writes a score.

    Args:
        url: The part of the URL before ``/chat/completions``, for instance ``http://127.0.0.1:30010/v1``.
        model: Name of the model at this endpoint.
        template: The question, with the placeholders ``{prompt}``, ``{response}`` and ``{answer}``.
        system_prompt: System message before the question; None: no system message.
        pattern: Regular expression whose first group is the score; the last match in the reply counts.
        lowest, highest: Scores that correspond to the rewards 0 and 1. A score outside of this range is invalid.
        unparsed: Reward of a reply without a valid score. None: the reward is unavailable, so that the judge is called
            again, and after the last attempt the response is replaced.
        request: Further fields of the request. They override the defaults ``temperature: 0`` and ``max_tokens: 512``.
        api_key_variable: Environment variable with the endpoint's key; None: the endpoint needs no key.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        template: str = JUDGE_TEMPLATE,
        system_prompt: str | None = None,
        pattern: str = r"(?i)score\**\s*:\s*\**\s*(-?\d+(?:\.\d+)?)",
        lowest: float = 0.0,
        highest: float = 10.0,
        unparsed: float | None = None,
        request: Mapping[str, Any] | None = None,
        api_key_variable: str | None = None,
    ) -> None:
        if "{response}" not in template:
            raise ValueError("template: expected {response} in it, where the response goes")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern: {pattern!r} is no regular expression: {error}") from error
        if self._pattern.groups < 1 or not lowest < highest:
            raise ValueError(
                f"got pattern {pattern!r}, lowest {lowest:g} and highest {highest:g}; expected a group in the "
                "pattern, and lowest < highest"
            )
        self._endpoint = JsonEndpoint(url, api_key_variable)
        self._template = template
        self._system_prompt = system_prompt
        self._settings = {"model": model, "temperature": 0.0, "max_tokens": 512, **(request or {})}
        self._range = (lowest, highest)
        self._unparsed = unparsed
        self._cache = _Cache(_CACHE_SIZE)

    async def __call__(self, record: RewardInput) -> RewardResult:
        """Score a response. Raises ValueError and RewardUnavailableError."""
        question = self._question(record)
        (result,) = await self._cache.values_of([question], self._judge)
        return result

    async def _judge(self, questions: Sequence[Hashable]) -> list[RewardResult]:
        (question,) = questions
        reply = await self._reply_to(str(question))
        score = self._score(reply)
        last_words = self._endpoint.without_key(reply)[-_MAX_SHOWN:]
        excerpt = " ".join(last_words.split())
        if score is not None:
            return [RewardResult(score, reason=excerpt)]
        if self._unparsed is None:
            raise RewardUnavailableError(f"the judge gave no score: {excerpt!r}")
        return [RewardResult(float(self._unparsed), reason=f"no score: {excerpt}")]

    def _question(self, record: RewardInput) -> str:
        # Replace all placeholders in one pass, so that the characters of a response are never read as a placeholder.
        def field_text(match: re.Match[str]) -> str:
            if match[1] == "response":
                return record.turn
            return str(getattr(record, match[1]))

        return _PLACEHOLDER.sub(field_text, self._template)

    async def _reply_to(self, question: str) -> str:
        """Send a question to the judge and return its reply. Raises ValueError and RewardUnavailableError."""
        messages = [{"role": "user", "content": question}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        body = {**self._settings, "messages": messages}
        answer = await self._endpoint.post("/chat/completions", body)
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            excerpt = self._endpoint.excerpt(answer)
            raise RewardUnavailableError(f"no chat completion: {excerpt}") from error

    def _score(self, reply: str) -> float | None:
        """The score in a reply, mapped to [0, 1]. None without a score, or for a score outside of the range."""
        scores = [match[1] for match in self._pattern.finditer(reply)]
        lowest, highest = self._range
        try:
            score = float(scores[-1])
        except (IndexError, TypeError, ValueError):
            return None
        if lowest <= score <= highest:
            return (score - lowest) / (highest - lowest)
        return None
