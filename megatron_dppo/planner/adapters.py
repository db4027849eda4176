"""Parameters of a trainer rank where only adapters (and perhaps routers) are trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dppo.config.lora import adapters_of
from megatron_dppo.config.schema import LoraConfig
from megatron_dppo.model.adapters import LORA_A, LORA_B, Adapters, adapted_linears
from megatron_dppo.model.adapters import elements as adapter_elements
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.planner.weights import RankParameters


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
        """Trained elements of the whole model."""
        routers = shape.num_layers * shape.num_experts * shape.hidden_size if self.routers else 0
        return adapter_elements(self.adapters, shape) + routers

    def trained_base(self, shape: ModelShape, layout: Layout) -> int:
        """Elements of the model's own parameters, the routers', that are trained."""
        layers = shape.num_layers // layout.pipeline
        return shape.num_experts * shape.hidden_size * layers if self.routers else 0
