"""conversion.json: what was converted into which form, and the SHA-256 of every tensor and of the whole."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_dppo.checkpoint_conversion.publishing import side_files
from megatron_dppo.model.errors import CheckpointError, MismatchError
from megatron_dppo.model.families import FAMILIES
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.shape import Llama3RopeScaling, ModelShape

Form = Literal["huggingface", "torch_dist"]
FILE = "conversion.json"
VERSION = 1
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Certificate:
    """``form``: of the files beside it.

    ``dtype``: of the stored tensors; ``source_dtype``: of those that were read. ``tensors``: name -> SHA-256 (hex) of
    the tensor's bytes in Hugging Face's own shape, row-major, of type ``dtype``; independent of the layout.
    ``files``: name -> SHA-256 of config, tokenizer and what else lies beside the weights; empty before ``save``, and
    where an earlier version wrote it.
    """

    form: Form
    shape: ModelShape
    dtype: str
    source_dtype: str
    tensors: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write ``folder/conversion.json``, with the hashes of the files that lie beside the weights by now."""
        hashes = {path.name: _file_digest(path) for path in side_files(folder)}
        body = replace(self, files=hashes)._body()
        text = json.dumps({**body, "sha256": _digest(body)}, indent=1)
        (folder / FILE).write_text(text + "\n")

    def _body(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "form": self.form,
            "model": dataclasses.asdict(self.shape),
            "dtype": self.dtype,
            "source_dtype": self.source_dtype,
            "tensors": dict(self.tensors),
            "files": dict(self.files),
        }

    def check_files(self, folder: Path) -> None:
        """Raise MismatchError, naming each file that is not the recorded one, or not there."""
        for name, digest in self.files.items():
            path = folder / name
            found = _file_digest(path) if path.is_file() else "none, it is gone"
            if found != digest:
                raise MismatchError(
                    f"{path}: its SHA-256 is {found}, {FILE} recorded {digest}; if it was changed on purpose, "
                    f"convert again, or take {FILE} away from a folder in Hugging Face's format"
                )


def load_certificate(folder: str | Path) -> Certificate:
    """Read ``folder/conversion.json``, and compare the files beside the weights with it.

    Raises CheckpointError where it is missing, altered or of another version or form, MismatchError for a file.
    """
    path = Path(folder) / FILE
    body = read_body(path)
    if body.get("form") == "sharded":
        raise CheckpointError(
            f"{folder}: of the form 'sharded', one file a rank, which is read no more; "
            f"tools/convert_sharded_checkpoint.py {folder} NEW_FOLDER makes Megatron-Core's of it"
        )
    try:
        certificate = certificate_of(body)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a certificate of this version ({error!r})") from error
    if certificate.shape.family not in FAMILIES:
        raise CheckpointError(
            f"{path}: of family {certificate.shape.family!r}, supported: {sorted(FAMILIES)}"
        )
    if list(certificate.tensors) != list(hf_tensors(certificate.shape)):
        raise CheckpointError(f"{path}: its tensors are not those of its model")
    certificate.check_files(path.parent)
    return certificate


def read_body(path: Path) -> dict[str, Any]:
    """What ``conversion.json`` says, of any form. Raises CheckpointError where it is missing, altered or of another
    version.
    """
    try:
        body = json.loads(path.read_text())
        digest = body.pop("sha256")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; the folder is not a finished conversion"
        ) from None
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a readable certificate ({error!r})") from error
    if body.get("version") != VERSION:
        raise CheckpointError(f"{path}: version {body.get('version')!r}, expected {VERSION}")
    if _digest(body) != digest:
        raise CheckpointError(
            f"{path}: its own SHA-256 is {_digest(body)}, recorded {digest}; it was altered"
        )
    return dict(body)


def certificate_of(body: Mapping[str, Any]) -> Certificate:
    """What ``read_body`` returned, as a certificate."""
    model = dict(body["model"])
    scaling = model.pop("rope_scaling")
    return Certificate(
        form=body["form"],
        shape=ModelShape(**model, rope_scaling=Llama3RopeScaling(**scaling) if scaling else None),
        dtype=body["dtype"],
        source_dtype=body["source_dtype"],
        tensors=body["tensors"],
        files=body.get("files", {}),
    )


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
