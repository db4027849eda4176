"""The model of a recipe whose checkpoint may not be here: read from the checkpoint, or from a known model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dppo import EXAMPLES
from megatron_dppo.model.errors import ModelConfigError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.shape import ModelShape

KNOWN_MODELS = EXAMPLES / "model_configs"
"""A folder with a config.json for each known model. A folder's name is the model's name in lower case."""
_GUESSED_MOE, _GUESSED_DENSE = "qwen3-30b-a3b-base", "qwen3-1.7b-base"
"""Models of ``KNOWN_MODELS`` that replace an unknown model."""


@dataclass(frozen=True)
class KnownModel:
    """The config.json of a recipe's model, or of a known model in its place.

    Attributes:
        values: the content of config.json.
        shape: the model that config.json describes.
        missing: the reason why the model was guessed; empty if the model was not guessed.
    """

    values: Mapping[str, Any]
    shape: ModelShape
    missing: str = ""


def read_model(checkpoint: str, known_models: str | Path = KNOWN_MODELS) -> KnownModel:
    """Read the config.json of ``checkpoint``, or else of the model with its name in the folder ``known_models``.

    Raises:
        ModelConfigError: Both files are missing, or the file is no JSON.
        UnsupportedModelError: The model is not in the tables.
    """
    folder = Path(checkpoint)
    stand_in = Path(known_models) / folder.name.lower()
    model = _first_of(folder, stand_in)
    if model is None:
        raise ModelConfigError(
            f"model.hf_checkpoint: no config.json in {folder} nor in {stand_in}, expected one of them"
        )
    return model


def read_or_guess_model(checkpoint: str, *, is_moe: bool) -> KnownModel:
    """Return the model of ``read_model``, or a guessed model if both files are missing.

    ``is_moe``: whether an unknown model is taken for a mixture of experts. Raises ModelError for a config.json that is
    damaged or outside the families.
    """
    folder = Path(checkpoint)
    model = _first_of(folder, KNOWN_MODELS / folder.name.lower())
    if model is not None:
        return model
    guessed_name = _GUESSED_MOE if is_moe else _GUESSED_DENSE
    guessed_model = _first_of(KNOWN_MODELS / guessed_name)
    assert guessed_model is not None
    missing = (
        f"no config.json in {folder} and no model {folder.name!r} among the known ones, so the model is taken for "
        f"{guessed_model.shape.family}, as {guessed_name}"
    )
    return replace(guessed_model, missing=missing)


def _first_of(*folders: Path) -> KnownModel | None:
    """Read the first of ``folders`` that has a config.json; return None if no folder has one."""
    for folder in folders:
        file = folder / "config.json"
        if file.is_file():
            shape = load_model_shape(folder)
            return KnownModel(json.loads(file.read_bytes()), shape)
    return None
