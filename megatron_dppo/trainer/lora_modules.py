"""Adapters of Megatron linears: they add ``scale * B A x`` to a linear's output, in the layout of the output.

T = tokens, R = rank of the adapters, P = adapted Hugging Face matrices that are fused in the linear. In column-parallel
linears (q_proj, gate_proj, up_proj, ...) B is cut by rows, and every rank holds all of A; in row-parallel linears
(o_proj, down_proj) A is cut by columns, and every rank holds all of B. Tensor-parallel ranks exchange only tensors of
width R.

Every rank holds all of the projections to attention's latents. In these linears A and B are both whole, and a rank
computes with its own tokens.

Gradients of an A or B that is not cut are complete on every rank of a tensor-parallel group, with two exceptions. Under
sequence parallelism each rank has only the gradients from its tokens: the attribute ``sequence_parallel`` lets
Megatron-Core sum them. For experts each rank has only the gradients from its rows or columns: the attribute
``sum_over_expert_tensor`` lets ``sum_expert_tensor_grads`` sum them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo.model.adapters import CHILD, LORA_A, LORA_B, AdaptedLinear, AdapterPart, Adapters
from megatron_dppo.trainer.rms_norm import rms_norm

_GROUPED_ALIGNMENT_BYTES = 16
_GROUPED_DTYPES = (torch.bfloat16, torch.float32)
"""Alignment and types that ``F.grouped_mm`` requires."""
SUM_OVER_EXPERT_TENSOR = "sum_over_expert_tensor"
"""Attribute of a parameter whose gradient is the sum over the ranks of an expert-tensor group."""


@dataclass(frozen=True)
class AdapterOptions:
    """The options of all adapters of a run. ``dropout`` is the share of an adapter's inputs that training drops."""

    adapters: Adapters
    dropout: float
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device


class LowRank(torch.nn.Module):
    """A and B of one Hugging Face matrix. If experts have separate adapters, the first axis counts local experts."""

    def __init__(self, shape_a: list[int], shape_b: list[int], options: AdapterOptions) -> None:
        super().__init__()
        for name, dims in ((LORA_A, shape_a), (LORA_B, shape_b)):
            # ``fill`` sets the values later from tensors of the whole model, so that they do not depend on the layout.
            zeros = torch.zeros(dims, dtype=options.dtype, device=options.device)
            self.register_parameter(name, Parameter(zeros))

    @property
    def pair(self) -> tuple[Parameter, Parameter]:
        """A and B."""
        return getattr(self, LORA_A), getattr(self, LORA_B)


