"""Rewards that another server gives: a reward model behind SGLang's ``/classify``, and a judge behind any endpoint of
OpenAI's chat completions.

Both are asynchronous: the verifier bounds how many responses are asked for at a time, keeps the time limit and asks
again. Here: one request, what its answer means, and a cache, as a group's responses are often alike: of equal ones a
worker asks for one, also while its answer is on the way. A connection that
breaks, a status of 408, 429 or 5xx and an answer that makes no sense are RewardUnavailableErrors; any other status says
that the request itself is wrong, which ends the run. A redirect is such a status: the address that it names was not
configured, and a server there must not set rewards.
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

from megatron_dppo.chat import ControlTokens, render
from megatron_dppo.rewards import (
    USABLE_NUMBER,
    RewardInput,
    RewardResult,
    RewardUnavailableError,
    is_usable,
)
from megatron_dppo.system.network import url_fault, without_secrets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPORARY = (408, 429)
_REDIRECTS = range(300, 400)
_LONGEST_SHOWN = 300
_PRESENCE_S = 10.0
_LARGEST_BYTES = 1 << 24
"""Of an answer."""
_CACHED = 65536
"""Scores and judgements that a worker keeps."""
_PLACEHOLDER = re.compile(r"\{(prompt|response|answer)\}")
JUDGE_TEMPLATE = """\
Judge the response to the request below by how correct, helpful and honest it is.

Request:
{prompt}

Response:
{response}

Explain in one sentence, then end with a line "Score: N", N being a whole number from 0 (worthless) to 10 (perfect)."""


class JsonEndpoint:
    """POSTs of JSON to one server. ``api_key_variable``: of the environment, with the key; None: it needs none.

    Raises ValueError for an address that is none, and where the variable is not set.
    """

    def __init__(self, url: str, api_key_variable: str | None) -> None:
        if fault := url_fault(url):
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
        """The answer's JSON. Raises ValueError where the server refuses the request, RewardUnavailableError where none
        comes that can be read."""
        where = f"{self._url}{path}"
        if self._session is None:
            # Without limits of its own: the verifier has them.
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        try:
            async with self._session.post(where, json=body, allow_redirects=False) as answer:
                content = bytearray()
                async for piece in answer.content.iter_any():
                    content += piece
                    if len(content) > _LARGEST_BYTES:
                        raise RewardUnavailableError(
                            f"{where}: more than {_LARGEST_BYTES} bytes, expected an answer of fewer"
                        )
        except aiohttp.ClientError as error:
            raise RewardUnavailableError(
                f"{where}: {str(error) or type(error).__name__}"
            ) from error
        shown = self.shown(content.decode(errors="replace"))
        if answer.status >= 500 or answer.status in _TEMPORARY:
            raise RewardUnavailableError(f"{where}: status {answer.status}: {shown}")
        if answer.status in _REDIRECTS:
            target = self.shown(answer.headers.get("Location", ""))
            raise ValueError(
                f"{where}: status {answer.status}, a redirect to {target!r}, which is not followed; expected the "
                "server's own address as url"
            )
        if answer.status != 200:
            raise ValueError(f"{where}: status {answer.status}: {shown}")
        try:
            return json.loads(content)
        # Deeply nested brackets are a RecursionError.
        except (ValueError, RecursionError) as error:
            raise RewardUnavailableError(f"{where}: no JSON: {shown}") from error

    async def absence(self) -> str | None:
        """Why nothing answers at the address now, within some seconds; None where something does, whatever it says."""
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

    def shown(self, said: Any) -> str:
        """The beginning of what the server said, for a message: without the key, which a server may echo."""
        return self.without_key(_text_of(said))[:_LONGEST_SHOWN]

    def without_key(self, text: str) -> str:
        """``text`` with the server's key replaced."""
        return without_secrets(text, [self._key])

    async def close(self) -> None:
        """Let go of its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _text_of(said: Any) -> str:
    try:
        return str(said)
    # Nested too deeply, or an integer of thousands of digits.
    except (RecursionError, ValueError):
        return f"a {type(said).__name__} that can't be shown"


class _Cache(OrderedDict[Hashable, Any]):
    """The last ``size`` values that were asked for."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    async def values_of(
        self, keys: Sequence[Hashable], ask: Callable[[list[Hashable]], Awaitable[Sequence[Any]]]
    ) -> list[Any]:
        """The value of each key. ``ask`` gives, in order, those that are neither here nor under way; what it raises
        reaches all who wait for them, and is not kept."""
        lacking = [key for key in dict.fromkeys(keys) if key not in self]
        for key in keys:
            self[key] = self.get(key) or asyncio.get_running_loop().create_future()
            self.move_to_end(key)
        futures = {key: self[key] for key in keys}
        while len(self) > self._size:
            self.popitem(last=False)
        if lacking:
            try:
                values = dict(zip(lacking, await ask(lacking), strict=True))
            # Whatever it is: an equal request must not wait for an answer that never comes.
            except BaseException as error:
                failure: Exception = RewardUnavailableError("an equal request was given up")
                if isinstance(error, Exception):
                    failure = error
                for key in lacking:
                    self.pop(key, None)
                    futures[key].set_exception(failure)
                    # Perhaps nobody else waits, which asyncio takes for a mistake.
                    futures[key].exception()
                raise
            for key, value in values.items():
                futures[key].set_result(value)
        # Whoever is cancelled leaves it to the others.
        return [await asyncio.shield(futures[key]) for key in keys]


