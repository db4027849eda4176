"""The layout that a configuration asks for: whether it fits the model, and in a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.config.schema import RolloutConfig, TrainingConfig
from megatron_dppo.model.layout import (
    Layout,
    LayoutSizes,
    model_faults,
    most_all_to_all,
    size_faults,
)
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import padded_vocab_size

Faults = Iterator[str]


def describe(
    sizes: LayoutSizes, rollout: RolloutConfig, training: TrainingConfig, model: ModelShape
) -> str:
    """The layout, the vocabulary and a batch's optimiser steps, in a line; the sections must be valid."""
    layout, vocab = Layout.of(sizes), model.vocab_size
    dense = {
        "TP": layout.tensor,
        "CP": layout.context,
        "PP": layout.pipeline,
        "VPP": layout.chunks,
        "DP": layout.data,
    }
    experts = {
        "EP": layout.expert,
        "ETP": layout.expert_tensor,
        "expert DP": layout.expert_data,
    }
    sequence = ", sequence parallel" if sizes.sequence_parallel(model) else ""
    padded = padded_vocab_size(vocab, sizes.tensor)
    padding = f" (padded to {padded})" if padded != vocab else ""
    steps = rollout.prompts_per_step // training.prompts_per_mini_batch
    return (
        f"{layout.world_size} ranks: {_product(dense)}, experts {_product(experts)}{sequence}; vocabulary "
        f"{vocab}{padding}; a rollout batch is {rollout.prompts_per_step * rollout.group_size} responses and "
        f"{steps} optimiser steps"
    )


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def world_faults(sizes: LayoutSizes) -> Faults:
    """What is wrong with the layout whatever the model is."""
    yield from (fault.text("parallel.") for fault in size_faults(sizes))


def layout_faults(sizes: LayoutSizes, megatron: Mapping[str, Any], model: ModelShape) -> Faults:
    """What is wrong with the layout, and with the ``megatron:`` table's dispatcher and exchange, for this model."""
    yield from (fault.text("parallel.") for fault in model_faults(sizes, model))
    dispatcher = megatron.get("moe_token_dispatcher_type")
    if dispatcher is not None and not model.is_moe:
        yield (
            f"megatron.moe_token_dispatcher_type: got {dispatcher!r}, expected nothing: "
            f"{model.family} is a dense model"
        )
    yield from _exchange_faults(sizes, megatron.get("cp_comm_type"), model)


EXCHANGES = ("p2p", "a2a")
"""How Transformer Engine's attention brings a packed sequence's keys and values to its context-parallel ranks: around
a ring, or heads for tokens."""


def _exchange_faults(sizes: LayoutSizes, exchange: Any, model: ModelShape) -> Faults:
    if exchange is None:
        return
    key = f"megatron.cp_comm_type: got {exchange!r}"
    if sizes.context == 1:
        yield f"{key}, expected nothing: parallel.context is 1"
    elif exchange not in EXCHANGES:
        yield f"{key}, expected {' or '.join(EXCHANGES)}, which take packed sequences"
    elif exchange == "a2a" and (most := most_all_to_all(sizes.tensor, model)) % sizes.context:
        yield (
            f"{key} with parallel.context {sizes.context} and parallel.tensor {sizes.tensor}, expected a context that "
            f"divides {most}, the heads of queries and of keys that a rank has; or p2p"
        )
