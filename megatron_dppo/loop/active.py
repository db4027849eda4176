"""What is active in a run, in a line: its algorithm with its numbers, replay, filter, staleness, layout."""

from __future__ import annotations

import math

from megatron_dppo.algorithms.policy_loss import Algorithm
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.model.layout import Layout


def active_line(config: TrainConfig, algorithm: Algorithm, layout: Layout) -> str:
    """``active: dppo-binary-tv (tv_threshold 0.15), R3 off, filter off, staleness 0, TP2 EP2, float32``."""
    rollout = config.rollout
    numbers = ", ".join(
        f"{name} {value:g}" for name, value in algorithm.numbers.items() if math.isfinite(value)
    )
    parts = [
        f"{algorithm.name} ({numbers})" if numbers else algorithm.name,
        f"R3 {_switch(rollout.router_replay)}",
        f"filter {_switch(rollout.drop_zero_variance_groups)}",
        f"staleness {rollout.max_staleness}",
        f"replaying {rollout.replay_from}" if rollout.replay_from is not None else "",
        layout.describe(),
        config.model.dtype,
    ]
    return "active: " + ", ".join(part for part in parts if part)


def _switch(active: bool) -> str:
    return "on" if active else "off"
