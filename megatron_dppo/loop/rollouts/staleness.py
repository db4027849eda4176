"""How far behind the trainer the weights were that sampled a batch, token by token, and its bound.

A batch of step n is trained on from weight version n - 1. The staleness of a token is n - 1 less the version that
sampled it: 0 in synchronous runs, up to 1 where generation runs one step ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_dppo.data.outline import Known
from megatron_dppo.metrics import names

STALE_ANCHOR = (
    "algorithm.name: %s anchors on log-probabilities recomputed by the trainer, which with "
    "rollout.max_staleness=1 are no longer those of the weights that sampled; see docs/staleness.md"
)
"""A warning: such a mask does not see the distance that lies between mu and the recomputed policy."""


class StalenessError(RuntimeError):
    """A response was sampled by weights that a batch of this step may not come from."""


def staleness_figures(batch: Sequence[Known], step: int) -> dict[str, float]:
    """Mean and largest staleness over the response tokens of the batch of ``step``, in weight versions."""
    spans = [span for t in batch for span in t.version_spans]
    staleness = np.array([step - 1 - span.weight_version for span in spans])
    tokens = np.array([span.end - span.start for span in spans])
    mean = float((staleness * tokens).sum() / tokens.sum())
    return {names.STALENESS: mean, names.STALENESS_MAX: int(staleness.max())}


def check_staleness(batch: Sequence[Known], step: int, max_staleness: int) -> None:
    """Raise StalenessError unless every token's staleness is from 0 to ``max_staleness``."""
    for trajectory in batch:
        for span in trajectory.version_spans:
            if not 0 <= step - 1 - span.weight_version <= max_staleness:
                raise StalenessError(
                    f"step {step} trains weight version {step - 1}, but {trajectory} "
                    f"has tokens {span.start} to {span.end - 1} of version "
                    f"{span.weight_version}, expected {step - 1 - max_staleness} to {step - 1} "
                    f"(rollout.max_staleness: {max_staleness})"
                )


def with_gap_named(
    learned: Mapping[str, float], batch_figures: Mapping[str, float]
) -> dict[str, float]:
    """``learned`` with the first mini-batch's gap under the name that it deserves.

    It compares trainer and engine at equal weights only where the batch is not stale; else it shows what the
    updates in between moved.
    """
    named = dict(learned)
    if batch_figures[names.STALENESS_MAX] > 0 and names.GAP_ON_POLICY in named:
        named[names.GAP_STALE] = named.pop(names.GAP_ON_POLICY)
    return named
