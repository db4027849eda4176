"""Generation and weight updates of a run, which survive the death of servers.

Every public method is collective over all trainer ranks, but ``start``. Servers serve with committed weights only: at
each weight update the ranks agree who takes part (``fleet.membership``), and the update reaches all of them or fails.
When the last server is lost in generation, the ranks agree on it, wait for another, restore the current weights
there, verified, and ask only for what is still missing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from megatron_dppo.config.lora import updates_adapters
from megatron_dppo.config.schema import TrainConfig, WeightSyncConfig
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.answer_parsing import AnswerParser
from megatron_dppo.engine.client import HttpClient
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.options import ServerSections, check_engine
from megatron_dppo.engine.process import last_exception_of
from megatron_dppo.engine.weights import TAGS, EngineWeights, MemoryTag, Occupation
from megatron_dppo.fleet import membership
from megatron_dppo.fleet.client import FleetClient
from megatron_dppo.fleet.endpoint import (
    ENDPOINT_VARIABLE,
    FleetEndpoint,
    RecordClient,
    admin_key,
    control_host,
)
from megatron_dppo.fleet.generation import (
    Generation,
    GenerationEnd,
    GenerationJob,
    GenerationLimits,
    OnResponse,
    Slots,
)
from megatron_dppo.fleet.http_router import HttpRouterLink
from megatron_dppo.fleet.record import FleetRecord, Keys, Server
from megatron_dppo.fleet.suspects import Suspect
from megatron_dppo.loop.ending import RunStoppedError
from megatron_dppo.model.shape import TRAINER_PARTS, ModelShape, TrainerPart
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.errors import RunError
from megatron_dppo.trainer import collectives
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.weight_source import AdapterWeights, TrainerWeights, ranks_per_sender
from megatron_dppo.weight_sync.adapters import AdapterUpdater
from megatron_dppo.weight_sync.engines import interrupt_and_release
from megatron_dppo.weight_sync.strategies import check_reach
from megatron_dppo.weight_sync.transaction import (
    UpdateReport,
    WeightUpdateError,
    WeightUpdater,
    WeightUpdateRefusedError,
)

log = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Losses of the whole fleet in a row, without a response or an update in between, before a run gives up.

The supervisor bounds the restarts of its own servers (``engine.max_restarts``); this bounds the patience
with those that are attached by URL.
"""


class WeightsLostError(RunError):
    """Nobody has the weights any more that a generation is of."""


class _Connections:
    """This rank's connections to the servers and to ``record``, and the generations under way on them; ``close`` ends
    all, ``endpoint`` too.

    ``stop``: whether generations shall end. ``registers``: this rank tells the router of the servers.
    """

    def __init__(
        self,
        sections: ServerSections,
        record: RecordClient,
        endpoint: FleetEndpoint | None,
        stop: Callable[[], bool],
        *,
        registers: bool,
    ) -> None:
        self.record = record
        self._endpoint = endpoint
        self._stop = stop
        self._under_way: list[Generation] = []
        self._limits = GenerationLimits.of(sections.rollout, sections.engine, sections.environment)
        self._aborts = sections.rollout.interrupt == "abort"
        self.slots = Slots(self._limits.calls, self._limits.episodes)
        router = None
        if sections.engine.uses_router:
            router = HttpRouterLink(record.reachable_router, registers=registers)
        self.parser = AnswerParser()
        self.runner = AsyncRunner()
        adapters = updates_adapters(sections.lora)
        self.client = FleetClient(record.report_lost, router, self.parser, adapters=adapters)

    def start(self, generation: Generation) -> None:
        self._under_way.append(generation)
        self._resume(generation)

    def resume_lost(self) -> None:
        """Ask anew for what is missing of the generations whose servers were lost."""
        for generation in self._under_way:
            if generation.is_lost:
                generation.end()
                self._resume(generation)

    def wait(self, generation: Generation) -> tuple[GenerationEnd, str]:
        return generation.wait(self._stop)

    def drop(self, generation: Generation) -> None:
        """It is done, or nobody waits for it any more: end what is left of it."""
        if generation in self._under_way:
            self._under_way.remove(generation)
            generation.cancel()

    def _resume(self, generation: Generation) -> None:
        generation.resume(self.runner, self.client, self._limits, self._stop, self.slots)

    def break_off(self) -> None:
        """End this rank's calls: what they ask for is asked for again."""
        self.runner.run(self.client.break_off())

    def hold(self) -> None:
        """The servers are about to stand still, until they serve again. Collective."""
        self.runner.run(self._hold())
        if self._aborts:
            # Nobody's call may be in flight any more when the servers are paused.
            collectives.barrier()

    def serve(self, members: Sequence[membership.Member], version: int) -> None:
        """``members`` have committed weight ``version``: generation goes on."""
        self.runner.run(self._serve(members, version))

    async def _hold(self) -> None:
        await self.client.hold(abort=self._aborts)
        self.slots.hold(True)

    async def _serve(self, members: Sequence[membership.Member], version: int) -> None:
        await self.client.serve(members, version)
        self.slots.hold(False)

    @property
    def is_quiet(self) -> bool:
        """Whether no generation of this rank is running."""
        return all(g.running is None or g.running.done() for g in self._under_way)

    def question_suspects(self) -> Suspect | None:
        return self.runner.run(self.client.question_suspects(self._stop))

    def close(self) -> None:
        """Abort what is under way on the servers, and close the connections."""
        # While there are clients that can abort it on the servers.
        self.runner.cancel_all()
        self.runner.run(self.client.close())
        self.parser.close()
        self.runner.close()
        if self._endpoint is not None:
            self._endpoint.stop()


