"""Access to the servers' weights: compatibility checks, and the connections of weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.client import HttpClient
from megatron_dppo.engine.options import ServerSections
from megatron_dppo.engine.running_server import check_engine
from megatron_dppo.engine.server_state import MemoryTag
from megatron_dppo.engine.weights import EngineWeights, Occupation
from megatron_dppo.fleet import membership
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.weight_sync.engines import interrupt_and_release
from megatron_dppo.weight_sync.reach import check_reach

_FORGET_S = 20.0


@dataclass(frozen=True)
class ServerAccess:
    """Checks of a server before it joins the fleet, and connections to its weights."""

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
        """Open the weight control of a member of the fleet."""
        weights = await self._connect(member)
        # A server that is attached again keeps the state of its memory: what it released stays released.
        weights.occupation = self._occupations.setdefault(member, weights.occupation)
        return weights

    async def release_memory(self, member: membership.Member, tags: Sequence[MemoryTag]) -> None:
        """Ensure that the server has released its memory of ``tags``. Raises EngineError where that is unknown."""
        if member in self._occupations and self._occupations[member].released.issuperset(tags):
            return
        weights = await self.open_weights(member)
        try:
            await interrupt_and_release(weights, tags)
        finally:
            await weights.close()

    async def forget_ranks(self, member: membership.Member) -> None:
        """End what ranks that have died left in a server: their requests and their broadcast groups.

        The server stays paused, and keeps its memory, as they left it. Raises EngineError, TimeoutError where it does
        not answer.
        """
        async with asyncio.timeout(_FORGET_S), membership.client_of(member) as client:
            await client.abort_all(_FORGET_S)
            weights = await self.open_weights(member)
            try:
                for name in weights.groups:
                    await weights.close_group(name)
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
