"""Errors in a model, its layout, or the files of its checkpoints. A message has the value found and the value
expected."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dppo.system.errors import RunError


class ModelError(RunError, ValueError):
    """Base class of errors in a model's config.json, its layout, or its checkpoints."""


class ModelConfigError(ModelError):
    """A config.json is missing or cannot be read."""


class UnsupportedModelError(ModelError):
    """A config.json has a family or entries that no table describes. ``faults`` has a line for each error."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


class LayoutError(ModelError):
    """A parallel layout does not fit the model or the number of ranks."""


class ProofError(ModelError):
    """A resharding would provide or place an element twice or never. The message has the tensor and the position."""


class CheckpointError(ModelError):
    """Files are missing, truncated, inconsistent or of the wrong type."""


class MismatchError(CheckpointError):
    """Bytes of a converted checkpoint differ from its source. The message has the tensor, the rank and the offset."""
