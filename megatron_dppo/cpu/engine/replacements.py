"""PyTorch functions in the place of SGLang's functions that need a device."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

ATTENTION = "torch_native"
"""SGLang's name of PyTorch's attention."""


def replace(module: ModuleType, name: str, replacement: Any) -> None:
    """Put ``replacement`` in the place of ``module.name``, also in modules of SGLang that have imported the name.

    A forked server has imported SGLang's models before its platform is initialised.
    """
    original = getattr(module, name)
    for loaded_module in list(sys.modules.values()):
        if not getattr(loaded_module, "__name__", "").startswith("sglang"):
            continue
        if vars(loaded_module).get(name) is original:
            setattr(loaded_module, name, replacement)
