"""Build this rank's Megatron-Core model chunks and wrap them in DDP, and apply an update in two parts: norm, then step.

The modules of any rank of any layout can also be built on the meta device, to compare their parameters with the
conversion rules. That takes no memory and no other process: torch's fake process group simulates a world of any size.
"""

from __future__ import annotations

import math
import re
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
from torch.nn import Module, Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_dppo.config.schema import PolicyConfig
from megatron_dppo.model.adapters import CHILD
from megatron_dppo.model.families import family_of
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import local_parameters
from megatron_dppo.model.shape import Llama3RopeScaling, ModelShape, YarnRopeScaling
from megatron_dppo.model.splits import padded_vocab_size
from megatron_dppo.system.imports import import_target
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.lora_modules import HeadAdapter
from megatron_dppo.trainer.megatron_config import megatron_sizes, transformer_config
from megatron_dppo.vocab_parallel.head import HeadFactor

LayerSpecFunction = Callable[[TransformerConfig, int | None], Any]
"""Function from ``(config, vp_stage)`` to the layer spec of one chunk."""


def build_chunks(
    transformer: TransformerConfig, shape: ModelShape, spec: LayerSpecFunction | None = None
) -> list[GPTModel]:
    """Build this rank's part of the model on its device: one unwrapped GPTModel for each virtual stage.

    ``spec`` returns the layer spec of a chunk; None: the platform's function.
    """
    chunks = _build_on_default_device(transformer, shape, spec)
    return [chunk.to(platform.current().device) for chunk in chunks]


def _build_on_default_device(
    transformer: TransformerConfig, shape: ModelShape, spec: LayerSpecFunction | None = None
) -> list[GPTModel]:
    """Build the chunks of :func:`build_chunks` on torch's default device."""
    stage_count = transformer.virtual_pipeline_model_parallel_size
    stages = [None] if stage_count is None else list(range(stage_count))
    spec = spec or platform.current().decoder_spec
    return [_build_chunk(transformer, shape, stage, spec) for stage in stages]


def leave_out_logits(chunks: Sequence[GPTModel]) -> None:
    """Make the last stage return the input of its output layer, [1, T, H], instead of logits.

    The statistics are then computed from this input and the layer's weight; see ``head_factors``. The layer still sums
    the input's gradient over the tensor-parallel ranks, and with sequence parallelism it still gathers the input from
    these ranks. The layer's hooks still run, for example the hook that gathers deferred weights.
    """
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
    """Return the layer's input as every tensor-parallel rank needs it, and no bias. GPTModel passes all arguments."""
    if layer.sequence_parallel:
        whole_input = gather_from_sequence_parallel_region(
            input_, tensor_parallel_output_grad=True, group=layer.tp_group
        )
        return whole_input, None
    return copy_to_tensor_model_parallel_region(input_, group=layer.tp_group), None


def head_factors(chunk: GPTModel, hidden: Tensor) -> list[HeadFactor]:
    """Return the factors of the output layer, and of its adapter if it has one, for ``hidden``.

    ``chunk`` is the last stage; ``hidden`` [T, H] are the states that its latest forward pass returned.
    """
    layer = chunk.output_layer
    is_tied = chunk.share_embeddings_and_output_weights
    weight = chunk.shared_embedding_or_output_weight() if is_tied else layer.weight
    factors = [HeadFactor(hidden, weight, _main_gradient(weight))]
    adapter = dict(layer.named_children()).get(CHILD)
    if isinstance(adapter, HeadAdapter):
        adapter_factor = adapter.take_factor()
        if adapter_factor:
            factors.append(HeadFactor(*adapter_factor))
    return factors


