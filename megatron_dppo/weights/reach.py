"""Check, before the first update, that weights can be sent to a server on another host."""

from __future__ import annotations

import asyncio

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.weights.engine_weights import EngineWeights
from megatron_dppo.weights.engines import ENGINE_FAULTS, local_address
from megatron_dppo.weights.strategies import STRATEGIES
from megatron_dppo.weights.weight_group import WeightGroup

REACH_S = 30.0
"""Longest time of the check with strategy ``distributed``; see ``check_reach``."""


async def check_reach(
    engine: EngineWeights, config: WeightSyncConfig, *, shares_devices: bool = False
) -> None:
    """Raise EngineMismatchError if the configured strategy cannot reach ``engine`` from this process.

    With ``distributed`` the server's ranks connect as in an update, with their own NCCL: they join a group
    of this process, receive a tensor that changes no weight, and leave the group. ``shares_devices``: whether the
    engine runs on GPUs of trainer ranks.
    """
    fault = STRATEGIES[config.strategy].reach_fault(
        engine.url, config, shares_devices=shares_devices
    )
    if fault is not None:
        raise EngineMismatchError(fault)
    if config.strategy == "distributed":
        await _join_and_leave(engine)


async def _join_and_leave(engine: EngineWeights) -> None:
    """Make ``engine`` join a group of this process, receive a tensor, and leave. Raises EngineMismatchError."""
    address = local_address(engine.url)
    group = WeightGroup(
        ranks=engine.ranks, address=address, device=engine.device, timeout_s=REACH_S
    )
    try:
        async with asyncio.timeout(REACH_S):
            meeting_point = (group.address, group.port, group.name, group.backend)
            await engine.open_group(*meeting_point, first_rank=1, size=engine.ranks + 1)
            await asyncio.wrap_future(group.joined)
            await _connect(engine, group)
            await engine.close_group(group.name)
    except ENGINE_FAULTS as error:
        raise EngineMismatchError(
            f"{engine.url} can't connect back to the trainer at {group.address}:{group.port} for weight updates within "
            f"{REACH_S:.0f} s: {error or type(error).__name__}"
        ) from error
    finally:
        group.abort()


async def _connect(engine: EngineWeights, group: WeightGroup) -> None:
    """Broadcast a tensor to the engine; differing NCCL versions fail in this first operation."""
    header = engine.probe_header()
    await engine.begin()
    try:
        broadcast = group.connect(header.bytes)
        await engine.receive(header, group.name)
        await asyncio.wrap_future(broadcast)
    finally:
        await engine.end()
