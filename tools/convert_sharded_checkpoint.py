#!/usr/bin/env python3
"""Convert a folder of the form ``sharded``, which versions before 0.2 wrote, to Megatron-Core's ``torch_dist``.

    python tools/convert_sharded_checkpoint.py OLD_FOLDER NEW_FOLDER

The old form has a file ``rank-<global rank>.safetensors`` for each rank of ``conversion.json``'s layout. A file has the
parameters that the rank provides as primary holder. The names are those of ``GPTModel.named_parameters()``, with
``model<chunk>.`` in front if a stage has several model chunks. Every tensor is compared with its recorded SHA-256
before it is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_dppo.checkpoint_conversion.certificate import (
    CERTIFICATE,
    TORCH_DTYPES,
    Certificate,
    certificate_of,
    read_body,
)
from megatron_dppo.checkpoint_conversion.tensor_store import SafetensorsFile, TensorSpec
from megatron_dppo.checkpoint_conversion.torch_dist import CheckedReader, assemble_rows
from megatron_dppo.convert.streaming import no_progress, write_megatron
from megatron_dppo.model.errors import CheckpointError, ModelError
from megatron_dppo.model.gather_plan import Piece, gather_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, primary_parameters
from megatron_dppo.system.files import Closing


class ShardedFolder(Closing):
    """An old folder as Hugging Face tensors. Raises CheckpointError if a rank's file is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        body = read_body(folder / CERTIFICATE)
        if body["form"] != "sharded":
            raise CheckpointError(f"{folder}: is of form {body['form']}, expected sharded")
        self.certificate: Certificate = certificate_of(body)
        self.certificate.check_files(folder)
        self.shape = self.certificate.shape
        self._layout = Layout(**body["layout"])
        self._dtype = TORCH_DTYPES[self.certificate.dtype]
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(dims, self._dtype) for name, dims in hf_tensors(self.shape).items()
        }
        self._sources = {tensor.name: tensor for tensor in gather_plan(self.shape, self._layout)}
        self._files: dict[int, SafetensorsFile] = {}
        try:
            self._open()
        except CheckpointError:
            self.close()
            raise

    def _open(self) -> None:
        for rank in range(self._layout.world_size):
            expected = {
                self._stored_name(p.chunk, p.name): TensorSpec(p.shape, self._dtype)
                for p in primary_parameters(self.shape, self._layout, rank)
            }
            if not expected:
                continue
            path = self.folder / f"rank-{rank:05d}.safetensors"
            file = SafetensorsFile(path)
            self._files[rank] = file
            present = {
                name: TensorSpec(entry.shape, entry.dtype) for name, entry in file.entries.items()
            }
            if present != expected:
                raise CheckpointError(f"{path}: its tensors are not those of its layout")

    def _stored_name(self, chunk: int, name: str) -> str:
        return name if self._layout.chunks == 1 else f"model{chunk}.{name}"

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count`` of a Hugging Face tensor, out of all ranks' files."""

        def read(piece: Piece, first: int, rows: int) -> torch.Tensor:
            stored = self._stored_name(piece.chunk, piece.name)
            return self._files[piece.rank].read_rows(stored, first, rows)

        return assemble_rows(self._sources[name], start, count, self._dtype, read)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}


class CheckedRows(CheckedReader):
    """The rows of a ShardedFolder, checked: each tensor's hash must be the recorded hash."""

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count``. Raises MismatchError if the tensor was altered."""
        return self.read(name, 0, start, count)


def convert(old: Path, new: Path) -> Certificate:
    """Write the ``sharded`` folder ``old`` as ``new``. Raises ModelError; then no file is left in ``new``."""
    source = ShardedFolder(old)
    with CheckedRows(source, source.certificate) as rows:
        return write_megatron(rows, source.shape, old, new, dtype=None, progress=no_progress)


def main() -> int:
    """Convert, and return the exit code: 0, or 2 for an error that the user can mend."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("old", type=Path, help="folder with rank-*.safetensors")
    parser.add_argument("new", type=Path, help="new or empty folder")
    arguments = parser.parse_args()
    try:
        written = convert(arguments.old, arguments.new)
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.new}: {len(written.tensors)} tensors, hashes as recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
