"""The table of metrics. A row has a metric's name in ``metrics.jsonl``, its meaning, its divisor, its normal range, and
the panel of the report that draws it. docs/metrics.md is generated from the table.

A constant's value is a metric's name. Metrics under ``policy/``, ``mask/``, ``loss/``, ``reference/`` and
``distillation/`` are computed with the loss. The loop, the engine session and weight updates add all other metrics.
This module does not import torch or matplotlib.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_dppo.metrics.row import Line, Metric, NormalRange
from megatron_dppo.system import plugins

METRICS: dict[str, Metric] = {}
"""Every row by its name, in the order of this file."""


def _metric(name: str, meaning: str, divisor: str | None = None, **details: Any) -> str:
    """Add a row to the table and return its name. ``details``: further fields of ``Metric``."""
    METRICS[name] = Metric(name, meaning, divisor, **details)
    return name


# Metrics of a step's first mini-batch: measured before the batch changes the weights.
GAP_ON_POLICY = _metric(
    "mismatch/mean_abs_prob_gap",
    "policy/abs_prob_gap of the first mini-batch after a weight update, when trainer and engine have equal weights",
    normal=NormalRange(
        "|pi-mu| at equal weights",
        "Trainer and engine disagree about the same tokens under the same weights: a weight "
        "update that did not arrive whole, another sampling temperature, a different kernel or "
        "precision, or experts routed differently.",
        high=1e-4,
        high_bf16=5e-3,
        high_fp8=2.5e-2,
    ),
    line=Line("gap", "equal weights"),
)
GAP_STALE = _metric(
    "policy/abs_prob_gap_stale",
    "policy/abs_prob_gap of the first mini-batch, if older weights sampled the batch: the gap includes the change of "
    "the weights since",
)

FREQUENCY_EVIDENCE = _metric(
    "mismatch/frequency_evidence",
    "log10 of the evidence, collected since the ranks started, that tokens sampled at equal weights are not drawn from "
    "mu. Of all healthy runs, at most a share of 10^-n ever has a value above n",
)

# Metrics of the tokens that train: sums over micro-batches and ranks.
TRAINED_TOKENS = _metric("policy/tokens", "tokens that train: loss_mask is True")
LOSS = _metric(
    "loss/sum",
    "mean over trained tokens of -M min(w, C) A (mask M, weight w, its cap C, advantage A), and of the loss that "
    "distillation.loss adds",
    TRAINED_TOKENS,
    recorded_as="loss/mean",
)
NEGATIVE_LOG_LIKELIHOOD = _metric(
    "supervised/nll",
    "supervised runs: mean over the step's response tokens of -log pi before the step, nats",
    line=Line("likelihood", "training"),
)
PENALTY = _metric(
    "loss/penalty", "mean over trained tokens of the loss's additive terms", TRAINED_TOKENS
)
GAP = _metric(
    "policy/abs_prob_gap",
    "mean |pi - mu| of the sampled tokens",
    TRAINED_TOKENS,
    normal=NormalRange(
        "mean |pi-mu| of the step",
        "The policy moves far within one rollout batch (stable DPPO runs stay near 0.004): use a "
        "smaller learning rate or fewer optimiser steps per batch. If the gap at equal weights is "
        "equally large, check that gap first. The bound is this project's choice.",
        high=0.02,
        # This bound is the sum of ``high`` and of the bound at equal weights under FP8.
        high_fp8=0.045,
    ),
    line=Line("gap", "whole step", "second"),
)
SIGNED_GAP = _metric("policy/prob_gap", "mean pi - mu of the sampled tokens", TRAINED_TOKENS)
GAP_MAX = _metric("policy/prob_gap_max", "largest pi - mu")
GAP_MIN = _metric("policy/prob_gap_min", "smallest pi - mu")
RATIO_MAX = _metric("policy/ratio_max", "largest pi / mu")
KL = _metric("policy/kl", "KL(mu || pi), nats: mean of r - 1 - log r", TRAINED_TOKENS)
BAD_UPDATE = _metric(
    "policy/bad_update",
    "share of tokens with A < 0 and mu - pi >= 0.5",
    TRAINED_TOKENS,
    share=True,
    normal=NormalRange(
        "bad updates (A<0 and mu-pi >= 0.5)",
        "Tokens of high probability in the engine lost 0.5 of probability or more: a sign of a "
        "coming collapse. Stable runs stay at or below 0.5%.",
        high=0.005,
    ),
)
ENTROPY = _metric(
    "policy/entropy",
    "mean entropy of pi at the trained tokens, nats",
    TRAINED_TOKENS,
    normal=NormalRange(
        "entropy",
        "It should fall slowly. A sudden drop is a collapse: the responses of a group become "
        "equal, and training has no further effect.",
        most_drop=0.4,
    ),
    line=Line("entropy", "policy"),
)
TOPK_MASS = _metric(
    "policy/topk_mass",
    "mean mass of mu on TopK(mu)",
    TRAINED_TOKENS,
    normal=NormalRange(
        "mass of the engine's top K",
        "The top-K ids hold little of the distribution, so the Top-K divergence is coarse: use a "
        "larger K, or a lower temperature.",
        low=0.99,
    ),
)
REFERENCE_KL = _metric(
    "reference/kl",
    "mean KL penalty for leaving the reference policy, before the factor algorithm.reference_kl, nats",
    TRAINED_TOKENS,
)
REFERENCE_CLAMPED = _metric(
    "reference/clamped",
    "share of tokens whose log reference - log pi is above 20; the penalty takes 20 in its place",
    TRAINED_TOKENS,
)
TEACHER_GAP = _metric(
    "distillation/gap",
    "mean over trained tokens of log pi - log p_T of the sampled token, nats: if pi sampled, an estimate of "
    "KL(pi || p_T)",
    TRAINED_TOKENS,
    line=Line("teacher", "log pi - log p_T"),
)
TEACHER_DISTANCE = _metric(
    "distillation/distance",
    "mean over trained tokens of the divergence that distillation.loss names, over TopK(p_T), the sampled token and "
    "one bucket, nats",
    TRAINED_TOKENS,
    line=Line("teacher", "divergence", "second"),
)
TEACHER_MASKED = _metric(
    "distillation/masked",
    "share of trained tokens whose divergence from the teacher the mask leaves out",
    TRAINED_TOKENS,
    share=True,
)
TEACHER_TOPK_MASS = _metric(
    "distillation/topk_mass", "mean mass of p_T on TopK(p_T)", TRAINED_TOKENS
)
TEACHER_SECONDS = _metric(
    "distillation/seconds",
    "seconds since the last batch in which a leader's teachers had responses to score, largest of all leaders",
)
TEACHER_SPEED = _metric(
    "distillation/tokens_per_second",
    "tokens that the teachers have read since the last batch, prompts included, / distillation/seconds",
)
POSITIVE = _metric("mask/tokens_positive", "trained tokens with A > 0")
NEGATIVE = _metric("mask/tokens_negative", "trained tokens with A < 0")
MASKED = _metric("mask/masked", "tokens that the mask blocks")
MASKED_POSITIVE = _metric(
    "mask/masked_positive",
    "share of the tokens with A > 0 that the mask blocks",
    POSITIVE,
    share=True,
    normal=NormalRange(
        "masked tokens of positive advantage",
        "The trust region blocks more than the rare tokens it is meant for (Binary-TV at "
        "0.15-0.2: well under 1%): steps too large, stale rollouts, or a threshold set for "
        "another divergence. Ratio clips block more than DPPO.",
        high=0.01,
    ),
    line=Line("masked", "A > 0", scale=100),
)
MASKED_NEGATIVE = _metric(
    "mask/masked_negative",
    "share of the tokens with A < 0 that the mask blocks",
    NEGATIVE,
    share=True,
    normal=NormalRange(
        "masked tokens of negative advantage",
        "The causes are the same as for positive advantages. The mask also keeps unlikely tokens from being pushed to "
        "probability 0.",
        high=0.01,
    ),
    line=Line("masked", "A < 0", "second", scale=100),
)
CAP_HIT = _metric(
    "mask/cap_hit",
    "share of tokens whose weight the cap cuts",
    TRAINED_TOKENS,
    share=True,
    normal=NormalRange(
        "tokens at the ratio cap",
        "Importance ratios are cut on many tokens: the batch is far off-policy. The bound is this project's choice.",
        high=0.01,
    ),
)
NONFINITE = _metric(
    "mask/nonfinite",
    "tokens that are blocked because a number that the algorithm reads is not finite: pi, mu, pi' (pi at the rollout's "
    "weights), TopK(mu) or the token's weight",
)
ROLLOUT_PROB_OF_MASKED = _metric(
    "mask/rollout_prob_of_masked", "mean mu of the blocked tokens", MASKED
)
ENTROPY_OF_MASKED = _metric(
    "mask/entropy_of_masked", "mean entropy of pi at the blocked tokens, nats", MASKED
)
PPO_ONLY = _metric(
    "mask/ppo_only",
    "share of tokens that Clip-Higher would block and this mask does not",
    TRAINED_TOKENS,
)
DPPO_ONLY = _metric(
    "mask/dppo_only",
    "share of tokens that this mask blocks and Clip-Higher would not",
    TRAINED_TOKENS,
)
COMPARED = _metric(
    "r3/compared",
    "number of comparisons of the trainer's own routing with the engine's: recorded tokens x layers",
)
ROUTING_AGREEMENT = _metric(
    "r3/agreement",
    "share of recorded tokens x layers for which the trainer's own routing (the top-k experts as a set) equals the "
    "engine's",
    COMPARED,
    share=True,
    normal=NormalRange(
        "routing that equals the engine's",
        "The trainer's routers would choose other experts than the engine recorded. Rounding in "
        "bfloat16 moves up to a tenth of the choices; far fewer matches mean recordings of other "
        "layers, tokens or weights. The bound is this project's choice.",
        low=0.75,
    ),
    line=Line("gap", "routing", "third", scale=100, right=True),
)
ROUTING_AGREEMENT_FIRST = _metric(
    "r3/agreement_first", "r3/agreement of the first mini-batch", share=True
)
ROUTING_BYTES_PER_TOKEN = _metric(
    "r3/bytes_per_token", "bytes of recorded routing for each token of prompt and response"
)
ROUTING_UNRECORDED = _metric(
    "r3/unrecorded_share",
    "share of the tokens (the last of each sequence excluded) whose routing is not replayed",
    share=True,
)
ROUTING_DISCARDED = _metric(
    "r3/discarded_tokens",
    "recorded tokens whose routing is not replayed, because other weights sampled the tokens after them",
)

# Metrics of rollouts.
REWARD = _metric(
    "reward/mean", "mean reward of all generated groups", line=Line("reward", "training reward")
)
REWARD_TRAINED = _metric(
    "reward/mean_trained",
    "mean reward of the trained groups only; recorded with rollout.drop_zero_variance_groups",
)
ZERO_VARIANCE_GROUPS = _metric(
    "reward/groups_without_spread",
    "share of the groups whose responses all have the same reward",
    share=True,
    normal=NormalRange(
        "zero-variance groups (all responses with the same reward)",
        "The advantages of these groups are 0, so the groups have no gradient: the problems are too easy "
        "or too hard. If the mean reward is near 1, the policy has learned the problems, and nothing is wrong. "
        "The bound is this project's choice.",
        high=0.8,
    ),
)
CONCENTRATION = _metric(
    "rollout/concentration",
    "similarity of the responses to a prompt: |sum v|^2 / sum |v|^2, v of a response: the sum of e_y - mu over its "
    "tokens (e_y: one-hot). 1: independent responses; the size of the group: all equal. Recorded only with TopK(mu)",
    normal=NormalRange(
        "concentration of a group's responses",
        "The responses to a prompt have become alike: the policy may be giving up other ways to solve it, and accuracy "
        "shows this only late. Compare with the run's first steps: Mesh Learning (arXiv 2610.02835) warns above the "
        "mean of a healthy model plus three standard deviations, 1.013 for long answers. The bound is this project's "
        "choice.",
        high=1.5,
    ),
)
REWARD_TIMEOUTS = _metric(
    "reward/timeouts", "checks that exceeded reward.timeout_s, since the previous record"
)
REWARD_CRASHES = _metric(
    "reward/crashes", "checks whose process died or had no memory left, since the previous record"
)
REWARD_REPLACED = _metric(
    "reward/replaced",
    "responses without a reward (a service was unavailable) that were replaced by other responses, since the previous "
    "record",
)
RESPONSE_LENGTH = _metric(
    "rollout/response_length",
    "mean tokens of a response in all generated groups",
    line=Line("length", "generated"),
)
RESPONSE_LENGTH_TRAINED = _metric(
    "rollout/response_length_trained",
    "mean tokens of a response that is trained on",
    line=Line("length", "trained on", "third"),
)
TRUNCATED = _metric(
    "rollout/truncated",
    "share of the responses that hit the length limit",
    share=True,
    normal=NormalRange(
        "truncated responses",
        "Many responses reach the length limit: raise rollout.max_response_tokens, or check "
        "whether responses have become longer without need. With an environment the limit applies to each turn, and a "
        "turn that is cut off ends its episode (environment.cut_turns); the reason of a sample names the limit that "
        "was reached. The bound is this project's choice.",
        high=0.1,
    ),
    line=Line("length", "truncated (right axis)", "second", scale=100, right=True),
)
DISTINCT = _metric(
    "rollout/distinct",
    "different responses of a group, as a share of its responses",
    share=True,
    line=Line("entropy", "different responses (right axis)", "second", scale=100, right=True),
)
TWINS = _metric(
    "rollout/twins",
    "ordered pairs of equal rare responses in a group (rare: mu of the response is below 0.01), minus the number of "
    "pairs that is expected by chance; divided by the number of all responses",
    normal=NormalRange(
        "equal responses beyond chance",
        "Responses repeat each other more often than their probabilities allow: servers with equal seeds "
        "(--random-seed of engine.urls), or a cache of answers in front of them. The bound is this project's choice.",
        high=0.5,
    ),
)
TOKENS = _metric("rollout/tokens", "response tokens of all generated groups")
GENERATION_SECONDS = _metric(
    "rollout/generation_s",
    "seconds from the first request of the batch to its last response, including the time in which the trainer worked",
)
TOKENS_PER_SECOND = _metric("rollout/tokens_per_second", "rollout/tokens / rollout/generation_s")
GENERATION_WAITED = _metric(
    "rollout/generation_waited_s",
    "the part of rollout/generation_s in which the trainer only waited",
)
GENERATION_OVERLAPPED = _metric(
    "rollout/generation_overlapped",
    "share of rollout/generation_s in which the trainer did other work",
    share=True,
)
STALENESS = _metric(
    "rollout/staleness",
    "mean age of the sampling weights over the batch's response tokens, in weight versions",
    line=Line("age", "mean"),
)
STALENESS_MAX = _metric(
    "rollout/staleness_max",
    "largest age of the sampling weights of a token, in weight versions",
    line=Line("age", "oldest token", "bound"),
)
INTERRUPTED = _metric(
    "rollout/interrupted",
    "share of the batch's responses that a weight update interrupted; they have tokens of several versions",
    share=True,
    line=Line("age", "interrupted (right axis)", "second", scale=100, right=True),
)
RECOMPUTED_TOKENS = _metric(
    "rollout/recomputed_tokens",
    "tokens of prompts and responses that servers computed again, because an update interrupted the responses",
)
REDRAWN = _metric(
    "rollout/redrawn",
    "sampled tokens that were discarded and drawn again, because an update aborted their responses",
)
TIMED_OUT = _metric(
    "rollout/timed_out",
    "responses, or turns of an episode, that took longer than rollout.request_timeout_s and were sampled again; "
    "recorded only above 0",
    normal=NormalRange(
        "responses that timed out",
        "The second sample may be shorter, so a limit that long responses reach favours short responses: raise "
        "rollout.request_timeout_s, or lower rollout.max_response_tokens. The bound is this project's choice.",
        high=0,
    ),
)
TURNS = _metric(
    "rollout/turns",
    "mean turns of the policy in a response; more than 1 with an environment",
    line=Line("turns", "turns of an episode"),
)
BRANCHES = _metric(
    "rollout/branches",
    "mean branches of a response (docs/environments.md#branches); recorded only if a response has several",
)
PREFIX_CACHED = _metric(
    "rollout/prefix_cached",
    "share of the prompt tokens of all calls, including later turns, that servers had in their prefix cache",
    share=True,
    line=Line("prefix", "in the prefix cache", scale=100),
)
ACCEPTED_LENGTH = _metric(
    "rollout/accepted_length",
    "sampled tokens for each verification of drafted tokens by a server; recorded only with speculation",
    line=Line("accepted", "tokens a verification"),
)
ENVIRONMENT_FAULTS = _metric(
    "environment/faults",
    "crashes, time-outs and refused answers of environments since the previous batch",
)
UNREAD_CALLS = _metric(
    "environment/unread_calls",
    "turns since the previous batch with the beginning of a tool call that can't be read, so that it stayed text",
)
TRAINERS_WAITED = _metric(
    "rollout/trainers_waited",
    "share of the time since the previous batch in which trainers waited for responses",
    share=True,
    line=Line("waiting", "trainers", scale=100),
)
SERVERS_IDLE = _metric(
    "rollout/servers_idle",
    "share of the time since the previous batch in which a data-parallel leader (the rank that generates for its "
    "replica) had nothing to generate, mean over the leaders",
    share=True,
    line=Line("waiting", "servers", "second", scale=100),
)
EVALUATION_WAITED = _metric(
    "evaluation/waited_s",
    "seconds that trainers waited for the evaluation of this step, which ran during the training of the next step",
)
GENERATION_ROUNDS = _metric(
    "rollout/generation_rounds", "rounds of generation until the batch was full"
)
GROUPS_GENERATED = _metric("rollout/groups_generated", "groups generated for the batch")
GROUPS_DROPPED = _metric("rollout/groups_dropped", "zero-variance groups that were replaced")
GROUPS_SURPLUS = _metric(
    "rollout/groups_surplus", "groups of non-zero variance beyond the size of the batch"
)
GROUPS_FILLED = _metric(
    "rollout/groups_filled",
    "zero-variance groups that were trained on because the last allowed round had ended",
)

# Metrics of optimiser steps.
GRAD_NORM = _metric(
    "optimizer/grad_norm",
    "norm of the gradient before clipping, mean over the batch's optimiser steps",
    normal=NormalRange(
        "gradient norm",
        "The norm jumped to several times its recent size: a few tokens dominate the batch. Clipping "
        "bounds the effect of one jump; many jumps in a row often precede a collapse. In the first steps, a large norm "
        "comes from the model or the data: rows of zeros in the embedding, another dtype, a wrong checkpoint. The "
        "bound of the first steps is this project's choice.",
        most_rise=5.0,
        high_first=100.0,
    ),
)
GRAD_NORM_MAX = _metric(
    "optimizer/grad_norm_max",
    "largest norm of the gradient before clipping, over the batch's optimiser steps",
)
LEARNING_RATE = _metric("optimizer/lr", "learning rate of the batch's last optimiser step")
OPTIMIZER_STEPS = _metric("optimizer/steps", "optimiser steps of the batch")
IDLE_SHARE = _metric(
    "train/idle_share",
    "share of the ranks' time in which they wait for micro-batches of other ranks, computed from FLOPs; mean over the "
    "batch's optimiser steps",
    share=True,
    line=Line("memory", "ranks idle (right axis)", "second", scale=100, right=True),
)
TFLOPS = _metric(
    "train/tflops_per_rank",
    "floating-point operations of the model per second of training on a rank, 1e12, without recomputed activations",
    line=Line("tflops", "a rank"),
)
MFU = _metric(
    "train/mfu",
    "train/tflops_per_rank divided by the GPU's dense bf16 peak; recorded only on GPUs with a known peak",
    share=True,
    line=Line("mfu", "MFU", scale=100),
)
PEAK_MEMORY = _metric(
    "train/peak_memory_gib",
    "largest memory of a rank, GiB: of its GPU in this step; without a GPU, of the host since the rank's start",
    line=Line("memory", "fullest rank"),
)
CHECKPOINT_BYTES = _metric(
    "checkpoint/bytes", "bytes of the checkpoints that were published since the previous record"
)
CHECKPOINT_WRITTEN = _metric(
    "checkpoint/write_s",
    "seconds from the first byte of a checkpoint to its publication, summed over the checkpoints of checkpoint/bytes",
)

REDERIVED = _metric(
    "replay/rederived",
    "1 if the hash of the weights after the step equals the hash in the batch's seal (docs/replay.md), else 0",
)

# Metrics of weight updates.
WEIGHT_UPDATES = _metric(
    "weights/updates", "weight updates that the engine committed since the previous record"
)
WEIGHT_UPDATES_VERIFIED = _metric(
    "weights/verified", "weight updates among weights/updates that compared every tensor"
)
UPDATE_SECONDS = _metric(
    "weights/update_s",
    "seconds of the newest weight update",
    line=Line("update seconds", "whole update"),
)
UPDATE_STALL = _metric(
    "weights/stall_s",
    "the part of weights/update_s from the engines' pause to the commit",
    line=Line("update seconds", "engines paused", "second"),
)
UPDATE_BOUND = _metric(
    "weights/bound_s",
    "lower bound of an update's seconds: weights/bytes_into_node_bound at the rate weight_sync.network_gb_per_s; "
    "recorded only if this key is set",
    line=Line("update seconds", "network's bound", "bound"),
)
UPDATE_BYTES = _metric("weights/bytes", "bytes that trainer ranks sent to engines")
UPDATE_BYTES_MOVED = _metric(
    "weights/bytes_moved",
    "bytes that trainer ranks exchanged for the update, and that engine ranks received",
    line=Line("update bytes", "moved", scale=1e-9),
)
UPDATE_BYTES_BOUND = _metric(
    "weights/bytes_bound",
    "the fewest bytes that any plan moves into the engines",
    line=Line("update bytes", "bound", "bound", scale=1e-9),
)
UPDATE_BYTES_OVER_BOUND = _metric(
    "weights/bytes_over_bound", "weights/bytes_moved / weights/bytes_bound"
)
UPDATE_BYTES_BETWEEN_NODES = _metric(
    "weights/bytes_between_nodes",
    "the part of weights/bytes_moved that left a node",
    line=Line("update bytes", "between nodes", "second", scale=1e-9),
)
UPDATE_BYTES_BETWEEN_NODES_BOUND = _metric(
    "weights/bytes_between_nodes_bound", "the static lower bound of weights/bytes_between_nodes"
)
UPDATE_BYTES_INTO_NODE_BOUND = _metric(
    "weights/bytes_into_node_bound",
    "lower bound of the bytes that enter a node, for the node that needs the most",
)
UPDATE_BUSIEST_SENDER = _metric(
    "weights/bytes_busiest_sender_over_mean",
    "bytes that the busiest trainer rank sends, over the mean; not recorded with weight_sync.strategy disk",
)
UPDATE_BUSIEST_RECEIVER = _metric(
    "weights/bytes_busiest_receiver_over_mean", "the same of received bytes and engine ranks"
)
UPDATE_SENT_FRACTION = _metric(
    "weights/sent_fraction",
    "bytes of the update, divided by the bytes of all weights; recorded with weight_sync.changes_only",
)
UPDATE_HELD = _metric(
    "weights/held_update",
    "with merged adapters: the part of their change of the frozen model that the engines' weights hold after rounding; "
    "the projection sum(h d) / sum(d^2) of the rounded change h onto the exact change d",
    normal=NormalRange(
        "held part of the adapters' change",
        "The engines' 16-bit weights round most of the adapters' change away, so they sample from a policy near the "
        "frozen model. The part grows with the adapters. Send adapters alone (lora.update=adapters, "
        "where SGLang serves all of them), train in float32, or use a larger learning rate. The "
        "bound is this project's choice.",
        low=0.5,
    ),
)
UPDATE_RATE = _metric("weights/gb_per_s", "GB of weights per second of weights/stall_s")
CANARY_MAX = _metric(
    "weights/canary_max_abs_diff",
    "largest difference of a log-probability between trainer and engine after the update, nats",
)
CANARY_MEAN = _metric(
    "weights/canary_mean_abs_diff",
    "mean difference of a log-probability between trainer and engine after the update, nats",
)
CANARY_DECODE_MAX = _metric(
    "weights/canary_decode_max_abs_diff",
    "largest difference of a log-probability between an engine's decode and its prefill, for four tokens after each "
    "prompt, nats",
)

BY_METRIC: dict[str, NormalRange] = {
    name: row.normal for name, row in METRICS.items() if row.normal is not None
}
"""Metric -> its normal range, for metrics that have one."""
_DIVISORS = (TRAINED_TOKENS, POSITIVE, NEGATIVE, MASKED)
"""Metrics that may divide a user's own metric: they are recorded in every run."""


