"""What an adapter computes beside its Megatron linear: ``scale * B A x`` in the layout of the linear's output.

T = tokens, R = rank, P = adapted Hugging Face matrices that are fused in the linear. Column-parallel linears
(queries, gates, ups) have B cut by rows and A whole; row-parallel ones (outputs, downs) A cut by columns and B whole.
What crosses tensor-parallel ranks is R wide.

Who sums the gradients: those of a whole A or B are complete on every rank of a tensor-parallel group, except under
sequence parallelism, where each rank has those of its tokens (``sequence_parallel``, which Megatron-Core sums), and for
experts, where each rank has the share of its rows or columns (``sum_over_expert_tensor``, see ``gradients``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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

SUM_OVER_EXPERT_TENSOR = "sum_over_expert_tensor"
"""Attribute of a parameter whose gradient the ranks of an expert-tensor group each have a share of."""


@dataclass(frozen=True)
class AdapterOptions:
    """What all adapters of a run have in common. ``dropout``: share of an adapter's inputs left out in training."""

    adapters: Adapters
    dropout: float
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device


class LowRank(torch.nn.Module):
    """A and B of one Hugging Face matrix, with an axis of local experts in front where each has its own."""

    def __init__(self, shape_a: list[int], shape_b: list[int], options: AdapterOptions) -> None:
        super().__init__()
        for name, dims in ((LORA_A, shape_a), (LORA_B, shape_b)):
            # Filled later, from tensors of the whole model, so that every layout starts alike.
            zeros = torch.zeros(dims, dtype=options.dtype, device=options.device)
            self.register_parameter(name, Parameter(zeros))

    @property
    def pair(self) -> tuple[Parameter, Parameter]:
        """A and B."""
        return getattr(self, LORA_A), getattr(self, LORA_B)


class LinearAdapter(torch.nn.Module):
    """The adapters of one linear. Subclasses compute ``delta``.

    Attributes:
        linear: which Hugging Face matrices of it have an adapter, and what this rank holds of them.
        enabled: without it the linear computes with its own weight alone.
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
        """A and B of the matrix ``name``."""
        matrices = getattr(self, name)
        assert isinstance(matrices, LowRank)
        return matrices

    def delta(self, x: Tensor, *sizes: Any) -> Tensor:
        """What is added to the linear's output for its input ``x``."""
        raise NotImplementedError

    def after_forward(self, module: Any, inputs: tuple, output: Any) -> Any:
        """Forward hook of the linear: its output, with the adapters'."""
        if not self.enabled:
            return output
        x, *sizes = inputs
        if hasattr(module, "layer_norm_weight"):
            # The fused norm hands its result to nobody else.
            eps = module.config.layernorm_epsilon
            x = F.rms_norm(x, x.shape[-1:], module.layer_norm_weight, eps)
        result, bias = output
        return result + self.delta(x, *sizes), bias

    def weight_delta(self, expert: int | None = None) -> Tensor:
        """``scale * B A`` of this rank's part of the linear's (local expert's) weight, fp32."""
        a, b = self._stacked()
        if expert is not None and self.linear.experts:
            a, b = a[expert], b[expert]
        return self.options.adapters.scale * (b.detach().float() @ a.detach().float())

    def _shape(self, part: AdapterPart, which: str) -> list[int]:
        return list(part.local(which, self.options.adapters.rank))

    def _mark_parameters(self) -> None:
        raise NotImplementedError

    def _local(self, part: AdapterPart) -> tuple[Tensor, Tensor]:
        """A and B of one matrix as this rank uses them."""
        return self.matrices(part.name).pair

    def _stacked(self) -> tuple[Tensor, Tensor]:
        """A [.., P R, in] and B [.., rows, P R] of the fused linear: the product is the sum over its matrices."""
        parts = self.linear.parts
        pairs = [self._local(part) for part in parts]
        first_a, first_b = pairs[0]
        if self.linear.axis == 1:
            return first_a, first_b
        rank = self.options.adapters.rank
        a = torch.cat([pair[0] for pair in pairs], -2)
        # One product for the fused linear; zeros where a matrix has none of its rows.
        b = first_b.new_zeros(*first_b.shape[:-2], self.linear.rows, len(parts) * rank)
        for i, (part, (_, rows)) in enumerate(zip(parts, pairs, strict=True)):
            first = 0
            for block in part.blocks:
                target = slice(block.local_start, block.local_start + block.length)
                b[..., target, i * rank : (i + 1) * rank] = rows[
                    ..., first : first + block.length, :
                ]
                first += block.length
        return a, b

    def _dropped(self, x: Tensor, generator: AbstractContextManager) -> Tensor:
        if not self.training or self.options.dropout == 0:
            return x
        with generator:
            return F.dropout(x, self.options.dropout)


