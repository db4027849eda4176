"""Hugging Face weights into this rank's parameters, and the trained ones back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_dppo.checkpoint_conversion.digest import combined_digest, tensor_digests
from megatron_dppo.checkpoint_conversion.gathering import gather
from megatron_dppo.checkpoint_conversion.loading import open_checkpoint
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.gather_plan import Bucket, ParameterKey
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import local_parameters
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer.collectives import all_gather_json, first_failure
from megatron_dppo.trainer.topology import Topology


def named_parameters(chunks: list[GPTModel]) -> dict[ParameterKey, torch.nn.Parameter]:
    """Parameters of this rank by (chunk, name)."""
    return {(i, name): p for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}


@torch.no_grad()
def load_hf(
    chunks: list[GPTModel], shape: ModelShape, layout: Layout, rank: int, hf_dir: str | Path
) -> None:
    """Fill every parameter of this rank from ``hf_dir``, reading only the slices that it holds.

    Rows that pad the vocabulary become zero. Raises CheckpointError where a tensor of ``hf_dir`` is
    not of the name and shape that its config.json asks for, ValueError where the model's parameters
    and the table disagree.
    """
    parameters = named_parameters(chunks)
    table = {(p.chunk, p.name): p for p in local_parameters(shape, layout, rank)}
    if table.keys() != parameters.keys():
        raise ValueError(
            f"rank {rank}: the model and the conversion table name different parameters; only in "
            f"the model {sorted(parameters.keys() - table.keys())[:5]}, only in the table "
            f"{sorted(table.keys() - parameters.keys())[:5]}"
        )
    with open_checkpoint(hf_dir) as reader:
        reader.check(shape)
        for key, entry in table.items():
            parameter = parameters[key]
            if tuple(parameter.shape) != tuple(entry.shape):
                raise ValueError(
                    f"rank {rank}: {key} has shape {tuple(parameter.shape)} in the model, expected "
                    f"{tuple(entry.shape)}"
                )
            parameter.zero_()
            for segment in entry.segments:
                part = reader.read(segment.hf_name, segment.dim, segment.hf_start, segment.length)
                segment.of_local(parameter).copy_(part)


def gather_buckets(
    plan: list[Bucket],
    rank: int,
    values: Mapping[ParameterKey, Tensor],
) -> Iterator[list[tuple[str, Tensor]]]:
    """Collective: each bucket's full tensors on its receiver, an empty list elsewhere; see ``gather``."""
    return (gathered.tensors for gathered in gather(plan, rank, values))


def shared_digest(folder: str | Path, topology: Topology) -> str:
    """SHA-256 (hex) over all tensors of ``folder``, of which each rank reads its share. Collective."""
    own = tensor_digests(folder, topology.rank, topology.world_size)
    return combined_digest(all_gather_json(own))


def write_on_rank_0(write: Callable[[], None], buckets: Iterator[Any], failed: str) -> None:
    """``write`` consumes ``buckets`` on global rank 0; the other ranks send what it gathers. Collective.

    Raises CheckpointError, which begins with ``failed``, on every rank where rank 0 can't write.
    """
    failure: str | None = None
    if dist.get_rank() == 0:
        try:
            write()
        except (OSError, CheckpointError) as error:
            failure = str(error)
    for _ in buckets:  # the other ranks still send
        pass
    if (first := first_failure(failure)) is not None:
        raise CheckpointError(f"{failed}: {first}")