def _main_gradient(weight: Parameter) -> Tensor | None:
    """Return the buffer where Megatron's DDP sums the gradient of ``weight``; None if the weight gets no gradient.

    The head itself adds the gradient to this buffer. So the function marks the weight: DDP then does not add ``.grad``,
    except for a tied weight.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "main_grad")):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # Megatron-Core sets zero_out_wgrad on a tied weight. The .grad of a tied weight is the embedding's gradient, and
    # DDP adds this gradient in spite of the mark. Every other weight must have some .grad, which DDP drops: set an
    # expanded scalar, because it takes no memory.
    is_tied = getattr(weight, "zero_out_wgrad", False)
    if not is_tied:
        weight.grad = weight.new_zeros(()).expand(weight.shape)
    return weight.main_grad


def wrap_chunks(
    chunks: list[GPTModel],
    transformer: TransformerConfig,
    options: Mapping[str, Any],
    *,
    distributed_optimizer: bool,
) -> list[DistributedDataParallel]:
    """Wrap each chunk in Float16Module (bfloat16 only) and in Megatron-Core's DDP, by default with fp32 gradients.

    ``options``: fields of DistributedDataParallelConfig; they override the defaults of this function.
    """
    defaults = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": distributed_optimizer}
    ddp = DistributedDataParallelConfig(**(defaults | dict(options)))
    wrapped = []
    for i, chunk in enumerate(chunks):
        module = chunk
        if transformer.bf16:
            module = _in_bfloat16(chunk, transformer)
        # Disable bucketing for later chunks, as Megatron-LM does: the computation of other chunks already overlaps
        # their communication.
        wrapped.append(DistributedDataParallel(transformer, ddp, module, disable_bucketing=i > 0))
    # Accumulate the gradients of all micro-batches except the last without reducing them: otherwise every micro-batch
    # would send its gradients.
    if ddp.overlap_grad_reduce:
        no_sync_functions = [chunk.no_sync for chunk in wrapped]
        is_interleaved = len(no_sync_functions) > 1
        transformer.no_sync_func = no_sync_functions if is_interleaved else no_sync_functions[0]
    return wrapped


def _in_bfloat16(chunk: GPTModel, transformer: TransformerConfig) -> Float16Module:
    """Wrap ``chunk`` in Float16Module: the chunk is converted to bfloat16.

    Buffers that are part of the model's state, and parameters with ``keeps_dtype``, keep their values and type: with a
    bias rounded to bfloat16, a router would choose other experts.
    """
    buffers = [
        (module, leaf, module.get_buffer(leaf)) for _, module, leaf in _stored_buffers(chunk)
    ]
    parameters = [(p, p.data) for p in chunk.parameters() if getattr(p, "keeps_dtype", False)]
    wrapped = Float16Module(transformer, chunk)
    for module, leaf, values in buffers:
        module.register_buffer(leaf, values)
    for parameter, data in parameters:
        parameter.data = data
    return wrapped


def _build_chunk(
    transformer: TransformerConfig, shape: ModelShape, vp_stage: int | None, spec: LayerSpecFunction
) -> GPTModel:
    """Build the chunk of the virtual stage ``vp_stage`` (None: the only chunk) with the layers of ``spec``."""
    layer_spec = spec(transformer, vp_stage)
    change_layers = family_of(shape).trainer_layers
    if change_layers:
        import_target(change_layers)(layer_spec, transformer)
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=layer_spec,
        vocab_size=padded_vocab_size(shape.vocab_size, transformer.tensor_model_parallel_size),
        max_sequence_length=shape.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rotary_percent=shape.rotary_fraction,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    _mark_divided_parameters(model)
    if shape.latent is None and isinstance(shape.rope_scaling, YarnRopeScaling):
        # Megatron-Core's own YaRN is for latent attention only.
        model.rotary_pos_emb.inv_freq = yarn_frequencies(
            model.rotary_pos_emb.inv_freq, shape.rope_theta, shape.rope_scaling
        )
    if isinstance(shape.rope_scaling, Llama3RopeScaling):
        rope = model.rotary_pos_emb
        # Scale the frequencies here: GPTModel's own option has a fixed value, from Llama 3.1, for three of these four
        # numbers.
        rope.inv_freq = rope._apply_scaling(
            rope.inv_freq,
            factor=shape.rope_scaling.factor,
            low_freq_factor=shape.rope_scaling.low_freq_factor,
            high_freq_factor=shape.rope_scaling.high_freq_factor,
            original_max_position_embeddings=shape.rope_scaling.original_max_positions,
        )
    return model


_UNMARKED = re.compile(r".*\.(softmax_offset|experts\.linear_fc[12]\.bias\d+)")
"""Names of parameters that differ between tensor-parallel ranks, because the ranks hold different parts or different
experts. Megatron-Core and Transformer Engine do not mark these parameters as divided."""


def _mark_divided_parameters(model: GPTModel) -> None:
    """Mark the parameters of ``_UNMARKED`` as divided: otherwise the norm of the gradients would count them only on
    the first tensor-parallel rank.
    """
    for name, parameter in model.named_parameters():
        if _UNMARKED.fullmatch(name):
            parameter.tensor_model_parallel = True


def yarn_frequencies(plain: Tensor, theta: float, yarn: YarnRopeScaling) -> Tensor:
    """Compute YaRN's frequencies f_i from the ``plain`` frequencies p_i [D / 2] (arXiv:2309.00071, equations 19 to 23).

    f_i = (1 - r_i) p_i + r_i p_i / factor, with the ramp r_i = (i - low) / (high - low), between 0 and 1. The
    frequency at index ``low`` makes beta_fast turns within the original positions, and the frequency at index ``high``
    makes beta_slow turns.
    """
    pairs = len(plain)

    # Solve turns = original_max_positions * p_i / (2 pi), with p_i = theta^(-i / pairs), for i.
    def index_of(turns: float) -> float:
        return (
            pairs * math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / math.log(theta)
        )

    low, high = index_of(yarn.beta_fast), index_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    # YaRN's reference code has the same bounds, although the last index is pairs - 1.
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        # The ramp divides by high - low.
        high += 0.001
    indices = torch.arange(pairs, dtype=torch.float32, device=plain.device)
    ramp = ((indices - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp


@dataclass(frozen=True)
class MetaComparison:
    """The result of comparing the modules of some ranks with the conversion rules.

    ``faults`` has a line for each parameter that only the modules or only the rules have, or whose shape differs.
    ``parameters`` and ``elements`` count the parameters of the modules and their elements.
    """

    layout: str
    ranks: tuple[int, ...]
    parameters: int
    elements: int
    faults: tuple[str, ...]

    def summary(self) -> str:
        """Return the result in one line."""
        verdict = "all as the rules say"
        if self.faults:
            verdict = f"{len(self.faults)} differ"
        return (
            f"{self.layout}: Megatron's modules of ranks {', '.join(map(str, self.ranks))}, {self.parameters:,} "
            f"parameters of {self.elements / 1e9:.2f} B elements: {verdict}"
        )


def compare_with_rules(config: PolicyConfig, shape: ModelShape) -> MetaComparison:
    """Compare the parameters of the first and the last rank of ``config``'s layout with the conversion rules.

    The function builds both ranks' modules on the meta device and compares the name and shape of every parameter with
    ``model.mapping.local_parameters``. The process must not be in a process group.
    """
    layout = Layout.of(config.parallel.sizes)
    ranks = tuple(sorted({0, layout.world_size - 1}))
    transformer = transformer_config(config, shape, layout)
    faults: list[str] = []
    parameters = 0
    elements = 0
    for rank in ranks:
        module_shapes = meta_parameters(transformer, shape, layout, rank)
        rule_shapes = {(p.chunk, p.name): p.shape for p in local_parameters(shape, layout, rank)}
        for text in differences(module_shapes, rule_shapes):
            faults.append(f"rank {rank} of {layout.describe()}: {text}")
        parameters += len(module_shapes)
        elements += sum(math.prod(dims) for dims in module_shapes.values())
    return MetaComparison(layout.describe(), ranks, parameters, elements, tuple(faults))


def named_parameters(chunks: list[GPTModel]) -> dict[ParameterKey, Tensor]:
    """Return this rank's parameters, and the buffers that checkpoints contain, by (chunk, name)."""
    parameters: dict[ParameterKey, Tensor] = {}
    for i, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            parameters[i, name] = parameter
        for name, module, leaf in _stored_buffers(chunk):
            parameters[i, name] = module.get_buffer(leaf)
    return parameters


