"""Servers that run elsewhere, examined when they are attached: whether they fit the run, and why not.

Whatever goes wrong while a server is examined means that it is refused, or, where it does not answer,
that it is asked again in a while. A refusal lasts until the server is attached anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from megatron_dppo.engine.errors import EngineAnswerError, EngineError, EngineRequestError
from megatron_dppo.fleet.folder import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, Server
from megatron_dppo.fleet.members import Member
from megatron_dppo.fleet.record import FleetRecord

log = logging.getLogger(__name__)

ASK_AGAIN_S = 30.0
_LOOK_S = 1.0
_NO_KEY = (401, 403)
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    EngineAnswerError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What answers of another shape than SGLang's end in, wherever they are read."""


@dataclass(frozen=True)
class Verdict:
    """What an examination found; ``at``: when, by the monotonic clock."""

    state: Literal["fits", "refused", "waits"]
    reason: str = ""
    at: float = field(default_factory=time.monotonic, compare=False)

    def __str__(self) -> str:
        words = {
            "fits": "fits; joins at the next weight update",
            "refused": f"refused: {self.reason}",
            "waits": f"not yet usable, asked again every {ASK_AGAIN_S:.0f} s: {self.reason}",
        }
        return words[self.state]


class Examiner:
    """Verdicts on the attached servers of a run; rank 0 has it.

    Coroutines run on one event loop.

    Args:
        record: where servers are published; may be another process, so it is asked in a thread.
        member_of: the server with what it asks of its clients.
        check: raises EngineMismatchError for a server that does not serve what the run trains or can't
            be updated, EngineError where it does not answer.
        is_in_use: says whether a server takes part in the run: it must be left alone.
        on_news: called in a thread when there is another verdict on a server.
    """

    def __init__(
        self,
        record: FleetRecord,
        member_of: Callable[[Server], Member],
        check: Callable[[Member], Coroutine[Any, Any, None]],
        is_in_use: Callable[[Server], bool],
        on_news: Callable[[], None],
    ) -> None:
        self._record = record
        self._member_of = member_of
        self._check = check
        self._is_in_use = is_in_use
        self._on_news = on_news
        self._verdicts: dict[Server, Verdict] = {}
        self._one_at_a_time = asyncio.Lock()

    def verdict(self, server: Server) -> Verdict | None:
        """The last one; None before the first. From any thread."""
        return self._verdicts.get(server)

    async def watch(self) -> NoReturn:
        """Examine whoever is attached, and again in a while whoever did not answer; for ever."""
        await asyncio.to_thread(self._on_news)
        while True:
            published = await self._published()
            for server in [s for s in self._verdicts if s not in published]:
                del self._verdicts[server]
            for server in published:
                known = self._verdicts.get(server)
                settled = known is not None and known.state != "waits"
                if not (server.replaceable or settled or self._is_in_use(server)):
                    await self.examine(server)
            await asyncio.sleep(_LOOK_S)

    async def examine(self, server: Server, *, at_once: bool = False) -> Verdict:
        """The verdict on an attached server: a new one where none is recent, or one that waits must be
        settled ``at_once``."""
        async with self._one_at_a_time:
            known = self._verdicts.get(server)
            if known is not None and (known.state == "refused" or self._is_recent(known, at_once)):
                return known
            found = await self._examine(self._member_of(server))
            self._verdicts[server] = found
        if found != known:
            level = logging.INFO if found.state == "fits" else logging.WARNING
            log.log(level, "%s at %s: %s", server.name, server.url, found)
            await asyncio.to_thread(self._on_news)
        return found

    async def _published(self) -> list[Server]:
        """Those seen before where the record can't be asked now: the next look is soon."""
        try:
            return await asyncio.to_thread(self._record.servers)
        except EngineError as error:
            log.warning("%s", error)
            return list(self._verdicts)

    @staticmethod
    def _is_recent(verdict: Verdict, at_once: bool) -> bool:
        recent = time.monotonic() < verdict.at + ASK_AGAIN_S
        return recent and not (at_once and verdict.state == "waits")

    async def _examine(self, member: Member) -> Verdict:
        try:
            await self._check(member)
        except _UNREADABLE as error:
            return Verdict("refused", _said(error))
        except EngineError as error:
            refused = error.attempts == 1
            return Verdict("refused" if refused else "waits", _said(error))
        except OSError as error:
            return Verdict("waits", _said(error))
        return Verdict("fits")


def _said(error: BaseException) -> str:
    """The error in words, with what to do about a key."""
    text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    if isinstance(error, EngineRequestError) and error.status in _NO_KEY:
        return (
            f"{text}; the run's keys are its environment's {API_KEY_VARIABLE}, {ADMIN_KEY_VARIABLE}"
        )
    return text