def add_metrics(names: Iterable[str]) -> None:
    """Add a user's own rows to the table, as ``tracking.metrics`` names them. A row that is there already stays.

    Raises ValueError for an unknown name, an object that is no usable row, and a metric that has another row.
    """
    for name in names:
        row = plugins.import_part("metric", name, plugins.METRICS, (), "package.module:ROW")
        if not isinstance(row, Metric):
            raise ValueError(
                f"metric {name!r}: got a {type(row).__name__}, expected a row: "
                "megatron_dppo.metrics.row.Metric(name, meaning, measure=...)"
            )
        if METRICS.get(row.name) is row:
            continue
        for fault in _own_row_faults(row):
            raise ValueError(f"metric {name!r}: {fault}")
        METRICS[row.name] = row
        if row.normal is not None:
            BY_METRIC[row.name] = row.normal


def _own_row_faults(row: Metric) -> Iterator[str]:
    """Yield what makes a row of a user's module unusable."""
    if not callable(row.measure):
        yield f"measure: got {row.measure!r}, expected a function of token inputs and decisions"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", row.name):
        yield f"name: got {row.name!r}, expected a group and a name, as in policy/halved"
    if row.recorded_as is not None:
        yield f"recorded_as: got {row.recorded_as!r}, expected None: a metric is recorded under its name"
    if row.name in {*METRICS, *(other.recorded_as for other in METRICS.values())}:
        yield f"name: {row.name!r} is the name of another metric"
    if row.divisor is not None and row.divisor not in _DIVISORS:
        yield f"divisor: got {row.divisor!r}, expected one of {', '.join(_DIVISORS)}, or None"


