"""The config.json files of published models, and altered copies of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "model_configs"


def published(name: str) -> dict[str, Any]:
    """Return the values in the config.json of the model in the folder ``name``."""
    values: dict[str, Any] = json.loads((CONFIGS / name / "config.json").read_text())
    return values


def written(folder: Path, values: dict[str, Any]) -> Path:
    """Write ``values`` as the config.json of ``folder``, and return the folder."""
    (folder / "config.json").write_text(json.dumps(values))
    return folder
