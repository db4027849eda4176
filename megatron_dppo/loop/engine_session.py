"""Generation and weight updates of a run, which survive the death of servers.

Every public method is collective over all trainer ranks, but ``start``. Servers serve with committed
weights only: at each weight update the ranks agree who takes part (``fleet.membership``), and the
update reaches all of them or fails. When the last server is lost in generation, the ranks agree on
it, wait for another, restore the current weights there, verified, and ask only for what is still
missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from megatron_dppo.config.lora import updates_adapters
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.answer_parsing import AnswerParser
from megatron_dppo.engine.client import HttpClient
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.options import ServerSections, check_engine
from megatron_dppo.engine.weights import EngineWeights
from megatron_dppo.fleet.client import FleetClient
from megatron_dppo.fleet.endpoint import FleetEndpoint, admin_key, control_host
from megatron_dppo.fleet.folder import FleetFolder, Keys, Server
from megatron_dppo.fleet.generation import (
    Generation,
    GenerationEnd,
    GenerationJob,
    GenerationLimits,
    OnResponse,
)
from megatron_dppo.fleet.http_router import HttpRouterLink
from megatron_dppo.fleet.membership import (
    EngineUnavailableError,
    FleetMembership,
    Member,
    client_of,
    member_from_json,
    member_to_json,
)
from megatron_dppo.fleet.remote_record import record_of_rank
from megatron_dppo.loop.stopping import RunStoppedError
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.trainer.collectives import (
    all_gather_json,
    barrier,
    broadcast_json,
    first_failure,
)
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.weight_source import (
    AdapterWeights,
    TrainerWeights,
    ranks_per_sender,
)
from megatron_dppo.weight_sync.adapters import AdapterUpdater
from megatron_dppo.weight_sync.distributed import check_reach
from megatron_dppo.weight_sync.transaction import UpdateReport, WeightUpdateError, WeightUpdater

log = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Losses of the whole fleet in a row, without a response or an update in between, before a run gives up.

The supervisor bounds the restarts of its own servers (``engine.max_restarts``); this bounds the patience
with those that are attached by URL.
"""


