"""The guard that ends a run whose trainer and engine disagree about log-probabilities."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from megatron_dppo.config.schema import RolloutConfig
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.row import Dtype
from megatron_dppo.metrics.table import BY_METRIC
from megatron_dppo.system.errors import RunError

log = logging.getLogger(__name__)


LARGEST_GAP = {"float32": 0.01, "bfloat16": 0.1, "fp8": 0.3}
"""Default of ``rollout.largest_gap`` by the dtype of the weights.

The defaults are 100, 20 and 12 times the upper end of the normal range. They are still small: if trainer and servers
hold different models, |pi - mu| of a sampled token is about as large as its probability.
"""


class GapError(RunError):
    """Trainer and servers differ in the probabilities of tokens by more than rounding explains, at equal weights."""


class GapGuard:
    """Checks mean |pi - mu| of each batch's first mini-batch before training on it.

    The guard warns if the gap is above the normal range, and again each time that the gap has doubled. Beyond
    ``rollout.largest_gap`` it stops the run. In two cases it only warns: for a replayed batch, because the weights may
    differ, and for forward passes with dropout, because the activations differ. It skips stale batches.

    Args:
        dtype: dtype of the weights, or ``fp8`` for servers with FP8 weights.
        rollout: settings of the limit.
        is_coarse: see the function ``is_coarse``.
        has_dropout: whether forward passes of training drop inputs of adapters.
    """

    def __init__(
        self, dtype: Dtype, rollout: RolloutConfig, *, is_coarse: bool, has_dropout: bool
    ) -> None:
        self._dtype = dtype
        default = LARGEST_GAP[dtype]
        if is_coarse:
            default = max(default, LARGEST_GAP["bfloat16"])
        self._limit = rollout.largest_gap or default
        self._stops_run = not rollout.replays and not has_dropout
        # A warning is due above twice this gap. So the first warning is due above the upper end of the normal range.
        self._warned_gap = BY_METRIC[metric_names.GAP_ON_POLICY].upper(self._dtype) / 2

    def check(self, gap: float, *, is_stale: bool) -> bool:
        """Return whether a warning was logged; raise GapError if ``gap`` exceeds the limit.

        ``gap`` must be the same on every rank, so that all ranks raise or none does. It is NaN if no token trains.
        """
        if is_stale or math.isnan(gap):
            return False
        message = (
            f"mean |pi - mu| of the first mini-batch is {gap:.3g} at equal weights in {self._dtype}"
        )
        if self._stops_run and gap > self._limit:
            raise GapError(
                f"{message}, expected at most {self._limit:g} (rollout.largest_gap); it was not trained on. "
                f"{BY_METRIC[metric_names.GAP_ON_POLICY].why} With rollout.save=true the batch is kept, and "
                "megatron-dppo doctor RUN names the cause"
            )
        if gap <= 2 * self._warned_gap:
            return False
        self._warned_gap = gap
        log.warning("%s; %s", message, BY_METRIC[metric_names.GAP_ON_POLICY].why)
        return True


def is_coarse(sglang: Mapping[str, Any], megatron: Mapping[str, Any]) -> bool:
    """Return whether engine or trainer computes with fewer bits than the dtype of the weights has."""
    has_narrow_cache = sglang.get("kv_cache_dtype", "auto") != "auto"
    return bool(sglang.get("quantization")) or has_narrow_cache or megatron.get("fp8") is not None
