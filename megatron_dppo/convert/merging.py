"""Merge the adapters of a PEFT folder into their base; write the adapters of a run's checkpoint as a PEFT folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.checkpoint_conversion import hf_folder, tensor_store, torch_dist
from megatron_dppo.checkpoint_conversion.adapters import (
    REVERSIBLE,
    base_changing_initialization,
    initialization_fault,
    kind_faults,
    read_peft_config,
    selected_matrices,
    write_peft,
)
from megatron_dppo.checkpoint_conversion.certificate import Certificate, TensorHashes, other_dtypes
from megatron_dppo.convert.peft_deltas import Factors, PeftDeltas
from megatron_dppo.convert.streaming import Progress
from megatron_dppo.model.adapters import AdapterError, Adapters, adapter_tensors, checkpoint_key
from megatron_dppo.model.errors import CheckpointError, MismatchError
from megatron_dppo.model.families import load_stored_shape
from megatron_dppo.model.json_file import read_json
from megatron_dppo.model.mapping import carried_names, hf_tensors
from megatron_dppo.model.shape import ModelShape


def merge_adapters(
    hf_dir: str | Path, peft_dir: str | Path, out_dir: str | Path, progress: Progress
) -> Certificate:
    """Write ``hf_dir`` with the adapters of ``peft_dir`` merged into it, in the dtype of ``hf_dir``, and a certificate.

    Each adapted matrix is ``W + scale * B A``, summed in fp32 and then rounded. If PEFT subtracted the initial B A
    from the base (PiSSA, OLoRA), W is the result of ``residual``. Raises CheckpointError if the adapters do not fit
    the model, or cannot be merged; then no files are left.
    """
    folder = Path(peft_dir)
    config = read_peft_config(folder)
    with (
        torch_dist.open_source(hf_dir) as (shape, base),
        PeftDeltas(folder, config, shape) as deltas,
    ):
        _check_merge(folder, config, deltas, shape)
        names = [*hf_tensors(shape), *carried_names(shape, base.specs)]
        specs = tensor_store.packed_specs(shape, {name: base.specs[name] for name in names})
        hashes = TensorHashes()
        writer = hf_folder.ShardedWriter(out_dir, specs, side_files_from=hf_dir)
        with writer, hashes:
            initialization = base_changing_initialization(config)
            for name, start, rows in _merged_rows(base, deltas, initialization, shape):
                hashes.update(name, rows)
                writer.write_rows(name, start, rows)
                progress(rows.nbytes)
            (dtype,) = tensor_store.dtypes_of(base, shape)
            dtypes = other_dtypes({name: spec.dtype for name, spec in specs.items()}, dtype)
            certificate = Certificate(
                "huggingface", shape, dtype, dtype, hashes.digests(), dtypes=dtypes
            )
            writer.certify(certificate)
    return certificate


def residual(weight: torch.Tensor, initialization: str, factors: Factors) -> torch.Tensor:
    """Compute ``weight`` minus its initial adapter, ``W - scale B A``, as PEFT does.

    Args:
        weight: W, [rows, columns].
        initialization: ``pissa``: U S V is the singular value decomposition of W, cut to the r largest values.
            A = sqrt(S / scale) V, B = U sqrt(S / scale). ``olora``: W = Q R. A is the first r rows of R, B the first
            r columns of Q.
        factors: Their rank r and their scale are those of the initial adapter.
    """
    matrix = weight.float()
    rank, scale = factors.a.shape[0], factors.scale
    if initialization == "pissa":
        u, values, v = torch.linalg.svd(matrix, full_matrices=False)
        roots = (values[:rank] / scale).sqrt()
        a = roots[:, None] * v[:rank]
        b = u[:, :rank] * roots
    else:
        q, r = torch.linalg.qr(matrix)
        a = r[:rank]
        b = q[:, :rank]
    return (matrix - scale * (b @ a)).to(weight.dtype)


def _check_merge(
    folder: Path, config: Mapping[str, Any], deltas: PeftDeltas, shape: ModelShape
) -> None:
    """Raise CheckpointError with all reasons why the adapters cannot be merged into their base."""
    faults = list(kind_faults(config))
    initialization = base_changing_initialization(config)
    if initialization is not None and initialization not in REVERSIBLE:
        faults.append(initialization_fault(initialization))
    # A folder that adapts only parameters (target_parameters) has no target_modules.
    if config["target_modules"] or not config.get("target_parameters"):
        try:
            selected = selected_matrices(config, shape, deltas.stored)
        except AdapterError as error:
            faults.append(str(error))
        else:
            missing = sorted(name for name in selected if f"{name}.weight" not in deltas.names)
            if missing:
                faults.append(f"{len(missing)} adapters are missing, first {missing[0]}")
    if faults:
        raise CheckpointError(f"{folder}: its adapters cannot be merged: {'; '.join(faults)}")


def checkpoint_to_peft(checkpoint: str | Path, hf_dir: str | Path, out_dir: str | Path) -> Adapters:
    """Write the adapters of a training run's checkpoint (a ``step_...`` folder) in PEFT's format.

    ``hf_dir`` is the base of the adapters. Raises MismatchError if the SHA-256 of the base differs from the SHA-256
    that the checkpoint recorded. Raises CheckpointError if the checkpoint has no adapters, or has trained routers:
    a folder of plain LoRA adapters has no place for routers.
    """
    shape = load_stored_shape(hf_dir)
    model = _recorded_model(Path(checkpoint))
    digest = torch_dist.combined_digest([torch_dist.tensor_digests(hf_dir)])
    if digest != model["base_sha256"]:
        raise MismatchError(
            f"{hf_dir}: its tensors have SHA-256 {digest}, the base of {checkpoint} had {model['base_sha256']}"
        )
    adapters = Adapters(
        model["lora.rank"],
        model["lora.alpha"],
        tuple(model["lora.target_modules"]),
        model["lora.experts"] == "shared",
    )
    with torch_dist.TorchDistFolder(checkpoint) as stored:
        first_key, _ = checkpoint_key(next(iter(adapter_tensors(adapters, shape))))
        tensors = _stored_tensors(stored, adapters, shape)
        dtype = stored.dtype(first_key)
        write_peft(out_dir, adapters, shape, tensors, base=str(hf_dir), dtype=dtype)
    return adapters


def _stored_tensors(
    stored: torch_dist.TorchDistFolder, adapters: Adapters, shape: ModelShape
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dims in adapter_tensors(adapters, shape).items():
        key, expert = checkpoint_key(name)
        first_row = 0
        count = dims[0]
        if expert is not None:
            # The first dimension of the stored tensor counts the experts.
            first_row = expert
            count = 1
        rows = stored.read_rows(key, first_row, count)
        yield name, rows.reshape(dims)


def _merged_rows(
    base: torch_dist.CheckedReader,
    deltas: PeftDeltas,
    initialization: str | None,
    shape: ModelShape,
) -> Iterator[tuple[str, int, torch.Tensor]]:
    for name in (*hf_tensors(shape), *carried_names(shape, base.specs)):
        if name not in deltas.names:
            for start, count in tensor_store.row_blocks(base.specs[name]):
                yield name, start, base.read_rows(name, start, count)
            continue
        factors = deltas.factors(name)
        residual_weight = None
        if initialization is not None:
            residual_weight = residual(base.read(name), initialization, factors)
        for start, count in tensor_store.row_blocks(base.specs[name]):
            end = start + count
            rows = (
                base.read_rows(name, start, count)
                if residual_weight is None
                else residual_weight[start:end]
            )
            # Sum in fp32, so that the delta itself is not rounded.
            delta = factors.scale * (factors.b[start:end] @ factors.a)
            yield name, start, (rows.float() + delta).to(rows.dtype)


def _recorded_model(folder: Path) -> dict[str, Any]:
    """Return the model in a checkpoint's manifest. Raises CheckpointError without adapters, or with trained routers."""
    path = folder / "manifest.json"
    expected = "the manifest of a training checkpoint"
    manifest = read_json(path, expected)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("model"), dict):
        raise CheckpointError(f"{path}: expected {expected}")
    model: dict[str, Any] = manifest["model"]
    if "lora.rank" not in model:
        raise CheckpointError(f"{folder}: holds no adapters: the whole model was trained")
    if model["lora.train_router"]:
        raise CheckpointError(
            f"{folder}: holds trained routers, which a folder of plain LoRA adapters can't hold; resume the run and "
            "take its merged export"
        )
    return model