class EngineSession:
    """``connect`` first; a context manager. Its end closes the connections; the servers keep running.

    ``fence``: collective; raises on every rank once another start of the run has taken over.
    ``version`` is the weight version that the fleet has committed; None before the first update.
    """

    def __init__(
        self,
        config: TrainConfig,
        trainer: Trainer,
        stop: Callable[[], bool],
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._stop = stop
        self._runner = AsyncRunner()
        self._record = record_of_rank(config.run.directory)
        self._endpoint: FleetEndpoint | None = None
        if isinstance(self._record, FleetFolder) and trainer.topology.rank == 0:
            host = control_host(config.parallel.interface, "127.0.0.1")
            self._endpoint = FleetEndpoint(self._record, admin_key(), host)
            self._endpoint.start()
        router = None
        if config.engine.uses_router:
            router = HttpRouterLink(self._find_router, registers=trainer.topology.rank == 0)
        self._parser = AnswerParser()
        adapters = updates_adapters(config.lora)
        self._fleet = FleetClient(self._report_lost, router, self._parser, adapters=adapters)
        self._membership: FleetMembership | None = None
        if trainer.topology.rank == 0:
            self._membership = FleetMembership(
                self._record, config.engine, self._runner, self._check_newcomer, stop
            )
        self._members: list[Member] = []
        self._attached = False
        self._updater = self._make_updater(fence)
        self._failures = 0
        self._alike = ("", 0)
        self.version: int | None = None
        self.updates = 0
        self.verified_updates = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._updater.close(at_once=kind is not None)
        self._runner.cancel_all()  # while there are clients that can abort it on the servers
        self._runner.run(self._fleet.close())
        self._parser.close()
        self._runner.close()
        if self._endpoint is not None:
            self._endpoint.stop()

    def connect(self) -> None:
        """Wait for the servers and attach to them. Raises RunStoppedError, EngineUnavailableError."""
        self._admit()

    # --- weights

    def _make_updater(self, fence: Callable[[], None]) -> WeightUpdater:
        config, trainer = self._config, self._trainer
        rest = (config.weight_sync, first_failure, self._open_engine, self._runner, fence)
        if updates_adapters(config.lora):
            return AdapterUpdater(AdapterWeights(trainer), *rest)
        source = TrainerWeights(trainer, ranks_per_sender(config.weight_sync.senders))
        return WeightUpdater(source, *rest)

    def update_weights(self, version: int) -> UpdateReport:
        """Bring the trainer's weights to the fleet as ``version``; returns when they are committed.

        Here restarted and new servers join, and those that fail the update are left out of it. Raises
        RunStoppedError, EngineUnavailableError.
        """
        while True:
            self._admit()
            try:
                report = self._updater.update(version)
            except WeightUpdateError as error:
                self._blame(error)
                continue
            self._commit(version, report)
            return report

    def _commit(self, version: int, report: UpdateReport) -> None:
        # A push that only restores the same version is no progress: the loss may come again.
        if version != self.version:
            self._failures = 0
        self._alike = ("", 0)
        self.version = version
        self.updates += 1
        self.verified_updates += report.verified
        if self._membership is not None:
            self._membership.commit(self._members, version)
            self._runner.run(self._fleet.serve(self._members, version))
        barrier()  # rank 0 has told the router, which the others ask
        if self._membership is None:
            self._runner.run(self._fleet.serve(self._members, version))

    # --- generation

    def start(
        self, job: GenerationJob, description: str, on_response: OnResponse | None = None
    ) -> Generation:
        """Ask for the responses of ``job``, this rank's own (an empty job on ranks that lead no replica), and
        return at once; they come while this rank does other work.

        ``on_response`` is called, in another thread, with each response once, as soon as it is there.
        Until ``finish``, weights must not be updated: an update waits for running requests. Not collective.
        """
        generation = Generation(job, description, on_response)
        self._resume(generation)
        return generation

    def finish(self, generation: Generation, held: int | None = None) -> list[Trajectory]:
        """All responses of what ``start`` began; shows progress while it waits.

        ``held``: version of the weights that the trainer has by now (None: those that the fleet has). Where the
        whole fleet was lost, the next server gets them under that name, and draws what is missing from them.

        Raises on every rank RunStoppedError when a clean stop was asked for meanwhile, and
        EngineUnavailableError.
        """
        while True:
            before = len(generation.done)
            outcome, reason = generation.wait(self._stop)
            answers = all_gather_json([int(outcome), reason, len(generation.done) > before])
            worst = max(GenerationEnd(answer[0]) for answer in answers)
            if worst is GenerationEnd.FAILED:
                raise EngineUnavailableError(next(a[1] for a in answers if a[0] == worst))
            if worst is GenerationEnd.STOPPED:
                raise RunStoppedError("stopped while generating")
            if worst is GenerationEnd.DONE:
                self._failures = 0
                return generation.job.trajectories(generation.done)
            if any(answer[2] for answer in answers):
                self._failures = 0
            self._count_failure(next(a[1] for a in answers if a[0] == GenerationEnd.LOST))
            self._restore(held)
            self._resume(generation)

    def _resume(self, generation: Generation) -> None:
        limits = GenerationLimits.of(self._config.rollout, self._config.engine)
        generation.resume(self._runner, self._fleet, limits, self._stop)

    # --- membership

    def _restore(self, held: int | None) -> None:
        """A healthy fleet with the trainer's weights: version ``held``, or the one that it had."""
        version = self.version if held is None else held
        self._attached = False
        self._admit()
        if version is not None:
            self.update_weights(version)
            log.info("engine restored at weight version %d", version)

    def _admit(self) -> None:
        """Attach to the servers that may serve, where they are others than before or were lost; the
        weights of all count as unknown then."""
        while True:
            members = self._agree_on_members()
            if self._attached and members == self._members:
                return
            self._members = members
            try:
                self._updater.attach([member.server.url for member in members])
            except WeightUpdateError as error:
                self._blame(error)
                continue
            self._attached = True
            return

    def _agree_on_members(self) -> list[Member]:
        suspended = {
            name: reason
            for part in all_gather_json(self._fleet.take_losses())
            for name, reason in part.items()
        }
        chosen, problem = None, None
        if self._membership is not None:
            try:
                members = self._membership.choose(self._members, suspended)
                chosen = None if members is None else [member_to_json(m) for m in members]
            except (EngineUnavailableError, EngineError) as error:
                problem = str(error)
        chosen, problem = broadcast_json([chosen, problem], src=0)
        if problem is not None:
            raise EngineUnavailableError(problem)
        if chosen is None:
            raise RunStoppedError("stopped while waiting for the engine")
        return [member_from_json(value) for value in chosen]

    def _blame(self, error: WeightUpdateError) -> None:
        """An update failed, or a server could not be attached; the next attempt is without those at
        fault, unless nobody would be left. Raises EngineUnavailableError where it would end alike."""
        self._attached = False
        reason = str(error)
        if 0 < len(error.engines) < len(self._members):
            log.warning("%s", reason)
        else:
            self._alike = reason, self._alike[1] + 1 if self._alike[0] == reason else 1
            if self._alike[1] >= error.attempts:
                raise EngineUnavailableError(f"{reason}; another attempt would end alike")
            self._count_failure(reason)
        if self._membership is not None:
            self._membership.blame(self._members, error.engines, reason, attempts=error.attempts)

    def _count_failure(self, reason: str) -> None:
        self._failures += 1
        log.warning("engine lost: %s", reason)
        if self._failures > MAX_FAILURES:
            raise EngineUnavailableError(
                f"the engine was lost {self._failures} times in a row; the last time: {reason}"
            )

    async def _check_newcomer(self, member: Member) -> None:
        """Raise EngineMismatchError for a server that the run can't use."""
        async with client_of(member) as client:
            await check_engine(ServerSections.of(self._config), client)
        weights = await self._open_weights(member)
        try:
            await weights.check_tensors()
            await check_reach(weights, self._config.weight_sync)
        finally:
            await weights.close()

    async def _open_engine(self, url: str) -> EngineWeights:
        """The weight control of a member; called on rank 0 and on every rank that sends weights."""
        return await self._open_weights(next(m for m in self._members if m.server.url == url))

    async def _open_weights(self, member: Member) -> EngineWeights:
        server, keys = member.server, member.keys
        return await EngineWeights.connect(
            HttpClient(server.url, keys.api, keys.admin, member.ca_file),
            self._trainer.shape,
            self._config.model.dtype,
            timeout_s=self._config.weight_sync.timeout_s,
            patience_s=self._config.engine.hang_timeout_s,
        )

    def _find_router(self) -> tuple[Server, Keys] | None:
        router = self._record.router()
        return None if router is None else (router, self._record.keys(router))

    def _report_lost(self, server: Server) -> None:
        if server.replaceable:
            self._record.report_lost(server)
