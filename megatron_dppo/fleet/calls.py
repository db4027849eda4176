"""A process's calls to a group of servers."""

from __future__ import annotations

from collections.abc import Callable

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.answer_parsing import AnswerParser
from megatron_dppo.fleet.client import FleetClient
from megatron_dppo.fleet.generation import Generation, GenerationLimits, Slots
from megatron_dppo.fleet.record import Server
from megatron_dppo.fleet.router_link import HttpRouterLink
from megatron_dppo.system.async_runner import AsyncRunner


class ServerCalls:
    """The client of the servers, its event loop, and the slots that all generations share. ``close`` ends them.

    Args:
        config: configuration of the calls' limits.
        on_lost, router, adapters: as in FleetClient.
    """

    def __init__(
        self,
        config: TrainConfig,
        on_lost: Callable[[Server], None],
        router: HttpRouterLink | None = None,
        *,
        adapters: bool = False,
    ) -> None:
        self._limits = GenerationLimits.of(config.rollout, config.engine, config.environment)
        self.slots = Slots(self._limits.calls, self._limits.episodes)
        self.parser = AnswerParser()
        self.runner = AsyncRunner()
        self.client = FleetClient(on_lost, router, self.parser, adapters=adapters)

    def request(self, generation: Generation, stop: Callable[[], bool]) -> None:
        """Request the missing responses of ``generation``, and return at once; see ``Generation.resume``."""
        generation.resume(self.runner, self.client, self._limits, stop, self.slots)

    def close(self) -> None:
        """Abort the running requests on the servers, and close the connections."""
        # Cancel the generations before the client is closed: a cancelled generation uses the client to abort its
        # requests on the servers.
        self.runner.cancel_all()
        self.runner.run(self.client.close())
        self.parser.close()
        self.runner.close()
