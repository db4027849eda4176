"""What can be wrong with a checkpoint's files. Each message says what was found and what was expected."""

from __future__ import annotations

from megatron_dppo.model.errors import ModelError


class CheckpointError(ModelError):
    """Files that are missing, truncated, inconsistent or of the wrong type."""


class MismatchError(CheckpointError):
    """Bytes that differ from what was converted; the message names the tensor, the rank and the offset."""
