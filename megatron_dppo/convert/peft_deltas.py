"""The changes ``scale * B A`` that a folder of PEFT's LoRA adapters makes to a model's matrices.

PEFT adapts a matrix by the tensors A [r, in] and B [out, r] of its module. Since transformers 5 all experts of a layer
are one module with two parameters: ``gate_up_proj`` [experts, gates and ups, in] and ``down_proj`` [experts, out, in].
PEFT adapts such a parameter (``target_parameters``) by A [experts * r, in] and B [out, r * experts]. Expert e has the
rows ``e * r`` to ``(e + 1) * r`` of A, and the columns ``e, e + experts, ...`` of B.

Each adapted module or parameter may have its own rank and alpha (``rank_pattern``, ``alpha_pattern``). The scale is
alpha / r, or alpha / sqrt(r) with ``use_rslora``.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_dppo.checkpoint_conversion.adapters import PEFT_PREFIX, base_hint
from megatron_dppo.checkpoint_conversion.tensor_store import SafetensorsFile
from megatron_dppo.config.lora import PEFT_CONFIG, PEFT_WEIGHTS
from megatron_dppo.model.adapters import LORA_A, LORA_B
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.rows import Rule, Source
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import Dims
from megatron_dppo.system.files import Closing

_EXPERTS = re.compile(r"(.*\.layers\.(\d+)\..*\bexperts)((?:\.base_layer)*)")
"""The module of a layer's experts, or the module inside of a number of its wrappers."""
_PARAMETERS = ("gate_up_proj", "down_proj")
"""The parameters of the experts' module, in PEFT's order. The first adapted parameter has the innermost wrapper."""


