"""Which servers take part in the next weight update, as rank 0 decides.

It reads which are published, checks newcomers and remembers faults.

A server serves from the weight update that first reaches it until it is *suspended* in generation or
*blamed* for a failed update. One that no longer answers is reported to the supervisor, which replaces
those that it started. One that answers is left out of the update that it failed and comes back with
the next; after the second failure in a row it is replaced, or refused where it runs elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NoReturn, TypeVar

from megatron_dppo.config.schema import EngineConfig
from megatron_dppo.engine.answer_parsing import AnswerParser
from megatron_dppo.engine.client import EngineClient
from megatron_dppo.engine.errors import (
    UNBOUNDED,
    EngineAnswerError,
    EngineError,
    EngineMismatchError,
    EngineRequestError,
    ServerLostError,
)
from megatron_dppo.fleet.folder import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    NOT_EXAMINED,
    Keys,
    Server,
)
from megatron_dppo.fleet.record import FleetRecord
from megatron_dppo.metrics.progress import progress
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.errors import RunError

# --- servers as a client sees them, and calls that can be broken off
T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """A server, what it asks of its clients, and who must have signed its certificate (None: whom the
    system trusts). ``first_answer_s``: as EngineClient's."""

    server: Server
    keys: Keys
    ca_file: str | None = None
    first_answer_s: float = 0.0


@dataclass(eq=False)
class ActiveServer:
    """A member that generates, and the calls that it has.

    ``suspended``: why it gets no more calls; empty while it gets them.
    """

    member: Member
    client: EngineClient
    in_flight: int = 0
    suspended: str = ""
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    watch: asyncio.Task[None] | None = None


async def breakable(call: Coroutine[Any, Any, T], calls: set[asyncio.Task[Any]]) -> T:
    """The result of ``call``; ServerLostError when somebody cancels its task, which is in ``calls``
    meanwhile."""
    task = asyncio.create_task(call)
    calls.add(task)
    try:
        await asyncio.wait([task])
        if task.cancelled():
            raise ServerLostError("broken off: its server, or the router, was lost")
        return task.result()
    finally:
        task.cancel()
        calls.discard(task)


def client_of(member: Member, parser: AnswerParser | None = None) -> EngineClient:
    """A client of one server; ``close`` it. ``parser``: of its answers; None: this process."""
    client = EngineClient(member.server.url, member.keys.api, member.keys.admin, member.ca_file)
    client.first_answer_s = member.first_answer_s
    if parser is not None:
        client.parser = parser
    return client


# --- servers that run elsewhere, examined when they are attached

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
class Examination:
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
        on_news: called in a thread when there is another examination on a server.
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
        self._examinations: dict[Server, Examination] = {}
        self._one_at_a_time = asyncio.Lock()

    def examination(self, server: Server) -> Examination | None:
        """The last one; None before the first. From any thread."""
        return self._examinations.get(server)

    async def watch(self) -> NoReturn:
        """Examine whoever is attached, and again in a while whoever did not answer; for ever."""
        await asyncio.to_thread(self._on_news)
        while True:
            published = await self._published()
            for server in [s for s in self._examinations if s not in published]:
                del self._examinations[server]
            for server in published:
                known = self._examinations.get(server)
                settled = known is not None and known.state != "waits"
                if not (server.replaceable or settled or self._is_in_use(server)):
                    await self.examine(server)
            await asyncio.sleep(_LOOK_S)

    async def examine(self, server: Server, *, at_once: bool = False) -> Examination:
        """The examination on an attached server: a new one where none is recent, or one that waits must be
        settled ``at_once``."""
        async with self._one_at_a_time:
            known = self._examinations.get(server)
            if known is not None and (known.state == "refused" or self._is_recent(known, at_once)):
                return known
            found = await self._examine(self._member_of(server))
            self._examinations[server] = found
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
            return list(self._examinations)

    @staticmethod
    def _is_recent(examination: Examination, at_once: bool) -> bool:
        recent = time.monotonic() < examination.at + ASK_AGAIN_S
        return recent and not (at_once and examination.state == "waits")

    async def _examine(self, member: Member) -> Examination:
        try:
            await self._check(member)
        except _UNREADABLE as error:
            return Examination("refused", _said(error))
        except EngineError as error:
            refused = error.attempts == 1
            return Examination("refused" if refused else "waits", _said(error))
        except OSError as error:
            return Examination("waits", _said(error))
        return Examination("fits")


def _said(error: BaseException) -> str:
    """The error in words, with what to do about a key."""
    text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    if isinstance(error, EngineRequestError) and error.status in _NO_KEY:
        return (
            f"{text}; the run's keys are its environment's {API_KEY_VARIABLE}, {ADMIN_KEY_VARIABLE}"
        )
    return text