def _stored_buffers(chunk: Module) -> Iterator[tuple[str, Module, str]]:
    """Yield the buffers that are part of the model's state: name in the chunk, module, name in the module."""
    for path, module in chunk.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                # The path of the chunk itself is empty.
                name = f"{path}.{leaf}" if path else leaf
                yield name, module, leaf


def meta_parameters(
    transformer: TransformerConfig, shape: ModelShape, layout: Layout, rank: int
) -> dict[tuple[int, str], tuple[int, ...]]:
    """Build ``rank``'s GPTModels on the meta device and return the shape of every parameter by (chunk, name)."""
    # Skip the initialization: tensors on the meta device have no values.
    transformer = replace(transformer, perform_initialization=False)
    with _fake_world(layout, rank), torch.device("meta"):
        parameters = named_parameters(_build_on_default_device(transformer, shape))
    return {key: tuple(parameter.shape) for key, parameter in parameters.items()}


def differences(
    shapes: dict[tuple[int, str], tuple[int, ...]], expected: dict[tuple[int, str], tuple[int, ...]]
) -> Iterator[str]:
    """Yield a line for each parameter whose shape is not the expected one, or that only one side has.

    ``shapes``: the shapes in Megatron's modules; ``expected``: the shapes by the conversion rules. Keys: (chunk, name).
    """
    for key in sorted(shapes.keys() | expected.keys()):
        if shapes.get(key) != expected.get(key):
            chunk, name = key
            yield (
                f"chunk {chunk}, {name}: Megatron has {shapes.get(key, 'none')}, expected "
                f"{expected.get(key, 'none')} by the rules"
            )


@contextmanager
def _fake_world(layout: Layout, rank: int) -> Iterator[None]:
    """Inside this context, let this process be rank ``rank`` of a world whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        parallel_state.initialize_model_parallel(
            **megatron_sizes(layout), create_gloo_process_groups=False
        )
        platform.seed_everything(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@torch.no_grad()
def prepare_step(optimizer: ChainedOptimizer) -> float:
    """Copy the reduced gradients to the optimizer and return their global L2 norm. Collective."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def apply_step(
    optimizer: ChainedOptimizer, scheduler: OptimizerParamScheduler, grad_norm: float
) -> float:
    """Clip the gradients, whose norm is ``grad_norm``, update the weights and return the learning rate."""
    # Advance the schedule before the update: otherwise step 1 would use the rate of step 0, which is 0 in a warm-up.
    scheduler.step(increment=1)
    for part in optimizer.chained_optimizers:
        parameters = []
        if not part.is_stub_optimizer:
            parameters = part.get_parameters()
        # Clip by the caller's ``grad_norm``: Megatron's own step would compute the norm anew over all ranks.
        max_norm = part.config.clip_grad
        if parameters and max_norm > 0:
            use_decoupled_grad = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, max_norm, grad_norm, use_decoupled_grad)
    optimizer.step_with_ready_grads()
    return float(optimizer.param_groups[0]["lr"])


def complete_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather the weights that other replicas have updated. Collective.

    Without this call ``overlap_param_gather`` defers the gather to the next forward pass.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
