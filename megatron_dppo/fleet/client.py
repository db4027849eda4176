"""Generation on several servers that hold the same committed weights.

Calls go through the HTTP router if the run has one, because the router sees the load of every client. Without a router,
and while the router is down, each call goes directly to the server with the fewest requests of this client in flight.
A server that dies, hangs, or answers with other weights is *suspended*: it receives no calls until the next ``serve``,
its unfinished calls are sent to other servers, and the supervisor receives a report.

A weight update may start while calls are in flight. From ``hold`` to the next ``serve`` no call is sent and no answer
is read, so that the result of the update is known when an answer is checked. If ``hold`` aborts the calls in flight, it
returns when all these calls have ended.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, methodcaller
from typing import Any, NoReturn, TypeVar

from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine import errors
from megatron_dppo.engine.answer_parsing import AnswerParser
from megatron_dppo.engine.client import Answer, EngineClient
from megatron_dppo.engine.protocol import GenerationRequest, adapter_name, request_body
from megatron_dppo.fleet.membership import Member, client_of
from megatron_dppo.fleet.record import Server
from megatron_dppo.fleet.router_link import ROUTED_MODEL, SERVED_BY, HttpRouterLink
from megatron_dppo.fleet.suspects import Suspect, Suspects
from megatron_dppo.system.async_runner import cancel_tasks

log = logging.getLogger(__name__)

T = TypeVar("T")

_PROBE_SECONDS = 5.0
"""Longest time of a server's answer to a health check."""
_REPLACED_SECONDS = 10.0
"""If the supervisor started a server that hangs, the supervisor kills the server within this time."""
_ROUTER_REMOVES_SECONDS = 0.1
"""The router stops using a dead server within this time."""
_ABORT_AGAIN_SECONDS = 0.2
_QUESTION_SECONDS = 300.0
"""Longest time for the requests to all suspects. Meanwhile other ranks wait in a collective with a limit of 600 s."""
_FATAL_ENDS = 2
"""When this many servers have ended after the same prompt, the prompt counts as the cause."""
_NO_SERVER_CODES = ("no_available_workers", "model_not_found")
"""smg's error codes for a call when smg has no server."""


@dataclass(eq=False)
class ActiveServer:
    """A member that generates, and its calls in flight.

    ``in_flight`` counts the requests of these calls. ``suspended`` is the reason why the server receives no more calls;
    empty while it receives them.
    """

    member: Member
    client: EngineClient
    in_flight: int = 0
    suspended: str = ""
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    watch: asyncio.Task[None] | None = None


async def breakable(call: Coroutine[Any, Any, T], calls: set[asyncio.Task[Any]]) -> T:
    """Run ``call`` in a task, and return its result. The task is in ``calls`` until it ends.

    Raises ServerLostError when the task is cancelled.
    """
    task = asyncio.create_task(call)
    calls.add(task)
    try:
        await asyncio.wait([task])
        if task.cancelled():
            raise errors.ServerLostError("broken off: its server, or the router, was lost")
        return task.result()
    finally:
        task.cancel()
        calls.discard(task)


