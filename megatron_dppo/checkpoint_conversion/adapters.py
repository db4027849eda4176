"""Adapters between their forms, block by block: of a training run -> PEFT's folder, and merged into their base."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.checkpoint_conversion.certificate import Certificate
from megatron_dppo.checkpoint_conversion.digest import combined_digest, tensor_digests
from megatron_dppo.checkpoint_conversion.hashing import TensorHashes
from megatron_dppo.checkpoint_conversion.hf_io import SafetensorsReader, ShardedWriter
from megatron_dppo.checkpoint_conversion.peft import CONFIG, PeftReader, write_peft
from megatron_dppo.checkpoint_conversion.tensor_store import row_blocks
from megatron_dppo.checkpoint_conversion.torch_dist import TorchDistFolder
from megatron_dppo.model.adapters import (
    LORA_A,
    LORA_B,
    Adapters,
    adapter_tensors,
    checkpoint_place,
    resolve_modules,
)
from megatron_dppo.model.errors import CheckpointError, MismatchError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.shape import ModelShape

Progress = Callable[[int], None]


def merge_adapters(
    hf_dir: str | Path, peft_dir: str | Path, out_dir: str | Path, progress: Progress
) -> Certificate:
    """Write ``hf_dir`` with the adapters of ``peft_dir`` merged into it, of its dtype, and a certificate.

    Each row is ``W + scale * B A`` in fp32, rounded once. Raises CheckpointError where the adapters are not of this
    model, or not plain ones; nothing is left behind.
    """
    shape = load_model_shape(hf_dir)
    adapters = _adapters_in(Path(peft_dir), shape)
    with SafetensorsReader(hf_dir) as base, PeftReader(peft_dir, adapters, shape) as reader:
        base.check(shape)
        specs = {name: base.specs[name] for name in hf_tensors(shape)}
        hashes = TensorHashes()
        writer = ShardedWriter(out_dir, specs, side_files_from=hf_dir)
        with writer, hashes:
            for name, start, rows in _merged_rows(base, reader, adapters, shape):
                hashes.update(name, rows)
                writer.write_rows(name, start, rows)
                progress(rows.nbytes)
            dtype = str(next(iter(specs.values())).dtype).removeprefix("torch.")
            certificate = Certificate("huggingface", shape, dtype, dtype, hashes.digests())
            writer.certify(certificate)
    return certificate


def checkpoint_to_peft(checkpoint: str | Path, hf_dir: str | Path, out_dir: str | Path) -> Adapters:
    """Write the adapters of a training run's checkpoint (a ``step_...`` folder) in PEFT's format.

    ``hf_dir``: their base; raises MismatchError where its SHA-256 is not the one that the checkpoint recorded, and
    CheckpointError where the checkpoint holds no adapters, or routers that such a folder can't hold.
    """
    shape, model = load_model_shape(hf_dir), _recorded_model(Path(checkpoint))
    found = combined_digest([tensor_digests(hf_dir)])
    if found != model["base_sha256"]:
        raise MismatchError(
            f"{hf_dir}: its tensors have SHA-256 {found}, the base of {checkpoint} had "
            f"{model['base_sha256']}"
        )
    adapters = Adapters(
        model["lora.rank"],
        model["lora.alpha"],
        tuple(model["lora.target_modules"]),
        model["lora.experts"] == "shared",
    )
    stored = TorchDistFolder(checkpoint)
    try:
        first = checkpoint_place(next(iter(adapter_tensors(adapters, shape))), adapters)[0]
        tensors = _stored_tensors(stored, adapters, shape)
        dtype = stored.dtype(first)
        write_peft(out_dir, adapters, shape, tensors, base=str(hf_dir), dtype=dtype)
    finally:
        stored.close()
    return adapters


def _stored_tensors(
    stored: TorchDistFolder, adapters: Adapters, shape: ModelShape
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dims in adapter_tensors(adapters, shape).items():
        key, expert = checkpoint_place(name, adapters)
        rows = dims[0] if expert is None else 1
        found = stored.read_rows(key, 0 if expert is None else expert, rows)
        yield name, found.reshape(dims)


def _merged_rows(
    base: SafetensorsReader, reader: PeftReader, adapters: Adapters, shape: ModelShape
) -> Iterator[tuple[str, int, torch.Tensor]]:
    dims = adapter_tensors(adapters, shape)
    for name in hf_tensors(shape):
        module = name.removesuffix(".weight")
        pair = [f"{module}.{which}" for which in (LORA_A, LORA_B)]
        is_adapted = pair[0] in dims
        a, b = (reader.read(n, dims[n]).float() for n in pair) if is_adapted else (None, None)
        for start, count in row_blocks(base.specs[name]):
            rows = base.read_rows(name, start, count)
            if a is not None and b is not None:
                delta = adapters.scale * (b[start : start + count] @ a)
                rows = (rows.float() + delta).to(rows.dtype)
            yield name, start, rows


def _adapters_in(folder: Path, shape: ModelShape) -> Adapters:
    """As the folder's own adapter_config.json says; ``PeftReader`` checks the rest of it."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        modules = resolve_modules(sorted(config["target_modules"]), shape)
        return Adapters(int(config["r"]), float(config["lora_alpha"]), modules)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not adapters of this {shape.family} ({error})") from error


def _recorded_model(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        model: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: not the manifest of a training checkpoint ({error!r})"
        ) from error
    if "lora.rank" not in model:
        raise CheckpointError(f"{folder}: holds no adapters: the whole model was trained")
    if model["lora.train_router"]:
        raise CheckpointError(
            f"{folder}: holds trained routers, which a folder of adapters can't; resume the run and "
            "take its merged export"
        )
    return model
