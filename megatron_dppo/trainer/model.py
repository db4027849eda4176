"""This rank's model chunks and their optimizer, as Megatron-Core has them; an update in two parts: norm, then step.

The modules of any rank of any layout can also be made on the meta device, to compare them with the conversion's rules:
no memory is taken and no other process is needed, for torch's fake process group stands for a world of any size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_dppo.config.schema import OptimizerConfig, PolicyConfig
from megatron_dppo.model.adapters import CHILD
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.layout import Layout, padded_vocab_size
from megatron_dppo.model.mapping import local_parameters
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.lora_modules import HeadAdapter
from megatron_dppo.trainer.megatron_config import megatron_sizes, transformer_config
from megatron_dppo.vocab_parallel.head import HeadFactor

LayerSpec = Callable[[TransformerConfig, int | None], Any]
"""``(config, vp_stage)`` -> the layers of one chunk."""


def build_chunks(
    transformer: TransformerConfig, shape: ModelShape, spec: LayerSpec | None = None
) -> list[GPTModel]:
    """Build this rank's part of the model: one GPTModel, unwrapped, for each virtual stage, on its device.

    ``spec``: its layers; None: the platform's.
    """
    chunks = make_chunks(transformer, shape, spec)
    return [chunk.to(platform.current().device) for chunk in chunks]


def make_chunks(
    transformer: TransformerConfig, shape: ModelShape, spec: LayerSpec | None = None
) -> list[GPTModel]:
    """The same where they are made: on torch's default device."""
    virtual = transformer.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else list(range(virtual))
    layers = spec or platform.current().decoder_spec
    return [_build_chunk(transformer, shape, stage, layers) for stage in stages]


def leave_out_logits(chunks: Sequence[GPTModel]) -> None:
    """Let the last stage return what its output layer would read, [1, T, H], in place of logits: ``head_factors``
    takes the layer's part from there. What brings the layer's input from other tensor-parallel ranks, and sums its
    gradient over them, stays; and so do hooks on the layer (a gather of its weights that was put off)."""
    for chunk in chunks:
        if chunk.post_process:
            layer = chunk.output_layer
            layer.forward = partial(_output_layer_input, layer)


def _output_layer_input(
    layer: ColumnParallelLinear,
    input_: Tensor,
    weight: Tensor | None = None,
    runtime_gather_output: bool | None = None,
) -> tuple[Tensor, None]:
    if layer.sequence_parallel:
        return gather_from_sequence_parallel_region(
            input_, tensor_parallel_output_grad=True, group=layer.tp_group
        ), None
    return copy_to_tensor_model_parallel_region(input_, group=layer.tp_group), None


def head_factors(chunk: GPTModel, hidden: Tensor) -> list[HeadFactor]:
    """The output layer of a last stage, for the ``hidden`` states [T, H] that its forward pass has just handed on; and
    its adapter, if it has one."""
    layer = chunk.output_layer
    tied = chunk.share_embeddings_and_output_weights
    weight = chunk.shared_embedding_or_output_weight() if tied else layer.weight
    factors = [HeadFactor(hidden, weight, _main_gradient(weight))]
    adapter = dict(layer.named_children()).get(CHILD)
    if isinstance(adapter, HeadAdapter) and (factor := adapter.take_factor()):
        factors.append(HeadFactor(*factor))
    return factors


def _main_gradient(weight: Parameter) -> Tensor | None:
    """Where Megatron's DDP sums the gradient of ``weight``; it is told that the sum is not its own to make."""
    if not (torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "main_grad")):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # A tied weight's .grad is the embedding's, which DDP still adds. Any other must have one, which DDP drops: this
    # one takes no memory.
    if not getattr(weight, "zero_out_wgrad", False):
        weight.grad = weight.new_zeros(()).expand(weight.shape)
    return weight.main_grad


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
        # As in Megatron-LM: later chunks' communication is hidden by the computation of others anyway.
        wrapped.append(DistributedDataParallel(transformer, ddp, module, disable_bucketing=i > 0))
    # Gradients of all micro-batches but the last only add up: reducing each would send them all.
    if ddp.overlap_grad_reduce:
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


@dataclass(frozen=True)
class MetaComparison:
    """What was found in the modules of some ranks. ``faults``: a line for each parameter that the rules lack, that
    the modules lack, or whose shape differs."""

    layout: str
    ranks: tuple[int, ...]
    parameters: int
    elements: int
    faults: tuple[str, ...]

    def summary(self) -> str:
        """In a line."""
        verdict = f"{len(self.faults)} differ" if self.faults else "all as the rules say"
        return (
            f"{self.layout}: Megatron's modules of ranks {', '.join(map(str, self.ranks))}, {self.parameters:,} "
            f"parameters of {self.elements / 1e9:.2f} B elements: {verdict}"
        )


