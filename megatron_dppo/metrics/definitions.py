"""Definitions of the policy loss's metrics: meaning, and the denominator that makes a mean.

``DEFINITIONS[name].denominator`` is the name of another sum; ``means`` divides by it. A metric
without a denominator is shown unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """Meaning of a metric as shown, and the name of its denominator (None: shown unchanged).

    ``shown_as``: its name once it was divided; None: the same.
    """

    meaning: str
    denominator: str | None = None
    shown_as: str | None = None


TOKENS = "policy/tokens"
POSITIVE = "mask/tokens_positive"
NEGATIVE = "mask/tokens_negative"
MASKED = "mask/masked"
COMPARED = "r3/compared"

DEFINITIONS: dict[str, Definition] = {
    TOKENS: Definition("tokens that train: loss_mask is True"),
    "loss/sum": Definition("mean over trained tokens of -M min(w, C) A", TOKENS, "loss/mean"),
    "loss/penalty": Definition("mean over trained tokens of the additive terms", TOKENS),
    "policy/abs_prob_gap": Definition("mean |pi - mu| of the sampled tokens", TOKENS),
    "policy/prob_gap": Definition("mean pi - mu of the sampled tokens", TOKENS),
    "policy/prob_gap_max": Definition("largest pi - mu"),
    "policy/prob_gap_min": Definition("smallest pi - mu"),
    "policy/ratio_max": Definition("largest pi / mu"),
    "policy/kl": Definition("KL(mu || pi), nats: mean of r - 1 - log r", TOKENS),
    "policy/bad_update": Definition("share of tokens with A < 0 and mu - pi >= 0.5", TOKENS),
    "policy/entropy": Definition("mean entropy of pi at the trained tokens, nats", TOKENS),
    "policy/topk_mass": Definition("mean mass of mu on TopK(mu)", TOKENS),
    "reference/kl": Definition(
        "mean of the penalty on leaving the reference, before its factor, nats", TOKENS
    ),
    "reference/clamped": Definition(
        "share of tokens whose log reference - log pi is above 20 and counts as 20", TOKENS
    ),
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
    "mask/nonfinite": Definition(
        "tokens that are blocked because mu, pi', TopK(mu) or their weight is not finite"
    ),
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
    """Divide each sum by its denominator.

    Args:
        values: metric name -> sum, maximum or minimum, reduced over all ranks.

    Returns:
        metric name -> number to show; nan where the denominator is 0. Names without a definition
        pass unchanged.
    """
    shown = {}
    for name, value in values.items():
        definition = DEFINITIONS.get(name)
        if definition is None or definition.denominator is None:
            shown[name] = value
        else:
            count = values[definition.denominator]
            shown[definition.shown_as or name] = value / count if count else math.nan
    return shown
