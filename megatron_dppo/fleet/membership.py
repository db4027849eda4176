"""The servers that take part in the next weight update, chosen by rank 0.

Rank 0 reads the published servers, checks new servers and remembers faults.

A server serves from the weight update that first reaches it until it is *suspended* in generation or *blamed* for a
failed update. If a server does not answer, rank 0 reports this to the supervisor. The supervisor replaces the server if
the supervisor started it. If a server fails an update and still answers, and other servers did not fail, the server is
*quarantined*: it is left out, and may join the next update. After its second failure in a row, or after a failure for
which a retry is pointless, a server that the supervisor started is replaced, and any other server is quarantined for
good.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, Literal, NoReturn

from pydantic import TypeAdapter

from megatron_dppo.config.schema import EngineConfig
from megatron_dppo.engine import errors
from megatron_dppo.engine.answer_parsing import AnswerParser
from megatron_dppo.engine.client import EngineClient
from megatron_dppo.fleet.endpoint import RecordClient
from megatron_dppo.fleet.record import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    NOT_EXAMINED,
    Keys,
    Server,
)
from megatron_dppo.metrics.progress import progress
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.errors import RunError

log = logging.getLogger(__name__)

ASK_AGAIN_S = 30.0
"""Seconds until a server that did not answer is asked again."""
_LOOK_S = 1.0
"""Seconds between two checks for newly attached servers."""
_ANSWER_S = 5.0
"""Longest time of a server's answer to a health check."""
_GENERATE_S = 10.0
"""A healthy server generates a token within this time."""
_SETTLE_S = 10.0
"""Shortest time to wait, after the first server is ready, for the other servers of the configuration."""
_POLL_S = 0.25
_PROGRESS_S = 60.0
_CLEAR_S = 60.0
"""Longest time that a killed process, perhaps on another node, may take to end."""
_STRIKES = 2
"""Number of failed updates in a row after which a server is replaced or left out for good."""
_NO_KEY = (401, 403)
"""Statuses of an answer to a missing or wrong key."""
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    errors.EngineAnswerError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions of the code that reads answers, if an answer has another form than SGLang's answers."""


class EngineUnavailableError(RunError):
    """No engine is available. All trainer ranks raise this error.

    No healthy server appeared in time, servers were lost repeatedly, or servers refuse requests that the run needs.
    """


class FatalPromptError(EngineUnavailableError):
    """Servers ended when they received this prompt, although only one token was requested. Every further server would
    end too."""


@dataclass(frozen=True)
class Member:
    """A server with the keys and certificate authority that its clients need.

    ``ca_file`` None: the system's authorities. ``first_answer_s``: as in EngineClient.
    """

    server: Server
    keys: Keys
    ca_file: str | None = None
    first_answer_s: float = 0.0

    @classmethod
    def of(cls, server: Server, keys: Keys, engine: EngineConfig) -> Member:
        # A server that the run starts is published after its first answer. An attached server may still be starting.
        first_answer_s = 0.0
        if not server.replaceable:
            first_answer_s = engine.start_timeout_s
        return cls(server, keys, engine.ca_file, first_answer_s)


MEMBERS = TypeAdapter(list[Member])
"""Converts members to JSON and back, to send them to other ranks."""


def client_of(member: Member, parser: AnswerParser | None = None) -> EngineClient:
    """Return a client of one server; the caller closes it. ``parser``: parser of answers; None: this process parses."""
    client = EngineClient(member.server.url, member.keys.api, member.keys.admin, member.ca_file)
    client.first_answer_s = member.first_answer_s
    if parser is not None:
        client.parser = parser
    return client


@dataclass(frozen=True)
class Examination:
    """Result of the examination of an attached server. ``time_s``: monotonic time of the examination."""

    state: Literal["fits", "refused", "waits"]
    reason: str = ""
    time_s: float = field(default_factory=time.monotonic, compare=False)

    def __str__(self) -> str:
        if self.state == "fits":
            return "fits"
        if self.state == "refused":
            return f"refused: {self.reason}"
        return f"not yet usable, asked again every {ASK_AGAIN_S:.0f} s: {self.reason}"