def compare(config: PolicyConfig, shape: ModelShape) -> MetaComparison:
    """Build the first and the last rank of ``config``'s layout, and compare every parameter's name and shape with
    ``model.mapping.local_parameters``. The process must be in no process group."""
    layout = Layout.of(config.parallel.sizes)
    ranks = tuple(sorted({0, layout.world_size - 1}))
    transformer = transformer_config(config, shape, layout)
    faults: list[str] = []
    count = elements = 0
    for rank in ranks:
        shapes = meta_parameters(transformer, shape, layout, rank)
        expected = {(p.chunk, p.name): p.shape for p in local_parameters(shape, layout, rank)}
        faults += [
            f"rank {rank} of {layout.describe()}: {text}" for text in differences(shapes, expected)
        ]
        count += len(shapes)
        elements += sum(math.prod(dims) for dims in shapes.values())
    return MetaComparison(layout.describe(), ranks, count, elements, tuple(faults))


def named_parameters(chunks: list[GPTModel]) -> dict[ParameterKey, Parameter]:
    """Parameters of this rank by (chunk, name)."""
    return {(i, name): p for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}


def meta_parameters(
    transformer: TransformerConfig, shape: ModelShape, layout: Layout, rank: int
) -> dict[tuple[int, str], tuple[int, ...]]:
    """(chunk, name) -> shape of every parameter of ``rank``'s GPTModels."""
    # Tensors on the meta device have no values to draw.
    transformer = replace(transformer, perform_initialization=False)
    with _fake_world(layout, rank), torch.device("meta"):
        parameters = named_parameters(make_chunks(transformer, shape))
    return {key: tuple(parameter.shape) for key, parameter in parameters.items()}


def differences(
    shapes: dict[tuple[int, str], tuple[int, ...]], expected: dict[tuple[int, str], tuple[int, ...]]
) -> Iterator[str]:
    """A line for each parameter whose shape is not the expected one, or that only one side has."""
    for key in sorted(shapes.keys() | expected.keys()):
        if shapes.get(key) != expected.get(key):
            yield (
                f"chunk {key[0]}, {key[1]}: Megatron has {shapes.get(key, 'none')}, expected "
                f"{expected.get(key, 'none')} by the rules"
            )


@contextmanager
def _fake_world(layout: Layout, rank: int) -> Iterator[None]:
    """This process as ``rank`` of a world whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        parallel_state.initialize_model_parallel(
            **megatron_sizes(layout),
            create_gloo_process_groups=False,
        )
        platform.seed_everything(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_optimizer(
    config: OptimizerConfig,
    chunks: list[DistributedDataParallel],
    dtype: torch.dtype,
    options: Mapping[str, Any],
    *,
    distributed: bool,
) -> tuple[ChainedOptimizer, OptimizerParamScheduler]:
    """Build Adam with decoupled weight decay (none on norms and biases) and its schedule.

    The learning rate of step n = 1, 2, ... is ``lr * n / W`` in a warm-up of W steps, then ``min_lr + c (lr - min_lr)``
    with c = 1 (constant), 1 - x (linear) or (1 + cos(pi x)) / 2 (cosine), x = (n - W) / (decay_steps - W) up to 1. It
    depends on n alone, so a resumed run goes on in it. ``options``: further fields of Megatron-Core's OptimizerConfig.
    """
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
            **options,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        # A constant rate has no end, but Megatron-Core asks for one.
        lr_decay_steps=config.decay_steps or sys.maxsize,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


@torch.no_grad()
def prepare_step(optimizer: ChainedOptimizer) -> float:
    """Copy the reduced gradients to the optimizer; returns the global L2 norm. Collective."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def apply_step(
    optimizer: ChainedOptimizer, scheduler: OptimizerParamScheduler, grad_norm: float
) -> float:
    """Clip the gradients, whose norm is ``grad_norm``, and update; returns the learning rate."""
    # Before the update: else step 1 had the rate of step 0, which is 0 in a warm-up.
    scheduler.step(increment=1)
    for part in optimizer.chained_optimizers:
        parameters = [] if part.is_stub_optimizer else part.get_parameters()
        # By the norm that was checked: Megatron's own step would compute it again, over all ranks.
        if parameters and part.config.clip_grad > 0:
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm, decoupled)
    optimizer.step_with_ready_grads()
    return float(optimizer.param_groups[0]["lr"])


def complete_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather the weights that other replicas updated, where ``overlap_param_gather`` has put it off until a forward
    pass asks for them. Collective."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