class LinearAdapter(torch.nn.Module):
    """The adapters of one linear. Subclasses compute ``delta``.

    Attributes:
        linear: The adapted Hugging Face matrices of the linear, and this rank's part of them.
        options: Options of all adapters.
        enabled: False: the linear computes without its adapters.
    """

    def __init__(self, linear: AdaptedLinear, options: AdapterOptions) -> None:
        super().__init__()
        self.linear = linear
        self.options = options
        self.enabled = True
        for part in linear.parts:
            shapes = [self._shape(part, which) for which in (LORA_A, LORA_B)]
            self.add_module(part.name, LowRank(shapes[0], shapes[1], options))
        self._mark_parameters()

    def matrices(self, name: str) -> LowRank:
        """Return A and B of the matrix ``name``."""
        matrices = getattr(self, name)
        assert isinstance(matrices, LowRank)
        return matrices

    def delta(self, x: Tensor, *sizes: Any) -> Tensor:
        """Compute the term that is added to the linear's output for its input ``x``."""
        raise NotImplementedError

    def after_forward(self, module: Any, inputs: tuple, output: Any) -> Any:
        """Forward hook of the linear: add the adapters' output to the linear's output."""
        if not self.enabled:
            return output
        x, *sizes = inputs
        if hasattr(module, "layer_norm_weight"):
            # The linear's fused norm does not return its result, so compute it again.
            config = module.config
            adds_one = config.layernorm_zero_centered_gamma
            x = rms_norm(x, module.layer_norm_weight, config.layernorm_epsilon, adds_one=adds_one)
        result, bias = output
        return result + self.delta(x, *sizes), bias

    def weight_delta(self, expert: int | None = None) -> Tensor:
        """Compute ``scale * B A``, fp32, for this rank's part of the linear's weight. ``expert``: a local expert."""
        a, b = self._stacked()
        # Experts that share their adapters have one A and one B.
        if expert is not None and self.linear.experts:
            a, b = a[expert], b[expert]
        return self.options.adapters.scale * (b.detach().float() @ a.detach().float())

    def _shape(self, part: AdapterPart, which: str) -> list[int]:
        """Return the shape of the parameter for ``part``'s A or B: ``which`` is LORA_A or LORA_B."""
        return list(part.local_dims(which, self.options.adapters.rank))

    def _mark_parameters(self) -> None:
        """Set attributes on A and B. They tell Megatron-Core how A and B are divided and how to reduce gradients."""
        raise NotImplementedError

    def _local(self, part: AdapterPart) -> tuple[Tensor, Tensor]:
        """Return A and B of one matrix, as this rank uses them."""
        return self.matrices(part.name).pair

    def _stacked(self) -> tuple[Tensor, Tensor]:
        """Stack A [.., P R, in] and B [.., rows, P R] of the fused linear's matrices. One product B A then serves all.

        The B of a matrix is zero in the linear's rows that belong to other matrices.
        """
        parts = self.linear.parts
        pairs = [self._local(part) for part in parts]
        first_a, first_b = pairs[0]
        if self.linear.axis == 1:
            # Row-parallel linears have one matrix.
            return first_a, first_b
        rank = self.options.adapters.rank
        a = torch.cat([pair[0] for pair in pairs], -2)
        b = first_b.new_zeros(*first_b.shape[:-2], self.linear.rows, len(parts) * rank)
        for i, (part, (_, part_b)) in enumerate(zip(parts, pairs, strict=True)):
            columns = slice(i * rank, (i + 1) * rank)
            for block in part.blocks:
                rows = slice(block.local_start, block.local_start + block.length)
                rows_of_part = part_b.narrow(-2, part.local_start(block), block.length)
                b[..., rows, columns] = rows_of_part
        return a, b

    def _dropped(self, x: Tensor, generator: AbstractContextManager) -> Tensor:
        """Apply dropout to ``x`` in training. ``generator``: a context with the random state for dropout."""
        if not self.training or self.options.dropout == 0:
            return x
        with generator:
            return F.dropout(x, self.options.dropout)


class DenseAdapter(LinearAdapter):
    """The adapters of a column-parallel, row-parallel or whole linear of the attention or a dense MLP."""

    def delta(self, x: Tensor, *sizes: Any) -> Tensor:
        """x [T, .., in] -> [T, .., out], each divided among the ranks like the linear's input and output."""
        a, b = self._stacked()
        product = F.linear(self._dropped(x, self._generator()), a)
        return self.options.adapters.scale * F.linear(self._exchange(product), b)

    def _exchange(self, product: Tensor) -> Tensor:
        """Exchange the products A x, of width P R, between tensor-parallel ranks, as the linear exchanges its input
        (column-parallel) or output (row-parallel)."""
        if self.linear.is_whole:
            return product
        is_column_parallel = self.linear.axis == 0
        if is_column_parallel:
            if self.options.sequence_parallel:
                return gather_from_sequence_parallel_region(
                    product, tensor_parallel_output_grad=True
                )
            return copy_to_tensor_model_parallel_region(product)
        if self.options.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(product)
        return reduce_from_tensor_model_parallel_region(product)

    def _generator(self) -> AbstractContextManager:
        """Return the context of the random state for dropout. Ranks with equal inputs drop the same elements."""
        has_equal_inputs = self.linear.axis == 0 and not self.options.sequence_parallel
        if has_equal_inputs:
            # Tensor-parallel ranks have the same default random state. Their states in the tracker differ.
            return nullcontext()
        return get_cuda_rng_tracker().fork()

    def _mark_parameters(self) -> None:
        for part in self.linear.parts:
            for which in (LORA_A, LORA_B):
                parameter = getattr(self.matrices(part.name), which)
                if part.is_cut(which):
                    set_tensor_model_parallel_attributes(
                        parameter, is_parallel=True, dim=self.linear.axis, stride=1
                    )
                else:
                    parameter.sequence_parallel = self.options.sequence_parallel


