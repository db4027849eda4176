"""Freezing a rank's model chunks and putting the adapters beside their linears."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_dppo.model.adapters import CHILD, LORA_A, AdaptedLinear
from megatron_dppo.trainer.lora.modules import (
    SUM_OVER_EXPERT_TENSOR,
    AdapterOptions,
    LinearAdapter,
    adapter_of,
)

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
    made = []
    for linear in linears:
        module = chunks[linear.chunk].get_submodule(linear.path)
        adapter = adapter_of(linear, options)
        module.add_module(CHILD, adapter)
        module.register_forward_hook(adapter.after_forward)
        made.append(adapter)
    return made


def sum_expert_tensor_grads(chunks: list[Any]) -> None:
    """Sum over each expert-tensor group the gradients that its ranks have shares of, after all other reductions."""
    group = parallel_state.get_expert_tensor_parallel_group()
    if group.size() == 1:
        return
    for chunk in chunks:
        for parameter in chunk.parameters():
            if getattr(parameter, SUM_OVER_EXPERT_TENSOR, False):
                dist.all_reduce(parameter.main_grad, group=group)


@contextmanager
def without_adapters(adapters: list[LinearAdapter]) -> Iterator[None]:
    """The frozen model alone: the policy that training started from, where the adapters started at zero."""
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


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
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return INITS[init](dims, rank, generator)
