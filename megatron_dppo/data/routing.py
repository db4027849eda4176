"""Recorded expert choices (R3, arXiv 2510.11370): which rows of a recording hold, and their place in
a pack.

A recording of one response is uint8 or uint16 [P + R - 1, L, E]: row t holds the experts of token t
in each mixture-of-experts layer. The last token of a response is never fed back to the engine, so
it has none. T = tokens of a pack, L = mixture-of-experts layers, E = experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from megatron_dppo.types import Rollout

UNWRITTEN_TOKENS = 8
"""Where one expert serves a token, zeros in every layer for more tokens than this were never
written: no router sends so many tokens to expert 0 of every layer."""


class Recorded(Protocol):
    """What of a training sample concerns its routing."""

    @property
    def routed_experts(self) -> np.ndarray | None: ...

    @property
    def routed_valid(self) -> np.ndarray | None: ...


def check_recording(routed: np.ndarray, experts: int) -> None:
    """Raise ValueError unless each token goes to distinct experts of 0 .. ``experts`` - 1.

    ``routed`` [rows, L, E] of any integer type. Repeated experts would break the dispatch of
    tokens.
    """
    if routed.size == 0:
        return
    if routed.min() < 0 or routed.max() >= experts:
        raise ValueError(f"routed expert outside 0..{experts - 1}")
    if routed.shape[-1] > 1 and not routed.any():
        raise ValueError("routed experts are all 0: the engine recorded nothing")
    ordered = np.sort(routed, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError("a token is routed to the same expert twice")


def is_unwritten(routed: np.ndarray) -> bool:
    """Whether a recording with one expert a token holds zeros alone: a buffer nobody wrote to."""
    return routed.shape[-1] == 1 and len(routed) > UNWRITTEN_TOKENS and not routed.any()


def usable_rows(rollout: Rollout) -> np.ndarray:
    """bool [P + R - 1]: whether each row of the rollout's recording belongs to its log-probabilities.

    An engine that goes on with a response after a weight update records the whole sequence again
    under the new weights. Rows that predict tokens of an earlier version are left out.
    """
    rows = np.ones(rollout.length - 1, dtype=bool)
    first_predicting = len(rollout.prompt_ids) - 1
    for span in rollout.weight_versions[:-1]:
        rows[first_predicting + span.start : first_predicting + span.end] = False
    return rows


def routing_columns(
    samples: Sequence[Recorded], starts: np.ndarray, tokens: int
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Routing [T, L, E] in the recordings' type and its validity bool [T]; None without recordings.

    ``starts``: first row of each sample. Invalid rows are 0. Raises ValueError where recordings
    differ in L, E or type.
    """
    recorded = [
        (start, sample.routed_experts, sample.routed_valid)
        for sample, start in zip(samples, starts, strict=False)
        if sample.routed_experts is not None
    ]
    if not recorded:
        return None, None
    kinds = {(routed.shape[1:], routed.dtype) for _, routed, _ in recorded}
    if len(kinds) != 1:
        raise ValueError(f"recordings of different shapes in one pack: {sorted(map(str, kinds))}")
    ((shape, dtype),) = kinds
    experts = np.zeros((tokens, *shape), dtype=dtype)
    valid = np.zeros(tokens, dtype=bool)
    for start, routed, usable in recorded:
        rows = slice(start, start + len(routed))
        valid[rows] = True if usable is None else usable
        experts[rows] = routed if usable is None else routed * usable[:, None, None]
    return torch.from_numpy(experts), torch.from_numpy(valid)
