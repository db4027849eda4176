"""A Megatron distributed checkpoint as a store of Hugging Face tensors: of a training run, or made by the converter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch

from megatron_dppo.checkpoint_conversion.certificate import FILE, Certificate, load_certificate
from megatron_dppo.checkpoint_conversion.safetensors_file import TensorSpec
from megatron_dppo.checkpoint_conversion.sharded_checkpoint import assemble_rows
from megatron_dppo.checkpoint_conversion.torch_dist import TorchDistFolder
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.gather_plan import Piece, TensorSources, gather_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, local_parameters
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.files import Closing

TRACKER = "latest_checkpointed_iteration.txt"


def find_torch_dist(folder: str | Path) -> Path | None:
    """The folder that holds ``.metadata``: ``folder``, or the iteration that its Megatron-LM tracker names."""
    folder = Path(folder)
    if (folder / ".metadata").exists():
        return folder
    if not (folder / TRACKER).exists():
        return None
    named = (folder / TRACKER).read_text().strip()
    inner = folder / (named if named == "release" else f"iter_{named:0>7}")
    if not (inner / ".metadata").exists():
        raise CheckpointError(
            f"{folder / TRACKER}: names {named}, but {inner} holds no torch_dist checkpoint"
        )
    return inner


class TorchDistCheckpoint(Closing):
    """Opens ``folder`` as a model of ``shape``. Raises CheckpointError where it holds another model.

    ``certificate``: of the conversion that made it; None for a checkpoint of a training run.
    """

    def __init__(self, folder: str | Path, shape: ModelShape) -> None:
        self.folder = Path(folder)
        self.shape = shape
        inner = find_torch_dist(folder)
        if inner is None:
            raise CheckpointError(
                f"{folder}: holds neither .metadata nor {TRACKER}; not a torch_dist checkpoint"
            )
        has_certificate = (self.folder / FILE).exists()
        self.certificate: Certificate | None = (
            load_certificate(self.folder) if has_certificate else None
        )
        self._tensors = TorchDistFolder(inner)
        try:
            self.dtype = self._check()
        except CheckpointError:
            self.close()
            raise
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(dims, self.dtype) for name, dims in hf_tensors(shape).items()
        }

    def _check(self) -> torch.dtype:
        """All parameters are there, of one dtype, and of the model's shapes; the vocabulary may be padded."""
        dtypes, vocabulary = set(), family_of(self.shape).vocabulary_tensors
        for p in local_parameters(self.shape, Layout(), 0):
            dtypes.add(self._tensors.dtype(p.name))
            found = self._tensors.dims(p.name)
            padded = p.segments[0].hf_name in vocabulary
            if (
                found[1:] != p.shape[1:]
                or found[0] < p.shape[0]
                or (found[0] > p.shape[0] and not padded)
            ):
                raise CheckpointError(
                    f"{self.folder}: {p.name} has shape {found}, config.json says {p.shape}"
                )
        if len(dtypes) != 1:
            raise CheckpointError(
                f"{self.folder}: tensors of several dtypes, {sorted(map(str, dtypes))}"
            )
        return dtypes.pop()

    @cached_property
    def plan(self) -> list[TensorSources]:
        """The parts of every tensor in the stacked parameters, in model order."""
        return gather_plan(self.shape, Layout())

    @cached_property
    def _sources(self) -> dict[str, TensorSources]:
        return {tensor.name: tensor for tensor in self.plan}

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count`` of a Hugging Face tensor."""

        def read(piece: Piece, first: int, rows: int) -> torch.Tensor:
            return self._tensors.read_rows(piece.name, first, rows)

        return assemble_rows(self._sources[name], start, count, self.dtype, read)

    def locate(self, name: str, index: Sequence[int]) -> str:
        """In words, where an element of a Hugging Face tensor is stored."""
        pieces = self._sources[name].pieces
        return f"{self.folder}'s {pieces[0].name}"

    def close(self) -> None:
        """Close the files."""
        self._tensors.close()
