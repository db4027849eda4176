"""What a configuration's layout comes to, and ``model.layout_checks`` in the configuration's own words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_dppo.config.schema import PolicyConfig, TrainConfig
from megatron_dppo.model.layout import Layout, model_faults, size_faults
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import padded_vocab_size

Problems = Iterator[str]
LayoutCheck = Callable[[PolicyConfig, ModelShape], Problems]


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
        at = self.layout
        sizes = {"TP": at.tensor, "PP": at.pipeline, "VPP": at.chunks, "DP": at.data}
        experts = {"EP": at.expert, "ETP": at.expert_tensor, "expert DP": at.expert_data}
        sequence = ", sequence parallel" if self.sequence_parallel else ""
        padding = f" (padded to {self.padded_vocab})" if self.padded_vocab != self.vocab else ""
        return (
            f"{at.world_size} ranks: {_product(sizes)}, experts {_product(experts)}{sequence}; "
            f"vocabulary {self.vocab}{padding}; a rollout batch is {self.responses_per_batch} "
            f"responses and {self.steps_per_batch} optimiser steps"
        )


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def world_problems(config: PolicyConfig) -> Problems:
    """What is wrong with the layout whatever the model is."""
    yield from (problem.text("parallel.") for problem in size_faults(config.parallel.sizes))


def _fits_the_model(config: PolicyConfig, model: ModelShape) -> Problems:
    yield from (p.text("parallel.") for p in model_faults(config.parallel.sizes, model))


def _dense_dispatches_nothing(config: PolicyConfig, model: ModelShape) -> Problems:
    dispatcher = config.megatron.get("moe_token_dispatcher_type")
    if dispatcher is not None and not model.is_moe:
        yield (
            f"megatron.moe_token_dispatcher_type: got {dispatcher!r}, expected nothing: "
            f"{model.family} is a dense model"
        )


LAYOUT_CHECKS: tuple[LayoutCheck, ...] = (_fits_the_model, _dense_dispatches_nothing)
