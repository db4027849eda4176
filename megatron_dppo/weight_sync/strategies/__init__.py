"""The table of strategies, by their name in the configuration (``weight_sync.strategy``)."""

from __future__ import annotations

from megatron_dppo.weight_sync.interfaces import Strategy
from megatron_dppo.weight_sync.strategies.disk import DiskStrategy
from megatron_dppo.weight_sync.strategies.distributed import DistributedStrategy
from megatron_dppo.weight_sync.strategies.tensor import TensorStrategy

STRATEGIES: dict[str, type[Strategy]] = {
    "distributed": DistributedStrategy,
    "tensor": TensorStrategy,
    "disk": DiskStrategy,
}