def _open_record(
    run_directory: str, interface: str | None, rank: int
) -> tuple[RecordClient, FleetEndpoint | None]:
    """The record of the servers, and its endpoint where this rank keeps it.

    Collective where a launcher such as torchrun has started the ranks: rank 0 then keeps it.
    """
    keys, url = Keys.handed_down(), os.environ.get(ENDPOINT_VARIABLE)
    endpoint: FleetEndpoint | None = None
    if url is not None:
        return RecordClient(url, keys), None
    if rank == 0:
        record, key = FleetRecord(run_directory), admin_key()
        record.withdraw_started()
        endpoint = FleetEndpoint(record, key, control_host(interface, "127.0.0.1"))
        endpoint.start()
        url, keys = endpoint.url, Keys(admin=key)
    url, admin = collectives.broadcast_json([url, keys.admin], src=0)
    return RecordClient(url, Keys(admin=admin)), endpoint


@dataclass(frozen=True)
class _ServerAccess:
    """How the run examines a server, and opens the control of its weights."""

    sections: ServerSections
    weight_sync: WeightSyncConfig
    shape: ModelShape
    _occupations: dict[membership.Member, Occupation] = field(default_factory=dict)

    async def check(self, member: membership.Member) -> None:
        """Raise EngineMismatchError for a server that the run can't use."""
        async with membership.client_of(member) as client:
            await check_engine(self.sections, client)
        weights = await self._connect(member)
        try:
            await weights.check_tensors()
            await check_reach(weights, self.weight_sync)
        finally:
            await weights.close()

    async def open_weights(self, member: membership.Member) -> EngineWeights:
        """The weight control of a member of the fleet."""
        weights = await self._connect(member)
        # A server that is attached again has released what it had.
        weights.occupation = self._occupations.setdefault(member, weights.occupation)
        return weights

    async def let_go(self, member: membership.Member, tags: Sequence[MemoryTag]) -> None:
        """It has no memory of ``tags`` any more. Raises EngineError where that is not known."""
        if member in self._occupations and self._occupations[member].released.issuperset(tags):
            return
        weights = await self.open_weights(member)
        try:
            await interrupt_and_release(weights, tags)
        finally:
            await weights.close()

    async def _connect(self, member: membership.Member) -> EngineWeights:
        server, keys = member.server, member.keys
        return await EngineWeights.connect(
            HttpClient(server.url, keys.api, keys.admin, member.ca_file),
            self.shape,
            self.sections.model.dtype,
            timeout_s=self.weight_sync.timeout_s,
            patience_s=self.sections.engine.hang_timeout_s,
        )


class _Patience:
    """How often in a row the servers were lost, or refused an update in the same words."""

    def __init__(self) -> None:
        self._losses = 0
        self._refusal = ""
        self._refusals = 0

    def count_loss(self, reason: str) -> None:
        """The whole fleet was lost. Raises EngineUnavailableError where that came too often."""
        self._losses += 1
        log.warning("engine lost: %s", reason)
        if self._losses > MAX_FAILURES:
            raise membership.EngineUnavailableError(
                f"the engine was lost {self._losses} times in a row; the last time: {reason}"
            )

    def count_refusal(self, reason: str, attempts: int) -> None:
        """All failed. Raises EngineUnavailableError where it would end alike after so many ``attempts``."""
        self._refusals = self._refusals + 1 if reason == self._refusal else 1
        self._refusal = reason
        if self._refusals >= attempts:
            raise membership.EngineUnavailableError(f"{reason}; another attempt would end alike")

    def forget_losses(self) -> None:
        """A response came, or other weights."""
        self._losses = 0

    def forget_refusals(self) -> None:
        self._refusal, self._refusals = "", 0


