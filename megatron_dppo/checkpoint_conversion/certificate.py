"""SHA-256 of tensors and files, and conversion.json, which has these hashes and the hash of its own content."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_dppo.checkpoint_conversion.tensor_store import TensorStore, byte_view, row_blocks
from megatron_dppo.model.errors import CheckpointError, MismatchError
from megatron_dppo.model.families import FAMILIES
from megatron_dppo.model.json_file import read_json
from megatron_dppo.model.mapping import carried_names, hf_tensors
from megatron_dppo.model.shape import ModelShape, shape_of_json
from megatron_dppo.system.files import Closing, sha256_of


class TensorHashes(Closing):
    """SHA-256 of tensors that arrive in row blocks, tensor after tensor. A thread hashes one block while the caller
    reads the next."""

    def __init__(self) -> None:
        self._hashes: dict[str, hashlib._Hash] = {}
        self._pool = ThreadPoolExecutor(1, "hash")
        self._pending: Future | None = None

    def update(self, name: str, rows: torch.Tensor) -> None:
        """Add a block to the hash of ``name``. The caller must not change the block afterwards."""
        # Wait for the previous block, because every waiting block uses memory.
        self._wait()
        digest = self._hashes.setdefault(name, hashlib.sha256())
        self._pending = self._pool.submit(digest.update, byte_view(rows))

    def add(self, store: TensorStore, name: str) -> str:
        """Read and hash a whole tensor of ``store``. Returns its hex digest."""
        for start, count in row_blocks(store.specs[name]):
            self.update(name, store.read_rows(name, start, count))
        self._wait()
        return self._hashes[name].hexdigest()

    def digests(self) -> dict[str, str]:
        """Hex digests by tensor, in the order of arrival."""
        self._wait()
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        self._pool.shutdown()


Form = Literal["huggingface", "torch_dist"]
CERTIFICATE = "conversion.json"
"""Name of the certificate's file."""
VERSION = 1
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron-LM's file with the name of the current checkpoint in a folder. A conversion writes `release` there."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Certificate:
    """The content of conversion.json.

    Attributes:
        form: Form of the checkpoint files in the same folder.
        shape: The model.
        dtype: Type of the stored tensors.
        dtypes: Name -> type of the tensors that have another type.
        source_dtype: Type of the tensors that were read; the names of several types are joined by ``+``. 8-bit weights
            (``float8_e4m3fn``) were multiplied by their scales.
        tensors: Name -> SHA-256 (hex) of the tensor's bytes in its stored type and Hugging Face's shape, row-major. The
            hash does not depend on the layout. Tensors that are only copied (``carried_names``) come last.
        files: Name -> SHA-256 of config, tokenizer and other files in the folder; empty before ``save``.
    """

    form: Form
    shape: ModelShape
    dtype: str
    source_dtype: str
    tensors: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write ``folder/conversion.json``, with the hashes of the files that are beside the weights now."""
        files = {path.name: sha256_of(path) for path in side_files(folder)}
        body = replace(self, files=files)._body()
        text = json.dumps({**body, "sha256": _digest(body)}, indent=1)
        (folder / CERTIFICATE).write_text(text + "\n")

    def _body(self) -> dict[str, Any]:
        body = {
            "version": VERSION,
            "form": self.form,
            "model": dataclasses.asdict(self.shape),
            "dtype": self.dtype,
            "source_dtype": self.source_dtype,
            "tensors": dict(self.tensors),
            "files": dict(self.files),
        }
        if self.dtypes:
            body["dtypes"] = dict(self.dtypes)
        return body

    def check_files(self, folder: Path) -> None:
        """Raise MismatchError for a file that is missing or has another hash."""
        for name, digest in self.files.items():
            path = folder / name
            present_digest = "none, it is gone"
            if path.is_file():
                present_digest = sha256_of(path)
            if present_digest != digest:
                raise MismatchError(
                    f"{path}: its SHA-256 is {present_digest}, {CERTIFICATE} recorded {digest}; if it was changed on "
                    f"purpose, convert again, or take {CERTIFICATE} away from a folder in Hugging Face's format"
                )

    def check_tensor(self, name: str, digest: str, folder: Path) -> None:
        """Raise MismatchError if ``digest`` is not the recorded hash of the tensor."""
        if digest != self.tensors.get(name):
            raise MismatchError(
                f"{folder}: {name} has SHA-256 {digest}, {CERTIFICATE} recorded {self.tensors.get(name)}; if its "
                f"weights were changed on purpose, remove {CERTIFICATE}"
            )


def load_certificate(folder: str | Path) -> Certificate:
    """Read ``folder/conversion.json``, and compare the files beside the weights with it.

    Raises CheckpointError if conversion.json is missing, altered or of another version or form, and MismatchError if a
    file beside the weights is missing or altered.
    """
    path = Path(folder) / CERTIFICATE
    body = read_body(path)
    if body.get("form") == "sharded":
        raise CheckpointError(
            f"{folder}: has the form 'sharded', one file for each rank, expected Megatron-Core's form; "
            f"tools/convert_sharded_checkpoint.py {folder} NEW_FOLDER converts it"
        )
    try:
        certificate = certificate_of(body)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: not a certificate of this version ({error!r})") from error
    if certificate.shape.family not in FAMILIES:
        raise CheckpointError(
            f"{path}: of family {certificate.shape.family!r}, supported: {sorted(FAMILIES)}"
        )
    names = list(certificate.tensors)
    expected_names = [*hf_tensors(certificate.shape), *carried_names(certificate.shape, names)]
    if names != expected_names:
        raise CheckpointError(f"{path}: its tensors differ from its model's tensors")
    certificate.check_files(path.parent)
    return certificate


def source_certificate(hf_dir: str | Path) -> Certificate | None:
    """Read the certificate of the Hugging Face folder ``hf_dir``, the source of a conversion; None if none exists.

    Raises what ``load_certificate`` raises, and CheckpointError if the certificate's form is not ``huggingface``.
    """
    if not (Path(hf_dir) / CERTIFICATE).exists():
        return None
    certificate = load_certificate(hf_dir)
    if certificate.form != "huggingface":
        raise CheckpointError(
            f"{hf_dir}: {CERTIFICATE} says that the folder is of the form {certificate.form!r}, expected 'huggingface'"
        )
    return certificate


def read_body(path: Path) -> dict[str, Any]:
    """Read ``conversion.json`` of any form. Raises CheckpointError if it is missing, altered or of another version."""
    expected = "the certificate of a finished conversion"
    body = read_json(path, expected)
    if not isinstance(body, dict) or "sha256" not in body:
        raise CheckpointError(f"{path}: expected {expected}")
    digest = body.pop("sha256")
    if body.get("version") != VERSION:
        raise CheckpointError(f"{path}: version {body.get('version')!r}, expected {VERSION}")
    if _digest(body) != digest:
        raise CheckpointError(
            f"{path}: its own SHA-256 is {_digest(body)}, recorded {digest}; it was altered"
        )
    return dict(body)


def certificate_of(body: Mapping[str, Any]) -> Certificate:
    """Convert the result of ``read_body`` to a certificate."""
    return Certificate(
        form=body["form"],
        shape=shape_of_json(body["model"]),
        dtype=body["dtype"],
        source_dtype=body["source_dtype"],
        tensors=body["tensors"],
        files=body["files"],
        dtypes=body.get("dtypes", {}),
    )


def other_dtypes(dtypes: Mapping[str, torch.dtype], dtype: str) -> dict[str, str]:
    """Return, for a certificate, the dtypes of the tensors whose dtype is not ``dtype``."""
    names = {tensor: str(value).removeprefix("torch.") for tensor, value in dtypes.items()}
    return {tensor: name for tensor, name in names.items() if name != dtype}


def side_files(folder: str | Path) -> list[Path]:
    """The files of a folder that are neither weights nor their index: config, tokenizer, generation files."""
    paths: list[Path] = []
    for path in sorted(Path(folder).iterdir()):
        has_weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        is_hidden = path.name.startswith(".")
        # The certificate lists the hashes of these files. It cannot list its own hash.
        is_certificate = path.name == CERTIFICATE
        if path.is_file() and not (has_weights or is_hidden or is_certificate):
            paths.append(path)
    return paths


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