def own_metrics() -> list[Metric]:
    """Return the rows that ``add_metrics`` has added."""
    return [row for row in METRICS.values() if row.measure is not None]


def accuracy(evaluation_set: str) -> str:
    """Return the name of the metric avg@k on a held-out set."""
    return f"evaluation/{evaluation_set}/accuracy"


def accuracy_set(name: str) -> str | None:
    """Invert ``accuracy``: return the held-out set's name; None for another metric."""
    return _held_out_set(name, "accuracy")


def held_out_loss(evaluation_set: str) -> str:
    """Return the name of a supervised run's loss on a held-out set: the mean of -log pi over response tokens, nats."""
    return f"evaluation/{evaluation_set}/nll"


def held_out_loss_set(name: str) -> str | None:
    """Invert ``held_out_loss``: return the held-out set's name; None for another metric."""
    return _held_out_set(name, "nll")


def _held_out_set(name: str, figure: str) -> str | None:
    """Return SET of the name ``evaluation/SET/<figure>``; None for another name."""
    if name.startswith("evaluation/") and name.endswith(f"/{figure}"):
        return name.removeprefix("evaluation/").removesuffix(f"/{figure}")
    return None


def component(component_name: str, evaluation_set: str | None = None) -> str:
    """Return the name of the metric of a reward's component. The value is the component's mean over all generated
    responses that have the component.

    ``evaluation_set``: the held-out set of the responses; None: the training set.
    """
    prefix = "reward"
    if evaluation_set is not None:
        prefix = f"evaluation/{evaluation_set}"
    return f"{prefix}/component/{component_name}"


