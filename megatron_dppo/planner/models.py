"""The model of a recipe: its checkpoint's config.json, or, before it is downloaded, one that is kept by its name."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.model.errors import ModelConfigError
from megatron_dppo.model.reader import load_model_shape
from megatron_dppo.model.shape import ModelShape


def shape_of(checkpoint: str, known: str | Path) -> ModelShape:
    """Of ``checkpoint/config.json``; where that is missing, of ``known/<its name in small letters>/config.json``.

    Raises ModelConfigError where neither is there, UnsupportedModelError for a model outside the tables.
    """
    folder = Path(checkpoint)
    if (folder / "config.json").is_file():
        return load_model_shape(folder)
    kept = Path(known) / folder.name.lower()
    if (kept / "config.json").is_file():
        return load_model_shape(kept)
    raise ModelConfigError(
        f"model.hf_checkpoint: no config.json in {folder} nor in {kept}, expected one of them"
    )
