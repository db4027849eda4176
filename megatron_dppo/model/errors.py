"""What can be wrong with a checkpoint, a model or a layout. Each message says what was found and what was expected."""

from __future__ import annotations


class ConversionError(ValueError):
    """Base of everything that this package refuses."""


class UnsupportedModelError(ConversionError):
    """A config.json of a family, or with a feature, that the map does not describe."""


class LayoutError(ConversionError):
    """A parallel layout that does not divide the model or the world."""


class CheckpointError(ConversionError):
    """Files that are missing, truncated, inconsistent or of the wrong type."""


class MismatchError(CheckpointError):
    """Bytes that differ from what was converted; the message names the tensor, the rank and the offset."""
