"""Folders of LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, one A and B a matrix.

An adapter that all experts of a layer share is stored once for every expert, as PEFT knows no sharing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.checkpoint_conversion.publishing import StagedFolder
from megatron_dppo.checkpoint_conversion.safetensors_file import (
    SafetensorsFile,
    SafetensorsFileWriter,
    TensorSpec,
)
from megatron_dppo.model.adapters import ANY_EXPERT, Adapters, adapter_tensors
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.files import Closing

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "target_parameters": ([], None),
    "layers_to_transform": ([], None),
}
"""Entry of adapter_config.json -> values under which it means plain adapters."""


@dataclass(frozen=True)
class AdapterFolder:
    """What a folder of adapters holds beside its tensors. ``base``: the model that adapter_config.json names."""

    adapters: Adapters
    shape: ModelShape
    base: str

    def write(
        self, out_dir: str | Path, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
    ) -> None:
        """As ``write_peft``."""
        write_peft(out_dir, self.adapters, self.shape, tensors, base=self.base, dtype=dtype)


def peft_names(name: str, shape: ModelShape) -> list[str]:
    """What PEFT's files call the tensor ``name`` of ``adapter_tensors``: one name, or one for each expert."""
    experts = range(shape.num_experts) if f".{ANY_EXPERT}." in name else range(1)
    found = (name.replace(f".{ANY_EXPERT}.", f".{expert}.") for expert in experts)
    return [f"{_PREFIX}{full}{_SUFFIX}" for full in found]


class PeftReader(Closing):
    """A folder of adapters, open for reading.

    Raises CheckpointError where it is not in PEFT's format, of kinds other than plain LoRA, or not of ``adapters`` and
    ``shape``; the message names everything that differs.
    """

    def __init__(self, folder: str | Path, adapters: Adapters, shape: ModelShape) -> None:
        self.folder = Path(folder)
        self._shape, self._adapters = shape, adapters
        problems = list(_config_problems(self.folder, adapters))
        self._file = SafetensorsFile(self.folder / WEIGHTS)
        problems += self._tensor_problems()
        if problems:
            self.close()
            raise CheckpointError(
                f"{self.folder}: its adapters are not those of this run: {'; '.join(problems)}"
            )

    def read(self, name: str, dims: tuple[int, ...]) -> torch.Tensor:
        """The tensor ``name`` of ``adapter_tensors``. Raises CheckpointError where experts that share it differ."""
        first, *others = peft_names(name, self._shape)
        found = self._file.read_rows(first, 0, dims[0])
        for other in others:
            if not torch.equal(self._file.read_rows(other, 0, dims[0]), found):
                raise CheckpointError(
                    f"{self.folder}: {other} differs from {first}, expected the same for all experts "
                    "of a layer (lora.experts: shared)"
                )
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _tensor_problems(self) -> Iterator[str]:
        expected = {
            peft: dims
            for name, dims in adapter_tensors(self._adapters, self._shape).items()
            for peft in peft_names(name, self._shape)
        }
        present = {name: tuple(entry.shape) for name, entry in self._file.entries.items()}
        missing = [name for name in expected if name not in present]
        unknown = sorted(present.keys() - expected.keys())
        wrong = [n for n, d in expected.items() if n in present and present[n] != d]
        if missing:
            yield f"{len(missing)} tensors are missing, first {missing[0]}"
        if unknown:
            yield f"{len(unknown)} tensors are unknown, first {unknown[0]}"
        if wrong:
            name = wrong[0]
            yield f"{len(wrong)} shapes differ, first {name}: {present[name]}, expected {expected[name]}"


def write_peft(
    out_dir: str | Path,
    adapters: Adapters,
    shape: ModelShape,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    base: str,
    dtype: torch.dtype,
) -> None:
    """Write ``tensors`` (all of ``adapter_tensors``) as a folder that appears whole or not at all.

    ``base``: what adapter_config.json names as the model to load them on.
    """
    dims = adapter_tensors(adapters, shape)
    specs = {p: TensorSpec(d, dtype) for name, d in dims.items() for p in peft_names(name, shape)}
    unwritten = set(dims)
    with StagedFolder(out_dir, sum(spec.bytes for spec in specs.values())) as folder:
        with SafetensorsFileWriter(folder / WEIGHTS, specs) as writer:
            for name, tensor in tensors:
                for peft in peft_names(name, shape):
                    writer.write_rows(peft, 0, tensor.detach().to("cpu", dtype))
                unwritten.discard(name)
            if unwritten:
                raise CheckpointError(
                    f"{len(unwritten)} adapters were not written, first {min(unwritten)}"
                )
        text = json.dumps(peft_config(adapters, base), indent=2)
        (folder / CONFIG).write_text(text + "\n")


def peft_config(adapters: Adapters, base: str) -> dict[str, Any]:
    """adapter_config.json as PEFT, transformers and SGLang read it."""
    alpha = adapters.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": list(adapters.modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _config_problems(folder: Path, adapters: Adapters) -> Iterator[str]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        found = {"r": config["r"], "lora_alpha": config["lora_alpha"]}
        modules = config["target_modules"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a readable adapter_config.json ({error!r})") from error
    for key, allowed in _PLAIN.items():
        value = config.get(key, allowed[-1])
        if value not in allowed:
            yield f"{key} is {value!r}, expected {allowed[0]!r}"
    for key, expected in {"r": adapters.rank, "lora_alpha": adapters.alpha}.items():
        if found[key] != expected:
            yield f"{key} is {found[key]}, expected {expected}"
    if isinstance(modules, list) and set(modules) != set(adapters.modules):
        yield f"target_modules are {sorted(modules)}, expected {sorted(adapters.modules)}"