@dataclass
class CommittedUpdates:
    """``version``: of the weights that the fleet has; None before the first update. ``count``: updates that were
    committed, ``verified`` of them compared tensor by tensor."""

    version: int | None = None
    count: int = 0
    verified: int = 0


@dataclass(frozen=True)
class _SharedDevices:
    """Devices that trainer and servers use in turns (``engine.placement: colocated``). Where each has its own
    (``is_shared`` False), nothing of this is called.

    ``parts``: of the trainer, that leave in the servers' turn; ``released``: what servers let go of in the trainer's.
    ``record``: of rank 0, which says there whether servers may be started.
    """

    is_shared: bool
    trainer: Trainer
    parts: Sequence[TrainerPart]
    released: Sequence[MemoryTag]
    record: RecordClient | None

    def leave(self, *stays: TrainerPart) -> None:
        """The trainer's turn is over, but for what ``stays``. Collective."""
        if leaving := [p for p in self.parts if p not in self.trainer.parked.union(stays)]:
            self.trainer.park(leaving)
        collectives.barrier()
        self.allow_starts(not stays)

    def take(self) -> None:
        """The trainer's turn begins. Collective."""
        # Nobody generates any more, also not a server that fails to say so.
        collectives.barrier()
        if self.trainer.parked:
            self.trainer.unpark()

    def allow_starts(self, allowed: bool) -> None:
        if self.record is not None:
            self.record.allow_starts(allowed)


