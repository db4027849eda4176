"""Recorded expert choices (R3, arXiv 2510.11370): what no router chooses, and which rows hold.

A recording of one trajectory is uint8 or uint16 [S - 1, L, E]: row t holds the experts of token t in
each mixture-of-experts layer. The last token is never fed back to the engine, so it has none. S =
tokens of the trajectory, L = mixture-of-experts layers, E = experts a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

UNWRITTEN_TOKENS = 8
"""Where one expert serves a token, zeros in every layer for more tokens than this were never
written: no router sends so many tokens to expert 0 of every layer."""


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
    if has_repeats(routed):
        raise ValueError("a token is routed to the same expert twice")


def has_repeats(routed: np.ndarray) -> bool:
    """Whether an entry [..., E] has one number twice. Pairs are compared: a sort of so short rows takes
    ten times as long."""
    size = routed.shape[-1]
    choices = np.ascontiguousarray(routed.reshape(-1, size).T)
    return any((choices[i + 1 :] == choices[i]).any() for i in range(size - 1))


def check_stored(routed: np.ndarray) -> None:
    """``check_recording`` as far as that needs no model: any expert that the type can name."""
    check_recording(routed, np.iinfo(routed.dtype).max + 1)


def is_unwritten(routed: np.ndarray) -> bool:
    """Whether a recording with one expert a token holds zeros alone: a buffer nobody wrote to."""
    return routed.shape[-1] == 1 and len(routed) > UNWRITTEN_TOKENS and not routed.any()


def usable_rows(loss_mask: np.ndarray, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """bool [S - 1]: whether each row of a recording belongs to the tokens' log-probabilities.

    An engine that goes on with a response after a weight update records the whole sequence again
    under the new weights. Rows that predict tokens of an earlier version are left out; without the
    column ``weight_version`` all rows hold.
    """
    rows = np.ones(len(loss_mask) - 1, dtype=bool)
    versions = columns.get("weight_version")
    if versions is not None and len(versions):
        rows[np.flatnonzero(loss_mask)[versions != versions[-1]] - 1] = False
    return rows


def discarded_rows(version_spans: Sequence[tuple[int, int, int]]) -> int:
    """Rows that ``usable_rows`` leaves out, from the runs (version, start, end) of the sampled tokens."""
    if not version_spans:
        return 0
    last = version_spans[-1][0]
    return sum(end - start for version, start, end in version_spans if version != last)
