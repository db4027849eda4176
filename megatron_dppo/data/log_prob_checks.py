"""What log-probabilities of a rollout must be: the same that the engine's protocol asks of answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LOG_PROB_ROUNDING = 1e-6
"""A log-probability may exceed 0 by this much: what fp32 makes of a near-certain token."""


def check_log_probs(log_probs: Sequence[float] | np.ndarray, where: str) -> None:
    """Raise ValueError, naming ``where`` and the position, unless all are finite and at most 0, give
    or take fp32's rounding.
    """
    values = np.asarray(log_probs, dtype=np.float64)
    good = np.isfinite(values) & (values <= LOG_PROB_ROUNDING)
    if not good.all():
        first = tuple(int(i) for i in np.argwhere(~good)[0])
        raise ValueError(
            f"{where}: {values[first]} at token {first[0]}, expected a finite log-probability <= 0"
        )


def check_topk(ids: np.ndarray, log_probs: np.ndarray, where: str) -> None:
    """As ``check_log_probs``, of Top-K entries [R, K] whose id is not negative; ValueError also where
    a token has an id twice, whose probability would count twice.
    """
    valid = ids >= 0
    check_log_probs(np.where(valid, log_probs, 0.0), f"{where}: Top-K log-probabilities")
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        row, column = np.argwhere(twice)[0]
        raise ValueError(
            f"{where}: Top-K id {ordered[row, column]} stands twice at token {row}, expected "
            "different ids"
        )
