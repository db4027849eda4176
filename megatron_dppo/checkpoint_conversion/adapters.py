"""Write and read LoRA adapters in PEFT's format, export them from a training run, and merge them into their base."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.checkpoint_conversion import hf_folder, tensor_store
from megatron_dppo.config.lora import PEFT_CONFIG, PEFT_WEIGHTS
from megatron_dppo.model.adapters import (
    ALL,
    ANY_EXPERT,
    HEAD,
    LORA_A,
    AdapterError,
    Adapters,
    adapter_tensors,
    module_groups,
    resolve_modules,
)
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.json_file import read_json
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.files import Closing

PEFT_PREFIX = "base_model.model."
"""Beginning of a tensor's name in PEFT's files."""
_SUFFIX = ".weight"
"""End of a tensor's name in PEFT's files."""
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": ([], None),
    "layers_to_transform": ([], None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
"""Entry of adapter_config.json -> the values that plain LoRA adapters may have. An error names the first value."""
_SINGLE: Mapping[str, tuple[Any, ...]] = {
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "target_parameters": ([], None),
}
"""The same for adapters that start a run: a run has one rank and one alpha. Other adapters can be merged."""
_EXPERT = re.compile(r"\.experts\.\d+\.")
"""Part of the name of one expert's matrix."""
_INITIAL = "init_lora_weights"
_BASE_KEPT = (True, False, None, "true", "gaussian", "eva", "orthogonal", "mica")
"""With these values of ``init_lora_weights``, PEFT does not change the base."""
REVERSIBLE = ("pissa", "olora")
"""With these values of ``init_lora_weights``, PEFT subtracts the initial B A from the base. This B A can be computed
from the base's weights. With a value in neither tuple, PEFT changes the base in another way."""


@dataclass(frozen=True)
class AdapterFolder:
    """The configuration in a folder of adapters. ``base`` is the model that adapter_config.json names."""

    adapters: Adapters
    shape: ModelShape
    base: str

    def write(
        self, out_dir: str | Path, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
    ) -> None:
        """Write a folder with this configuration and ``tensors``, as ``write_peft`` does."""
        write_peft(out_dir, self.adapters, self.shape, tensors, base=self.base, dtype=dtype)


def peft_names(name: str, shape: ModelShape) -> list[str]:
    """The names in PEFT's files of the tensor ``name`` of ``adapter_tensors``: one name, or one for each expert."""
    full_names = [name]
    # PEFT has no shared adapters, so an adapter that all experts of a layer share is stored for every expert.
    if f".{ANY_EXPERT}." in name:
        experts = range(shape.num_experts)
        full_names = [name.replace(f".{ANY_EXPERT}.", f".{expert}.") for expert in experts]
    return [f"{PEFT_PREFIX}{full_name}{_SUFFIX}" for full_name in full_names]


class PeftReader(Closing):
    """A folder of adapters, open for reading.

    Raises CheckpointError if the folder is not in PEFT's format, has adapters that are not plain LoRA, or does not fit
    ``adapters`` and ``shape``. The message lists all differences.
    """

    def __init__(self, folder: str | Path, adapters: Adapters, shape: ModelShape) -> None:
        self.folder = Path(folder)
        self._shape = shape
        self._adapters = adapters
        config = read_peft_config(self.folder)
        self._file = tensor_store.SafetensorsFile(self.folder / PEFT_WEIGHTS)
        faults = [*kind_faults(config), *_single_faults(config, adapters)]
        initialization = base_changing_initialization(config)
        if initialization is not None:
            faults.append(initialization_fault(initialization))
        try:
            modules = modules_of(config, shape, self._file.entries)
        except AdapterError as error:
            faults.append(str(error))
        else:
            if set(modules) != set(adapters.modules):
                run_modules = sorted(adapters.modules)
                faults.append(f"target_modules are {sorted(modules)}, expected {run_modules}")
        faults += self._tensor_faults()
        if faults:
            self.close()
            raise CheckpointError(
                f"{self.folder}: its adapters differ from this run's: {'; '.join(faults)}"
            )

    def read(self, name: str, dims: tuple[int, ...]) -> torch.Tensor:
        """Read the tensor ``name`` of ``adapter_tensors``.

        PEFT's file has a copy for each expert if experts share the tensor. Raises CheckpointError if the copies differ.
        """
        first_name, *copy_names = peft_names(name, self._shape)
        tensor = self._file.read_rows(first_name, 0, dims[0])
        for copy_name in copy_names:
            if not torch.equal(self._file.read_rows(copy_name, 0, dims[0]), tensor):
                raise CheckpointError(
                    f"{self.folder}: {copy_name} differs from {first_name}, expected the same for all experts "
                    "of a layer (lora.experts: shared)"
                )
        return tensor

    def close(self) -> None:
        self._file.close()

    def _tensor_faults(self) -> Iterator[str]:
        run_dims: dict[str, tuple[int, ...]] = {}
        for name, dims in adapter_tensors(self._adapters, self._shape).items():
            run_dims |= dict.fromkeys(peft_names(name, self._shape), dims)
        file_dims: dict[str, tuple[int, ...]] = {}
        for name, entry in self._file.entries.items():
            file_dims[name] = tuple(entry.shape)
        missing_names = [name for name in run_dims if name not in file_dims]
        unknown_names = sorted(file_dims.keys() - run_dims.keys())
        wrong_names = [n for n, d in run_dims.items() if n in file_dims and file_dims[n] != d]
        if missing_names:
            yield f"{len(missing_names)} tensors are missing, first {missing_names[0]}"
        if unknown_names:
            hint = base_hint(unknown_names)
            yield f"{len(unknown_names)} tensors are unknown, first {unknown_names[0]}{hint}"
        if wrong_names:
            name = wrong_names[0]
            yield (
                f"{len(wrong_names)} shapes differ, first {name}: {file_dims[name]}, expected {run_dims[name]}"
            )


