"""Access to the servers' weights: compatibility checks, and the connections of weight updates."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.client import HttpClient
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.running_server import check_engine
from megatron_dppo.fleet import membership
from megatron_dppo.fleet.endpoint import ENDPOINT_VARIABLE, RecordClient
from megatron_dppo.fleet.record import STARTED_KEYS_VARIABLE, Keys
from megatron_dppo.spec import ModelSpec, RunSpec, ServersSpec
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.lease import start_of_ranks
from megatron_dppo.weights.engine_weights import TAGS, EngineWeights, Occupation
from megatron_dppo.weights.engines import interrupt_and_release
from megatron_dppo.weights.reach import check_reach
from megatron_dppo.weights.server.server_state import MemoryTag

log = logging.getLogger(__name__)

_FORGET_S = 20.0
"""Longest time for a server to end the requests and weight groups of dead ranks."""


@dataclass(frozen=True)
class ServerAccess:
    """Checks of a server before it joins the fleet, and connections to its weights."""

    config: TrainConfig
    model: ModelSpec
    servers: ServersSpec
    _occupations: dict[membership.Member, Occupation] = field(default_factory=dict)

    async def check(self, member: membership.Member) -> None:
        """Raise EngineMismatchError for a server that the run can't use."""
        async with membership.client_of(member) as client:
            await check_engine(self.model, self.servers, client)
        weights = await self._connect(member)
        try:
            await weights.check_tensors()
            shares_devices = self.config.engine.placement == "colocated"
            await check_reach(weights, self.config.weight_sync, shares_devices=shares_devices)
        finally:
            await weights.close()

    async def open_weights(self, member: membership.Member) -> EngineWeights:
        """Open the connection that updates the weights of a member."""
        weights = await self._connect(member)
        # All connections to a server share one record of the memory that it has released.
        weights.occupation = self._occupations.setdefault(member, weights.occupation)
        return weights

    async def release_memory(self, member: membership.Member, tags: Sequence[MemoryTag]) -> None:
        """Ensure that the server has released its memory of ``tags``. Raises EngineError if the release failed."""
        if member in self._occupations and self._occupations[member].released.issuperset(tags):
            return
        weights = await self.open_weights(member)
        try:
            await interrupt_and_release(weights, tags)
        finally:
            await weights.close()

    async def forget_ranks(self, member: membership.Member) -> None:
        """End the requests and the weight groups that dead ranks left in a server.

        The server's pause and its released memory stay as they are. Raises EngineError or, if the server does not
        answer, TimeoutError.
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
        server = member.server
        keys = member.keys
        return await EngineWeights.connect(
            HttpClient(server.url, keys.api, keys.admin, member.ca_file),
            self.model.shape,
            self.model.dtype,
            quantization=self.model.quantization,
            timeout_s=self.config.weight_sync.timeout_s,
            patience_s=self.config.engine.hang_timeout_s,
        )


def free_shared_devices(config: TrainConfig, spec: RunSpec) -> None:
    """Have colocated servers release their memory before restarted ranks allocate memory. Every rank calls this.

    Rank 0 sends the requests; the other ranks wait for rank 0 when they join the process group. A server that does not
    release its memory is reported lost, so that the supervisor ends the server.
    """
    start = start_of_ranks() or 1
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    if start == 1 or not is_rank_0 or not spec.roles.colocated:
        return
    url = os.environ.get(ENDPOINT_VARIABLE)
    keys = os.environ.get(STARTED_KEYS_VARIABLE)
    if url is None or keys is None:
        return
    record = RecordClient(url, Keys(**json.loads(keys)), start)
    access = ServerAccess(config, spec.model, spec.servers)
    tags = released_tags(spec.model)
    with AsyncRunner() as runner:
        for server in record.servers():
            # Only servers that the supervisor starts share devices.
            if not server.replaceable:
                continue
            member = membership.Member.of(server, record.keys(server), config.engine)
            try:
                runner.run(access.release_memory(member, tags))
            except (EngineError, OSError) as error:
                log.warning("%s does not release its memory: %s", server.name, error)
                record.report_lost(server)


def released_tags(model: ModelSpec) -> list[MemoryTag]:
    """Return the memory tags that colocated servers release in the trainer's turn."""
    if model.sends_adapters:
        # Updates of adapters don't send the frozen model again, so the servers keep its weights.
        return [tag for tag in TAGS if tag != "weights"]
    return list(TAGS)