class HeadAdapter(DenseAdapter):
    """The adapter of the output layer. The layer returns its input and computes no logits (``model.leave_out_logits``).

    ``model.head_factors`` takes the adapter's factor directly after a forward pass.
    """

    _product: Tensor | None = None

    def after_forward(self, module: Any, inputs: tuple, output: Any) -> Any:
        """Forward hook of the output layer: keep scale A x, and return the layer's ``output``."""
        if self.enabled:
            a, _ = self._stacked()
            product = F.linear(self._dropped(inputs[0], self._generator()), a)
            self._product = self.options.adapters.scale * self._exchange(product)
        return output

    def take_factor(self) -> tuple[Tensor, Tensor] | None:
        """Return scale A x [T, R] of the last forward pass, and B [C, R] of this rank's C columns of the vocabulary.

        The result is None if the adapter was disabled. Call this method once for each pass.
        """
        # Drop the reference: it would keep the pass's graph in memory.
        product = self._product
        self._product = None
        if product is None:
            return None
        return (product.flatten(0, 1), self._stacked()[1])


def grouped_linear(x: Tensor, weights: Tensor, tokens: Sequence[int]) -> Tensor:
    """Apply each expert's matrix to its tokens, in one kernel if shapes and types allow it.

    Args:
        x: [T, in], sorted by expert.
        weights: [experts, out, in].
        tokens: number of tokens of each expert.
    """
    if not _accepted_by_grouped_kernel(x, weights):
        expert_inputs = x.split(list(tokens))
        outputs = []
        for expert_input, weight in zip(expert_inputs, weights, strict=True):
            outputs.append(F.linear(expert_input, weight))
        return torch.cat(outputs)
    ends = torch.tensor(list(accumulate(tokens)), dtype=torch.int32, device=x.device)
    return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)


def _accepted_by_grouped_kernel(x: Tensor, weights: Tensor) -> bool:
    """Return whether ``F.grouped_mm`` accepts the tensors: the rows of inputs, matrices and outputs must begin at
    multiples of 16 bytes."""
    row_sizes = (x.shape[-1] * x.itemsize, weights.shape[-2] * x.itemsize)
    addresses = (x.data_ptr(), weights.data_ptr())
    is_aligned = all(n % _GROUPED_ALIGNMENT_BYTES == 0 for n in (*row_sizes, *addresses))
    has_dtype = x.dtype in _GROUPED_DTYPES and x.dtype == weights.dtype
    return is_aligned and has_dtype and len(x) > 0


class ExpertAdapter(LinearAdapter):
    """The adapters of the linears of a rank's experts. Each expert has its own A and B, stacked along a first axis.

    The dispatcher around the experts sums outputs, and gradients of inputs, over the ranks that share an expert. So
    each rank computes its share without communication.
    """

    def delta(self, x: Tensor, *sizes: Any) -> Tensor:
        """x [T, in], sorted by expert -> [T, out]. ``sizes`` has the number of tokens of each expert."""
        a, b = self._stacked()
        x = self._dropped(x, get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()))
        tokens = [int(size) for size in sizes[0]]
        product = grouped_linear(x, a, tokens)
        return self.options.adapters.scale * grouped_linear(product, b, tokens)

    def _shape(self, part: AdapterPart, which: str) -> list[int]:
        return [len(self.linear.experts), *super()._shape(part, which)]

    def _mark_parameters(self) -> None:
        group = parallel_state.get_expert_tensor_parallel_group()
        for part in self.linear.parts:
            for which in (LORA_A, LORA_B):
                parameter = getattr(self.matrices(part.name), which)
                # The parameter's first axis counts experts.
                axis = self.linear.axis + 1
                # Mark every parameter as divided, also if A or B is not cut: otherwise the norm of the gradients counts
                # only the experts of the first tensor-parallel rank.
                set_tensor_model_parallel_attributes(
                    parameter, is_parallel=True, dim=axis, stride=1
                )
                # Megatron's DDP reduces parameters with a false ``allreduce`` only over expert-data ranks.
                parameter.allreduce = parallel_state.get_expert_model_parallel_world_size() == 1
                if not part.is_cut(which) and group.size() > 1:
                    setattr(parameter, SUM_OVER_EXPERT_TENSOR, True)
                    # The norm of the gradients skips parameters with a true ``shared``: they are copies.
                    parameter.shared = group.rank() > 0