class DenseAdapter(LinearAdapter):
    """Beside a column- or row-parallel linear of the attention or a dense MLP."""

    def delta(self, x: Tensor, *sizes: Any) -> Tensor:
        """x [T, .., in] -> [T, .., out], each cut as the linear's."""
        a, b = self._stacked()
        inner = F.linear(self._dropped(x, self._generator()), a)
        return self.options.adapters.scale * F.linear(self._across(inner), b)

    def _across(self, inner: Tensor) -> Tensor:
        """The R-wide products, between tensor-parallel ranks."""
        if self.linear.axis == 0:
            if self.options.sequence_parallel:
                return gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True)
            return copy_to_tensor_model_parallel_region(inner)
        if self.options.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(inner)
        return reduce_from_tensor_model_parallel_region(inner)

    def _generator(self) -> AbstractContextManager:
        """Ranks that hold the same inputs drop the same ones."""
        is_whole = self.linear.axis == 0 and not self.options.sequence_parallel
        return nullcontext() if is_whole else get_cuda_rng_tracker().fork()

    def _mark_parameters(self) -> None:
        for part in self.linear.parts:
            for which in (LORA_A, LORA_B):
                parameter = getattr(self.matrices(part.name), which)
                if part.is_cut(which):
                    set_tensor_model_parallel_attributes(parameter, True, self.linear.axis, 1)
                else:
                    parameter.sequence_parallel = self.options.sequence_parallel


class HeadAdapter(DenseAdapter):
    """Beside the output layer, which hands on its input and computes no logits: what computes them asks for the
    adapter's part right after a forward pass."""

    _inner: Tensor | None = None

    def after_forward(self, module: Any, inputs: tuple, output: Any) -> Any:
        """Forward hook of the output layer."""
        if self.enabled:
            a, _ = self._stacked()
            inner = self._across(F.linear(self._dropped(inputs[0], self._generator()), a))
            self._inner = self.options.adapters.scale * inner
        return output

    def take_factor(self) -> tuple[Tensor, Tensor] | None:
        """scale A x [T, R] of the last forward pass, and B [C, R] of this rank's columns of the vocabulary; None where
        the adapter was off. Once for each pass."""
        # Held on to, it would keep the pass's graph in memory.
        inner, self._inner = self._inner, None
        return None if inner is None else (inner.flatten(0, 1), self._stacked()[1])


class ExpertAdapter(LinearAdapter):
    """Beside the linears of a rank's experts, each with its own A and B, stacked along a first axis.

    The dispatcher around the experts sums outputs, and gradients of inputs, over the ranks that share an expert. So
    each computes its share with no communication.
    """

    def delta(self, x: Tensor, *sizes: Any) -> Tensor:
        """x [T, in], sorted by expert -> [T, out]; ``sizes``: tokens of each expert."""
        a, b = self._stacked()
        x = self._dropped(x, get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()))
        pieces = x.split(list(map(int, sizes[0])))
        outputs = [F.linear(F.linear(piece, a[i]), b[i]) for i, piece in enumerate(pieces)]
        return self.options.adapters.scale * torch.cat(outputs)

    def _shape(self, part: AdapterPart, which: str) -> list[int]:
        return [len(self.linear.experts), *super()._shape(part, which)]

    def _mark_parameters(self) -> None:
        group = parallel_state.get_expert_tensor_parallel_group()
        for part in self.linear.parts:
            for which in (LORA_A, LORA_B):
                parameter = getattr(self.matrices(part.name), which)
                set_tensor_model_parallel_attributes(parameter, True, self.linear.axis + 1, 1)
                # By this attribute Megatron's DDP tells parameters that are reduced over expert-data ranks alone.
                parameter.allreduce = parallel_state.get_expert_model_parallel_world_size() == 1
                if not part.is_cut(which) and group.size() > 1:
                    setattr(parameter, SUM_OVER_EXPERT_TENSOR, True)
                    # Copies that the gradient's norm leaves out.
                    parameter.shared = group.rank() > 0


