"""Names of the step's metrics that the console, the report and the summary read.

``policy/`` and ``mask/`` are computed with the loss (``definitions.py``); the loop adds the others.
"""

REWARD = "reward/mean"
GROUPS_WITHOUT_SPREAD = "reward/groups_without_spread"
RESPONSE_LENGTH = "rollout/response_length"
TRUNCATED = "rollout/truncated"
TOKENS = "rollout/tokens"
"""Response tokens of all generated groups."""
TOKENS_PER_SECOND = "rollout/tokens_per_second"
"""Those, by the seconds that their generation took, waited for or not."""
GENERATION_SECONDS = "rollout/generation_s"
"""From the first request of the batch to its last response, whatever the trainer did meanwhile."""
GENERATION_WAITED = "rollout/generation_waited_s"
"""Seconds of it in which the trainer did nothing but wait."""
GENERATION_OVERLAPPED = "rollout/generation_overlapped"
"""Share of it that ran behind other work of the trainer."""
STALENESS = "rollout/staleness"
"""Mean over the batch's response tokens of how many weight versions their sampler was behind."""
STALENESS_MAX = "rollout/staleness_max"
REWARD_TRAINED = "reward/mean_trained"
"""As ``REWARD``, of the groups that were trained on, where groups without spread are dropped."""
GENERATION_ROUNDS = "rollout/generation_rounds"
GROUPS_GENERATED = "rollout/groups_generated"
GROUPS_DROPPED = "rollout/groups_dropped"
"""Groups without spread that were replaced."""
GROUPS_SURPLUS = "rollout/groups_surplus"
"""Groups with spread beyond what the batch takes."""
GROUPS_FILLED = "rollout/groups_filled"
"""Groups without spread that were trained on because the rounds were used up."""
GAP = "policy/abs_prob_gap"
GAP_ON_POLICY = "mismatch/mean_abs_prob_gap"
"""As ``GAP``, of the first mini-batch after a weight update alone: both sides hold the same
weights.
"""
GAP_STALE = "policy/abs_prob_gap_stale"
"""As ``GAP_ON_POLICY``, of a batch that is a weight version behind: what the step in between moved."""
ROUTING_AGREEMENT = "r3/agreement"
"""Share of recorded tokens x layers whose natural routing, as a set, is the engine's."""
ROUTING_AGREEMENT_FIRST = "r3/agreement_first"
"""As ``ROUTING_AGREEMENT``, of the first mini-batch: before this batch moved the weights."""
ROUTING_BYTES_PER_TOKEN = "r3/bytes_per_token"
"""Bytes of recorded routing for each token of prompt and response."""
ROUTING_UNRECORDED = "r3/unrecorded_share"
"""Share of the tokens that are followed by another whose routing is not replayed."""
ROUTING_DISCARDED = "r3/discarded_tokens"
"""Recorded tokens that are not replayed: other weights sampled what follows them."""
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
    {
        GROUPS_WITHOUT_SPREAD,
        TRUNCATED,
        GENERATION_OVERLAPPED,
        ROUTING_AGREEMENT,
        ROUTING_AGREEMENT_FIRST,
        ROUTING_UNRECORDED,
        BAD_UPDATE,
        MASKED_POSITIVE,
        MASKED_NEGATIVE,
        CAP_HIT,
    }
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
