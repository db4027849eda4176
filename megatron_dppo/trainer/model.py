"""Construction of this rank's model chunks: GPTModel, mixed-precision wrapper, DDP wrapper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import padded_vocab_size
from megatron_dppo.trainer import platform

LayerSpec = Callable[[TransformerConfig, int | None], Any]
"""``(config, vp_stage)`` -> the layers of one chunk."""


def build_chunks(
    transformer: TransformerConfig, shape: ModelShape, spec: LayerSpec | None = None
) -> list[GPTModel]:
    """Build this rank's part of the model: one GPTModel, unwrapped, for each virtual stage, on its device.

    ``spec``: its layers; None: the platform's.
    """
    made = make_chunks(transformer, shape, spec)
    return [chunk.to(platform.current().device) for chunk in made]


def make_chunks(
    transformer: TransformerConfig, shape: ModelShape, spec: LayerSpec | None = None
) -> list[GPTModel]:
    """The same where they are made: on torch's default device."""
    virtual = transformer.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else list(range(virtual))
    layers = spec or platform.current().decoder_spec
    return [_build_chunk(transformer, shape, stage, layers) for stage in stages]


def wrap_chunks(
    chunks: list[GPTModel],
    transformer: TransformerConfig,
    options: Mapping[str, Any],
    *,
    distributed_optimizer: bool,
) -> list[DistributedDataParallel]:
    """Wrap each chunk in Float16Module (bfloat16 only) and in DDP with fp32 gradient buffers.

    ``options``: fields of DistributedDataParallelConfig, in place of ours.
    """
    ours = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": distributed_optimizer}
    ddp = DistributedDataParallelConfig(**{**ours, **options})
    wrapped = []
    for i, chunk in enumerate(chunks):
        module = Float16Module(transformer, chunk) if transformer.bf16 else chunk
        wrapped.append(DistributedDataParallel(transformer, ddp, module, disable_bucketing=i > 0))
    if ddp.overlap_grad_reduce:  # gradients of all micro-batches but the last only add up
        without = [chunk.no_sync for chunk in wrapped]
        transformer.no_sync_func = without if len(without) > 1 else without[0]
    return wrapped


def _build_chunk(
    transformer: TransformerConfig, shape: ModelShape, vp_stage: int | None, spec: LayerSpec
) -> GPTModel:
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=spec(transformer, vp_stage),
        vocab_size=padded_vocab_size(shape.vocab_size, transformer.tensor_model_parallel_size),
        max_sequence_length=shape.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    if shape.rope_scaling is not None:
        rope = model.rotary_pos_emb
        # GPTModel's own option sets three of these four numbers to those of Llama 3.1.
        rope.inv_freq = rope._apply_scaling(
            rope.inv_freq,
            factor=shape.rope_scaling.factor,
            low_freq_factor=shape.rope_scaling.low_freq_factor,
            high_freq_factor=shape.rope_scaling.high_freq_factor,
            original_max_position_embeddings=shape.rope_scaling.original_max_positions,
        )
    return model
