"""Load Hugging Face weights into this rank's parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_dppo.checkpoint_conversion import tensor_store, torch_dist
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import local_parameters, stepped
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer import collectives
from megatron_dppo.trainer.model import named_parameters
from megatron_dppo.trainer.topology import Topology


@torch.no_grad()
def load_hf(
    chunks: list[GPTModel], shape: ModelShape, layout: Layout, rank: int, hf_dir: str | Path
) -> None:
    """Fill every parameter of this rank from ``hf_dir``, reading only the slices that the rank holds.

    Rows that pad the vocabulary become zero.

    Raises:
        CheckpointError: the name or shape of a tensor in ``hf_dir`` does not match its config.json, or a tensor is not
            finite.
        ValueError: the model and the conversion table have different parameters.
    """
    parameters = named_parameters(chunks)
    table = {(p.chunk, p.name): p for p in local_parameters(shape, layout, rank)}
    if table.keys() != parameters.keys():
        raise ValueError(
            f"rank {rank}: the model and the conversion table name different parameters; only in "
            f"the model {sorted(parameters.keys() - table.keys())[:5]}, only in the table "
            f"{sorted(table.keys() - parameters.keys())[:5]}"
        )
    with torch_dist.open_checkpoint(hf_dir) as reader:
        reader.check(shape)
        for key, entry in table.items():
            parameter = parameters[key]
            if tuple(parameter.shape) != tuple(entry.shape):
                raise ValueError(
                    f"rank {rank}: {key} has shape {tuple(parameter.shape)} in the model, expected "
                    f"{tuple(entry.shape)}"
                )
            # Zero the parameter first: rows that no segment fills pad the vocabulary.
            parameter.zero_()
            for segment in entry.segments:
                span = segment.hf_end - segment.hf_start
                part = reader.read(segment.hf_name, segment.dim, segment.hf_start, span)
                # The segment may have only every n-th index of the span.
                part = stepped(part, segment.dim, 0, segment.length, segment.hf_step)
                tensor_store.require_finite(part, segment.hf_name, 0, str(hf_dir))
                segment.of_local(parameter).copy_(part)


def shared_digest(folder: str | Path, topology: Topology) -> str:
    """Return the SHA-256 (hex) over all tensors of ``folder``. Each rank reads a share of the tensors. Collective."""
    digests = torch_dist.tensor_digests(folder, topology.rank, topology.world_size)
    return torch_dist.combined_digest(collectives.all_gather_json(digests))