class SharedExpertAdapter(LinearAdapter):
    """The adapters of the linears of a rank's experts. All experts of a layer share one A and one B, which are not cut.

    Each rank uses its rows or columns for the tokens of its experts. The gradient is the sum over all ranks of the
    stage. The attribute ``sequence_parallel`` lets Megatron sum the gradient over tensor-parallel ranks. Megatron's DDP
    sums the gradient over the stage's other ranks, as for every dense parameter.
    """

    def delta(self, x: Tensor, *sizes: Any) -> Tensor:
        """x [T, in] -> [T, out]."""
        a, b = self._stacked()
        x = self._dropped(x, get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()))
        return self.options.adapters.scale * F.linear(F.linear(x, a), b)

    def _shape(self, part: AdapterPart, which: str) -> list[int]:
        return list(part.whole_dims(which, self.options.adapters.rank))

    def _local(self, part: AdapterPart) -> tuple[Tensor, Tensor]:
        """Return A and B with only this rank's columns of A, or only this rank's rows of B."""
        a, b = super()._local(part)
        # Ranks have neighbouring rows or columns of an expert's matrix.
        ((start, length),) = part.ranges
        local = slice(start, start + length)
        if part.axis == 1:
            return (a[:, local], b)
        return (a, b[local])

    def _mark_parameters(self) -> None:
        for parameter in self.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


def adapter_of(linear: AdaptedLinear, options: AdapterOptions) -> LinearAdapter:
    """Build the adapters of one linear, with A and B zero."""
    if linear.path == HEAD_PATH:
        return HeadAdapter(linear, options)
    if not linear.of_experts:
        return DenseAdapter(linear, options)
    if linear.experts:
        return ExpertAdapter(linear, options)
    return SharedExpertAdapter(linear, options)


HEAD_PATH = "output_layer"
ROUTER = "mlp.router.weight"


def freeze(chunks: list[GPTModel], *, train_router: bool) -> None:
    """Freeze every parameter. With ``train_router``, do not freeze the routers' weights."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(train_router and name.endswith(ROUTER))
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_require_grad)


def attach(
    chunks: list[GPTModel], linears: list[AdaptedLinear], options: AdapterOptions
) -> list[LinearAdapter]:
    """Attach adapters with zero A and B to each of ``linears``, as a child module and a forward hook that adds the
    module's output.
    """
    adapters = []
    for linear in linears:
        module = chunks[linear.chunk].get_submodule(linear.path)
        adapter = adapter_of(linear, options)
        module.add_module(CHILD, adapter)
        module.register_forward_hook(adapter.after_forward)
        adapters.append(adapter)
    return adapters


def sum_expert_tensor_grads(chunks: list[Any]) -> None:
    """Sum the gradients of parameters with ``sum_over_expert_tensor`` over the expert-tensor group. Call this function
    after all other reductions.
    """
    group = parallel_state.get_expert_tensor_parallel_group()
    if group.size() == 1:
        return
    for chunk in chunks:
        for parameter in chunk.parameters():
            if getattr(parameter, SUM_OVER_EXPERT_TENSOR, False):
                dist.all_reduce(parameter.main_grad, group=group)


def _require_grad(module: Any, inputs: tuple, output: Tensor) -> Tensor:
    """Forward hook of the embedding: make its output require a gradient.

    The embedding is frozen, and activation recomputation computes no gradient of a layer whose input does not require
    one.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
    return output


Init = Callable[[tuple[int, ...], int, torch.Generator], Tensor]
"""Function from (dims, rank, generator) to the initial A. PEFT uses the same distributions."""


def _kaiming(dims: tuple[int, ...], rank: int, generator: torch.Generator) -> Tensor:
    # PEFT's ``kaiming_uniform_(a=sqrt(5))`` has the bound sqrt(3) sqrt(2 / (1 + 5)) / sqrt(in) = 1 / sqrt(in).
    bound = 1 / math.sqrt(dims[1])
    return torch.empty(dims).uniform_(-bound, bound, generator=generator)


def _gaussian(dims: tuple[int, ...], rank: int, generator: torch.Generator) -> Tensor:
    return torch.empty(dims).normal_(0, 1 / rank, generator=generator)


INITS: dict[str, Init] = {"kaiming": _kaiming, "gaussian": _gaussian}


def initial_tensor(name: str, dims: tuple[int, ...], rank: int, seed: int, init: str) -> Tensor:
    """Return the initial A or B ``name`` [dims] of the whole model, fp32. It is the same in every layout."""
    if not name.endswith(LORA_A):
        # B is zero, so that adapters start without effect.
        return torch.zeros(dims)
    # Seed with the name, so that the values depend neither on the layout nor on the set of adapted matrices.
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return INITS[init](dims, rank, generator)