def base_hint(unknown_names: Sequence[str]) -> str:
    """Return the end of an error about tensors that PEFT's files should not have."""
    if not any(name.endswith(".base_layer.weight") for name in unknown_names):
        return ""
    return ", a matrix of the base: PEFT's save_pretrained(..., save_embedding_layers=False) leaves it out"


def write_peft(
    out_dir: str | Path,
    adapters: Adapters,
    shape: ModelShape,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    base: str,
    dtype: torch.dtype,
) -> None:
    """Write ``tensors`` (all of ``adapter_tensors``) as a folder, atomically.

    ``base`` is the model that adapter_config.json names as the base of the adapters.
    """
    dims = adapter_tensors(adapters, shape)
    specs: dict[str, tensor_store.TensorSpec] = {}
    for name, tensor_dims in dims.items():
        spec = tensor_store.TensorSpec(tensor_dims, dtype)
        specs |= dict.fromkeys(peft_names(name, shape), spec)
    unwritten = set(dims)
    with hf_folder.StagedFolder(out_dir, sum(spec.bytes for spec in specs.values())) as folder:
        with tensor_store.SafetensorsFileWriter(folder / PEFT_WEIGHTS, specs) as writer:
            for name, tensor in tensors:
                for peft_name in peft_names(name, shape):
                    writer.write_rows(peft_name, 0, tensor.detach().to("cpu", dtype))
                unwritten.discard(name)
            if unwritten:
                raise CheckpointError(
                    f"{len(unwritten)} adapters were not written, first {min(unwritten)}"
                )
        text = json.dumps(peft_config(adapters, base), indent=2)
        (folder / PEFT_CONFIG).write_text(text + "\n")