@dataclass
class ServerState:
    """Rank 0's view of one published server.

    Attributes:
        is_member: whether the server takes part in the update under way, or took part in the last update.
        serves: whether the server had the committed weights at the last commit.
        strikes: failed updates in a row that the server caused.
        lost: reason why the server is lost; empty while it is not lost.
        quarantined: reason why the server is quarantined; empty while it is not quarantined.
        silent_s: monotonic time at which the server last failed to answer.
        examination: result of the last examination; None before the first, and for servers that the run starts.
    """

    is_member: bool = False
    serves: bool = False
    strikes: int = 0
    lost: str = ""
    quarantined: str = ""
    silent_s: float = -math.inf
    examination: Examination | None = None

    def describe(self, server: Server) -> str:
        if reason := self.quarantined or self.lost:
            return reason
        if self.serves:
            return "serves"
        if self.examination is not None and self.examination.state != "fits":
            return str(self.examination)
        if server.replaceable or self.examination is not None:
            return "joins at the next weight update"
        return NOT_EXAMINED


class ServerStates(dict[Server, ServerState]):
    """The state of every published server; usable from any thread."""

    def __missing__(self, server: Server) -> ServerState:
        # setdefault is one step, so that two threads that ask for a new server get one state.
        return self.setdefault(server, ServerState())

    def keep(self, published: Collection[Server]) -> None:
        """Remove the states of servers that are not in ``published``."""
        # list(self) is one step. A loop over self would fail if another thread added a server meanwhile.
        for server in list(self):
            if server not in published:
                self.pop(server, None)


@dataclass(eq=False)
class Examiner:
    """The examination of servers: whether they fit the run, and why not. Rank 0 examines attached servers, and each
    leader examines the servers of teachers.

    A server that does not answer is examined again later. If a retry can't mend an error, the server is refused until
    the server is attached or started anew. The coroutines run on one event loop.

    Args:
        states: stores the examinations; members are not examined.
        check: raises EngineMismatchError for a server that does not serve the run's model or can't be updated, and
            another EngineError for a server that does not answer.
        on_news: called in a thread after a new examination of a server.
        servers: returns the published servers; None: those of the policy. Raises EngineError.
    """

    record: RecordClient
    engine: EngineConfig
    states: ServerStates
    check: Callable[[Member], Coroutine[Any, Any, None]]
    on_news: Callable[[], None]
    servers: Callable[[], list[Server]] | None = None
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def watch(self) -> NoReturn:
        """Examine every attached server once. A server that did not answer is examined again later.

        Runs until it is cancelled.
        """
        await asyncio.to_thread(self.on_news)
        while True:
            for server in await self.published():
                state = self.states[server]
                is_settled = state.examination is not None and state.examination.state != "waits"
                if not (server.replaceable or is_settled or state.is_member):
                    await self.examine(server)
            await asyncio.sleep(_LOOK_S)

    async def examine(self, server: Server, *, at_once: bool = False) -> Examination:
        """Return the last examination of an attached server if it is still valid; otherwise examine the server.

        ``at_once``: a last examination that the server did not answer is not valid.
        """
        state = self.states[server]
        async with self._one_at_a_time:
            last_examination = state.examination
            if last_examination is not None and self._is_valid(last_examination, at_once):
                return last_examination
            member = Member.of(server, self.record.keys(server), self.engine)
            examination = await self._examine(member)
            state.examination = examination
        if examination != last_examination:
            level = logging.INFO if examination.state == "fits" else logging.WARNING
            log.log(level, "%s at %s: %s", server.name, server.url, examination)
            await asyncio.to_thread(self.on_news)
        return examination

    async def published(self) -> list[Server]:
        """Return the published servers, and forget the states of others.

        If the registry does not answer, return the servers of its last answer.
        """
        try:
            published = await asyncio.to_thread(self.servers or self.record.servers)
        except errors.EngineError as error:
            log.warning("%s", error)
            return list(self.states)
        self.states.keep(published)
        return published

    @staticmethod
    def _is_valid(examination: Examination, at_once: bool) -> bool:
        if examination.state == "refused":
            return True
        if examination.state == "waits" and at_once:
            return False
        return time.monotonic() < examination.time_s + ASK_AGAIN_S

    async def _examine(self, member: Member) -> Examination:
        try:
            await self.check(member)
        except _UNREADABLE as error:
            return Examination("refused", _reason_of(error))
        except errors.EngineError as error:
            # ``attempts`` is 1 if a retry is pointless after the first failure.
            if error.attempts == 1:
                return Examination("refused", _reason_of(error))
            return Examination("waits", _reason_of(error))
        except OSError as error:
            return Examination("waits", _reason_of(error))
        return Examination("fits")


