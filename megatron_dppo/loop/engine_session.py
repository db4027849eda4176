"""Generation and weight updates of a run: both survive the death of servers.

Every public method except ``start`` and ``drop`` is collective over all trainer ranks. Servers serve with committed
weights only: at each weight update the ranks agree on the servers that take part, the members (``fleet.membership``).
The update reaches all members or fails. When the last server is lost during generation, the ranks agree on the loss,
wait for another server, send it the current weights, verify the weights, and request only the missing responses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.process import last_exception_of
from megatron_dppo.fleet import membership
from megatron_dppo.fleet.endpoint import RecordClient
from megatron_dppo.fleet.generation import Generation, GenerationEnd, GenerationJob, OnResponse
from megatron_dppo.fleet.record import Server
from megatron_dppo.fleet.suspects import Suspect
from megatron_dppo.logging import LOGS_FOLDER
from megatron_dppo.loop.ending import RunStoppedError
from megatron_dppo.loop.engine_connections import EngineConnections, open_record
from megatron_dppo.loop.failure_limits import FailureLimits
from megatron_dppo.loop.server_access import ServerAccess, released_tags
from megatron_dppo.loop.shared_devices import SharedDevices
from megatron_dppo.model.shape import TRAINER_PARTS, TrainerPart
from megatron_dppo.spec import ModelSpec, RunSpec
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.lease import FencedError, start_of_ranks
from megatron_dppo.trainer import collectives
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.weight_source import AdapterWeights, TrainerWeights
from megatron_dppo.weights.adapters import AdapterUpdater
from megatron_dppo.weights.engine_weights import EngineWeights
from megatron_dppo.weights.engines import ENGINE_FAULTS
from megatron_dppo.weights.server import held_tensors
from megatron_dppo.weights.server.server_state import MemoryTag
from megatron_dppo.weights.transaction import (
    UpdateReport,
    WeightUpdateError,
    WeightUpdater,
    WeightUpdateRefusedError,
)

log = logging.getLogger(__name__)


class WeightsLostError(RunError):
    """No server and no rank holds the weight version that must sample the missing responses of a generation."""


@dataclass
class CommittedUpdates:
    """Weight updates that the fleet has committed.

    Attributes:
        version: weight version of the fleet; None before the first update.
        count: number of committed updates.
        verified: number of committed updates that were compared tensor by tensor.
    """

    version: int | None = None
    count: int = 0
    verified: int = 0


class _RankEnd(NamedTuple):
    """How one rank's wait for a generation ended.

    Attributes:
        end: a GenerationEnd as an integer.
        reason: the reason of a loss or a failure.
        has_new_responses: whether responses have arrived during the wait.
        has_servers: whether the rank knows a server that runs.
    """

    end: int
    reason: str
    has_new_responses: bool
    has_servers: bool


class EngineSession:
    """The fleet as the training loop sees it: generation, weight updates and recovery.

    Call ``connect`` first. Leaving the context closes the connections; the servers keep running.

    Args:
        config: configuration of the run.
        spec: facts that follow from the configuration.
        trainer: source of the weights.
        stop: returns whether a clean stop was requested.
        fence: collective; raises on every rank once another start of the run has taken over.
        place_of: tokens of a prompt -> file and line of the prompt's problem; None if no problem has this prompt.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: RunSpec,
        trainer: Trainer,
        stop: Callable[[], bool],
        fence: Callable[[], None] | None = None,
        place_of: Callable[[Sequence[int]], str | None] | None = None,
    ) -> None:
        rank = trainer.topology.rank
        record, endpoint = open_record(config.run.directory, config.parallel.interface, rank)
        self._rank = rank
        self._place_of = place_of or _unknown_place
        self._logs = Path(config.run.directory) / LOGS_FOLDER
        self._access = ServerAccess(config, spec.model, spec.servers)
        self._connections = EngineConnections(
            config,
            record,
            endpoint,
            stop,
            sends_adapters=spec.model.sends_adapters,
            registers=rank == 0,
        )
        self._devices = _shared_devices(config, spec, trainer, record if rank == 0 else None)
        self._membership: membership.FleetMembership | None = None
        if rank == 0:
            self._membership = membership.FleetMembership(
                record, config.engine, self._connections.runner, self._access.check, stop
            )
        self._members: list[membership.Member] = []
        # Whether the updater is attached to the members.
        self._is_attached = False
        self._record = record
        self._fence = fence or _no_fence
        self._updater = self._weight_updater(config, spec.model, trainer, self._check_fences)
        self._failures = FailureLimits()
        self.updates = CommittedUpdates()

    def _weight_updater(
        self, config: TrainConfig, model: ModelSpec, trainer: Trainer, fence: Callable[[], None]
    ) -> WeightUpdater:
        """Return the updater of LoRA adapters or of the whole policy, as ``lora.update`` says."""
        source: AdapterWeights | TrainerWeights
        if model.sends_adapters:
            updater_class: Callable[..., WeightUpdater] = AdapterUpdater
            source = AdapterWeights(trainer)
        else:
            updater_class = WeightUpdater
            source = TrainerWeights(trainer)
        return updater_class(
            source,
            config.weight_sync,
            collectives.first_failure,
            self._open_engine,
            self._connections.runner,
            fence,
            interrupts=config.rollout.interrupt == "retract",
            compare_before_every=config.memory_checks.engines_every,
            quantization=model.quantization,
            is_atomic=config.engine.atomic_updates,
            # The trainer leaves shared devices as soon as the update has read its weights.
            leave_devices=self._devices.leave if self._devices.is_shared else None,
        )

    def _check_fences(self) -> None:
        """Raise FencedError on every rank once a newer start of the run, or a restart of its ranks, has taken over.

        Collective.
        """
        fault = None
        if self._rank == 0:
            try:
                self._record.check_start()
            except FencedError as error:
                fault = str(error)
        fault = collectives.first_failure(fault)
        if fault is not None:
            raise FencedError(fault)
        self._fence()

    @property
    def record(self) -> RecordClient:
        """This rank's client of the server registry."""
        return self._record

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._updater.close(at_once=kind is not None)
        self._connections.close()

    def connect(self) -> None:
        """Wait for the servers and attach to them.

        Restarted ranks first take over the servers that the ranks before the restart used.

        Raises RunStoppedError, EngineUnavailableError.
        """
        self._recover()
        self._make_room()
        self._admit()

    def _recover(self) -> None:
        """After a restart of the ranks, have the servers forget the ranks that ran before. Otherwise do nothing.

        Collective after a restart.
        """
        is_first_start = start_of_ranks() in (None, 1)
        if is_first_start:
            return
        fault = None
        if self._membership is not None:
            try:
                self._membership.recover(self._access.forget_ranks)
            except EngineError as error:
                fault = str(error)
        fault = collectives.first_failure(fault)
        if fault is not None:
            raise membership.EngineUnavailableError(fault)

    def update_weights(self, version: int) -> UpdateReport:
        """Send the trainer's weights to the fleet as ``version`` and return when they are committed.

        Restarted and new servers join the fleet here. Servers that fail the update are left out of the fleet.

        Raises RunStoppedError, EngineUnavailableError.
        """
        while True:
            self._make_room()
            self._admit()
            connections = self._connections
            # Hold the calls before the first server is paused: a paused server's silence must not count as a hang.
            connections.hold()
            if version == self.updates.version:
                # The same version is sent again. Responses that continued across this update would have one version
                # span, and the span would hide the update. So end the calls.
                connections.break_off()
            try:
                if self._devices.is_shared:
                    # Make room for the trainer's weights, which the update reads. Release all tags except the servers'
                    # weights, which the update writes. Most servers released these tags in the trainer's turn already.
                    # New servers hold the tags. Before the first and after a failed update, all servers hold the tags.
                    tags = [tag for tag in self._devices.released if tag != "weights"]
                    self._updater.release_memory(tags)
                    self._clear_devices(tags)
                    if "weights" in self._devices.trainer.parked:
                        self._devices.trainer.unpark(["weights"])
                report = self._updater.update(version)
            except WeightUpdateError as error:
                # After a refused update, the engines continue with their previous weights, so the calls stay valid.
                if not isinstance(error, WeightUpdateRefusedError):
                    connections.break_off()
                self._blame(error)
                continue
            self._commit(version, report)
            return report

    def _commit(self, version: int, report: UpdateReport) -> None:
        """Count the update, and let every rank generate with the updated servers. Collective."""
        # Sending the same version again is no progress: the fleet may be lost again for the same reason.
        if version != self.updates.version:
            self._failures.forget_losses()
        self._failures.forget_refusals()
        self.updates.version = version
        self.updates.count += 1
        self.updates.verified += report.verified
        if self._membership is not None:
            self._membership.commit(self._members, version)
            self._connections.serve(self._members, version)
        # Rank 0 must register the servers with the router before the other ranks send calls to the router.
        collectives.barrier()
        if self._membership is None:
            self._connections.serve(self._members, version)
        self._question_suspects()
        self._connections.resume_lost()

    def _question_suspects(self) -> None:
        """Find the prompt that kills servers, if a prompt was in flight at several losses of servers. Collective.

        The ranks send their suspected prompts one rank after another. The search is skipped while a generation is
        running, because a request of that generation could also end a server. Raises FatalPromptError.
        """
        connections = self._connections
        states = collectives.all_gather_json(
            [connections.client.suspect_count, connections.is_quiet]
        )
        if not all(is_quiet for _, is_quiet in states):
            return
        for rank, (suspect_count, _) in enumerate(states):
            if not suspect_count:
                continue
            suspect = None
            if rank == self._rank:
                suspect = connections.question_suspects()
            own_fault = None if suspect is None else self._fault_of(suspect)
            fault = collectives.first_failure(own_fault)
            if fault is not None:
                raise membership.FatalPromptError(fault)

    def _fault_of(self, suspect: Suspect) -> str:
        """Return the error message for a prompt that ends servers."""
        prompt = suspect.request.prompt_ids
        place = self._place_of(prompt) or f"problem {suspect.request.problem_id}"
        exceptions = "; ".join(f"{s.name}: {self._last_exception(s)}" for s in suspect.servers)
        return (
            f"{place}: servers end when one token is requested after this prompt of {len(prompt)} tokens alone, "
            f"expected a prompt that they answer; the servers that were lost with it: {exceptions}"
        )

    def _last_exception(self, server: Server) -> str:
        path = self._logs / f"{server.name}-{server.incarnation}.log"
        exception = None
        if path.is_file():
            exception = last_exception_of(path)
        return exception or f"no Python exception in {path}"

    def take_devices(self) -> None:
        """Interrupt the servers, release their memory and give the trainer its devices until the next update.
        Collective.
        """
        self._connections.hold()
        if self._is_attached:
            try:
                self._updater.release_memory(self._devices.released)
            except WeightUpdateError as error:
                log.warning("%s", error)
                self._is_attached = False
                if self._membership is not None:
                    self._membership.blame(self._members, error.engines, str(error))
        self._clear_devices(self._devices.released)
        self._devices.take()

    def write_held_tensors(self, path: Path) -> None:
        """Write checksums of the servers' tensors to ``path``, on rank 0, as evidence for ``megatron-dppo doctor``.

        If the file cannot be written, only a warning is logged.
        Nothing is written if devices are shared, because the servers have released their weights. Nothing is written
        if updates send only adapters, because the tensors of adapters are no whole policy.
        """
        holds_policy = not (self._devices.is_shared or isinstance(self._updater, AdapterUpdater))
        if self._rank != 0 or not self._is_attached or not holds_policy:
            return
        try:
            held_tensors.write(path, self._updater.held_tensors())
        except ENGINE_FAULTS as error:
            log.warning("%s: not written: %s", path, error)
            return
        log.info("%s: what the servers hold, for megatron-dppo doctor", path)

    def _clear_devices(self, tags: Sequence[MemoryTag]) -> None:
        """Ensure that no server starts or holds memory of ``tags``. Collective. Raises EngineUnavailableError."""
        self._devices.allow_starts(False)
        fault = None
        if self._membership is not None:
            fault = self._membership.clear_devices(partial(self._access.release_memory, tags=tags))
        fault = collectives.first_failure(fault)
        if fault is not None:
            raise membership.EngineUnavailableError(fault)

    def _make_room(self) -> None:
        """Park the trainer's parts on shared devices, so that servers can start on these devices.

        If the updater is attached to servers, the trainer's weights stay on the devices: the update reads them.
        """
        if self._devices.is_shared:
            kept_parts: list[TrainerPart] = ["weights"] if self._is_attached else []
            self._devices.leave(*kept_parts)

    def start(
        self,
        job: GenerationJob,
        description: str,
        on_response: OnResponse | None = None,
        order: int = 0,
        done: Mapping[Hashable, Trajectory] | None = None,
    ) -> Generation:
        """Request the responses of ``job`` and return at once; they arrive while this rank does other work.

        Not collective. A weight update in the meantime waits for the responses or interrupts them
        (``rollout.interrupt``).

        Args:
            job: this rank's own problems; empty on ranks that lead no replica.
            description: text of the progress bar.
            on_response: called in another thread, once for each response, as soon as it arrives.
            order: an open generation with a lower order is served before a generation with a higher order.
            done: responses that exist already, by key; they are not requested.
        """
        generation = Generation(job, description, on_response, order, dict(done or {}))
        self._connections.start(generation)
        return generation

    @property
    def busy_s(self) -> float:
        """Seconds since the start during which this rank had requests to generate."""
        return self._connections.slots.busy_s

    def finish(
        self, generation: Generation, trainer_version: int | None = None, *, mixes: bool = True
    ) -> list[Trajectory]:
        """Return all responses of a generation that ``start`` began, and show progress while waiting. Collective.

        If the whole fleet was lost, the next server receives the trainer's weights and generates the missing responses.
        If the servers still run but a response failed, the response is requested again.

        Args:
            generation: the handle that ``start`` returned.
            trainer_version: version of the trainer's weights; None if it is the version of the fleet.
            mixes: whether the missing responses may come from another weight version than the fleet had.

        Raises on every rank:
            RunStoppedError: a clean stop was requested.
            EngineUnavailableError: no server is available.
            WeightsLostError: the fleet's weights are lost and ``mixes`` is false.
        """
        if not self._connections.client.is_serving and collectives.any_rank(generation.is_begun):
            # No call is sent before an update, and the caller is not about to make an update while it waits here.
            log.warning(
                "%s: responses are missing, so the weights are sent", generation.description
            )
            self._restore(trainer_version)
        while True:
            done_before = len(generation.done)
            end, own_reason = self._connections.wait(generation)
            has_new_responses = len(generation.done) > done_before
            has_servers = self._connections.client.has_servers
            own_end = [int(end), own_reason, has_new_responses, has_servers]
            rank_ends = [_RankEnd(*values) for values in collectives.all_gather_json(own_end)]
            worst_end = max(GenerationEnd(rank.end) for rank in rank_ends)
            if worst_end is GenerationEnd.STOPPED:
                raise RunStoppedError("stopped while generating")
            if worst_end is GenerationEnd.DONE:
                self._failures.forget_losses()
                self._connections.drop(generation)
                return generation.job.trajectories(generation.done)
            # The worst end is a loss or a failure. Only ranks with this end decide how the generation goes on.
            worst_ranks = [rank for rank in rank_ends if rank.end == worst_end]
            reason = worst_ranks[0].reason
            if worst_end is GenerationEnd.FAILED:
                raise membership.EngineUnavailableError(reason)
            if any(rank.has_new_responses for rank in rank_ends):
                self._failures.forget_losses()
            servers_run = all(rank.has_servers for rank in worst_ranks)
            is_same_version = trainer_version in (None, self.updates.version)
            if not (servers_run or mixes or is_same_version):
                raise WeightsLostError(f"weight version {self.updates.version} is lost: {reason}")
            self._failures.count_loss(reason)
            if servers_run:
                # The servers still run, but a response failed repeatedly.
                self._question_suspects()
                self._connections.resume_lost()
            else:
                self._restore(trainer_version)

    def drop(self, generation: Generation) -> None:
        """Cancel a generation whose responses are not needed. Not collective."""
        self._connections.drop(generation)

    def _restore(self, trainer_version: int | None) -> None:
        """Wait for healthy servers, and send them the trainer's weights as ``trainer_version``.

        If ``trainer_version`` is None, the trainer still has the weights of the fleet's last version.
        """
        version = self.updates.version if trainer_version is None else trainer_version
        self._is_attached = False
        self._admit()
        if version is not None:
            self.update_weights(version)
            log.info("engine restored at weight version %d", version)

    def _admit(self) -> None:
        """Agree on the members. Attach the updater to them if they changed, or if the updater is not attached.

        After an attachment, the weights of the members count as unknown.
        """
        while True:
            members = self._agree_on_members()
            if self._is_attached and members == self._members:
                return
            self._members = members
            try:
                self._updater.attach([member.server.url for member in members])
            except WeightUpdateError as error:
                self._blame(error)
                continue
            self._is_attached = True
            return

    def _agree_on_members(self) -> list[membership.Member]:
        """Return the members of the next update, at least one; wait for a server if there is none. Collective.

        A new server can start only after the trainer has left shared devices.
        """
        members = self._choose_members(waits=self._devices.are_free)
        if not members:
            self._devices.leave()
            members = self._choose_members(waits=True)
        return members

    def _choose_members(self, *, waits: bool) -> list[membership.Member]:
        """Return the members that rank 0 chooses among the servers (``FleetMembership.choose``). Collective."""
        # The servers that a rank has lost since the last call: name -> reason.
        suspended: dict[str, str] = {}
        for losses in collectives.all_gather_json(self._connections.client.take_losses()):
            suspended |= losses
        members_json = None
        fault = None
        if self._membership is not None:
            try:
                members = self._membership.choose(self._members, suspended, waits=waits)
                if members is not None:
                    members_json = membership.MEMBERS.dump_python(members)
            except (membership.EngineUnavailableError, EngineError) as error:
                fault = str(error)
        members_json, fault = collectives.broadcast_json([members_json, fault], src=0)
        if fault is not None:
            raise membership.EngineUnavailableError(fault)
        if members_json is None:
            raise RunStoppedError("stopped while waiting for the engine")
        return membership.MEMBERS.validate_python(members_json)

    def _blame(self, error: WeightUpdateError) -> None:
        """Record the servers that failed an update or could not be attached, so that the next attempt excludes them.

        If all members failed, or if it is not known which members failed, no member is excluded, and the failure is
        counted. Raises EngineUnavailableError if another attempt would fail the same way.
        """
        self._is_attached = False
        reason = str(error)
        some_failed = 0 < len(error.engines) < len(self._members)
        if some_failed:
            log.warning("%s", reason)
        else:
            self._failures.count_refusal(reason, error.attempts)
            self._failures.count_loss(reason)
        if self._membership is not None:
            self._membership.blame(self._members, error.engines, reason, attempts=error.attempts)

    async def _open_engine(self, url: str) -> EngineWeights:
        """Open the connection that updates a member's weights. Rank 0 and every rank that sends weights call it."""
        member = next(m for m in self._members if m.server.url == url)
        return await self._access.open_weights(member)


def _no_fence() -> None:
    """Accept this start as the newest of its run."""


def _unknown_place(prompt_ids: Sequence[int]) -> str | None:
    """Return no place in the data for any prompt."""
    return None


def _shared_devices(
    config: TrainConfig, spec: RunSpec, trainer: Trainer, record: RecordClient | None
) -> SharedDevices:
    """Return the devices that trainer and servers share; ``record`` is rank 0's client of the server registry."""
    return SharedDevices(
        spec.roles.colocated,
        trainer,
        config.engine.parked or TRAINER_PARTS,
        released_tags(spec.model),
        record,
    )