def file_prompts(file: str) -> str:
    """Return the name of the metric that counts a batch's prompts from ``file``, one of several training files."""
    return f"data/{file}/prompts"


def file_reward(file: str) -> str:
    """Return the name of the metric of the mean reward for prompts from ``file``, one of several training files."""
    return f"data/{file}/reward"


def phase_seconds(phase: str) -> str:
    """Return the name of the metric of a phase's seconds."""
    return f"time/{phase}_s"


def phase_of(name: str) -> str | None:
    """Invert ``phase_seconds``: return the phase; None for another metric."""
    if name.startswith("time/") and name.endswith("_s"):
        return name.removeprefix("time/").removesuffix("_s")
    return None


_INTRODUCTION = """\
# Metrics

Generated by `python -m megatron_dppo.metrics.table > docs/metrics.md` from the table of metrics in that file.

Each step is a line of `metrics.jsonl`, and the same numbers are in TensorBoard. A sum over tokens is divided once, by a
count over all ranks. If the count is 0, or a number is not finite, the record has null. Beside these rows a record has
`time/PHASE_s` (seconds of the step's phases; their sum is the step's time), `evaluation/SET/accuracy` (avg@k, the mean
reward) or, in supervised runs, `evaluation/SET/nll` (mean -log pi), `reward/component/NAME`,
`evaluation/SET/component/NAME`, `data/FILE/prompts` and `data/FILE/reward` of each of several training files, and
`weights/PHASE_s`. The console marks a figure outside its normal range.

| name | meaning | normal, float32 (bfloat16; FP8 weights in the servers) |
|---|---|---|
"""


