"""What of a model's folder is checked before anything starts: its config.json, its weights' and tokenizer's files."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_dppo.config.errors import ConfigError
from megatron_dppo.model.errors import ModelConfigError, UnsupportedModelError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.shape import ModelShape

_WHERE = "model.hf_checkpoint"
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


def read_checkpoint_folder(folder: str | Path, *, weights: bool = True) -> ModelShape:
    """The model in ``folder``, whose tokenizer is there, and where ``weights`` is true its weights; an index
    of weights must be one in any case.

    Raises ConfigError with every file that is missing and every entry of config.json that is wrong.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError([f"{_WHERE}: got {str(folder)!r}, which is not a folder"])
    shape: ModelShape | None = None
    faults: list[str] = []
    try:
        shape = load_model_shape(folder)
    except UnsupportedModelError as error:
        faults += error.faults
    except ModelConfigError as error:
        faults.append(str(error))
    faults += [*(missing_weights(folder) if weights else _damaged_index(folder))]
    faults += _missing_tokenizer(folder)
    if faults or shape is None:
        raise ConfigError([f"{_WHERE}: {fault}" for fault in faults])
    return shape


def missing_weights(folder: str | Path) -> list[str]:
    """Which files of the weights are not in ``folder``, in words; empty where all are."""
    folder = Path(folder)
    if damaged := _damaged_index(folder):
        return damaged
    index = folder / _INDEX
    if not index.is_file():
        if (folder / "model.safetensors").is_file():
            return []
        return [f"no weights in {folder}: expected model.safetensors or {index.name}"]
    shards = _shards(index) or []
    lost = [name for name in shards if not (folder / name).is_file()]
    if not lost:
        return []
    some = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
    return [f"{len(lost)} of the {len(shards)} files that {index} names are missing: {some}"]


def _damaged_index(folder: Path) -> list[str]:
    index = folder / _INDEX
    if not index.is_file() or _shards(index) is not None:
        return []
    return [f'{index} is damaged, expected {{"weight_map": {{tensor name: file name}}}}']


def _shards(index: Path) -> list[str] | None:
    """The files that an index names; None where it is no index."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        return None
    return sorted(set(files.values()))


def _missing_tokenizer(folder: Path) -> list[str]:
    if any(all((folder / f).is_file() for f in files) for files in _TOKENIZER_FILES):
        return []
    wanted = " or ".join(" + ".join(files) for files in _TOKENIZER_FILES)
    return [f"no tokenizer in {folder}: expected {wanted}"]
