"""An algorithm and a metric: tokens whose probability has changed by more than a factor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_dppo.algorithms.decisions import Decisions
from megatron_dppo.algorithms.inputs import Anchor, TokenInputs
from megatron_dppo.algorithms.rules import inside
from megatron_dppo.algorithms.table import Option, Preset
from megatron_dppo.metrics.row import Line, Metric, NormalRange
from megatron_dppo.metrics.table import TRAINED_TOKENS


@torch.no_grad()
def within_factor(inputs: TokenInputs, anchor: Anchor, *, factor: float) -> Tensor:
    """Block tokens where the update moves pi further away and pi / anchor is above ``factor`` or below its inverse."""
    ratio = (inputs.log_probs - anchor(inputs)).exp()
    return inside(inputs, ratio >= 1 / factor, ratio <= factor)


FACTOR = Preset(
    within_factor,
    {"factor": 2.0},
    options={
        "factor": Option(
            "largest factor between pi and mu at which a diverging token still trains",
            "mask",
            low=1,
            bound=lambda value, positive: f"r > {value:g}" if positive else f"r < 1/{value:g}",
        )
    },
)
"""The row: ``algorithm.name=factor``, ``algorithm.options.factor=3``."""


def is_halved(inputs: TokenInputs, decisions: Decisions) -> Tensor:
    """Return True for each token whose pi is below half of mu."""
    return inputs.log_probs - inputs.rollout_log_probs < math.log(0.5)


HALVED = Metric(
    "policy/halved",
    "share of tokens whose probability is below half of mu",
    TRAINED_TOKENS,
    share=True,
    normal=NormalRange("halved tokens", "A smaller learning rate keeps pi nearer to mu.", high=0.5),
    line=Line("Halved tokens", "pi < mu / 2", scale=100),
    measure=is_halved,
)
"""The row: ``tracking.metrics=[halved]``."""
