"""The layout that a configuration asks for: whether it fits the model, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_dppo.config.schema import PolicyConfig, TrainConfig
from megatron_dppo.model.layout import Layout, model_faults, size_faults
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import padded_vocab_size

Faults = Iterator[str]
LayoutCheck = Callable[[PolicyConfig, ModelShape], Faults]


@dataclass(frozen=True)
class Plan:
    """What follows from a valid configuration. ``steps_per_batch``: optimiser steps in a rollout
    batch."""

    layout: Layout
    sequence_parallel: bool
    vocab: int
    padded_vocab: int
    steps_per_batch: int
    responses_per_batch: int

    @classmethod
    def of(cls, config: TrainConfig, model: ModelShape) -> Plan:
        """Derive; ``config`` must have passed its checks."""
        sizes, rollout = config.parallel.sizes, config.rollout
        return cls(
            layout=Layout.of(sizes),
            sequence_parallel=sizes.sequence_parallel(model),
            vocab=model.vocab_size,
            padded_vocab=padded_vocab_size(model.vocab_size, sizes.tensor),
            steps_per_batch=rollout.prompts_per_step // config.training.prompts_per_mini_batch,
            responses_per_batch=rollout.prompts_per_step * rollout.group_size,
        )

    def summary(self) -> str:
        """The layout, the vocabulary and the steps, in a line."""
        layout = self.layout
        sizes = {
            "TP": layout.tensor,
            "PP": layout.pipeline,
            "VPP": layout.chunks,
            "DP": layout.data,
        }
        experts = {
            "EP": layout.expert,
            "ETP": layout.expert_tensor,
            "expert DP": layout.expert_data,
        }
        sequence = ", sequence parallel" if self.sequence_parallel else ""
        padding = f" (padded to {self.padded_vocab})" if self.padded_vocab != self.vocab else ""
        return (
            f"{layout.world_size} ranks: {_product(sizes)}, experts {_product(experts)}{sequence}; "
            f"vocabulary {self.vocab}{padding}; a rollout batch is {self.responses_per_batch} "
            f"responses and {self.steps_per_batch} optimiser steps"
        )


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def world_faults(config: PolicyConfig) -> Faults:
    """What is wrong with the layout whatever the model is."""
    yield from (fault.text("parallel.") for fault in size_faults(config.parallel.sizes))


def _fits_the_model(config: PolicyConfig, model: ModelShape) -> Faults:
    yield from (p.text("parallel.") for p in model_faults(config.parallel.sizes, model))


def _dense_dispatches_nothing(config: PolicyConfig, model: ModelShape) -> Faults:
    dispatcher = config.megatron.get("moe_token_dispatcher_type")
    if dispatcher is not None and not model.is_moe:
        yield (
            f"megatron.moe_token_dispatcher_type: got {dispatcher!r}, expected nothing: "
            f"{model.family} is a dense model"
        )


LAYOUT_CHECKS: tuple[LayoutCheck, ...] = (_fits_the_model, _dense_dispatches_nothing)
