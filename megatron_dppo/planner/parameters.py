"""Parameters of a trainer rank, all and those that are trained, counted from the tables without making them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from megatron_dppo.config.lora import adapters_of
from megatron_dppo.config.schema import LoraConfig
from megatron_dppo.model.adapters import LORA_A, LORA_B, Adapters, adapted_linears, trained_elements
from megatron_dppo.model.families import family_of
from megatron_dppo.model.family import Rule
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import shard_of
from megatron_dppo.model.shape import ModelShape

Counts = tuple[tuple[int, int], ...]
"""(elements, how many parameters have that size) of one group of parameters."""


@dataclass(frozen=True)
class RankParameters:
    """One rank of a pipeline stage holds ``dense`` and ``experts``.

    The two differ in who else holds them: dense ones the ``data`` replicas, experts the ``expert_data`` replicas.
    Without expert parallelism Megatron-Core keeps experts among the dense ones; so does this.
    """

    dense: Counts
    experts: Counts

    @property
    def elements(self) -> int:
        return elements(self.dense) + elements(self.experts)


def elements(counts: Counts) -> int:
    return sum(size * count for size, count in counts)


@lru_cache(maxsize=4096)
def rank_parameters(shape: ModelShape, layout: Layout, stage: int) -> RankParameters:
    """What every rank of pipeline stage ``stage`` holds; ranks of a stage hold equally much.

    Counted as ``model.mapping.local_parameters`` lists them: the family's rows, cut by their splits.
    """
    family = family_of(shape)
    layers = shape.num_layers // layout.pipeline
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    dense = [(rule, layers) for rule in family.layer]
    dense += [(family.embedding, 1)] if is_first else []
    dense += [(family.final_norm, 1)] if is_last else []
    if is_last and not (shape.tied_embeddings and is_first):
        source = family.embedding if shape.tied_embeddings else family.output
        dense.append((source, 1))
    experts = [(rule, layers * shape.num_experts // layout.expert) for rule in family.expert]
    dense_counts = _counted(dense, shape, layout.tensor)
    expert_counts = _counted(experts, shape, layout.expert_tensor)
    if layout.expert == 1:
        return RankParameters(dense_counts + expert_counts, ())
    return RankParameters(dense_counts, expert_counts)


def _counted(rules: Iterable[tuple[Rule, int]], shape: ModelShape, size: int) -> Counts:
    return tuple(
        (math.prod(shard_of(rule.split, rule.sources, shape, 0, size).shape), count)
        for rule, count in rules
        if count
    )


# Parameters of a trainer rank where only adapters (and perhaps routers) are trained.


@dataclass(frozen=True)
class Trained:
    """What of a model is trained beside the frozen rest."""

    adapters: Adapters
    routers: bool

    @classmethod
    def of(cls, lora: LoraConfig, shape: ModelShape) -> Trained | None:
        """As the section says; None where everything is trained."""
        adapters = adapters_of(lora, shape)
        return None if adapters is None else cls(adapters, lora.train_router)

    def parameters(self, shape: ModelShape, layout: Layout, stage: int) -> RankParameters:
        """The trained parameters of every rank of ``stage``: A and B of each adapted matrix, those of a rank's experts
        stacked in one; then the routers."""
        dense: list[tuple[int, int]] = []
        experts: list[tuple[int, int]] = []
        rank = self.adapters.rank
        for linear in adapted_linears(self.adapters, shape, layout, stage * layout.stage_ranks):
            is_whole = linear.of_experts and not linear.experts
            group = experts if linear.experts and layout.expert > 1 else dense
            for part in linear.parts:
                for which in (LORA_A, LORA_B):
                    dims = part.whole(which, rank) if is_whole else part.local(which, rank)
                    group.append((math.prod(dims) * max(1, len(linear.experts)), 1))
        if self.routers:
            layers = shape.num_layers // layout.pipeline
            dense.append((shape.num_experts * shape.hidden_size, layers))
        return RankParameters(tuple(dense), tuple(experts))

    def elements(self, shape: ModelShape) -> int:
        return trained_elements(shape, self.adapters, routers=self.routers)

    def trained_base(self, shape: ModelShape, layout: Layout) -> int:
        """Elements of the model's own parameters, the routers', that are trained."""
        layers = shape.num_layers // layout.pipeline
        return shape.num_experts * shape.hidden_size * layers if self.routers else 0
