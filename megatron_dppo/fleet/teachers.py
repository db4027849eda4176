"""One rank's use of a teacher's servers: the list of servers, calls with retries, and the checks at the start.

A server that dies or hangs is reported to the supervisor, and its calls are sent to another server or, after a restart,
to its next incarnation. A server that joins or restarts later passes the same checks before it is used; meanwhile calls
go to the other servers. The examiner of attached servers examines them. No weight update reaches these servers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import numpy as np

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine import errors
from megatron_dppo.engine.client import EngineClient
from megatron_dppo.engine.options import FIRST_WEIGHT_VERSION
from megatron_dppo.engine.running_server import check_engine
from megatron_dppo.engine.token_scores import ScoredTokens
from megatron_dppo.fleet.client import FleetClient
from megatron_dppo.fleet.endpoint import RecordClient
from megatron_dppo.fleet.membership import Examiner, Member, ServerStates, client_of
from megatron_dppo.fleet.record import Server, attached_name
from megatron_dppo.spec import TeacherSpec

log = logging.getLogger(__name__)

_ATTEMPTS = 4
"""Largest number of attempts at the scores of one sequence."""
_PAUSE_S = 1.0
"""Pause between two attempts, and between two reads of the registry while no server is in use."""
_REREAD_S = 10.0
"""Seconds between two reads of the registry while a server is in use."""
_LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 1.0}
"""Largest difference in nats between two scores of a token that rounding explains, by the teacher's dtype: a server
computes in another order if it scores several sequences together."""


class TeacherClient:
    """Scores tokens on the servers of one teacher, from one event loop; ``close`` it.

    Args:
        config: configuration of the run.
        teacher: the teacher.
        record: client of the server registry.
        sequences: tokens that each server scores when it is examined: the first alone, and together with the others.
        stop: returns whether the run is stopping, so that nothing waits for servers.
    """

    def __init__(
        self,
        config: TrainConfig,
        teacher: TeacherSpec,
        record: RecordClient,
        sequences: Sequence[ScoredTokens],
        stop: Callable[[], bool],
    ) -> None:
        self.name = teacher.name
        self._teacher = teacher
        self._record = record
        self._engine = config.engine
        self._request_timeout_s = config.distillation.request_timeout_s
        self._stop = stop
        self._bound = _LARGEST_DIFFERENCE[teacher.model.dtype]
        self._slots = asyncio.Semaphore(config.rollout.max_concurrent_requests)
        self._fleet = FleetClient(record.report_lost)
        self._members: list[Member] = []
        self._examiner = Examiner(
            record, config.engine, ServerStates(), self._examine, lambda: None, self._servers
        )
        self._follower: asyncio.Task[NoReturn] | None = None
        """The task of ``_follow_servers``, from the first call on."""
        self._is_starting = False
        """Whether a server that is refused ends the start."""
        self._sequences = sequences
        self._expected: Sequence[Sequence[float]] | None = None
        """Log-probabilities of ``_sequences``; None until the first server is checked."""
        self._origin = ""
        """The origin of ``_expected``, for messages."""

    async def score(self, tokens: ScoredTokens) -> dict[str, np.ndarray]:
        """Return the columns of ``tokens``.

        Raises EngineRequestError if a server refuses the request, and another EngineError if all attempts fail, or if
        no server is available within ``engine.start_timeout_s``.
        """
        async with self._slots:
            # The fleet client watches each server once, however many sequences are in flight.
            watch = asyncio.create_task(self._keep_watch())
            try:
                return await self._score(tokens)
            finally:
                watch.cancel()

    async def _score(self, tokens: ScoredTokens) -> dict[str, np.ndarray]:
        for attempt in range(1, _ATTEMPTS + 1):
            await self.wait_for_server()
            try:
                async with asyncio.timeout(self._request_timeout_s):
                    return await self._fleet.ask(lambda client: scores_by(client, tokens))
            except errors.EngineRequestError:
                raise
            except (errors.EngineError, TimeoutError) as error:
                reason = str(error) or f"no answer within {self._request_timeout_s:g} s"
                if attempt == _ATTEMPTS:
                    raise errors.EngineLostError(f"{attempt} attempts: {reason}") from error
                log.info("teacher %s: the request is sent again: %s", self.name, reason)
            await asyncio.sleep(_PAUSE_S)
        raise AssertionError("unreachable")

    async def wait_for_server(self) -> None:
        """Wait until a server of the teacher is available. Raises EngineLostError after ``engine.start_timeout_s``.

        A call that has a server does not wait until others are examined.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._engine.start_timeout_s
        if self._follower is None:
            self._follower = asyncio.create_task(self._follow_servers())
        while True:
            if self._follower.done():
                # The task ends only by an error. Raise it.
                self._follower.result()
            if self._fleet.has_servers:
                return
            if self._stop():
                raise errors.EngineLostError("the run stops while no server is available")
            if loop.time() > deadline:
                limit = f"{self._engine.start_timeout_s:g} s (engine.start_timeout_s)"
                states = self._examiner.states.items()
                reasons = [f"{server.name}: {state.examination}" for server, state in states]
                raise errors.EngineLostError("; ".join([f"no server within {limit}", *reasons]))
            await asyncio.sleep(_PAUSE_S)

    async def _follow_servers(self) -> NoReturn:
        """Use the servers that pass the checks, until the task is cancelled.

        Raises EngineMismatchError at the start for a refused server.
        """
        while True:
            losses = self._fleet.take_losses()
            for member in list(self._members):
                if member.server.name in losses:
                    # Its process may be another one when it answers again.
                    self._examiner.states.pop(member.server, None)
                    self._members.remove(member)
            await self._update_members()
            await asyncio.sleep(_REREAD_S if self._fleet.has_servers else _PAUSE_S)

    def _servers(self) -> list[Server]:
        """Return the teacher's servers that are published now, and the attached ones. Raises RecordLostError."""
        servers = [server for server in self._record.teachers() if server.teacher == self.name]
        urls = self._teacher.servers.urls
        return servers + [Server(attached_name(url), url, origin="config") for url in urls]

    async def _update_members(self) -> None:
        members: list[Member] = []
        for server in await self._examiner.published():
            member = Member.of(server, self._record.keys(server), self._engine)
            if member not in self._members:
                at_once = not self._fleet.has_servers
                examination = await self._examiner.examine(server, at_once=at_once)
                if examination.state == "refused" and self._is_starting:
                    raise errors.EngineMismatchError(examination.reason)
                if examination.state != "fits":
                    continue
            members.append(member)
        if members != self._members:
            await self._fleet.serve(members, FIRST_WEIGHT_VERSION)
        self._members = members

    async def _examine(self, member: Member) -> None:
        """Raise EngineError for a new server that generates nothing, or that fails the checks."""
        limit = self._engine.hang_timeout_s
        async with client_of(member) as client:
            # A server that hangs is published until the supervisor has killed it.
            if not await client.is_generating():
                raise errors.EngineLostError(f"{client.url} generates nothing")
            try:
                async with asyncio.timeout(limit):
                    await self._check_server(client)
            except TimeoutError as error:
                raise errors.EngineLostError(
                    f"{client.url}: no scores within {limit:g} s (engine.hang_timeout_s)"
                ) from error

    async def _keep_watch(self) -> NoReturn:
        """Report servers that hang, until the task is cancelled."""
        while True:
            with suppress(errors.EngineLostError):
                await self._fleet.watch(self._engine.hang_timeout_s)
            await asyncio.sleep(_PAUSE_S)

    async def check(self, earlier: Sequence[Sequence[float]] | None = None) -> list[list[float]]:
        """Compare the servers with the teacher's model, and return the log-probabilities of each of ``sequences``.

        ``earlier``: log-probabilities of the sequences at an earlier start; None: none are known. Raises
        EngineMismatchError for a server of another model, and for a server of other weights: its log-probabilities
        differ, by more than rounding explains, from ``earlier`` or from those of the teacher's first server.
        """
        self.expect(earlier, "at an earlier start of this run")
        self._is_starting = True
        await self.wait_for_server()
        self._is_starting = False
        return [list(row) for row in self._expected or ()]

    def expect(self, log_probs: Sequence[Sequence[float]] | None, origin: str) -> None:
        """Set the scores of ``sequences`` that servers must have from now on: ``log_probs``, from ``origin``.

        ``log_probs`` None: those of the first server.
        """
        self._expected = log_probs
        self._origin = origin

    async def _check_server(self, client: EngineClient) -> None:
        key = f"distillation.teachers.{self.name}.hf_checkpoint"
        await check_engine(self._teacher.model, self._teacher.servers, client, key)
        if not self._sequences:
            return
        scores = await self._measure(client)
        if self._expected is None:
            self._expected = [row.tolist() for row in scores]
            self._origin = f"by {client.url}"
        self._check_weights(client.url, scores)

    def _check_weights(self, url: str, scores: Sequence[np.ndarray]) -> None:
        """Raise EngineMismatchError if scores of the same tokens differ by more than rounding explains."""
        assert self._expected is not None
        largest = _largest_difference(np.concatenate(scores), np.concatenate(self._expected))
        if largest > self._bound:
            raise errors.EngineMismatchError(
                f"teacher {self.name} at {url}: got log-probabilities that differ by up to {largest:.2g} from those of "
                f"the same tokens {self._origin}, expected at most {self._bound:g} in {self._teacher.model.dtype}: the "
                "server has other weights than then. Serve the earlier weights; another teacher needs a folder of "
                f"another name (distillation.teachers.{self.name}.hf_checkpoint)"
            )

    async def _measure(self, client: EngineClient) -> list[np.ndarray]:
        """Return the log-probabilities of each sequence, and log how equal two scores of the first sequence are."""
        alone = await scores_by(client, self._sequences[0])
        together = await asyncio.gather(*(scores_by(client, tokens) for tokens in self._sequences))
        scores = [columns["teacher_log_probs"] for columns in together]
        largest = _largest_difference(alone["teacher_log_probs"], scores[0])
        log.log(
            logging.WARNING if largest > self._bound else logging.INFO,
            "teacher %s at %s: the same tokens, scored alone and beside others, have log-probabilities that differ by "
            "at most %.2g, expected at most %g in %s: the distillation loss has an error of this size",
            self.name,
            client.url,
            largest,
            self._bound,
            self._teacher.model.dtype,
        )
        return scores

    async def close(self) -> None:
        """Close the connections."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await self._fleet.close()


def _largest_difference(scores: np.ndarray, others: np.ndarray) -> float:
    return float(np.abs(scores - others).max())


async def scores_by(client: EngineClient, tokens: ScoredTokens) -> dict[str, np.ndarray]:
    """Return the columns of ``tokens`` as one server computes them. Raises the errors of ``request`` and ``read``."""
    payload = await client.request("POST", "/generate", tokens.body(), timeout_s=None)
    client.note_answer()
    return tokens.read(payload, client.url)
