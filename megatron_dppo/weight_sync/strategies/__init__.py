"""The table of strategies, by their name in the configuration (``weight_sync.strategy``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron_dppo.weight_sync.interfaces import Strategy
from megatron_dppo.weight_sync.strategies.disk import DiskStrategy
from megatron_dppo.weight_sync.strategies.distributed import DistributedStrategy
from megatron_dppo.weight_sync.strategies.route import Route
from megatron_dppo.weight_sync.strategies.tensor import TensorStrategy


class Kind(NamedTuple):
    """``make``: the strategy on one rank. ``spread``: several ranks send, each what it holds most of."""

    make: Callable[[Route], Strategy]
    spread: bool


STRATEGIES = {
    "distributed": Kind(DistributedStrategy, spread=True),
    "tensor": Kind(TensorStrategy, spread=True),
    "disk": Kind(DiskStrategy, spread=False),
}