class EngineSession:
    """``connect`` first; a context manager. Its end closes the connections; the servers keep running.

    ``fence``: collective; raises on every rank once another start of the run has taken over. ``place_of``: where in the
    data a prompt stands, by its tokens, in words; None where it isn't known.
    """

    def __init__(
        self,
        config: TrainConfig,
        trainer: Trainer,
        stop: Callable[[], bool],
        fence: Callable[[], None] = lambda: None,
        place_of: Callable[[Sequence[int]], str | None] = lambda prompt_ids: None,
    ) -> None:
        sections, rank = ServerSections.of(config), trainer.topology.rank
        self._rank, self._place_of = rank, place_of
        self._logs = Path(config.run.directory) / "logs"
        self._access = _ServerAccess(sections, config.weight_sync, trainer.shape)
        record, endpoint = _open_record(config.run.directory, config.parallel.interface, rank)
        self._connections = connections = _Connections(
            sections, record, endpoint, stop, registers=rank == 0
        )
        adapts = updates_adapters(config.lora)
        # Updates of adapters don't bring the frozen model again, so the servers keep it.
        kept_tags = {"weights"} if adapts else set()
        self._devices = _SharedDevices(
            config.engine.placement == "colocated",
            trainer,
            config.engine.parked or TRAINER_PARTS,
            [tag for tag in TAGS if tag not in kept_tags],
            record if rank == 0 else None,
        )
        self._membership: membership.FleetMembership | None = None
        if rank == 0:
            self._membership = membership.FleetMembership(
                connections.record, config.engine, connections.runner, self._access.check, stop
            )
        self._members: list[membership.Member] = []
        self._attached = False
        updater: Callable[..., WeightUpdater] = AdapterUpdater if adapts else WeightUpdater
        source = (
            AdapterWeights(trainer)
            if adapts
            else TrainerWeights(trainer, ranks_per_sender(config.weight_sync.senders))
        )
        self._updater = updater(
            source,
            config.weight_sync,
            collectives.first_failure,
            self._open_engine,
            connections.runner,
            fence,
            interrupts=config.rollout.interrupt == "retract",
            # An update that has read the weights ends the trainer's turn.
            leave_devices=self._devices.leave if self._devices.is_shared else None,
        )
        self._patience = _Patience()
        self.updates = CommittedUpdates()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._updater.close(at_once=kind is not None)
        self._connections.close()

    def connect(self) -> None:
        """Wait for the servers and attach to them. Raises RunStoppedError, EngineUnavailableError."""
        self._make_room()
        self._admit()

    # --- weights

    def update_weights(self, version: int) -> UpdateReport:
        """Bring the trainer's weights to the fleet as ``version``; returns when they are committed.

        Here restarted and new servers join, and those that fail the update are left out of it. Raises
        RunStoppedError, EngineUnavailableError.
        """
        while True:
            self._make_room()
            self._admit()
            connections = self._connections
            # Before the first server is paused: its silence must not be taken for a hang.
            connections.hold()
            if version == self.updates.version:
                # A span could not tell a token of before from one that was drawn while the servers were scored.
                connections.break_off()
            try:
                if self._devices.is_shared:
                    # Released in the trainer's turn, but by newcomers, in the first update, and after one that failed.
                    tags = [tag for tag in self._devices.released if tag != "weights"]
                    self._updater.release_memory(tags)
                    self._clear_devices(tags)
                    if "weights" in self._devices.trainer.parked:
                        self._devices.trainer.unpark(["weights"])
                report = self._updater.update(version)
            except WeightUpdateError as error:
                if not isinstance(error, WeightUpdateRefusedError):
                    connections.break_off()
                self._blame(error)
                continue
            self._commit(version, report)
            return report

    def _commit(self, version: int, report: UpdateReport) -> None:
        # A push that only restores the same version is no progress: the loss may come again.
        if version != self.updates.version:
            self._patience.forget_losses()
        self._patience.forget_refusals()
        self.updates.version = version
        self.updates.count += 1
        self.updates.verified += report.verified
        if self._membership is not None:
            self._membership.commit(self._members, version)
            self._connections.serve(self._members, version)
        # Rank 0 has informed the router, which the others ask.
        collectives.barrier()
        if self._membership is None:
            self._connections.serve(self._members, version)
        self._question_suspects()
        self._connections.resume_lost()

    def _question_suspects(self) -> None:
        """Find the prompt that servers die of, where losses had some in common, rank by rank. Collective.

        Not where a generation goes on: a server could end by what that asks for. Raises FatalPromptError.
        """
        connections = self._connections
        states = collectives.all_gather_json([connections.client.suspects, connections.is_quiet])
        if not all(is_quiet for _, is_quiet in states):
            return
        for rank, (count, _) in enumerate(states):
            if not count:
                continue
            suspect = connections.question_suspects() if rank == self._rank else None
            fault = collectives.first_failure(None if suspect is None else self._accuse(suspect))
            if fault is not None:
                raise membership.FatalPromptError(fault)

    def _accuse(self, suspect: Suspect) -> str:
        prompt = suspect.request.prompt_ids
        place = self._place_of(prompt) or f"problem {suspect.request.problem_id}"
        ends = "; ".join(f"{s.name}: {self._last_exception(s)}" for s in suspect.servers)
        return (
            f"{place}: servers end when they are asked for one token after this prompt of {len(prompt)} tokens alone, "
            f"expected a prompt that they answer; those that were lost with it: {ends}"
        )

    def _last_exception(self, server: Server) -> str:
        path = self._logs / f"{server.name}-{server.incarnation}.log"
        found = last_exception_of(path) if path.is_file() else None
        return found or f"no Python exception in {path}"

    # --- devices that trainer and servers share

    def take_devices(self) -> None:
        """The servers stop in the middle of what they generate and let go of their memory, and the trainer takes its
        own again, up to the next update. Collective."""
        self._connections.hold()
        if self._attached:
            try:
                self._updater.release_memory(self._devices.released)
            except WeightUpdateError as error:
                log.warning("%s", error)
                self._attached = False
                if self._membership is not None:
                    self._membership.blame(self._members, error.engines, str(error))
        self._clear_devices(self._devices.released)
        self._devices.take()

    def _clear_devices(self, tags: Sequence[MemoryTag]) -> None:
        """No server starts, or has memory of ``tags``, any more. Collective. Raises EngineUnavailableError."""
        self._devices.allow_starts(False)
        fault = None
        if self._membership is not None:
            fault = self._membership.clear_devices(lambda m: self._access.let_go(m, tags))
        if (fault := collectives.first_failure(fault)) is not None:
            raise membership.EngineUnavailableError(fault)

    def _make_room(self) -> None:
        """The trainer leaves the devices, as far as an update lets it: it reads its weights, once there are servers."""
        if self._devices.is_shared:
            has_servers = self._membership is not None and self._membership.has_servers()
            is_next = self._attached and collectives.any_rank(has_servers)
            stays: list[TrainerPart] = ["weights"] if is_next else []
            self._devices.leave(*stays)

    # --- generation

    def start(
        self,
        job: GenerationJob,
        description: str,
        on_response: OnResponse | None = None,
        order: int = 0,
        done: Mapping[Hashable, Trajectory] | None = None,
    ) -> Generation:
        """Ask for the responses of ``job``, this rank's own (an empty job on ranks that lead no replica), and
        return at once; they come while this rank does other work.

        ``on_response`` is called, in another thread, with each response once, as soon as it is there. ``order``: of two
        generations under way, that with the lower one goes first. ``done``: responses that are there already, by key;
        they are not asked for. A weight update meanwhile waits for the responses, or
        interrupts them (``rollout.interrupt``). Not collective.
        """
        generation = Generation(job, description, on_response, order, dict(done or {}))
        self._connections.start(generation)
        return generation

    @property
    def busy_s(self) -> float:
        """How long, since the start, this rank had something to generate."""
        return self._connections.slots.busy_s

    def finish(
        self, generation: Generation, trainer_version: int | None = None, *, mixes: bool = True
    ) -> list[Trajectory]:
        """All responses of what ``start`` began; shows progress while it waits.

        ``trainer_version``: of the weights that the trainer has by now (None: those that the fleet has). Where the
        whole fleet was lost, the next server gets them under that name, and draws what is missing from them; unless
        ``mixes`` is false and they are others than the fleet had, which raises WeightsLostError. Where servers go on,
        but without a response, they are asked again.

        Raises on every rank RunStoppedError when a clean stop was asked for meanwhile, and EngineUnavailableError.
        """
        while True:
            before = len(generation.done)
            outcome, reason = self._connections.wait(generation)
            is_served = self._connections.client.has_servers
            answers = collectives.all_gather_json(
                [int(outcome), reason, len(generation.done) > before, is_served]
            )
            worst = max(GenerationEnd(answer[0]) for answer in answers)
            if worst is GenerationEnd.FAILED:
                raise membership.EngineUnavailableError(
                    next(a[1] for a in answers if a[0] == worst)
                )
            if worst is GenerationEnd.STOPPED:
                raise RunStoppedError("stopped while generating")
            if worst is GenerationEnd.DONE:
                self._patience.forget_losses()
                self._connections.drop(generation)
                return generation.job.trajectories(generation.done)
            if any(answer[2] for answer in answers):
                self._patience.forget_losses()
            lost = [answer for answer in answers if answer[0] == GenerationEnd.LOST]
            reason, is_served = lost[0][1], all(answer[3] for answer in lost)
            if not (is_served or mixes or trainer_version in (None, self.updates.version)):
                raise WeightsLostError(f"weight version {self.updates.version} is lost: {reason}")
            self._patience.count_loss(reason)
            if is_served:
                # A response failed again and again on servers that go on.
                self._question_suspects()
                self._connections.resume_lost()
            else:
                self._restore(trainer_version)

    def drop(self, generation: Generation) -> None:
        """Nobody waits for it any more: end what is left of it. Not collective."""
        self._connections.drop(generation)

    # --- membership

    def _restore(self, trainer_version: int | None) -> None:
        """A healthy fleet with the trainer's weights, under that version or the one that it had."""
        version = self.updates.version if trainer_version is None else trainer_version
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

    def _agree_on_members(self) -> list[membership.Member]:
        suspended = {
            name: reason
            for losses in collectives.all_gather_json(self._connections.client.take_losses())
            for name, reason in losses.items()
        }
        chosen, fault = None, None
        if self._membership is not None:
            try:
                members = self._membership.choose(self._members, suspended)
                chosen = None if members is None else membership.MEMBERS.dump_python(members)
            except (membership.EngineUnavailableError, EngineError) as error:
                fault = str(error)
        chosen, fault = collectives.broadcast_json([chosen, fault], src=0)
        if fault is not None:
            raise membership.EngineUnavailableError(fault)
        if chosen is None:
            raise RunStoppedError("stopped while waiting for the engine")
        return membership.MEMBERS.validate_python(chosen)

    def _blame(self, error: WeightUpdateError) -> None:
        """An update failed, or a server could not be attached; the next attempt is without those at
        fault, unless nobody would be left. Raises EngineUnavailableError where it would end alike."""
        self._attached = False
        reason = str(error)
        if 0 < len(error.engines) < len(self._members):
            log.warning("%s", reason)
        else:
            self._patience.count_refusal(reason, error.attempts)
            self._patience.count_loss(reason)
        if self._membership is not None:
            self._membership.blame(self._members, error.engines, reason, attempts=error.attempts)

    async def _open_engine(self, url: str) -> EngineWeights:
        """The weight control of a member; called on rank 0 and on every rank that sends weights."""
        member = next(m for m in self._members if m.server.url == url)
        return await self._access.open_weights(member)
