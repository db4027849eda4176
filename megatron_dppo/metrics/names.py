"""Names of the metrics that the console table, the report and the summary read.

``policy/`` and ``mask/`` are computed with the loss (``definitions.py``); ``loop/`` adds the others.
"""

REWARD = "reward/mean"
ZERO_VARIANCE_GROUPS = "reward/groups_without_spread"
"""Share of the groups whose responses all have the same reward."""
RESPONSE_LENGTH = "rollout/response_length"
TRUNCATED = "rollout/truncated"
TOKENS = "rollout/tokens"
"""Response tokens of all generated groups."""
TOKENS_PER_SECOND = "rollout/tokens_per_second"
"""``TOKENS`` / ``GENERATION_SECONDS``."""
GENERATION_SECONDS = "rollout/generation_s"
"""Seconds from the first request of the batch to its last response, also where the trainer worked
at the same time.
"""
GENERATION_WAITED = "rollout/generation_waited_s"
"""The part of ``GENERATION_SECONDS`` in which the trainer only waited, s."""
GENERATION_OVERLAPPED = "rollout/generation_overlapped"
"""Share of ``GENERATION_SECONDS`` in which the trainer did other work."""
STALENESS = "rollout/staleness"
"""Mean age of the sampling weights over the batch's response tokens, in weight versions."""
STALENESS_MAX = "rollout/staleness_max"
"""Largest such age."""
REWARD_TRAINED = "reward/mean_trained"
"""As ``REWARD``, over the trained groups only; recorded where zero-variance groups are dropped."""
GENERATION_ROUNDS = "rollout/generation_rounds"
GROUPS_GENERATED = "rollout/groups_generated"
GROUPS_DROPPED = "rollout/groups_dropped"
"""Zero-variance groups that were replaced."""
GROUPS_SURPLUS = "rollout/groups_surplus"
"""Groups of non-zero variance beyond the size of the batch."""
GROUPS_FILLED = "rollout/groups_filled"
"""Zero-variance groups that were trained on because the last allowed round had ended."""
GAP = "policy/abs_prob_gap"
"""Mean |pi - mu| of the trained tokens."""
GAP_ON_POLICY = "mismatch/mean_abs_prob_gap"
"""As ``GAP``, over the first mini-batch after a weight update: trainer and engine hold the same
weights.
"""
GAP_STALE = "policy/abs_prob_gap_stale"
"""As ``GAP_ON_POLICY``, of a batch sampled by older weights: includes the change of one step."""
ROUTING_AGREEMENT = "r3/agreement"
"""Share of recorded tokens x layers where the trainer's own top-k choice of experts (as a set) is
the engine's.
"""
ROUTING_AGREEMENT_FIRST = "r3/agreement_first"
"""As ``ROUTING_AGREEMENT``, over the first mini-batch: before this batch changed the weights."""
ROUTING_BYTES_PER_TOKEN = "r3/bytes_per_token"
"""Bytes of recorded routing for each token of prompt and response."""
ROUTING_UNRECORDED = "r3/unrecorded_share"
"""Share of the tokens (the last of each sequence excluded) whose routing is not replayed."""
ROUTING_DISCARDED = "r3/discarded_tokens"
"""Recorded tokens that are not replayed: the tokens after them were sampled by other weights."""
ENTROPY = "policy/entropy"
TOPK_MASS = "policy/topk_mass"
BAD_UPDATE = "policy/bad_update"
MASKED_POSITIVE = "mask/masked_positive"
MASKED_NEGATIVE = "mask/masked_negative"
CAP_HIT = "mask/cap_hit"
GRAD_NORM = "optimizer/grad_norm"
IDLE_SHARE = "train/idle_share"
"""Share of the ranks' time that they wait for each other's micro-batches, by their FLOPs; mean over the
batch's optimiser steps.
"""
TFLOPS = "train/tflops_per_rank"
"""Floating-point operations of the model in a rank's second of training, 1e12: forward, and twice as
many backward (as many where only adapters are trained); what is computed again is not counted.
"""
MFU = "train/mfu"
"""``TFLOPS`` over the GPU's dense bf16 peak; not recorded on a CPU and on a GPU of an unknown peak."""
PEAK_MEMORY = "train/peak_memory_gib"
"""The most memory that a rank took, GiB: of its GPU in this step, or of the host since its start."""
CHECKPOINT_BYTES = "checkpoint/bytes"
"""Bytes of the checkpoints that were published since the record before this one."""
CHECKPOINT_WRITTEN = "checkpoint/write_s"
"""Seconds from their first byte to their name; with ``checkpoint.background`` the run goes on meanwhile,
and stands still for ``time/checkpoint_s``.
"""
WEIGHT_UPDATES = "weights/updates"
"""Weight updates that the engine committed since the record before this one."""
WEIGHT_UPDATES_VERIFIED = "weights/verified"
"""The part of ``WEIGHT_UPDATES`` in which every tensor was compared."""
UPDATE_SECONDS = "weights/update_s"
"""Seconds of the newest weight update."""
UPDATE_STALL = "weights/stall_s"
"""The part of ``UPDATE_SECONDS`` from the engines' pause to the commit."""
UPDATE_BOUND = "weights/bound_s"
"""The fewest seconds of an update: the bytes that must enter one node over its network, at the rate that
``weight_sync.network_gb_per_s`` states; 0 where nothing must. Not recorded without that rate.
"""
UPDATE_BYTES_MOVED = "weights/bytes_moved"
"""Bytes that the trainer's ranks exchanged and sent to engines for the update."""
UPDATE_BYTES_BOUND = "weights/bytes_bound"
"""The static lower bound of ``UPDATE_BYTES_MOVED``."""
UPDATE_BYTES_BETWEEN_NODES = "weights/bytes_between_nodes"
"""The part of ``UPDATE_BYTES_MOVED`` that left a node."""

SHARES = frozenset(
    {
        ZERO_VARIANCE_GROUPS,
        TRUNCATED,
        GENERATION_OVERLAPPED,
        ROUTING_AGREEMENT,
        ROUTING_AGREEMENT_FIRST,
        ROUTING_UNRECORDED,
        BAD_UPDATE,
        MASKED_POSITIVE,
        MASKED_NEGATIVE,
        CAP_HIT,
        IDLE_SHARE,
        MFU,
    }
)
"""Metrics between 0 and 1, shown in percent."""


def accuracy(evaluation_set: str) -> str:
    """Name of the metric avg@k on a held-out set."""
    return f"evaluation/{evaluation_set}/accuracy"


def accuracy_set(name: str) -> str | None:
    """Inverse of ``accuracy``: the held-out set's name; None for another metric."""
    if name.startswith("evaluation/") and name.endswith("/accuracy"):
        return name.removeprefix("evaluation/").removesuffix("/accuracy")
    return None


def file_prompts(file: str) -> str:
    """Name of the metric of a batch's prompts from one of several training files."""
    return f"data/{file}/prompts"


def file_reward(file: str) -> str:
    """Name of the metric of the mean reward of the responses to these prompts."""
    return f"data/{file}/reward"


def phase_seconds(phase: str) -> str:
    """Name of the metric of a phase's seconds in a step."""
    return f"time/{phase}_s"


def phase_of(name: str) -> str | None:
    """Inverse of ``phase_seconds``: the phase; None for another metric."""
    if name.startswith("time/") and name.endswith("_s"):
        return name.removeprefix("time/").removesuffix("_s")
    return None
