"""What each metric of the policy loss means, and what turns its sum into the number that is shown.

``DEFINITIONS[name].denominator`` names another sum; ``means`` divides by it. A metric without one
is shown as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """``meaning`` of the number shown, and the sum that it is divided by (None: shown as it is)."""

    meaning: str
    denominator: str | None = None


TOKENS = "policy/tokens"
POSITIVE = "mask/tokens_positive"
NEGATIVE = "mask/tokens_negative"
MASKED = "mask/masked"
COMPARED = "r3/compared"

DEFINITIONS: dict[str, Definition] = {
    TOKENS: Definition("tokens that train: loss_mask is True"),
    "loss/sum": Definition("mean over trained tokens of -M min(w, C) A", TOKENS),
    "policy/abs_prob_gap": Definition("mean |pi - mu| of the sampled tokens", TOKENS),
    "policy/prob_gap": Definition("mean pi - mu of the sampled tokens", TOKENS),
    "policy/prob_gap_max": Definition("largest pi - mu"),
    "policy/prob_gap_min": Definition("smallest pi - mu"),
    "policy/ratio_max": Definition("largest pi / mu"),
    "policy/kl": Definition("KL(mu || pi), nats: mean of r - 1 - log r", TOKENS),
    "policy/bad_update": Definition("share of tokens with A < 0 and mu - pi >= 0.5", TOKENS),
    "policy/entropy": Definition("mean entropy of pi at the trained tokens, nats", TOKENS),
    "policy/topk_mass": Definition("mean mass of mu on TopK(mu)", TOKENS),
    POSITIVE: Definition("trained tokens with A > 0"),
    NEGATIVE: Definition("trained tokens with A < 0"),
    MASKED: Definition("tokens that the mask blocks"),
    "mask/masked_positive": Definition(
        "share of the tokens with A > 0 that the mask blocks", POSITIVE
    ),
    "mask/masked_negative": Definition(
        "share of the tokens with A < 0 that the mask blocks", NEGATIVE
    ),
    "mask/cap_hit": Definition("share of tokens whose weight the cap cuts", TOKENS),
    "mask/rollout_prob_of_masked": Definition("mean mu of the blocked tokens", MASKED),
    "mask/entropy_of_masked": Definition(
        "mean entropy of pi where a token is blocked, nats", MASKED
    ),
    "mask/ppo_only": Definition(
        "share of tokens that Clip-Higher would block and this mask does not", TOKENS
    ),
    "mask/dppo_only": Definition(
        "share of tokens that this mask blocks and Clip-Higher would not", TOKENS
    ),
    COMPARED: Definition("recorded tokens x layers: their natural routing is compared"),
    "r3/agreement": Definition(
        "share of recorded tokens x layers whose natural routing is the engine's", COMPARED
    ),
}


def means(values: Mapping[str, float]) -> dict[str, float]:
    """``values`` (reduced sums and extremes by name) with each sum divided by its denominator.

    An empty denominator gives nan: no token, no mean. Names without a definition pass unchanged.
    """
    shown = {}
    for name, value in values.items():
        definition = DEFINITIONS.get(name)
        if definition is None or definition.denominator is None:
            shown[name] = value
        else:
            count = values[definition.denominator]
            shown[name] = value / count if count else math.nan
    return shown