class Factors(NamedTuple):
    """A [rank, in] and B [out, rank] of one matrix, in fp32; the matrix changes by ``scale * B A``."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class _Part:
    """The part of PEFT's tensors that changes one matrix.

    Attributes:
        module: beginning of the names of A and B in the file.
        rank: the rank of A and B.
        scale: the factor of B A.
        rows: the first row of B, and the number of rows.
        expert: the expert's number in A and B; None: A and B belong to one matrix.
        experts: the number of experts in A and B.
    """

    module: str
    rank: int
    scale: float
    rows: tuple[int, int]
    expert: int | None = None
    experts: int = 1


class PeftDeltas(Closing):
    """A folder of adapters, open for reading. ``names`` are the Hugging Face matrices that it changes.

    ``config`` has the entries of adapter_config.json. Raises CheckpointError for tensors that do not fit the model.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], shape: ModelShape) -> None:
        self._folder = folder
        self._config = config
        self._shape = shape
        self._dims = hf_tensors(shape)
        self._file = SafetensorsFile(folder / PEFT_WEIGHTS)
        self._parts: dict[str, _Part] = {}
        # The experts of a layer share their tensors, and are read one after the other.
        self._whole = lru_cache(maxsize=4)(self._read_whole)
        try:
            self._find_parts()
        except CheckpointError:
            self.close()
            raise

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._parts)

    @property
    def stored(self) -> Collection[str]:
        """PEFT's names of the folder's tensors."""
        return self._file.entries.keys()

    def factors(self, name: str) -> Factors:
        """Return the factors of the matrix ``name``."""
        part = self._parts[name]
        start, count = part.rows
        b = self._whole(f"{part.module}.{LORA_B}.weight")[start : start + count]
        if part.expert is None:
            a = self._whole(f"{part.module}.{LORA_A}.weight")
        else:
            a = self._file.read_rows(
                f"{part.module}.{LORA_A}.weight", part.expert * part.rank, part.rank
            )
            b = b.reshape(count, part.rank, part.experts)[:, :, part.expert]
        return Factors(a.float(), b.float(), part.scale)

    def close(self) -> None:
        self._file.close()

    def _read_whole(self, name: str) -> Tensor:
        return self._file.read_rows(name, 0, self._file.entries[name].shape[0])

    def _find_parts(self) -> None:
        modules: dict[str, set[str]] = defaultdict(set)
        unknown_names = []
        for name in self._file.entries:
            match = re.fullmatch(rf"(.*)\.({LORA_A}|{LORA_B})\.weight", name)
            if match is None or not name.startswith(PEFT_PREFIX):
                unknown_names.append(name)
            else:
                modules[match[1]].add(match[2])
        wrappers: dict[str, list[str]] = defaultdict(list)
        for module, kinds in modules.items():
            path = module.removeprefix(PEFT_PREFIX)
            match = _EXPERTS.fullmatch(path)
            if kinds != {LORA_A, LORA_B}:
                unknown_names.append(f"{module}.{min(kinds)}.weight")
            elif f"{path}.weight" in self._dims:
                self._add_matrix(module, path)
            elif match is not None:
                wrappers[match[1]].append(module)
            else:
                unknown_names.append(f"{module}.{LORA_A}.weight")
        if unknown_names:
            raise CheckpointError(
                f"{self._folder}: {len(unknown_names)} tensors are unknown in a {self._shape.family} model, first "
                f"{min(unknown_names)}{base_hint(unknown_names)}"
            )
        self._add_experts(wrappers)

    def _add_matrix(self, module: str, path: str) -> None:
        rows, columns = self._dims[f"{path}.weight"]
        rank = self._rank(module, (rows, columns))
        # The pattern of a router's parameter ends with ``weight``, that of a module does not.
        scale = self._scale(rank, path, f"{path}.weight")
        self._parts[f"{path}.weight"] = _Part(module, rank, scale, (0, rows))

    def _add_experts(self, wrappers: Mapping[str, Sequence[str]]) -> None:
        targets = self._config.get("target_parameters") or []
        paths = {int(layer): path for path, layer in map(_path_and_layer, wrappers)}
        if not targets or not self._shape.is_moe:
            if paths:
                raise CheckpointError(
                    f"{self._folder / PEFT_CONFIG}: target_parameters is {targets!r}, expected the names of the "
                    f"parameters that {wrappers[min(wrappers)][0]} adapts"
                )
            return
        for layer in self._shape.moe_layers:
            path = paths.get(layer, f"model.layers.{layer}.mlp.experts")
            parameters = [p for p in _PARAMETERS if _is_target(f"{path}.{p}", targets)]
            # The last wrapper is the outermost: it has the fewest ``base_layer`` in its name.
            modules = sorted(wrappers.get(path, ()), key=len, reverse=True)
            if len(modules) != len(parameters):
                raise CheckpointError(
                    f"{self._folder}: adapters of {len(modules)} parameters of {path}, expected those of {parameters} "
                    f"(target_parameters {targets!r})"
                )
            for module, parameter in zip(modules, parameters, strict=True):
                self._add_parameter(module, f"{path}.{parameter}", layer, parameter)

    def _add_parameter(self, module: str, path: str, layer: int, parameter: str) -> None:
        rule = self._expert_rules()[_PARAMETERS.index(parameter)]
        experts = self._shape.num_experts
        dims = [self._dims[_name(source, layer, 0)] for source in rule.sources]
        rows = sum(rows for rows, _ in dims)
        rank = self._rank(module, (rows, dims[0][1]), experts)
        scale = self._scale(rank, path)
        for expert in range(experts):
            start = 0
            for source, (count, _) in zip(rule.sources, dims, strict=True):
                part = _Part(module, rank, scale, (start, count), expert, experts)
                self._parts[_name(source, layer, expert)] = part
                start += count

    def _expert_rules(self) -> Sequence[Rule]:
        rules = family_of(self._shape).expert
        if len(rules) != len(_PARAMETERS):
            raise CheckpointError(
                f"{self._folder}: adapters of the experts of a {self._shape.family} model are not read; merge them "
                "with PEFT: model.merge_and_unload().save_pretrained(...)"
            )
        return rules

    def _rank(self, module: str, dims: Dims, experts: int = 1) -> int:
        """Return the rank of the module's adapters. Raises CheckpointError unless A and B fit a matrix of ``dims``."""
        entries = self._file.entries
        a, b = (tuple(entries[f"{module}.{kind}.weight"].shape) for kind in (LORA_A, LORA_B))
        rank = a[0] // experts
        if not rank or a != (rank * experts, dims[1]) or b != (dims[0], rank * experts):
            raise CheckpointError(
                f"{self._folder}: {module} has A of shape {a} and B of shape {b}, expected adapters of a matrix {dims}"
                + (f" of each of {experts} experts" if experts > 1 else "")
            )
        return rank

    def _scale(self, rank: int, *paths: str) -> float:
        """Return the factor of B A. ``paths`` are the names that PEFT compares with the patterns."""
        alpha = self._config["lora_alpha"]
        for pattern, value in (self._config.get("alpha_pattern") or {}).items():
            if any(re.fullmatch(rf"(.*\.)?({pattern})", path) for path in paths):
                alpha = value
                break
        return float(alpha) / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


def _path_and_layer(path: str) -> tuple[str, str]:
    match = _EXPERTS.fullmatch(path)
    assert match is not None
    return path, match[2]


def _name(source: Source, layer: int, expert: int) -> str:
    return source.name.format(layer=layer, expert=expert)


def _is_target(path: str, targets: Sequence[str]) -> bool:
    return any(path == target or path.endswith(f".{target}") for target in targets)