async def _outcomes(calls: Sequence[Coroutine[Any, Any, None]]) -> list[BaseException | None]:
    """Run the calls at the same time; return the exception of each, or None."""
    return await asyncio.gather(*calls, return_exceptions=True)


def _reason_of(error: BaseException) -> str:
    text = str(error)
    if not isinstance(error, errors.EngineError):
        text = f"{type(error).__name__}: {error}"
    if isinstance(error, errors.EngineRequestError) and error.status in _NO_KEY:
        return (
            f"{text}; the run's keys are its environment's {API_KEY_VARIABLE}, {ADMIN_KEY_VARIABLE}"
        )
    return text


class FleetMembership:
    """Rank 0's view of the servers: which servers are healthy, left out, lost or refused, and why.

    Args:
        record: client of the server registry.
        engine: the configuration's section.
        runner: event loop of the clients.
        check: examines an attached server, as in Examiner.
        stop: returns whether a clean stop was requested.
    """

    def __init__(
        self,
        record: RecordClient,
        engine: EngineConfig,
        runner: AsyncRunner,
        check: Callable[[Member], Coroutine[Any, Any, None]],
        stop: Callable[[], bool],
    ) -> None:
        record.sync_configured(engine.urls)
        self._record = record
        self._engine = engine
        self._runner = runner
        self._stop = stop
        self._states = ServerStates()
        self._expected = engine.servers_to_start + len(engine.urls)
        self._version: int | None = None
        self._publishing = threading.Lock()
        self._examiner = Examiner(record, engine, self._states, check, self._publish)
        runner.submit(self._examiner.watch())

    def choose(
        self, current: Sequence[Member], suspended: Mapping[str, str], *, waits: bool = True
    ) -> list[Member] | None:
        """Choose the members of the next update: healthy members of ``current``, and new servers that answer.

        Waits for at least one server; the first call also waits some time for every server that the configuration
        names. Returns None if a stop was requested while it waited.

        Args:
            current: members of the last update.
            suspended: servers that a rank suspended since the last update, by name, with the reason.
            waits: if false, return the servers that are ready now. The list may be empty.

        Raises:
            EngineUnavailableError: no server was ready within ``engine.start_timeout_s``.
            EngineMismatchError: ``engine.urls`` names a server that does not fit the run.
            EngineError: the registry does not answer.
        """
        self._note_suspended(current, suspended)
        # Only the first call waits for every server of the configuration.
        expected_count = self._expected
        self._expected = 1
        members = self._ready_members(current)
        if waits and len(members) < expected_count:
            with progress("waiting for the engine", interval_s=_PROGRESS_S):
                waited = self._wait(members, expected_count)
            if waited is None:
                return None
            members = waited
        chosen_servers = {member.server for member in members}
        for server, state in list(self._states.items()):
            state.is_member = server in chosen_servers
        return members

    def _wait(self, members: list[Member], expected_count: int) -> list[Member] | None:
        """Wait until ``expected_count`` servers are ready. Returns None if a stop was requested.

        When the first server is ready, wait for the other servers half as long as for the first, but at least
        ``_SETTLE_S``.
        """
        start = time.monotonic()
        # Seconds until the first server was ready.
        first_s = None
        while len(members) < expected_count:
            if self._stop():
                return None
            waited_s = time.monotonic() - start
            if members and first_s is None:
                first_s = waited_s
            if not members:
                # The first server has gone again.
                first_s = None
            if first_s is not None and waited_s > first_s + max(_SETTLE_S, first_s / 2):
                log.warning("%d of %d servers are ready; going on", len(members), expected_count)
                return members
            if not members and waited_s > self._engine.start_timeout_s:
                raise EngineUnavailableError(self._no_server_message(waited_s))
            time.sleep(_POLL_S)
            members = self._ready_members(members)
        return members

    def blame(
        self,
        current: Sequence[Member],
        urls: Collection[str],
        reason: str,
        *,
        attempts: int = errors.UNBOUNDED,
    ) -> None:
        """Handle a failed update: mark the servers at fault as lost, or count a strike.

        A server is lost if its scheduler does not answer. A server at fault is also lost if it did not answer in the
        update and does not generate now.

        Args:
            current: members of the update.
            urls: addresses of the servers at fault; empty if they are unknown.
            reason: the error of the update.
            attempts: failures in a row after which a retry is pointless (``EngineError.attempts``).
        """
        suspected_members = [m for m in current if m.server.url in urls] or list(current)
        has_other_members = len(current) > len(suspected_members)
        for member in suspected_members:
            server = member.server
            # A server is silent if its connection broke or timed out. Only such errors have no bound of attempts.
            is_silent = server.url in urls and attempts == errors.UNBOUNDED
            is_scheduling = self._with_client(member, methodcaller("is_scheduling", _ANSWER_S))
            if not is_scheduling or (is_silent and not self._still_generates(member)):
                self._lose(server, f"does not answer after a failed update: {reason}")
            elif server.url in urls:
                if attempts == 1:
                    # A retry is pointless, so this strike is the last one.
                    self._states[server].strikes = _STRIKES - 1
                self._strike(server, reason, has_other_members=has_other_members)

    def commit(self, members: Sequence[Member], version: int) -> None:
        """Record that ``members`` hold ``version``. Servers that this update left out may join the next update."""
        self._version = version
        serving = {member.server for member in members}
        for server in serving:
            self._states[server].strikes = 0
        for server, state in list(self._states.items()):
            state.serves = server in serving
        # Publish first, so that the published states contain the reasons that are cleared here.
        self._publish()
        for state in list(self._states.values()):
            if state.strikes < _STRIKES:
                state.quarantined = ""

    def recover(self, forget_ranks: Callable[[Member], Coroutine[Any, Any, None]]) -> None:
        """Take over the servers of ranks that have died. A server that fails in ``forget_ranks`` is replaced.

        ``forget_ranks`` ends the requests and groups that these ranks left in one server. Only servers that the
        supervisor started are taken over, because an attached server may serve other runs.
        """
        members = [self._member(s) for s in self._record.servers() if s.replaceable]
        outcomes = self._runner.run(_outcomes([forget_ranks(member) for member in members]))
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, errors.EngineError | OSError):
                reason = f"{type(outcome).__name__}: {outcome}"
                self._lose(
                    member.server, f"its state after the death of ranks is unknown: {reason}"
                )
            elif outcome is not None:
                raise outcome

    def clear_devices(self, release: Callable[[Member], Coroutine[Any, Any, None]]) -> str | None:
        """Wait until no server of this run is starting and all running servers have released their memory.

        Servers that don't release their memory are replaced. ``release`` releases the memory of one member. Returns
        None, or the reason if the wait takes too long or the registry does not answer.
        """
        deadline = time.monotonic() + _CLEAR_S
        try:
            while occupants := self._occupants(release):
                if time.monotonic() > deadline:
                    names = ", ".join(occupants)
                    return f"the trainer's devices are not free after {_CLEAR_S:.0f} s: {names} did not leave them"
                time.sleep(_POLL_S)
        except errors.EngineError as error:
            return str(error)
        return None

    def _occupants(self, release: Callable[[Member], Coroutine[Any, Any, None]]) -> list[str]:
        """Return the names of the servers that still use devices, after ``release`` of each running server."""
        # Read the starting servers first: a server that is published in between is then in at least one of the lists.
        occupants = self._record.starting()
        for server in self._record.servers():
            if server.replaceable and not self._states[server].lost:
                try:
                    self._runner.run(release(self._member(server)))
                except (errors.EngineError, OSError) as error:
                    self._lose(server, f"does not let go of its memory: {error}")
            if self._states[server].lost and server.replaceable:
                occupants.append(server.name)
        return occupants

    def _note_suspended(self, current: Sequence[Member], suspended: Mapping[str, str]) -> None:
        """Mark the ``suspended`` servers as lost, except attached servers that generate again."""
        for member in current:
            server = member.server
            if server.name not in suspended or self._states[server].lost:
                continue
            if server.replaceable or not self._generates(member):
                self._lose(server, suspended[server.name])

    def _ready_members(self, members: Sequence[Member]) -> list[Member]:
        """Return the healthy servers among ``members``, and the published servers that may join them."""
        published = self._record.servers()
        self._states.keep(published)
        healthy_servers: set[Server] = set()
        for member in members:
            if member.server not in published:
                continue
            state = self._states[member.server]
            if not (state.lost or state.quarantined):
                healthy_servers.add(member.server)
        ready_members: list[Member] = []
        for server in published:
            is_healthy = server in healthy_servers
            if is_healthy or self._may_join(server, urgent=not healthy_servers):
                ready_members.append(self._member(server))
        return ready_members

    def _member(self, server: Server) -> Member:
        return Member.of(server, self._record.keys(server), self._engine)

    def _may_join(self, server: Server, *, urgent: bool) -> bool:
        """Whether a new server, or a lost server that runs elsewhere, passes the checks for joining the fleet.

        A server that did not answer is asked again after some time, or at once if ``urgent``.
        """
        state = self._states[server]
        if state.quarantined or (state.lost and server.replaceable):
            return False
        current_time = time.monotonic()
        if not urgent and current_time < state.silent_s + ASK_AGAIN_S:
            return False
        member = self._member(server)
        # A lost server must generate again. A new server may be paused, so it need only answer.
        passes_test = self._generates if state.lost else self._answers
        if not (self._fits(server, urgent=urgent) and passes_test(member)):
            state.silent_s = current_time
            return False
        state.lost = ""
        log.info("%s at %s joins the fleet", server.name, server.url)
        return True

    def _fits(self, server: Server, *, urgent: bool) -> bool:
        """Whether a server fits the run. A server that runs elsewhere is examined.

        Raises EngineMismatchError if ``engine.urls`` names the server and it is refused.
        """
        if server.replaceable:
            return True
        examination = self._runner.run(self._examiner.examine(server, at_once=urgent))
        if examination.state == "refused" and server.origin == "config":
            raise errors.EngineMismatchError(examination.reason)
        return examination.state == "fits"

    def _strike(self, server: Server, reason: str, *, has_other_members: bool) -> None:
        state = self._states[server]
        state.strikes += 1
        if state.strikes >= _STRIKES and server.replaceable:
            self._lose(server, f"failed {state.strikes} weight updates in a row: {reason}")
        elif state.strikes >= _STRIKES or has_other_members:
            state.quarantined = f"quarantined: {reason}"
            log.warning("%s is quarantined: %s", server.name, reason)

    def _lose(self, server: Server, reason: str) -> None:
        log.warning("%s is lost: %s", server.name, reason)
        self._states[server].lost = f"lost: {reason}"
        self._record.report_lost(server)

    def _publish(self) -> None:
        """Publish the state of every server for the user's command; usable from any thread."""
        with self._publishing:
            try:
                states = {s.name: self._states[s].describe(s) for s in self._record.servers()}
                self._record.publish_status(self._version, states)
            except errors.EngineError as error:
                # The run does not depend on the published states.
                log.warning("%s", error)

    def _no_server_message(self, seconds: float) -> str:
        servers = [
            f"{s.name} at {s.url} ({self._states[s].describe(s)})" for s in self._record.servers()
        ]
        published_servers = "none was published"
        if servers:
            published_servers = f"published: {', '.join(servers)}"
        return f"no healthy engine within {seconds:.0f} s; {published_servers}"

    def _answers(self, member: Member) -> bool:
        # An attached server may be unmodified SGLang. Then /health generates, and so fails while the server is paused.
        if member.server.replaceable:
            return self._with_client(member, methodcaller("health", _ANSWER_S))
        return self._with_client(member, methodcaller("is_answering", _ANSWER_S))

    def _still_generates(self, member: Member) -> bool:
        # A colocated server may have released the memory that generation needs, and a request would kill it.
        if self._engine.placement != "separate":
            return False
        # The failed update has left the server paused, so ``generates_again`` first resumes it.
        return self._with_client(member, methodcaller("generates_again", _GENERATE_S))

    def _generates(self, member: Member) -> bool:
        return self._with_client(member, methodcaller("is_generating", _GENERATE_S))

    def _with_client(self, member: Member, question: Callable[[EngineClient], Any]) -> Any:
        async def ask() -> Any:
            async with client_of(member) as client:
                return await question(client)

        return self._runner.run(ask())
