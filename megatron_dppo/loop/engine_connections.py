"""A trainer rank's connections to the servers: the calls, the open generations and the registry of servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.fleet import membership
from megatron_dppo.fleet.calls import ServerCalls
from megatron_dppo.fleet.endpoint import (
    ENDPOINT_VARIABLE,
    FleetEndpoint,
    RecordClient,
    admin_key,
    control_host,
)
from megatron_dppo.fleet.generation import Generation, GenerationEnd
from megatron_dppo.fleet.record import FleetRecord, Keys
from megatron_dppo.fleet.router_link import HttpRouterLink
from megatron_dppo.fleet.suspects import Suspect
from megatron_dppo.system.lease import start_of_ranks
from megatron_dppo.trainer import collectives


class EngineConnections(ServerCalls):
    """This rank's connections to the servers and to the server registry, and its open generations. ``close`` ends them.

    Args:
        config: configuration of the run.
        record: client of the server registry.
        endpoint: HTTP endpoint of the registry, if this rank runs it; closed with the connections.
        stop: returns whether a clean stop was requested, so that generations end.
        sends_adapters: whether weight updates send only adapters, which requests then name.
        registers: whether this rank registers the servers with the router.
    """

    def __init__(
        self,
        config: TrainConfig,
        record: RecordClient,
        endpoint: FleetEndpoint | None,
        stop: Callable[[], bool],
        *,
        sends_adapters: bool,
        registers: bool,
    ) -> None:
        self.record = record
        self._endpoint = endpoint
        self._stop = stop
        self._generations: list[Generation] = []
        self._aborts_calls = config.rollout.interrupt == "abort"
        router = None
        if config.engine.uses_router:
            router = HttpRouterLink(record.reachable_router, registers=registers)
        super().__init__(config, record.report_lost, router, adapters=sends_adapters)

    def start(self, generation: Generation) -> None:
        """Send the requests of a generation."""
        self._generations.append(generation)
        self.request(generation, self._stop)

    def resume_lost(self) -> None:
        """Request the missing responses of the generations that lost their servers."""
        for generation in self._generations:
            if generation.is_lost:
                generation.end()
                self.request(generation, self._stop)

    def wait(self, generation: Generation) -> tuple[GenerationEnd, str]:
        """Wait for the end of this rank's share of a generation; return how it ended, and why."""
        return generation.wait(self._stop)

    def drop(self, generation: Generation) -> None:
        """Remove a generation that is done or not needed, and cancel its remaining requests."""
        if generation in self._generations:
            self._generations.remove(generation)
            generation.cancel()

    def break_off(self) -> None:
        """Cancel this rank's calls in flight. The running generations then send these calls again by themselves."""
        self.runner.run(self.client.break_off())

    def hold(self) -> None:
        """Send no calls until ``serve`` is called, because the servers are about to be paused. Collective."""
        self.runner.run(self._hold())
        if self._aborts_calls:
            # This rank has ended its calls. Wait for the other ranks: no call may be in flight when servers are paused.
            collectives.barrier()

    def serve(self, members: Sequence[membership.Member], version: int) -> None:
        """Resume the calls: ``members`` have committed weight ``version``."""
        self.runner.run(self._serve(members, version))

    async def _hold(self) -> None:
        await self.client.hold(abort=self._aborts_calls)
        self.slots.hold(True)

    async def _serve(self, members: Sequence[membership.Member], version: int) -> None:
        await self.client.serve(members, version)
        self.slots.hold(False)

    @property
    def is_quiet(self) -> bool:
        """Whether no generation of this rank is running."""
        return all(g.running is None or g.running.done() for g in self._generations)

    def question_suspects(self) -> Suspect | None:
        """Search for a prompt that kills servers (``fleet.suspects``). Returns None if no such prompt is found."""
        return self.runner.run(self.client.question_suspects(self._stop))

    def close(self) -> None:
        """Abort the running requests on the servers, and close the connections and the registry's endpoint."""
        super().close()
        if self._endpoint is not None:
            self._endpoint.stop()


def open_record(
    run_directory: str, interface: str | None, rank: int
) -> tuple[RecordClient, FleetEndpoint | None]:
    """Return the client of the server registry, and the registry's HTTP endpoint if this rank runs it.

    If the supervisor runs the registry, the call does not communicate between ranks. Otherwise (ranks that torchrun or
    another launcher started) rank 0 runs the registry, and the call is collective.
    """
    keys = Keys.handed_down()
    url = os.environ.get(ENDPOINT_VARIABLE)
    if url is not None:
        # The supervisor runs the registry.
        return RecordClient(url, keys, start_of_ranks()), None
    endpoint: FleetEndpoint | None = None
    key = None
    if rank == 0:
        record = FleetRecord(run_directory)
        key = admin_key()
        # The registry's file may list servers of an earlier supervisor. They ended with that supervisor: remove them.
        record.withdraw_started()
        endpoint = FleetEndpoint(record, key, control_host(interface, "127.0.0.1"))
        endpoint.start()
        url = endpoint.url
    url, key = collectives.broadcast_json([url, key], src=0)
    return RecordClient(url, Keys(admin=key)), endpoint
