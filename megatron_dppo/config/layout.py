"""Whether Megatron-Core can lay this model out over these ranks, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_dppo.config.model_facts import ModelFacts
from megatron_dppo.config.schema import PolicyConfig, TrainConfig

Problems = Iterator[str]
LayoutCheck = Callable[[PolicyConfig, ModelFacts], Problems]


def padded_vocab_size(vocab: int, tensor: int) -> int:
    """``vocab`` rounded up to a multiple of ``tensor``: rows of the embedding over all tensor
    ranks.

    The rows beyond ``vocab`` belong to no token: statistics leave them out and checkpoints drop
    them.
    """
    return -(-vocab // tensor) * tensor


@dataclass(frozen=True)
class Plan:
    """What follows from a valid configuration. ``steps_per_batch``: optimiser steps in a rollout
    batch."""

    data: int
    expert_tensor: int
    expert_data: int
    sequence_parallel: bool
    vocab: int
    padded_vocab: int
    steps_per_batch: int
    responses_per_batch: int

    @classmethod
    def of(cls, config: TrainConfig, model: ModelFacts) -> Plan:
        """Derive; ``config`` must have passed its checks."""
        parallel, rollout = config.parallel, config.rollout
        return cls(
            data=parallel.data,
            expert_tensor=parallel.expert_tensor_size,
            expert_data=parallel.expert_data,
            sequence_parallel=parallel.sequence_parallel(model.mixture_of_experts),
            vocab=model.vocab_size,
            padded_vocab=padded_vocab_size(model.vocab_size, parallel.tensor),
            steps_per_batch=rollout.prompts_per_step // config.training.prompts_per_mini_batch,
            responses_per_batch=rollout.prompts_per_step * rollout.group_size,
        )

    def summary(self, config: TrainConfig) -> str:
        """The layout, the vocabulary and the steps, in a line."""
        p = config.parallel
        sizes = {"TP": p.tensor, "PP": p.pipeline, "VPP": p.virtual_pipeline or 1, "DP": self.data}
        experts = {"EP": p.expert, "ETP": self.expert_tensor, "expert DP": self.expert_data}
        sequence = ", sequence parallel" if self.sequence_parallel else ""
        padding = f" (padded to {self.padded_vocab})" if self.padded_vocab != self.vocab else ""
        return (
            f"{p.world_size} ranks: {_product(sizes)}, experts {_product(experts)}{sequence}; "
            f"vocabulary {self.vocab}{padding}; a rollout batch is {self.responses_per_batch} "
            f"responses and {self.steps_per_batch} optimiser steps"
        )


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def world_problems(config: PolicyConfig) -> Problems:
    """What is wrong with the layout whatever the model is."""
    p = config.parallel
    if p.world_size % (p.tensor * p.pipeline):
        yield (
            f"parallel.world_size: got {p.world_size}, expected a multiple of tensor x pipeline = "
            f"{p.tensor} x {p.pipeline} = {p.tensor * p.pipeline}"
        )
    expert_ranks = p.expert_tensor_size * p.expert * p.pipeline
    if p.world_size % expert_ranks:
        yield (
            f"parallel.world_size: got {p.world_size}, expected a multiple of expert_tensor x "
            "expert x "
            f"pipeline = {p.expert_tensor_size} x {p.expert} x {p.pipeline} = {expert_ranks}"
        )
    if p.virtual_pipeline is not None and p.pipeline == 1:
        yield (
            f"parallel.virtual_pipeline: got {p.virtual_pipeline} with pipeline 1, expected null "
            "(there is nothing to interleave)"
        )
    if p.sequence and p.tensor == 1:
        yield "parallel.sequence: got true with tensor 1, expected null, or tensor > 1"


def _pipeline_splits(config: PolicyConfig, model: ModelFacts) -> Problems:
    p = config.parallel
    chunks = p.pipeline * (p.virtual_pipeline or 1)
    if model.layers % chunks:
        virtual = (
            f" x virtual_pipeline = {p.pipeline} x {p.virtual_pipeline}"
            if p.virtual_pipeline
            else ""
        )
        yield (
            f"parallel.pipeline: got {p.pipeline}{virtual}, expected a divisor of the model's "
            f"{model.layers} layers"
        )


def _tensor_splits(config: PolicyConfig, model: ModelFacts) -> Problems:
    tensor = config.parallel.tensor
    if model.attention_heads % tensor:
        yield (
            f"parallel.tensor: got {tensor}, expected a divisor of the model's "
            f"{model.attention_heads} attention heads"
        )
    if model.kv_heads % tensor:
        yield (
            f"parallel.tensor: got {tensor}, expected a divisor of the model's {model.kv_heads} "
            "key-value heads (they are not replicated over tensor ranks)"
        )
    if model.dense_layers and model.ffn_size % tensor:
        yield (
            f"parallel.tensor: got {tensor}, expected a divisor of the model's MLP size "
            f"{model.ffn_size}"
        )


def _experts_split(config: PolicyConfig, model: ModelFacts) -> Problems:
    p = config.parallel
    if not model.mixture_of_experts:
        return
    if model.experts % p.expert:
        yield (
            f"parallel.expert: got {p.expert}, expected a divisor of the model's "
            f"{model.experts} experts"
        )
    if model.expert_ffn_size % p.expert_tensor_size:
        yield (
            f"parallel.expert_tensor: got {p.expert_tensor_size}, expected a divisor of the "
            "experts' "
            f"MLP size {model.expert_ffn_size}"
        )


def _expert_tensor_alone(config: PolicyConfig, model: ModelFacts) -> Problems:
    p = config.parallel
    if model.mixture_of_experts and p.expert == 1 and p.expert_tensor_size != p.tensor:
        yield (
            f"parallel.expert_tensor: got {p.expert_tensor_size} with expert 1 and tensor "
            f"{p.tensor}, "
            f"expected {p.tensor}: Megatron-Core 0.16.1 does not synchronise the experts' "
            "gradients "
            "in this layout and trains wrongly without an error"
        )


def _mixture_needs_sequence(config: PolicyConfig, model: ModelFacts) -> Problems:
    p = config.parallel
    if model.mixture_of_experts and p.tensor > 1 and p.sequence is False:
        yield (
            f"parallel.sequence: got false with tensor {p.tensor}, expected true or null: "
            "Megatron-Core "
            "trains a mixture of experts under tensor parallelism only with sequence parallelism"
        )


def _dense_has_no_experts(config: PolicyConfig, model: ModelFacts) -> Problems:
    p = config.parallel
    if model.mixture_of_experts:
        return
    if p.expert > 1:
        yield f"parallel.expert: got {p.expert}, expected 1: {model.model_type} is a dense model"
    if p.expert_tensor is not None and p.expert_tensor != p.tensor:
        yield (
            f"parallel.expert_tensor: got {p.expert_tensor}, expected null: {model.model_type} "
            "is a "
            "dense model"
        )


def _dense_dispatches_nothing(config: PolicyConfig, model: ModelFacts) -> Problems:
    dispatcher = config.megatron.get("moe_token_dispatcher_type")
    if dispatcher is not None and not model.mixture_of_experts:
        yield (
            f"megatron.moe_token_dispatcher_type: got {dispatcher!r}, expected nothing: "
            f"{model.model_type} is a dense model"
        )


LAYOUT_CHECKS: tuple[LayoutCheck, ...] = (
    _pipeline_splits,
    _tensor_splits,
    _experts_split,
    _expert_tensor_alone,
    _mixture_needs_sequence,
    _dense_has_no_experts,
    _dense_dispatches_nothing,
)
