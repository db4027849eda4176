"""Which servers take part in the next weight update, as rank 0 decides.

It reads which are published, checks newcomers and remembers faults.

A server serves from the weight update that first reaches it until it is *suspended* in generation or
*blamed* for a failed update. One that no longer answers is reported to the supervisor, which replaces
those that it started. One that answers is left out of the update that it failed and comes back with
the next; after the second failure in a row it is replaced, or refused where it runs elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megatron_dppo.config.schema import EngineConfig
from megatron_dppo.engine.client import EngineClient
from megatron_dppo.engine.errors import UNBOUNDED, EngineError, EngineMismatchError
from megatron_dppo.fleet.examination import ASK_AGAIN_S, Examiner
from megatron_dppo.fleet.folder import NOT_EXAMINED, Keys, Server
from megatron_dppo.fleet.members import Member, client_of
from megatron_dppo.fleet.record import FleetRecord
from megatron_dppo.metrics.progress import progress
from megatron_dppo.system.async_runner import AsyncRunner

log = logging.getLogger(__name__)

_ANSWER_S = 5.0
_GENERATE_S = 10.0
_SETTLE_S = 10.0
_POLL_S = 0.25
_PROGRESS_S = 60.0
_STRIKES = 2


class EngineUnavailableError(RuntimeError):
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
        verdict = self._runner.run(self._examiner.examine(server, at_once=urgent))
        if verdict.state == "refused" and server.origin == "config":
            raise EngineMismatchError(verdict.reason)
        return verdict.state == "fits"

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
        if (verdict := self._examiner.verdict(server)) is not None:
            return str(verdict)
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
