"""JSON files of models and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_dppo.model.errors import CheckpointError, ModelError


def read_json(path: Path, expected: str, error: type[ModelError] = CheckpointError) -> Any:
    """Return the value in a JSON file. Raises ``error`` if the file is missing or is no JSON.

    ``expected``: what the file is, for the message.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path}: no such file; expected {expected}") from None
    # json raises ValueError also for an integer of more digits than Python converts, and RecursionError for deeply
    # nested brackets.
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path}: not a readable JSON file, expected {expected} ({cause})") from cause
