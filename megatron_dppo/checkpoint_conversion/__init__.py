"""Hugging Face <-> Megatron-Core: one table a model family, for loading, saving, updating and proving."""

from __future__ import annotations

from megatron_dppo.checkpoint_conversion.errors import (
    CheckpointError,
    ConversionError,
    LayoutError,
    MismatchError,
    UnsupportedModelError,
)
from megatron_dppo.checkpoint_conversion.families import FAMILIES, load_model_shape
from megatron_dppo.checkpoint_conversion.gather_plan import (
    Bucket,
    Piece,
    TensorSources,
    gather_plan,
    hf_buckets_plan,
)
from megatron_dppo.checkpoint_conversion.layout import Layout, RankCoordinates, check_layout
from megatron_dppo.checkpoint_conversion.mapping import (
    LocalParameter,
    Segment,
    hf_tensors,
    local_parameters,
)
from megatron_dppo.checkpoint_conversion.model_shape import ModelShape
from megatron_dppo.checkpoint_conversion.splits import padded_vocab_size

__all__ = [
    "FAMILIES",
    "Bucket",
    "CheckpointError",
    "ConversionError",
    "Layout",
    "LayoutError",
    "LocalParameter",
    "MismatchError",
    "ModelShape",
    "Piece",
    "RankCoordinates",
    "Segment",
    "TensorSources",
    "UnsupportedModelError",
    "check_layout",
    "gather_plan",
    "hf_buckets_plan",
    "hf_tensors",
    "load_model_shape",
    "local_parameters",
    "padded_vocab_size",
]
