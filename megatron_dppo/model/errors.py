"""What can be wrong with a model, its layout, or the files of its checkpoints. A message says what was found and what
was expected.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dppo.system.errors import RunError


class ModelError(RunError, ValueError):
    """Base of everything that is refused about a model: its config.json, its layout, its checkpoints."""


class ModelConfigError(ModelError):
    """A config.json that is missing or can't be read."""


class UnsupportedModelError(ModelError):
    """A config.json of a family, or with entries, that no table describes; ``faults``: one line each."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


class LayoutError(ModelError):
    """A parallel layout that does not fit the model or the world."""


class ProofError(ModelError):
    """An element that is produced or placed twice or never; the message names the tensor and the place."""


class CheckpointError(ModelError):
    """Files that are missing, truncated, inconsistent or of the wrong type."""


class MismatchError(CheckpointError):
    """Bytes that differ from what was converted; the message names the tensor, the rank and the offset."""