def peft_config(adapters: Adapters, base: str) -> dict[str, Any]:
    """The content of adapter_config.json for PEFT, transformers and SGLang."""
    # PEFT declares lora_alpha as an int; a fraction is written as it is.
    alpha = adapters.alpha
    if alpha == int(alpha):
        alpha = int(alpha)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(adapters.modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def read_peft_config(folder: Path) -> dict[str, Any]:
    path = folder / PEFT_CONFIG
    expected = "PEFT's configuration of adapters"
    config = read_json(path, expected)
    # Every file has these entries.
    entries = {"r", "lora_alpha", "target_modules"}
    if not isinstance(config, dict) or not entries <= config.keys():
        raise CheckpointError(f"{path}: expected {expected} with {', '.join(sorted(entries))}")
    return config


def kind_faults(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the entries of adapters that are no LoRA that can be merged by ``W + scale * B A``."""
    for key, plain_values in _PLAIN.items():
        # An entry that older versions of PEFT do not write counts as plain.
        if key in config and config[key] not in plain_values:
            yield f"{key} is {config[key]!r}, expected {plain_values[0]!r}"


def _single_faults(config: Mapping[str, Any], adapters: Adapters) -> Iterator[str]:
    """Yield the differences from ``adapters``, which have one rank and one factor."""
    for key, plain_values in _SINGLE.items():
        if key in config and config[key] not in plain_values:
            yield (
                f"{key} is {config[key]!r}, expected {plain_values[0]!r}: a run has one rank and one alpha; "
                "`megatron-dppo convert merge-adapters` merges these into their base"
            )
    if config["r"] != adapters.rank:
        yield f"r is {config['r']}, expected {adapters.rank}"
    alpha = config["lora_alpha"]
    if not config.get("use_rslora"):
        if alpha != adapters.alpha:
            yield f"lora_alpha is {alpha}, expected {adapters.alpha}"
        return
    # rsLoRA's factor alpha / sqrt(r) is that of a larger alpha.
    plain_alpha = float(alpha) * math.sqrt(config["r"])
    if not math.isclose(plain_alpha, adapters.alpha, rel_tol=1e-6):
        yield (
            f"lora_alpha is {alpha} with use_rslora, which is the factor of lora.alpha={plain_alpha:.9g}, expected "
            f"{adapters.alpha}"
        )


def base_changing_initialization(config: Mapping[str, Any]) -> str | None:
    """Return the name of the initialisation, if PEFT changes the base for it; else None."""
    value = config.get(_INITIAL)
    name = value.lower() if isinstance(value, str) else value
    return None if name in _BASE_KEPT else str(name)


def initialization_fault(initialization: str) -> str:
    merging = ""
    if initialization in REVERSIBLE:
        merging = "`megatron-dppo convert merge-adapters` merges them into their base, or "
    return (
        f"{_INITIAL} is {initialization!r}: the adapters belong to a base that PEFT changed when it made them, "
        f"expected plain adapters; {merging}PEFT's "
        "model.save_pretrained(..., path_initial_model_for_weight_conversion=...) writes them as plain adapters "
        "of twice the rank"
    )


def modules_of(
    config: Mapping[str, Any], shape: ModelShape, stored: Collection[str]
) -> tuple[str, ...]:
    """Return the matrices that PEFT adapts, by the last part of their names (``q_proj``), in the family's order.

    Args:
        config: The entries of adapter_config.json.
        shape: The model.
        stored: PEFT's names of the folder's tensors.

    Raises:
        AdapterError: ``target_modules`` matches nothing, or a matrix in only some of the layers. Also if
            ``target_modules`` or ``exclude_modules`` is malformed.
    """
    matrices = _adaptable(shape)
    selected = selected_matrices(config, shape, stored)
    targets = config["target_modules"]
    names = set(map(_last_name, selected))
    left_out: list[str] = []
    for matrix in sorted(matrices):
        if _last_name(matrix) in names and matrix not in selected:
            left_out.append(matrix)
    if left_out:
        raise AdapterError(
            f"target_modules are {targets!r}, which leave out {left_out[0]} (and {len(left_out) - 1} more), expected "
            f"{_last_name(left_out[0])} of all layers or of none"
        )
    return tuple(name for name in _all_modules(shape) if name in names)


def _all_modules(shape: ModelShape) -> tuple[str, ...]:
    return resolve_modules(list(module_groups(shape)), shape)


def _adaptable(shape: ModelShape) -> list[str]:
    """Return the matrices that a run can adapt, without ``.weight``."""
    dims = adapter_tensors(Adapters(1, 1.0, _all_modules(shape)), shape)
    return [name.removesuffix(f".{LORA_A}") for name in dims if name.endswith(LORA_A)]


def selected_matrices(
    config: Mapping[str, Any], shape: ModelShape, stored: Collection[str]
) -> set[str]:
    """Return the matrices that ``target_modules`` and ``exclude_modules`` select. Arguments and errors are those of
    ``modules_of``."""
    matrices = _adaptable(shape)
    targets = config["target_modules"]
    excluded = config.get("exclude_modules")
    has_experts = any(_EXPERT.search(name) for name in stored)
    if isinstance(targets, str) and targets.lower() == ALL:
        # PEFT does not count the output layer among all linear layers.
        heads = module_groups(shape).get(HEAD, ())
        candidates = [m for m in matrices if _last_name(m) not in heads]
    else:
        candidates = [matrix for matrix in matrices if _matches(targets, matrix)]
    selected: set[str] = set()
    for matrix in candidates:
        is_excluded = bool(excluded) and _matches(excluded, matrix)
        # Since transformers 5 a single expert is not a module, so PEFT does not find its matrices. Folders that were
        # written with earlier versions have tensors of experts.
        is_missed_by_peft = ".experts." in matrix and not has_experts
        if not is_excluded and not is_missed_by_peft:
            selected.add(matrix)
    unknown_targets: list[str] = []
    if isinstance(targets, list):
        unknown_targets = [t for t in targets if not any(_matches([t], m) for m in matrices)]
    if unknown_targets or not selected:
        raise AdapterError(
            f"target_modules are {targets!r}, of which {unknown_targets or targets!r} name nothing in a {shape.family} "
            f"model with these tensors, expected some of {[ALL, *_all_modules(shape)]}"
        )
    return selected


def _matches(targets: Any, matrix: str) -> bool:
    """Whether a value of ``target_modules`` or ``exclude_modules`` matches a matrix. The value is a regex of the full
    name, or a list of ends of the name at a dot."""
    if isinstance(targets, str):
        try:
            return re.fullmatch(targets, matrix) is not None
        except re.error as error:
            raise AdapterError(f"target_modules are {targets!r}, not a regex: {error}") from error
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise AdapterError(f"target_modules are {targets!r}, expected a list of names or a regex")
    parts = matrix.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return not set(targets).isdisjoint(ends)


def _last_name(matrix: str) -> str:
    return matrix.rpartition(".")[2]
