"""Client of one SGLang server: generation, and questions about the server's state.

EngineRequestError (4xx): the request is wrong; EngineLostError (5xx, a broken connection, no answer
in time): the server is; AbortedError: only this response is. Nothing is retried here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NoReturn

from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.answer_parsing import AnswerParser
from megatron_dppo.engine.errors import EngineLostError, EngineRequestError
from megatron_dppo.engine.http_client import HttpClient
from megatron_dppo.engine.protocol import request_body, request_ids
from megatron_dppo.engine.recordings.fetching import Way, download
from megatron_dppo.engine.requests import GenerationRequest

log = logging.getLogger(__name__)

_WATCH_SECONDS = 5.0
_LATE_SECONDS = 1.5
"""A timer this late tells of a process that was stopped; a busy machine's are less so."""


class EngineClient(HttpClient):
    """Generation on the server at ``url``, and its state; see HttpClient for keys and errors.

    ``parser``: of its answers.
    """

    _last_life = 0.0
    _answered = False
    first_answer_s: float = 0.0
    """How long its first answer may take, where that is more than what is allowed later."""
    _ways: frozenset[Way] = frozenset()
    parser = AnswerParser(smallest=None)

    # --- generation

    async def generate(
        self,
        requests: Sequence[GenerationRequest],
        rid: str,
        version: int | None = None,
        adapter: str | None = None,
    ) -> list[Trajectory]:
        """Draw ``requests`` in one call under the id ``rid``, without a time limit.

        ``rid`` must be new, and not the beginning of another: SGLang aborts by prefix. ``version``:
        the weights that it must come from. ``adapter``: name of the engine's adapters to draw with. Raises
        AbortedError, EngineAnswerError, StaleWeightsError and ``request``'s errors.
        """
        body = request_body(requests, rid, adapter=adapter)
        payload = await self.request("POST", "/generate", body, timeout_s=None)
        self.note_answer()
        return await self.parse(payload, requests, version)

    async def parse(
        self, payload: bytes, requests: Sequence[GenerationRequest], version: int | None = None
    ) -> list[Trajectory]:
        """Trajectories of this server's answer to one call, with what it keeps beside the JSON.

        Raises AbortedError, EngineAnswerError, StaleWeightsError and ``request``'s errors.
        """
        downloaded: dict[str, bytes] = {}
        parsed = await self.parser.parse(payload, requests, version, downloaded)
        if parsed.missing:
            for notice in parsed.missing:
                downloaded[notice.id] = await download(self, notice)
            parsed = await self.parser.parse(payload, requests, version, downloaded)
        if parsed.ways - self._ways:
            self._ways = parsed.ways
            log.info("%s: recorded routing comes through %s", self.url, " and ".join(parsed.ways))
        return parsed.trajectories

    async def abort(self, rid: str, count: int = 1) -> None:
        """End the call ``rid`` of ``count`` requests early; it raises AbortedError then. Unknown
        ids are ignored."""
        ids = request_ids(rid, count)
        await asyncio.gather(*(self.control("/abort_request", {"rid": i}) for i in ids))

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

    def note_answer(self) -> None:
        """A request was answered just now; from now on it is known how long that takes."""
        self._answered = True
        self.note_life()

    async def watch(self, hang_timeout_s: float) -> NoReturn:
        """Raises EngineLostError when nothing was generated for ``hang_timeout_s``, or, before the first
        answer, for ``first_answer_s`` where that is longer.

        A stopped process keeps its connections open, so requests to it would wait for ever. Time in
        which this process was stopped itself tells nothing of the server: it begins anew then.
        """
        pause = min(_WATCH_SECONDS, hang_timeout_s / 4)
        late = max(pause, _LATE_SECONDS)
        clock = asyncio.get_running_loop().time
        self._last_life = clock()
        while True:
            limit = hang_timeout_s
            if not self._answered:
                limit = max(limit, self.first_answer_s)
            asleep = clock()
            nap = min(pause, max(self._last_life + limit - asleep, 0))
            await asyncio.sleep(nap)
            if clock() > asleep + nap + late:
                self.note_life()
                continue
            left = self._last_life + limit - clock()
            if left <= 0:
                raise EngineLostError(f"{self.url}: nothing generated for {limit - left:.0f} s")
            if left < limit - pause:
                asked, patience = clock(), min(left, hang_timeout_s)
                if await self.generates(patience) or clock() > asked + patience + late:
                    self.note_life()

    async def generates_again(self, timeout_s: float) -> bool:
        """Whether a paused server, once resumed, generates a token in time; it is paused again."""
        try:
            await self.control("/continue_generation", timeout_s=timeout_s)
            generated = await self.generates(timeout_s)
            await self.control("/pause_generation", {"mode": "in_place"}, timeout_s=timeout_s)
        except (EngineLostError, EngineRequestError):
            return False
        return generated

    async def ready(self, timeout_s: float = 10.0) -> bool:
        """Whether the server takes new requests: False while it is paused, and would hold them."""
        try:
            await self.request("GET", "/ready", timeout_s=timeout_s)
        except EngineLostError:
            return False
        return True