class FleetClient:
    """A GenerationClient over the servers that ``serve`` names, used from one event loop.

    Args:
        on_lost: called with a server, or the HTTP router, that must be replaced.
        router: the connection to the HTTP router; None: the run has no router.
        parser: parser of answers; None: this process parses them.
        adapters: whether weight updates change adapters in the engines. Each call then names the adapter of the
            committed version.
    """

    def __init__(
        self,
        on_lost: Callable[[Server], None],
        router: HttpRouterLink | None = None,
        parser: AnswerParser | None = None,
        *,
        adapters: bool = False,
    ) -> None:
        self._names_adapters = adapters
        self._on_lost = on_lost
        self._parser = parser
        self._router = router
        self._servers: list[ActiveServer] = []
        self._routed_calls: set[asyncio.Task[Any]] = set()
        self._probing: asyncio.Task[None] | None = None
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._version: int | None = None
        # The committed version at the time of each failed update.
        self._failed_updates: list[int | None] = []
        self._losses: dict[str, str] = {}
        # Request id of each open call -> (its server, its requests). The server is None for a call through the router.
        self._open_calls: dict[str, tuple[ActiveServer | None, Sequence[GenerationRequest]]] = {}
        self._suspects = Suspects()
        # Set while calls may be sent: from ``serve`` to the next ``hold``.
        self._serving = asyncio.Event()
        self._watchers = 0
        self._router_watch: asyncio.Task[None] | None = None
        self._hang_timeout_s = 0.0
        self._server_lost = asyncio.Event()

    async def hold(self, *, abort: bool = False) -> None:
        """Stop sending calls and reading answers until ``serve``, because the servers will be paused for a weight
        update.

        ``abort``: end the calls in flight early, and return when all these calls have ended.
        """
        self._serving.clear()
        if abort:
            # End the calls before the servers are paused: a call that waits at a paused server would continue after the
            # update with the adapter of the previous version.
            await self._end_calls()
        for active in self._servers:
            active.client.is_paused = True

    async def break_off(self) -> None:
        """Cancel the calls in flight after a failed update, so that they are sent again.

        The weights of the servers are unknown. An answer that has arrived, but is not read yet, is read after the next
        ``serve``. If the answer has tokens of the failed update, the call is sent again too.
        """
        self._failed_updates.append(self._version)
        for active in self._servers:
            for call in active.calls:
                call.cancel()
        for call in self._routed_calls:
            call.cancel()

    async def serve(self, members: Sequence[Member], version: int) -> None:
        """Generate on ``members``, and end every suspension. The members have committed weight version ``version``.

        Calls in flight continue, except calls on servers that left.
        """
        kept_servers = {
            active.member: active for active in self._servers if active.member in members
        }
        for active in self._servers:
            if active.member not in kept_servers:
                self._drop(active, "it left the fleet")
                await active.client.close()
        for active in kept_servers.values():
            active.suspended = ""
            active.client.is_paused = False
        servers: list[ActiveServer] = []
        for member in members:
            server = kept_servers.get(member)
            if server is None:
                server = ActiveServer(member, client_of(member, self._parser))
            servers.append(server)
        self._servers = servers
        self._version = version
        if self._router is not None:
            await self._router.serve({m.server.url: m.keys.api for m in members})
        self._serving.set()
        self._watch_all()

    @property
    def is_serving(self) -> bool:
        """Whether calls are sent: from ``serve`` to the next ``hold``."""
        return self._serving.is_set()

    @property
    def has_servers(self) -> bool:
        """Whether a server with the committed weights is left."""
        return bool(self._live())

    def take_losses(self) -> dict[str, str]:
        """Return the servers that were suspended since the last call: name -> reason."""
        losses = self._losses
        self._losses = {}
        return losses

    async def close(self) -> None:
        """Close the connections; the servers abort the calls in flight."""
        tasks = list(self._background_tasks)
        if self._probing is not None:
            tasks.append(self._probing)
        await cancel_tasks(tasks)
        await asyncio.gather(*(active.client.close() for active in self._servers))
        if self._router is not None:
            await self._router.close()

    async def generate(self, requests: Sequence[GenerationRequest], rid: str) -> list[Trajectory]:
        await self._wait_until_served()
        try:
            if self._router is not None and self._router.is_usable and self._live():
                self._open_calls[rid] = (None, requests)
                results = await self._call_through_router(self._router, requests, rid)
            else:
                results = await self._call_server(self._least_loaded(), requests, rid)
        finally:
            self._open_calls.pop(rid, None)
        self._suspects.clear(requests)
        return results

    async def ask(self, question: Callable[[EngineClient], Coroutine[Any, Any, T]]) -> T:
        """Return the answer of the least loaded server to ``question``, which sends one call with the server's client.

        Raises the errors of ``generate``.
        """
        await self._wait_until_served()
        active = self._least_loaded()
        active.in_flight += 1
        try:
            return await breakable(question(active.client), active.calls)
        except errors.EngineLostError as error:
            raise await self._call_error(active, str(error)) from error
        finally:
            active.in_flight -= 1

    async def abort(self, rid: str, count: int) -> None:
        await self._abort_on_each(methodcaller("abort", rid, count))

    async def watch(self, hang_timeout_s: float) -> NoReturn:
        """Suspend servers that hang, and stop using a lost router. Raises EngineLostError when no server is left."""
        # Several generations run at the same time, but each server is watched once for all generations.
        self._watchers += 1
        self._hang_timeout_s = hang_timeout_s
        try:
            self._watch_all()
            while self._live() or not self._serving.is_set():
                self._server_lost.clear()
                await self._server_lost.wait()
            raise self._no_server_error()
        finally:
            self._watchers -= 1
            if not self._watchers:
                await self._end_watches()

    @property
    def suspect_count(self) -> int:
        """Number of prompts that were in flight at two losses of servers, and that no server has answered since."""
        return len(self._suspects.questionable())

    async def question_suspects(self, stop: Callable[[], bool]) -> Suspect | None:
        """Request one token for each suspect, one after another; return the first suspect after which two servers
        ended.

        If only one server is left, the end of this server is enough. No rank may have another call in flight.
        """
        questionable = self._suspects.questionable()
        log.warning(
            "%d prompts were in flight at two losses of servers; each is asked alone",
            len(questionable),
        )
        try:
            async with asyncio.timeout(_QUESTION_SECONDS):
                for suspect in questionable:
                    if stop() or not self._live():
                        return None
                    if await self._ends_servers(suspect.request):
                        return suspect
                    self._suspects.clear([suspect.request])
        except TimeoutError:
            log.warning("not all were answered within %.0f s; the run goes on", _QUESTION_SECONDS)
        return None

    async def _ends_servers(self, request: GenerationRequest) -> bool:
        """Whether each of up to two servers ends when it receives only this request."""
        probe_request = replace(request, sampling=replace(request.sampling, max_new_tokens=1))
        for ended_servers in range(_FATAL_ENDS):
            live = self._live()
            if not live:
                return ended_servers > 0
            server = live[0]
            try:
                await self._call_server(server, [probe_request], uuid.uuid4().hex)
            except errors.EngineError:
                if not (server.suspended and await self._has_ended(server)):
                    return False
            else:
                return False
        return True

    async def _has_ended(self, active: ActiveServer) -> bool:
        """Whether no process listens at the server's address. A server that hangs or refuses calls still listens."""
        try:
            await active.client.exchange("GET", "/health", timeout_s=_PROBE_SECONDS)
        except errors.EngineLostError as error:
            return not isinstance(error.__cause__, TimeoutError)
        return False

    def _least_loaded(self) -> ActiveServer:
        """Return the server with the fewest requests of this client. Raises EngineLostError if no server is left."""
        live = self._live()
        if not live:
            raise self._no_server_error()
        # Balance this client's own calls: without a router no client sees the calls of other ranks.
        return min(live, key=attrgetter("in_flight"))

    async def _call_server(
        self, active: ActiveServer, requests: Sequence[GenerationRequest], rid: str
    ) -> list[Trajectory]:
        active.in_flight += len(requests)
        self._open_calls[rid] = (active, requests)
        start_version = self._version
        failures = len(self._failed_updates)
        try:
            answer = await breakable(
                active.client.answer(requests, rid, self._adapter_name), active.calls
            )
            versions = await self._versions(start_version, failures)
            return await breakable(active.client.parse(answer, requests, versions), active.calls)
        except errors.StaleWeightsError as error:
            raise self._stale_error(active, str(error), failures) from error
        except errors.EngineLostError as error:
            raise await self._call_error(active, str(error)) from error
        finally:
            active.in_flight -= len(requests)
            self._open_calls.pop(rid, None)

    async def _call_through_router(
        self, router: HttpRouterLink, requests: Sequence[GenerationRequest], rid: str
    ) -> list[Trajectory]:
        body = request_body(requests, rid, model=ROUTED_MODEL, adapter=self._adapter_name)
        start_version = self._version
        failures = len(self._failed_updates)
        try:
            answer = await breakable(router.generate(body), self._routed_calls)
        except errors.EngineLostError as error:
            self._router_lost(router, str(error))
            raise errors.ServerLostError(str(error)) from error
        if answer.status >= 400:
            raise await self._refusal_error(router, answer)
        served_by = answer.headers.get(SERVED_BY, "")
        active = self._server_at(served_by.rstrip("/"))
        if active is None:
            raise errors.AbortedError(f"an answer from {served_by or 'a server'} that is no member")
        try:
            versions = await self._versions(start_version, failures)
            results = await active.client.parse(answer.body, requests, versions)
        except errors.StaleWeightsError as error:
            raise self._stale_error(active, str(error), failures) from error
        except errors.EngineLostError as error:
            # The server has answered, but did not deliver its routing recording.
            raise self._suspend(active, str(error)) from error
        active.client.note_answer()
        return results

    async def _refusal_error(self, router: HttpRouterLink, answer: Answer) -> errors.EngineError:
        """Return the error for a call that the router, or a server behind it, answered with an error status."""
        reason = f"{router.url}/generate answered {answer.status}: {answer.reason}"
        if answer.code in _NO_SERVER_CODES:
            # The router was restarted and has lost its list of servers.
            router.mark_down(reason)
            return errors.ServerLostError(reason)
        if answer.status < 500:
            return errors.EngineRequestError(answer.status, reason)
        await self._probe()
        for active in self._servers:
            if active.suspended and active.member.server.url in reason:
                # The error is about this lost server. The router may not have removed it yet, so wait before a retry.
                await asyncio.sleep(_ROUTER_REMOVES_SECONDS)
                return self._loss_error(reason)
        return errors.AbortedError(reason)

    async def _versions(self, start_version: int | None, failures: int) -> range | None:
        """Wait until no update runs, and return the committed versions that may have sampled the answer to a call.

        ``start_version`` is the committed version at the start of the call, ``failures`` the number of failed updates
        until then. Returns None if a version is unknown.
        """
        await self._wait_until_served()
        last_version = self._version
        later_failures = self._failed_updates[failures:]
        if later_failures:
            # A failed update cancels all unanswered calls. So this answer arrived before the first of these failures,
            # and the version that was committed then is the last that may have sampled the answer.
            last_version = later_failures[0]
        if start_version is None or last_version is None:
            return None
        return range(start_version, last_version + 1)

    def _stale_error(
        self, active: ActiveServer, reason: str, failures: int
    ) -> errors.ServerLostError | errors.EngineLostError:
        """Return the error for an answer from weights that are not committed.

        If an update has failed since the call started, the weights come from the failed update. Otherwise the server is
        at fault, and is suspended.
        """
        if len(self._failed_updates) > failures:
            return errors.ServerLostError(reason)
        return self._suspend(active, reason)

    async def _wait_until_served(self) -> None:
        # Repeat: ``hold`` may be called again before this task runs.
        while not self._serving.is_set():
            await self._serving.wait()

    async def _end_calls(self) -> None:
        """Abort all calls in flight, and wait until each has ended."""
        while True:
            calls = set(self._routed_calls)
            for active in self._servers:
                calls |= active.calls
            if not calls:
                return
            # Repeat the abort: it misses a call that is on its way to a scheduler.
            await self._abort_on_each(methodcaller("abort_all", _PROBE_SECONDS))
            await asyncio.wait(calls, timeout=_ABORT_AGAIN_SECONDS)

    async def _abort_on_each(self, abort: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Call ``abort`` on every server: the router forwards no aborts, and does not tell which server has a call."""
        aborts = (abort(active.client) for active in self._live())
        for outcome in await asyncio.gather(*aborts, return_exceptions=True):
            # A lost server has no call to abort.
            if isinstance(outcome, errors.EngineLostError):
                continue
            if isinstance(outcome, BaseException):
                raise outcome

    @property
    def _adapter_name(self) -> str | None:
        if self._names_adapters and self._version is not None:
            return adapter_name(self._version)
        return None

    def _server_at(self, url: str) -> ActiveServer | None:
        for active in self._servers:
            if active.member.server.url == url:
                return active
        return None

    def _live(self) -> list[ActiveServer]:
        """Return the servers that are not suspended."""
        return [active for active in self._servers if not active.suspended]

    def _watch_all(self) -> None:
        """Watch the servers in use, as long as a generation waits for responses."""
        if not self._watchers:
            return
        for active in self._live():
            if active.watch is None or active.watch.done():
                active.watch = asyncio.create_task(self._watch(active))
        if self._router is not None and self._router_watch is None:
            watch = self._router.watch(self._hang_timeout_s, self._router_lost)
            self._router_watch = asyncio.create_task(watch)

    async def _end_watches(self) -> None:
        tasks: list[asyncio.Task[None]] = []
        for active in self._servers:
            if active.watch is not None:
                tasks.append(active.watch)
                # A watch that begins before the task has ended makes a task of its own.
                active.watch = None
        if self._router_watch is not None:
            tasks.append(self._router_watch)
            self._router_watch = None
        await cancel_tasks(tasks)

    async def _watch(self, active: ActiveServer) -> None:
        try:
            await active.client.watch(self._hang_timeout_s)
        except errors.EngineLostError as error:
            self._suspend(active, str(error))

    async def _probe(self) -> None:
        """Suspend every server that doesn't answer; concurrent callers share one probe."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe_all())
        await asyncio.shield(self._probing)

    async def _probe_all(self) -> None:
        live = self._live()
        checks = [active.client.health(_PROBE_SECONDS) for active in live]
        answers = await asyncio.gather(*checks)
        for active, is_healthy in zip(live, answers, strict=True):
            if not is_healthy:
                self._suspend(active, f"{active.member.server.url} does not answer")

    def _suspend(
        self, active: ActiveServer, reason: str
    ) -> errors.ServerLostError | errors.EngineLostError:
        """Send a server no more calls, and cancel its calls. Return the error for the callers of these calls."""
        if active.suspended:
            return self._loss_error(active.suspended)
        server = active.member.server
        self._losses[server.name] = reason
        log.warning("%s is suspended: %s", server.name, reason)
        # The server had the calls that were sent to it directly. It may also have had any call through the router.
        lost_requests: list[GenerationRequest] = []
        for called_server, requests in self._open_calls.values():
            if called_server in (active, None):
                lost_requests += requests
        self._suspects.note_loss(server, lost_requests)
        self._drop(active, reason)
        self._on_lost(server)
        if self._router is not None:
            self._run_in_background(self._router.remove(server.url))
            self._run_in_background(self._break_routed(active, frozenset(self._routed_calls)))
        return self._loss_error(reason)

    def _drop(self, active: ActiveServer, reason: str) -> None:
        """Send no more calls to a server; its calls are repeated elsewhere."""
        active.suspended = reason
        for call in active.calls:
            call.cancel()
        if active.watch is not None:
            active.watch.cancel()
        self._server_lost.set()

    async def _break_routed(
        self, active: ActiveServer, calls: frozenset[asyncio.Task[Any]]
    ) -> None:
        """Repeat all routed ``calls`` if the suspended server hangs: the router doesn't tell which server has a call.

        Calls that other servers still work on are repeated too.
        """
        # If the supervisor started the server, the supervisor kills the server within this time, and so breaks its
        # calls. Afterwards only an attached server still hangs.
        await asyncio.sleep(_REPLACED_SECONDS)
        if active not in self._servers:
            # The server left the fleet meanwhile, and its client is closed.
            return
        try:
            await active.client.exchange("GET", "/health", timeout_s=_PROBE_SECONDS)
        except errors.EngineLostError as error:
            if isinstance(error.__cause__, TimeoutError):
                for call in calls & self._routed_calls:
                    call.cancel()

    def _router_lost(self, router: HttpRouterLink, reason: str) -> None:
        """Cancel the calls of a router that closed a connection or hangs; they are then sent to servers directly."""
        if router.mark_down(reason) and router.server is not None:
            self._on_lost(router.server)
        for call in self._routed_calls:
            call.cancel()

    async def _call_error(self, active: ActiveServer, reason: str) -> errors.EngineError:
        """Probe the servers, and return the error for a call that ``active`` did not answer.

        AbortedError: the server answers the probe, so only this call has failed.
        """
        await self._probe()
        if active.suspended:
            return self._loss_error(reason)
        return errors.AbortedError(reason)

    def _loss_error(self, reason: str) -> errors.ServerLostError | errors.EngineLostError:
        """Return the error for a call whose server is lost: ServerLostError if another server is left."""
        if self._live():
            return errors.ServerLostError(reason)
        return self._no_server_error()

    def _no_server_error(self) -> errors.EngineLostError:
        reasons = [f"{active.member.server.name}: {active.suspended}" for active in self._servers]
        return errors.EngineLostError("; ".join(reasons) or "no server has the weights")

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        # Keep the task here, because the loop has only a weak reference to it.
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)
