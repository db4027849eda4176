"""What the loss saw of each token of a step, for the saved batch: from the ranks that compute logits to
global rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from safetensors.numpy import load, save
from torch import Tensor

from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import Algorithm, LossSums
from megatron_dppo.data.packing import PackedBatch
from megatron_dppo.trainer.collectives import all_gather_json, broadcast_bytes
from megatron_dppo.trainer.topology import Topology

LossColumns = dict[int, dict[str, np.ndarray]]
"""By position in the batch, the ``LOSS_COLUMNS`` of a response that trained."""


class LossRecord:
    """Keeps, on the device, what the loss of ``algorithm`` sees, until ``collect``: some 60 bytes a token."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._parts: list[tuple[PackedBatch, dict[str, Tensor]]] = []

    def add(self, batch: PackedBatch, inputs: TokenInputs, sums: LossSums) -> None:
        """Keep a micro-batch's tokens. No device sync."""
        assert sums.blocked is not None
        seen = {
            "loss_log_probs": inputs.log_probs.detach().float(),
            "loss_recomputed_log_probs": inputs.recomputed_log_probs,
            "loss_entropy": None if inputs.entropy is None else inputs.entropy.float(),
            "loss_divergence": self._algorithm.divergence(inputs),
            "loss_trains": inputs.loss_mask & ~sums.blocked,
        }
        light = replace(batch, columns={}, valid={})
        self._parts.append((light, {name: x for name, x in seen.items() if x is not None}))

    def collect(self, topology: Topology) -> LossColumns:
        """Everything kept since the last call, of all replicas, on global rank 0; elsewhere empty.

        Collective.
        """
        own: LossColumns = {}
        for batch, seen in self._parts:
            own |= by_response(batch, seen)
        self._parts = []
        is_source = topology.is_last_stage and topology.tp_rank == 0
        found: LossColumns = {}
        for rank, sends in enumerate(all_gather_json(is_source)):
            if sends:
                blob = broadcast_bytes(_encoded(own) if rank == topology.rank else b"", rank)
                found |= _decoded(blob) if topology.rank == 0 else {}
        return found


def by_response(batch: PackedBatch, seen: Mapping[str, Tensor]) -> LossColumns:
    """The rows of each response's sampled tokens. ``seen``: tensors [T] beside ``batch``."""
    rows = torch.nonzero(batch.loss_mask).squeeze(1)
    arrays = {name: x[rows].cpu().numpy() for name, x in seen.items()}
    # Rows before each sequence's end: the rows of one sequence lie next to each other.
    ends = torch.searchsorted(rows, batch.cu_seqlens[1:].to(rows)).cpu().numpy()
    found: LossColumns = {}
    for position, start, end in zip(
        batch.sequence_index.tolist(), [0, *ends[:-1]], ends, strict=True
    ):
        if end > start:
            found[position] = {name: x[start:end] for name, x in arrays.items()}
    return found


def _encoded(columns: LossColumns) -> bytes:
    return save({f"{p}/{name}": rows for p, c in columns.items() for name, rows in c.items()})


def _decoded(blob: bytes) -> LossColumns:
    columns: LossColumns = {}
    for key, rows in load(blob).items():
        position, _, name = key.partition("/")
        columns.setdefault(int(position), {})[name] = rows
    return columns
