"""The guard that ends a run whose trainer and engine disagree about log-probabilities."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from megatron_dppo.config.schema import RolloutConfig
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.row import Dtype
from megatron_dppo.metrics.table import BY_METRIC
from megatron_dppo.system.errors import RunError

log = logging.getLogger(__name__)


LARGEST_GAP = {"float32": 0.01, "bfloat16": 0.1, "fp8": 0.3}
"""Default of ``rollout.largest_gap`` by the dtype of the weights: 100, 20 and 12 times the upper end of the normal
range.
If trainer and servers hold different models, the probabilities of sampled tokens of probability p differ by about p."""


class GapError(RunError):
    """Trainer and servers differ in the probabilities of tokens by more than rounding explains, at equal weights."""


class GapGuard:
    """Checks mean |pi - mu| of each batch's first mini-batch before training on it.

    The guard warns if the gap is outside the normal range, and again each time that it has doubled. Beyond
    ``rollout.largest_gap`` it stops the run. For a replayed batch, or a forward pass with dropout, it only warns,
    because the weights or activations may differ. It skips stale batches.
    """

    def __init__(
        self,
        dtype: Dtype,
        rollout: RolloutConfig,
        *,
        is_coarse: bool,
        has_dropout: bool,
    ) -> None:
        self._dtype = dtype
        default = LARGEST_GAP[dtype]
        if is_coarse:
            default = max(default, LARGEST_GAP["bfloat16"])
        self._limit = rollout.largest_gap or default
        self._stops = rollout.replay_from is None and not has_dropout
        self._warned = BY_METRIC[names.GAP_ON_POLICY].upper(self._dtype) / 2

    def check(self, gap: float, *, is_stale: bool) -> None:
        """Raise GapError if ``gap`` exceeds the limit. NaN: no token was trained.

        ``gap`` must be the same on every rank, so that all ranks raise or none does.
        """
        if is_stale or math.isnan(gap):
            return
        message = (
            f"mean |pi - mu| of the first mini-batch is {gap:.3g} at equal weights in {self._dtype}"
        )
        if self._stops and gap > self._limit:
            raise GapError(
                f"{message}, expected at most {self._limit:g} (rollout.largest_gap); it was not trained on. "
                f"{BY_METRIC[names.GAP_ON_POLICY].why} With rollout.save=true the batch is kept, and "
                "megatron-dppo doctor RUN names the cause"
            )
        if gap > 2 * self._warned:
            self._warned = gap
            log.warning("%s; %s", message, BY_METRIC[names.GAP_ON_POLICY].why)


def is_coarse(sglang: Mapping[str, Any], megatron: Mapping[str, Any]) -> bool:
    """Return whether engine or trainer computes with fewer bits than the dtype of the weights has."""
    has_narrow_cache = sglang.get("kv_cache_dtype", "auto") != "auto"
    return bool(sglang.get("quantization")) or has_narrow_cache or megatron.get("fp8") is not None
