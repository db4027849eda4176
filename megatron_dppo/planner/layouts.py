"""Whether a configuration's layout is one at all: the checks that come before any arithmetic."""

from __future__ import annotations

from megatron_dppo.config.checks import batch_problems
from megatron_dppo.config.layout import LAYOUT_CHECKS, world_problems
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.model.shape import ModelShape


def layout_problems(config: TrainConfig, shape: ModelShape) -> list[str]:
    """What is wrong with the layout by itself, with the model, and with the batch sizes; no file is looked at."""
    problems = list(world_problems(config)) or [*batch_problems(config)]
    return problems + [p for check in LAYOUT_CHECKS for p in check(config, shape)]
