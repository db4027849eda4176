"""Compute the metrics of a rollout batch, and check its limits.

The metrics come from one row for each generated group. The limits are the batch's staleness, the gap between trainer
and servers at equal weights, and the frequency of its tokens.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megatron_dppo.data.columns import Form
from megatron_dppo.data.sampling import TrainingFiles
from megatron_dppo.data.trajectory import Trajectory, TrajectoryFacts
from megatron_dppo.loop.group_quota import Selection
from megatron_dppo.metrics import table as names
from megatron_dppo.system.errors import RunError

log = logging.getLogger(__name__)

STALE_ANCHOR = (
    "algorithm.name: %s anchors on log-probabilities recomputed by the trainer, which with "
    "rollout.max_staleness above 0 are no longer those of the weights that sampled; see docs/staleness.md"
)
"""A warning: the mask of such an algorithm ignores the distance between mu and the recomputed policy."""


class GroupRow(NamedTuple):
    """Sums over a group's responses.

    ``flat``: whether all responses, and all their turns, have the same reward. ``distinct``: number of different
    responses. ``twins``: ordered pairs of equal rare responses, minus the number expected of independent draws
    (``twins_beyond_chance``). ``concentration``: of the group (``concentration_of``).
    """

    responses: int
    reward: float
    flat: bool
    tokens: int
    truncated: int
    distinct: int
    twins: float
    turns: int = 0
    branches: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    concentration: float | None = None

    @classmethod
    def of(cls, group: Sequence[TrajectoryFacts]) -> GroupRow:
        return cls(
            responses=len(group),
            reward=sum(t.reward for t in group),
            flat=all(t.reward == group[0].reward and not t.has_advantage for t in group),
            tokens=sum(t.sampled for t in group),
            truncated=sum(t.truncated for t in group),
            distinct=len({t.response_digest for t in group}),
            twins=twins_beyond_chance(group),
            turns=sum(t.turns for t in group),
            branches=sum(len(t.branch_lengths) for t in group),
            prompt_tokens=sum(t.prompt_tokens for t in group),
            cached_tokens=sum(t.cached_tokens for t in group),
            concentration=concentration_of(group),
        )


def concentration_of(group: Sequence[TrajectoryFacts]) -> float | None:
    """Return |sum_i v_i|^2 / sum_i |v_i|^2 over a group's responses i.

    v_i is the sum of e_y - mu over the tokens y of response i: the gradient of its log-probability with respect to a
    bias of the logits. Tokens that are neither in TopK(mu) nor sampled count as 0. Returns None if a response has no
    TopK(mu), or if all v_i are 0.

    The value is near 1 for independent, different responses, and n for n equal responses.

    The formula is the Mirrored Entanglement Index of Mesh Learning (arXiv 2610.02835), after its authors' code
    (Ayanami-0123/Open-Mesh-Learning, ``_compute_mei_mean_for_batch``), which uses pi of the trainer over the whole
    vocabulary. The paper's text was not consulted.
    """
    responses = [t for t in group if isinstance(t, Trajectory) and "topk_ids" in t.columns]
    if len(responses) < len(group) or not group:
        return None
    size = 1 + max(
        max(t.response_ids.max(initial=0), t.column("topk_ids").max(initial=0)) for t in responses
    )
    directions = np.stack([_direction(t, int(size)) for t in responses])
    norm_of_sum, sum_of_norms = np.square(directions.sum(0)).sum(), np.square(directions).sum()
    return float(norm_of_sum / sum_of_norms) if sum_of_norms > 0 else None


def _direction(t: Trajectory, size: int) -> np.ndarray:
    """Return v of a response, float64 [``size``] (see ``concentration_of``)."""
    ids, sampled_ids = t.column("topk_ids"), t.response_ids
    is_valid = ids >= 0
    expected_counts = np.bincount(
        ids[is_valid], np.exp(t.column("topk_log_probs")[is_valid]), minlength=size
    )
    is_outside_topk = ~((ids == sampled_ids[:, None]) & is_valid).any(1)
    sampled_probs = np.exp(t.column("rollout_log_probs")[is_outside_topk])
    expected_counts += np.bincount(sampled_ids[is_outside_topk], sampled_probs, minlength=size)
    return np.bincount(sampled_ids, minlength=size) - expected_counts


RARE = 0.01
"""Probability below which a response counts as rare. Likelier responses, such as short answers, repeat by chance."""


def twins_beyond_chance(group: Sequence[TrajectoryFacts]) -> float:
    """Count ordered pairs of equal rare responses in a group of n, minus sum_i (n - 1) mu(y_i) over rare responses y_i.

    A response y is rare if mu(y) < RARE.

    For independent draws the mean is 0 under any policy: both terms have the mean n (n - 1) sum_y mu(y)^2. Each rare
    response that was drawn with the seed of another response adds 1 for each response that shares its seed.
    """
    rare_responses = [t for t in group if t.log_prob < math.log(RARE)]
    counts = Counter(t.response_digest for t in rare_responses)
    equal_pairs = sum(count * (count - 1) for count in counts.values())
    return equal_pairs - (len(group) - 1) * sum(math.exp(t.log_prob) for t in rare_responses)


def rows_of(batch: Sequence[TrajectoryFacts], group_size: int) -> list[GroupRow]:
    """Return one row for each group of a batch, groups adjacent."""
    return [GroupRow.of(batch[i : i + group_size]) for i in range(0, len(batch), group_size)]


def generated_figures(rows: Sequence[GroupRow]) -> dict[str, float]:
    """Return the metrics of all generated groups: without the groups that a filter drops, they would be biased."""
    responses = sum(row.responses for row in rows)
    return (
        {
            names.REWARD: sum(row.reward for row in rows) / responses,
            names.ZERO_VARIANCE_GROUPS: sum(row.flat for row in rows) / len(rows),
            names.RESPONSE_LENGTH: sum(row.tokens for row in rows) / responses,
            names.TRUNCATED: sum(row.truncated for row in rows) / responses,
            names.DISTINCT: sum(row.distinct for row in rows) / responses,
            names.TWINS: sum(row.twins for row in rows) / responses,
            names.TOKENS: sum(row.tokens for row in rows),
            names.TURNS: sum(row.turns for row in rows) / responses,
        }
        | _cache_figures(rows)
        | _branch_figures(rows, responses)
        | _concentration_figures(rows)
    )


def _concentration_figures(rows: Sequence[GroupRow]) -> dict[str, float]:
    """Return the mean concentration; empty if no group has TopK(mu)."""
    values = [row.concentration for row in rows if row.concentration is not None]
    return {names.CONCENTRATION: sum(values) / len(values)} if values else {}


def _branch_figures(rows: Sequence[GroupRow], responses: int) -> dict[str, float]:
    """Return the mean number of branches; empty if every response has one branch."""
    branches = sum(row.branches for row in rows)
    return {names.BRANCHES: branches / responses} if branches > responses else {}


def _cache_figures(rows: Sequence[GroupRow]) -> dict[str, float]:
    """Return the cached share of prompt tokens; empty for a batch from a file, which does not hold it."""
    prompt_tokens = sum(row.prompt_tokens for row in rows)
    if not prompt_tokens:
        return {}
    return {names.PREFIX_CACHED: sum(row.cached_tokens for row in rows) / prompt_tokens}


def trained_figures(batch: Sequence[TrajectoryFacts]) -> dict[str, float]:
    """Return the mean length of the responses that are trained on."""
    return {names.RESPONSE_LENGTH_TRAINED: sum(t.sampled for t in batch) / len(batch)}


def file_figures(
    batch: Sequence[TrajectoryFacts], files: TrainingFiles, group_size: int
) -> dict[str, float]:
    """Return the number of trained prompts of each training file and their mean reward; empty if there is one file.

    A file without a prompt in the batch has 0 prompts and no reward.
    """
    if len(files.names) == 1:
        return {}
    rewards: dict[str, list[float]] = {name: [] for name in files.names}
    for trajectory in batch:
        rewards[files.of(trajectory.problem_id)].append(trajectory.reward)
    figures = {names.file_prompts(name): len(of) / group_size for name, of in rewards.items()}
    means = {names.file_reward(name): sum(of) / len(of) for name, of in rewards.items() if of}
    return figures | means


def selection_figures(
    rows: Sequence[GroupRow], selection: Selection, rounds: int
) -> dict[str, float]:
    """Return the counts of the filter of groups, and the mean reward of the groups that train."""
    trained_rows = [rows[i] for i in selection.positions]
    return {
        names.REWARD_TRAINED: sum(r.reward for r in trained_rows)
        / sum(r.responses for r in trained_rows),
        names.GENERATION_ROUNDS: rounds,
        names.GROUPS_GENERATED: len(rows),
        names.GROUPS_DROPPED: selection.dropped,
        names.GROUPS_SURPLUS: selection.surplus,
        names.GROUPS_FILLED: selection.filled,
    }


def speed_figures(tokens: float, seconds: float, waited: float) -> dict[str, float]:
    """Return the speed of generation. ``waited``: the part of ``seconds`` in which the trainer only waited for it."""
    figures = {names.GENERATION_SECONDS: seconds, names.GENERATION_WAITED: waited}
    if seconds > 0:
        figures[names.TOKENS_PER_SECOND] = tokens / seconds
        figures[names.GENERATION_OVERLAPPED] = max(0.0, 1 - waited / seconds)
    return figures


def routing_figures(
    batch: Sequence[TrajectoryFacts], recorded: Collection[int], form: Form
) -> dict[str, float]:
    """Return the metrics of recorded routing. ``recorded``: positions with a recording, on any rank."""
    recorded_responses = [batch[position] for position in recorded]
    rows = sum(t.length - 1 for t in batch)
    recorded_rows = sum(t.length - 1 for t in recorded_responses)
    usable_rows = recorded_rows - sum(t.discarded_rows for t in recorded_responses)
    tokens = sum(t.length for t in recorded_responses)
    return {
        names.ROUTING_BYTES_PER_TOKEN: recorded_rows * form.row_bytes / tokens,
        names.ROUTING_UNRECORDED: 1 - usable_rows / rows,
        names.ROUTING_DISCARDED: recorded_rows - usable_rows,
    }


# --- staleness of a batch's tokens, its bound, and the checks at equal weights
#
# The batch of step n trains weight version n - 1. The staleness of a token is n - 1 minus the version that sampled it:
# 0 in synchronous runs, up to 1 if generation runs one step ahead. At staleness 0, trainer and servers must agree about
# the probabilities of tokens, which ``GapGuard`` checks.


class StalenessError(RunError):
    """A token of the batch was sampled by a weight version that is newer or staler than the step allows."""


def staleness_figures(batch: Sequence[TrajectoryFacts], step: int) -> dict[str, float]:
    """Return mean and largest staleness of the response tokens of the batch of ``step``, in weight versions."""
    spans = [span for t in batch for span in t.version_spans]
    staleness = np.array([step - 1 - span.weight_version for span in spans])
    tokens = np.array([span.end - span.start for span in spans])
    mean = float((staleness * tokens).sum() / tokens.sum())
    return {names.STALENESS: mean, names.STALENESS_MAX: int(staleness.max())}


def interruption_figures(batch: Sequence[TrajectoryFacts]) -> dict[str, float]:
    """Return the share of responses that a weight update interrupted, and the number of recomputed tokens.

    All tokens before a change of version in the middle of a turn are recomputed. Empty if no response was interrupted.
    """
    interrupted_responses = [t for t in batch if t.interruptions]
    if not interrupted_responses:
        return {}
    recomputed_tokens = sum(sum(t.interruptions) for t in interrupted_responses)
    return {
        names.INTERRUPTED: len(interrupted_responses) / len(batch),
        names.RECOMPUTED_TOKENS: recomputed_tokens,
    }


def check_staleness(batch: Sequence[TrajectoryFacts], step: int, max_staleness: int) -> None:
    """Raise StalenessError unless every token's staleness is from 0 to ``max_staleness``."""
    for trajectory in batch:
        for span in trajectory.version_spans:
            if not 0 <= step - 1 - span.weight_version <= max_staleness:
                raise StalenessError(
                    f"step {step} trains weight version {step - 1}, but {trajectory} has tokens {span.start} to "
                    f"{span.end - 1} of version {span.weight_version}, expected {step - 1 - max_staleness} to "
                    f"{step - 1} (rollout.max_staleness: {max_staleness})"
                )


def with_gap_named(
    learned: Mapping[str, float], batch_figures: Mapping[str, float]
) -> dict[str, float]:
    """Return ``learned`` with the first mini-batch's gap renamed to ``GAP_STALE`` if the batch is stale.

    The gap compares trainer and engine at equal weights only if the batch is not stale. Otherwise it also contains the
    weight updates since the batch was sampled.
    """
    figures = dict(learned)
    if batch_figures[names.STALENESS_MAX] > 0 and names.GAP_ON_POLICY in figures:
        figures[names.GAP_STALE] = figures.pop(names.GAP_ON_POLICY)
    return figures
