"""Names of the step's metrics that the console, the report and the summary read.

``policy/`` and ``mask/`` are computed with the loss (``definitions.py``); the loop adds the others.
"""

REWARD = "reward/mean"
GROUPS_WITHOUT_SPREAD = "reward/groups_without_spread"
RESPONSE_LENGTH = "rollout/response_length"
TRUNCATED = "rollout/truncated"
TOKENS_PER_SECOND = "rollout/tokens_per_second"
GAP = "policy/abs_prob_gap"
GAP_ON_POLICY = "policy/abs_prob_gap_on_policy"
"""As ``GAP``, of the first mini-batch after a weight update alone: both sides hold the same
weights.
"""
ENTROPY = "policy/entropy"
TOPK_MASS = "policy/topk_mass"
BAD_UPDATE = "policy/bad_update"
MASKED_POSITIVE = "mask/masked_positive"
MASKED_NEGATIVE = "mask/masked_negative"
CAP_HIT = "mask/cap_hit"
GRAD_NORM = "optimizer/grad_norm"
WEIGHT_UPDATES = "weights/updates"
"""Weight updates that the engine committed since the record before this one."""
WEIGHT_UPDATES_VERIFIED = "weights/verified"
"""Those of them whose every tensor was compared."""

SHARES = frozenset(
    {GROUPS_WITHOUT_SPREAD, TRUNCATED, BAD_UPDATE, MASKED_POSITIVE, MASKED_NEGATIVE, CAP_HIT}
)
"""Between 0 and 1; shown in percent."""


def accuracy(evaluation_set: str) -> str:
    """avg@k on a held-out set."""
    return f"evaluation/{evaluation_set}/accuracy"


def accuracy_set(name: str) -> str | None:
    """The held-out set of a metric that ``accuracy`` names; None for another metric."""
    if name.startswith("evaluation/") and name.endswith("/accuracy"):
        return name.removeprefix("evaluation/").removesuffix("/accuracy")
    return None


def phase_seconds(phase: str) -> str:
    """Seconds of a step spent in a phase."""
    return f"time/{phase}_s"


def phase_of(name: str) -> str | None:
    """The phase of a metric that ``phase_seconds`` names; None for another metric."""
    if name.startswith("time/") and name.endswith("_s"):
        return name.removeprefix("time/").removesuffix("_s")
    return None