_ANSWER_S = 5.0
_GENERATE_S = 10.0
_SETTLE_S = 10.0
_POLL_S = 0.25
_PROGRESS_S = 60.0
_STRIKES = 2


class EngineUnavailableError(RunError):
    """The engine side is given up, on all trainer ranks alike: no healthy server appeared in time,
    servers were lost again and again, or they refuse what the run needs."""


class FleetMembership:
    """Rank 0's record of servers: who is sound, left out, lost or refused, and why.

    Args:
        folder: where servers are published.
        config: the servers that the configuration names, and how long to wait for one.
        runner: runs the questions to servers.
        check: raises EngineMismatchError for a server elsewhere that does not serve what the run
            trains or can't be updated, EngineError where it does not answer.
        stop: says whether a clean stop was asked for.
    """

    def __init__(
        self,
        folder: FleetRecord,
        config: EngineConfig,
        runner: AsyncRunner,
        check: Callable[[Member], Coroutine[Any, Any, None]],
        stop: Callable[[], bool],
    ) -> None:
        self.folder = folder
        self.folder.sync_configured(config.urls)
        self._start_timeout = config.start_timeout_s
        self._ca_file = config.ca_file
        self._runner = runner
        self._stop = stop
        self._strikes: dict[Server, int] = {}
        self._gone: dict[Server, str] = {}
        self._out: dict[Server, str] = {}
        self._asked: dict[Server, float] = {}
        self._expected = config.started + len(config.urls)
        self._version: int | None = None
        self._chosen: frozenset[Server] = frozenset()
        self._serving: frozenset[Server] = frozenset()
        self._publishing = threading.Lock()
        self._examiner = Examiner(folder, self._member, check, self._chosen_now, self._publish)
        runner.submit(self._examiner.watch())

    def choose(
        self, current: Sequence[Member], suspended: Mapping[str, str]
    ) -> list[Member] | None:
        """Members of the next update: those of ``current`` that still are in order, and newcomers
        that answer; at least one. None when a stop was asked for while there was none.

        ``suspended``: why, by name, of those that a rank suspended since. The first time it waits a
        while for every server that the configuration names. Raises EngineUnavailableError after
        ``engine.start_timeout_s`` without a server, EngineMismatchError where ``engine.urls`` names
        one that does not fit the run.
        """
        self._note_suspended(current, suspended)
        expected, self._expected = self._expected, 1
        found = self._present(current)
        if len(found) < expected:
            with progress("waiting for the engine", interval_s=_PROGRESS_S):
                waited = self._wait(found, expected)
            if waited is None:
                return None
            found = waited
        self._chosen = frozenset(m.server for m in found)
        return found

    def _wait(self, found: list[Member], expected: int) -> list[Member] | None:
        start, first_found = time.monotonic(), None
        while len(found) < expected:
            if self._stop():
                return None
            now = time.monotonic() - start
            if found and first_found is None:
                first_found = now
            if first_found is not None and now > first_found + max(_SETTLE_S, first_found / 2):
                log.warning("%d of %d servers are ready; going on", len(found), expected)
                return found
            if not found and now > self._start_timeout:
                raise EngineUnavailableError(self._nobody(now))
            time.sleep(_POLL_S)
            found = self._present(found)
        return found

    def blame(
        self,
        current: Sequence[Member],
        urls: Collection[str],
        reason: str,
        *,
        attempts: int = UNBOUNDED,
    ) -> None:
        """An update of ``current`` failed, because of ``urls`` where those are known.

        ``attempts``: as of EngineError. Whose scheduler does not answer is lost; so is one at fault that
        did not answer in the update and then generates nothing.
        """
        suspects = [m for m in current if m.server.url in urls] or list(current)
        for member in suspects:
            server = member.server
            silent = server.url in urls and attempts == UNBOUNDED
            if not self._schedules(member) or (silent and not self._generates_again(member)):
                self._lose(server, f"does not answer after a failed update: {reason}")
            elif server.url in urls:
                if attempts == 1:
                    self._strikes[server] = _STRIKES - 1
                self._strike(server, reason, others=len(current) > len(suspects))

    def commit(self, members: Sequence[Member], version: int) -> None:
        """``members`` hold ``version``; who was left out of that update may try the next."""
        for member in members:
            self._strikes.pop(member.server, None)
        self._version, self._serving = version, frozenset(m.server for m in members)
        self._publish()
        self._out = {s: why for s, why in self._out.items() if self._strikes.get(s) == _STRIKES}

    # --- one server

    def _note_suspended(self, current: Sequence[Member], suspended: Mapping[str, str]) -> None:
        for member in current:
            server = member.server
            if server.name not in suspended or server in self._gone:
                continue
            if server.replaceable or not self._generates(member):
                self._lose(server, suspended[server.name])

    def _present(self, members: Sequence[Member]) -> list[Member]:
        """Those of ``members`` that are published and in order, and newcomers."""
        published = self.folder.servers()
        for book in (self._gone, self._out, self._strikes, self._asked):
            for server in [s for s in book if s not in published]:
                book.pop(server)
        barred = {*self._gone, *self._out}
        kept = {m.server for m in members if m.server in published} - barred
        return [
            self._member(server)
            for server in published
            if server in kept or self._may_join(server, urgent=not kept)
        ]

    def _member(self, server: Server) -> Member:
        # Those that the run starts are published after their first answers.
        first_answer_s = 0.0 if server.replaceable else self._start_timeout
        return Member(server, self.folder.keys(server), self._ca_file, first_answer_s)

    def _may_join(self, server: Server, *, urgent: bool) -> bool:
        """Ask a newcomer, or one that was lost elsewhere; in a while again where it says nothing."""
        came_back = server in self._gone
        if server in self._out or (came_back and server.replaceable):
            return False
        now = time.monotonic()
        if not urgent and now < self._asked.get(server, -ASK_AGAIN_S) + ASK_AGAIN_S:
            return False
        member = self._member(server)
        alive = self._generates if came_back else self._answers
        if not (self._fits(server, urgent=urgent) and alive(member)):
            self._asked[server] = now
            return False
        self._gone.pop(server, None)
        log.info("%s at %s joins the fleet", server.name, server.url)
        return True

    def _fits(self, server: Server, *, urgent: bool) -> bool:
        """Whether a server that runs elsewhere serves what the run trains. Raises EngineMismatchError
        where the configuration names one that is refused."""
        if server.replaceable:
            return True
        examination = self._runner.run(self._examiner.examine(server, at_once=urgent))
        if examination.state == "refused" and server.origin == "config":
            raise EngineMismatchError(examination.reason)
        return examination.state == "fits"

    def _chosen_now(self, server: Server) -> bool:
        return server in self._chosen

    def _strike(self, server: Server, reason: str, *, others: bool) -> None:
        strikes = self._strikes[server] = self._strikes.get(server, 0) + 1
        if strikes >= _STRIKES and server.replaceable:
            self._lose(server, f"failed {strikes} weight updates in a row: {reason}")
        elif strikes >= _STRIKES or others:
            self._out[server] = f"quarantined: {reason}"
            log.warning("%s is quarantined: %s", server.name, reason)

    def _lose(self, server: Server, reason: str) -> None:
        log.warning("%s is lost: %s", server.name, reason)
        self._gone[server] = f"lost: {reason}"
        if server.replaceable:
            self.folder.report_lost(server)

    def _publish(self) -> None:
        """Put what is made of every server where the user's command reads it. From any thread."""
        with self._publishing:
            try:
                states = {s.name: self._state(s) for s in self.folder.servers()}
                self.folder.publish_status(self._version, states)
            except EngineError as error:  # a run can do without
                log.warning("%s", error)

    def _state(self, server: Server) -> str:
        return "serves" if server in self._serving else self._reason(server)

    def _reason(self, server: Server) -> str:
        if why := self._out.get(server) or self._gone.get(server):
            return why
        if (examination := self._examiner.examination(server)) is not None:
            return str(examination)
        return "joins at the next weight update" if server.replaceable else NOT_EXAMINED

    def _nobody(self, seconds: float) -> str:
        seen = [f"{s.name} at {s.url} ({self._reason(s)})" for s in self.folder.servers()]
        shown = f"published: {', '.join(seen)}" if seen else "none was published"
        return f"no healthy engine within {seconds:.0f} s; {shown}"

    # --- questions to a server

    def _answers(self, member: Member) -> bool:
        """A server elsewhere may be stock, whose /health generates, so that a paused one fails it."""
        if member.server.replaceable:
            return self._with_client(member, lambda client: client.health(_ANSWER_S))
        return self._with_client(member, lambda client: client.answers(_ANSWER_S))

    def _schedules(self, member: Member) -> bool:
        return self._with_client(member, lambda client: client.schedules(_ANSWER_S))

    def _generates_again(self, member: Member) -> bool:
        """The server is paused, as a failed update leaves it."""
        return self._with_client(member, lambda client: client.generates_again(_GENERATE_S))

    def _generates(self, member: Member) -> bool:
        return self._with_client(member, lambda client: client.generates(_GENERATE_S))

    def _with_client(self, member: Member, question: Callable[[EngineClient], Any]) -> Any:
        async def ask() -> Any:
            async with client_of(member) as client:
                return await question(client)

        return self._runner.run(ask())


def member_to_json(member: Member) -> list[Any]:
    """For the other ranks."""
    return [asdict(member.server), asdict(member.keys), member.ca_file, member.first_answer_s]


def member_from_json(value: list[Any]) -> Member:
    """What ``member_to_json`` wrote."""
    return Member(Server(**value[0]), Keys(**value[1]), *value[2:])
