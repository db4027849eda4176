"""Rewards that another server gives: a reward model behind SGLang's ``/classify``, and a judge behind any endpoint of
OpenAI's chat completions.

Both are asynchronous: the verifier bounds how many responses are asked for at a time, keeps the time limit and asks
again. Here: one request, what its answer means, and a cache, as a group's responses are often alike: of equal ones a
worker asks for one, also while its answer is on the way. A connection that
breaks, a status of 408, 429 or 5xx and an answer that makes no sense are RewardUnavailableErrors; any other status says
that the request itself is wrong, which ends the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from megatron_dppo.rewards import RewardInput, RewardResult, RewardUnavailableError
from megatron_dppo.system.network import url_fault
from megatron_dppo.system.time_limit import rendering_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPORARY = (408, 429)
_LONGEST_SHOWN = 300
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
        if api_key_variable is not None:
            key = os.environ.get(api_key_variable)
            if not key:
                raise ValueError(
                    f"api_key_variable: {api_key_variable} is not set in the environment, expected the server's key"
                )
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
            async with self._session.post(where, json=body) as answer:
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
        shown = content[:_LONGEST_SHOWN].decode(errors="replace")
        if answer.status >= 500 or answer.status in _TEMPORARY:
            raise RewardUnavailableError(f"{where}: status {answer.status}: {shown}")
        if answer.status != 200:
            raise ValueError(f"{where}: status {answer.status}: {shown}")
        try:
            return json.loads(content)
        except ValueError as error:
            raise RewardUnavailableError(f"{where}: no JSON: {shown}") from error

    async def close(self) -> None:
        """Let go of its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


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
                values = await ask(lacking)
            except (ValueError, OSError, RewardUnavailableError, asyncio.CancelledError) as error:
                is_over = isinstance(error, asyncio.CancelledError)
                failure = (
                    RewardUnavailableError("an equal request was given up") if is_over else error
                )
                for key in lacking:
                    self.pop(key, None)
                    futures[key].set_exception(failure)
                    # Perhaps nobody else waits, which asyncio takes for a mistake.
                    futures[key].exception()
                raise
            for key, value in zip(lacking, values, strict=True):
                futures[key].set_result(value)
        # Whoever is cancelled leaves it to the others.
        return [await asyncio.shield(futures[key]) for key in keys]


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
        self._folder = tokenizer
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._cache = _Cache(_CACHED)

    async def __call__(self, records: Sequence[RewardInput]) -> list[float]:
        """Raises ValueError, RewardUnavailableError."""
        ids = [self._token_ids(record) for record in records]
        keys = [hashlib.blake2b(repr(tokens).encode()).digest() for tokens in ids]
        tokens: dict[Hashable, list[int]] = dict(zip(keys, ids, strict=True))

        async def ask(lacking: Sequence[Hashable]) -> list[float]:
            body = {"input_ids": [tokens[key] for key in lacking]}
            return _classified(await self._endpoint.post("/classify", body), len(lacking))

        return await self._cache.values_of(keys, ask)

    def _token_ids(self, record: RewardInput) -> list[int]:
        if self._tokenizer is None:
            # Not before it is needed: the import takes seconds.
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._folder)
            except OSError as error:
                raise ValueError(f"tokenizer: {self._folder}: {error}") from error
        turns = [*record.messages, {"role": "assistant", "content": record.response}]
        # As text first: a template's own beginning must not be put before it twice.
        with rendering_limit():
            text = self._tokenizer.apply_chat_template([dict(t) for t in turns], tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _classified(answer: Any, count: int) -> list[float]:
    """One number for each sequence. Raises RewardUnavailableError, of a model with several labels ValueError."""
    rows = answer if isinstance(answer, list) else [answer]
    try:
        labels = [row["embedding"] for row in rows]
        numbers = [float(of_row[0]) for of_row in labels]
        finite = all(map(math.isfinite, numbers))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise RewardUnavailableError(
            f"/classify answered {str(answer)[:_LONGEST_SHOWN]}"
        ) from error
    if len(numbers) != count or not finite:
        raise RewardUnavailableError(
            f"/classify answered {numbers[:5]} for {count} sequences, expected a finite number for each"
        )
    if widest := max(map(len, labels), default=1) - 1:
        raise ValueError(
            f"/classify answered {widest + 1} numbers for a sequence, expected one label"
        )
    return numbers


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
        shown = " ".join(reply[-_LONGEST_SHOWN:].split())
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
        except (KeyError, IndexError, TypeError) as error:
            shown = str(answer)[:_LONGEST_SHOWN]
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
