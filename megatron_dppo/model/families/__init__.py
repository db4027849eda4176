"""The supported model families: every module of this folder, each with its ``FAMILY``. A new one is a file here."""

from __future__ import annotations

import importlib
import pkgutil

from megatron_dppo.model.family import Family
from megatron_dppo.model.shape import ModelShape

_MODULES = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
]
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
"""By their config.json's ``model_type``."""


def family_of(shape: ModelShape) -> Family:
    """The table that describes ``shape``."""
    return FAMILIES[shape.family]