async def service_faults(services: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which of the servers don't answer now: ``KEY.url: got URL, ...``.

    Args:
        services: by the key of the options table, its options, of which ``url`` is read. One that is no URL is left to
            the check of the options.
    """
    endpoints: dict[str, JsonEndpoint] = {}
    for key, options in services.items():
        try:
            endpoints[key] = JsonEndpoint(str(options.get("url")), None)
        except ValueError:
            continue
    absences = await asyncio.gather(*(endpoint.absence() for endpoint in endpoints.values()))
    return [
        f"{key}.url: {absence}; expected a server that runs before the start"
        for key, absence in zip(endpoints, absences, strict=True)
        if absence is not None
    ]


class RewardModel:
    """The score of a sequence classifier with one label, as SGLang serves it (``--is-embedding``).

    It reads the conversation, the response as its last turn, in its own chat template and without special tokens
    twice. One request has all responses of a call that are not in the cache.

    Args:
        url: of the server.
        tokenizer: folder, or name on the hub, of the reward model's tokenizer with its chat template.
        api_key_variable: of the environment, with the server's key; None: it needs none.
    """

    def __init__(self, *, url: str, tokenizer: str, api_key_variable: str | None = None) -> None:
        self._endpoint = JsonEndpoint(url, api_key_variable)
        # Here, and not in the first call: a call's time limit is for the server.
        self._tokenizer = _loaded_tokenizer(tokenizer)
        self._control = ControlTokens(self._tokenizer)
        self._cache = _Cache(_CACHED)

    async def __call__(self, records: Sequence[RewardInput]) -> list[float]:
        """Raises ValueError, RewardUnavailableError."""
        ids = [self._token_ids(record) for record in records]
        keys = [hashlib.blake2b(repr(tokens).encode()).digest() for tokens in ids]
        tokens: dict[Hashable, list[int]] = dict(zip(keys, ids, strict=True))

        async def ask(lacking: Sequence[Hashable]) -> list[float]:
            body = {"input_ids": [tokens[key] for key in lacking]}
            answer = await self._endpoint.post("/classify", body)
            try:
                return _classified(answer, len(lacking))
            except TypeError as error:
                raise RewardUnavailableError(
                    f"/classify answered {self._endpoint.shown(answer)}: {error}"
                ) from error

        return await self._cache.values_of(keys, ask)

    def _token_ids(self, record: RewardInput) -> list[int]:
        # A policy that writes <|im_end|> in letters must not end its turn there and praise itself in the next one.
        said = self._control.hold(record.response, self._control.special)
        turns = [*record.messages, {"role": "assistant", "content": said}]
        # As text first: a template's own beginning must not be put before it twice.
        return self._control.encode(render(self._tokenizer, turns, asks=False))


def _loaded_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """A reward model's tokenizer. Raises ValueError where there is none, or it has no chat template."""
    # Import lazily: it takes seconds, and a judge needs none of it.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    # Damaged files raise whatever the libraries make of them; tokenizers raises bare Exceptions.
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST_SHOWN]
        raise ValueError(
            f"tokenizer: got {folder!r}, expected the folder or the hub's name of a tokenizer: "
            f"{type(error).__name__}: {reason}"
        ) from error
    if tokenizer.chat_template is None:
        raise ValueError(f"tokenizer: got {folder!r}, expected one with a chat template")
    return tokenizer