def linked(text: str) -> str:
    """Replace each ``docs/NAME.md`` in ``text`` by a link, for a page of docs/."""
    return re.sub(r"\bdocs/((?:\w+/)*\w+\.md)(#[\w-]+)?", r"[\1](\1\2)", text)


def reference() -> str:
    """Return docs/metrics.md."""
    rows = []
    for row in METRICS.values():
        name = row.recorded_as or row.name
        meaning = linked(row.meaning).replace("|", "\\|")
        rows.append(f"| `{name}` | {meaning} | {_normal_text(row)} |\n")
    return _INTRODUCTION + "".join(rows)


def _normal_text(row: Metric) -> str:
    """Return a metric's normal range in float32. The ranges in bfloat16 and FP8 follow in brackets if they differ."""
    if row.normal is not None and math.isfinite(row.normal.most_rise):
        text = f"at most {row.normal.most_rise:g} times the mean of the steps before"
        if math.isfinite(row.normal.high_first):
            text += f"; in the first steps at most {row.normal.high_first:g}"
        return text
    if row.normal is not None and row.normal.most_drop:
        return f"at least {row.normal.most_drop:g} of the mean of the steps before"
    float32_range = row.range_text("float32")
    bfloat16_range = row.range_text("bfloat16")
    if row.normal is not None and row.normal.high_fp8 is not None:
        return f"{float32_range} ({bfloat16_range}; {row.range_text('fp8')})"
    if float32_range == bfloat16_range:
        return float32_range
    return f"{float32_range} ({bfloat16_range})"


if __name__ == "__main__":
    print(reference(), end="")