class SharedExpertAdapter(LinearAdapter):
    """Beside the linears of a rank's experts, one A and B for all experts of the layer, whole on every rank.

    Each rank uses its rows or columns for the tokens of its experts. The gradient is the sum over all ranks of the
    stage: over the tensor-parallel ones as under sequence parallelism, over the others as over replicas.
    """

    def delta(self, x: Tensor, *sizes: Any) -> Tensor:
        """x [T, in] -> [T, out]."""
        a, b = self._stacked()
        x = self._dropped(x, get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()))
        return self.options.adapters.scale * F.linear(F.linear(x, a), b)

    def _shape(self, part: AdapterPart, which: str) -> list[int]:
        return list(part.whole(which, self.options.adapters.rank))

    def _local(self, part: AdapterPart) -> tuple[Tensor, Tensor]:
        """This rank's columns of A, or its rows of B."""
        a, b = super()._local(part)
        local = slice(part.start, part.start + part.length)
        return (a[:, local], b) if part.axis == 1 else (a, b[local])

    def _mark_parameters(self) -> None:
        for parameter in self.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


def adapter_of(linear: AdaptedLinear, options: AdapterOptions) -> LinearAdapter:
    """The adapters of one linear, A and B zero."""
    if not linear.of_experts:
        kind = HeadAdapter if linear.path == HEAD_PATH else DenseAdapter
        return kind(linear, options)
    if linear.experts:
        return ExpertAdapter(linear, options)
    return SharedExpertAdapter(linear, options)


HEAD_PATH = "output_layer"
ROUTER = "mlp.router.weight"


def freeze(chunks: list[GPTModel], *, train_router: bool) -> None:
    """Take every parameter out of training; the routers' not with ``train_router``."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(train_router and name.endswith(ROUTER))
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_requiring_grad)


def attach(
    chunks: list[GPTModel], linears: list[AdaptedLinear], options: AdapterOptions
) -> list[LinearAdapter]:
    """Give each of ``linears`` its adapters: zero, as a child that its forward hook adds to the output."""
    adapters = []
    for linear in linears:
        module = chunks[linear.chunk].get_submodule(linear.path)
        adapter = adapter_of(linear, options)
        module.add_module(CHILD, adapter)
        module.register_forward_hook(adapter.after_forward)
        adapters.append(adapter)
    return adapters


def sum_expert_tensor_grads(chunks: list[Any]) -> None:
    """Sum over each expert-tensor group the gradients that its ranks have shares of, after all other reductions."""
    group = parallel_state.get_expert_tensor_parallel_group()
    if group.size() == 1:
        return
    for chunk in chunks:
        for parameter in chunk.parameters():
            if getattr(parameter, SUM_OVER_EXPERT_TENSOR, False):
                dist.all_reduce(parameter.main_grad, group=group)


def _requiring_grad(module: Any, inputs: tuple, output: Tensor) -> Tensor:
    """With all before it frozen, a recomputed layer's output would have no gradient to pass on."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
    return output


Init = Callable[[tuple[int, ...], int, torch.Generator], Tensor]


def _kaiming(dims: tuple[int, ...], rank: int, generator: torch.Generator) -> Tensor:
    bound = 1 / math.sqrt(dims[1])
    return torch.empty(dims).uniform_(-bound, bound, generator=generator)


def _gaussian(dims: tuple[int, ...], rank: int, generator: torch.Generator) -> Tensor:
    return torch.empty(dims).normal_(0, 1 / rank, generator=generator)


INITS: dict[str, Init] = {"kaiming": _kaiming, "gaussian": _gaussian}


def initial_tensor(name: str, dims: tuple[int, ...], rank: int, seed: int, init: str) -> Tensor:
    """How A or B ``name`` [dims] of the whole model starts, fp32: the same in every layout."""
    if not name.endswith(LORA_A):
        return torch.zeros(dims)
    # By name, not by order: a matrix starts alike in every layout, and whichever others have adapters.
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return INITS[init](dims, rank, generator)