def _classified(answer: Any, count: int) -> list[float]:
    """One number for each sequence. Raises TypeError where the answer has none, of a model with several labels
    ValueError."""
    rows = answer if isinstance(answer, list) else [answer]
    if len(rows) != count:
        raise TypeError(f"{len(rows)} results, expected {count}, one for each sequence")
    return [_only_label(row) for row in rows]


def _only_label(row: Any) -> float:
    labels = row.get("embedding") if isinstance(row, dict) else None
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
    """A language model that is asked for a score in words.

    Args:
        url: before ``/chat/completions``, as ``http://127.0.0.1:30010/v1``.
        model: its name there.
        template: what it is asked, with ``{prompt}``, ``{response}`` and ``{answer}`` where these go.
        system_prompt: before it; None: none.
        pattern: regular expression whose first group is the score; the last match counts.
        lowest, highest: scores that stand for 0 and 1. One outside of them counts as none.
        unparsed: the reward where the judge gave no score. None: no reward could be had, so it is asked again and at
            last the response is replaced.
        request: further fields of the request, instead of temperature 0 and 512 tokens at most.
        api_key_variable: of the environment, with the endpoint's key; None: it needs none.
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
        self._template, self._system_prompt = template, system_prompt
        self._settings = {"model": model, "temperature": 0.0, "max_tokens": 512, **(request or {})}
        self._range, self._unparsed = (lowest, highest), unparsed
        self._cache = _Cache(_CACHED)

    async def __call__(self, record: RewardInput) -> RewardResult:
        """Raises ValueError, RewardUnavailableError."""
        question = self._question(record)
        (result,) = await self._cache.values_of([question], self._judged)
        return result

    async def _judged(self, questions: Sequence[Hashable]) -> list[RewardResult]:
        (question,) = questions
        reply = await self._ask(str(question))
        score = self._score(reply)
        last_words = self._endpoint.without_key(reply)[-_LONGEST_SHOWN:]
        shown = " ".join(last_words.split())
        if score is None and self._unparsed is None:
            raise RewardUnavailableError(f"the judge gave no score: {shown!r}")
        if score is None:
            return [RewardResult(float(self._unparsed or 0.0), reason=f"no score: {shown}")]
        return [RewardResult(score, reason=shown)]

    def _question(self, record: RewardInput) -> str:
        # In one pass: what a response says is no placeholder.
        return _PLACEHOLDER.sub(lambda match: str(getattr(record, match[1])), self._template)

    async def _ask(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        body = {**self._settings, "messages": messages}
        answer = await self._endpoint.post("/chat/completions", body)
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            shown = self._endpoint.shown(answer)
            raise RewardUnavailableError(f"no chat completion: {shown}") from error

    def _score(self, reply: str) -> float | None:
        """In [0, 1]; None where there is none, or one outside of the range."""
        scores = [match[1] for match in self._pattern.finditer(reply)]
        lowest, highest = self._range
        try:
            score = float(scores[-1])
        except (IndexError, TypeError, ValueError):
            return None
        return (score - lowest) / (highest - lowest) if lowest <= score <= highest else None
