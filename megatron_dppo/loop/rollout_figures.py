"""Compute the metrics of a rollout batch, and check its staleness.

The metrics come from one row for each generated group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_dppo.data.columns import Form
from megatron_dppo.data.sampling import TrainingFiles
from megatron_dppo.data.trajectory import Trajectory, TrajectoryFacts
from megatron_dppo.loop.group_quota import Selection
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.system.errors import RunError

STALE_ANCHOR = (
    "algorithm.name: %s anchors on log-probabilities that the trainer recomputes. With rollout.max_staleness above 0, "
    "the trainer recomputes them with newer weights than those that sampled; see docs/staleness.md"
)
"""The warning for algorithms whose mask compares pi with the recomputed policy, and so ignores the distance between the
recomputed policy and mu."""


class GroupRow(NamedTuple):
    """The figures of one group: most of them are sums over its responses.

    ``responses``: number of responses. ``reward``: sum of their rewards. ``flat``: whether all responses have the same
    reward, and none has an advantage. ``tokens``: number of sampled tokens. ``truncated``: number of truncated
    responses. ``distinct``: number of different responses. ``twins``: ordered pairs of equal rare responses, minus the
    number expected of independent draws (``twins_beyond_chance``). ``turns`` to ``verify_steps``: sums of these counts.
    ``concentration``: the group's concentration (``concentration_of``).
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
    verify_steps: int = 0
    concentration: float | None = None

    @classmethod
    def of(cls, group: Sequence[TrajectoryFacts]) -> GroupRow:
        """Return the row of ``group``."""
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
            verify_steps=sum(t.verify_steps for t in group),
            concentration=concentration_of(group),
        )

    @classmethod
    def total(cls, rows: Sequence[GroupRow]) -> GroupRow:
        """Return the sum of each field over ``rows``, except ``concentration``. ``flat``: the number of flat groups."""
        rows_without_concentration = [row[:-1] for row in rows]
        sums: list[Any] = [sum(values) for values in zip(*rows_without_concentration, strict=True)]
        return cls(*sums)


def concentration_of(group: Sequence[TrajectoryFacts]) -> float | None:
    """Return |sum_i v_i|^2 / sum_i |v_i|^2 over a group's responses i.

    v_i is the sum of e_y - mu over the tokens y of response i. e_y is the one-hot vector of y, and mu is the
    distribution that y was drawn from. So v_i is the gradient of the response's log-probability with respect to a bias
    of the logits. mu counts as 0 at ids outside of TopK(mu), except at the sampled id. Returns None if a response has
    no TopK(mu), or if all v_i are 0.

    The value is near 1 for independent, different responses, and n for n equal responses.

    The formula is the Mirrored Entanglement Index of Mesh Learning (arXiv 2610.02835), after its authors' code
    (Ayanami-0123/Open-Mesh-Learning, ``_compute_mei_mean_for_batch``). Their code uses pi of the trainer over the whole
    vocabulary. The paper's text was not consulted.
    """
    responses: list[Trajectory] = []
    largest_id = 0
    for t in group:
        # The other kind of TrajectoryFacts, ``Outline``, has no columns.
        if not isinstance(t, Trajectory) or "topk_ids" not in t.columns:
            return None
        responses.append(t)
        largest_topk_id = t.column("topk_ids").max(initial=0)
        largest_id = max(largest_id, int(t.response_ids.max(initial=0)), int(largest_topk_id))
    if not responses:
        return None
    directions = np.stack([_direction(t, largest_id + 1) for t in responses])
    squared_norm_of_sum = np.square(directions.sum(0)).sum()
    sum_of_squared_norms = np.square(directions).sum()
    if sum_of_squared_norms > 0:
        return float(squared_norm_of_sum / sum_of_squared_norms)
    return None


def _direction(t: Trajectory, size: int) -> np.ndarray:
    """Return v_i of the response ``t`` (see ``concentration_of``): float64 [``size``], by token id."""
    topk_ids = t.column("topk_ids")
    sampled_ids = t.response_ids
    # The sum of mu over the tokens of the response: first mu at TopK ids, then mu of sampled tokens outside TopK.
    is_valid = topk_ids >= 0
    topk_probs = np.exp(t.column("topk_log_probs")[is_valid])
    sum_of_mu = np.bincount(topk_ids[is_valid], topk_probs, minlength=size)
    is_sampled_id = (topk_ids == sampled_ids[:, None]) & is_valid
    is_outside_topk = ~is_sampled_id.any(1)
    sampled_probs = np.exp(t.column("rollout_log_probs")[is_outside_topk])
    sum_of_mu += np.bincount(sampled_ids[is_outside_topk], sampled_probs, minlength=size)
    # The sum of e_y counts each sampled id.
    return np.bincount(sampled_ids, minlength=size) - sum_of_mu


RARE_PROB = 0.01
"""A response with a lower probability counts as rare. Likelier responses, e.g. short answers, repeat by chance."""


def twins_beyond_chance(group: Sequence[TrajectoryFacts]) -> float:
    """Return the number of ordered pairs of equal rare responses in a group of n, minus its mean for independent draws.

        value = #{(i, j): i != j, y_i = y_j, y_i is rare} - (n - 1) sum_{rare y_i} mu(y_i)

    A response y is rare if mu(y) < RARE_PROB. The mean of the value is 0 for independent draws from any policy: both
    terms have the mean n (n - 1) sum_{rare y} mu(y)^2. If k rare responses were drawn with the same seed, they are
    equal. They then add k (k - 1) to the first term.
    """
    rare_responses = [t for t in group if t.log_prob < math.log(RARE_PROB)]
    counts = Counter(t.response_digest for t in rare_responses)
    equal_pairs = sum(count * (count - 1) for count in counts.values())
    sum_of_probs = sum(math.exp(t.log_prob) for t in rare_responses)
    return equal_pairs - (len(group) - 1) * sum_of_probs


def rows_of(batch: Sequence[TrajectoryFacts], group_size: int) -> list[GroupRow]:
    """Return one row for each group of a batch, groups adjacent."""
    return [GroupRow.of(batch[i : i + group_size]) for i in range(0, len(batch), group_size)]


def generated_figures(rows: Sequence[GroupRow]) -> dict[str, float]:
    """Return the metrics of all generated groups. They would be biased without the groups that a filter drops."""
    total = GroupRow.total(rows)
    figures = {
        metric_names.REWARD: total.reward / total.responses,
        metric_names.ZERO_VARIANCE_GROUPS: total.flat / len(rows),
        metric_names.RESPONSE_LENGTH: total.tokens / total.responses,
        metric_names.TRUNCATED: total.truncated / total.responses,
        metric_names.DISTINCT: total.distinct / total.responses,
        metric_names.TWINS: total.twins / total.responses,
        metric_names.TOKENS: total.tokens,
        metric_names.TURNS: total.turns / total.responses,
    }
    if total.prompt_tokens:
        # A batch from a file has no prompt tokens.
        figures[metric_names.PREFIX_CACHED] = total.cached_tokens / total.prompt_tokens
    if total.verify_steps:
        figures[metric_names.ACCEPTED_LENGTH] = total.tokens / total.verify_steps
    if total.branches > total.responses:
        figures[metric_names.BRANCHES] = total.branches / total.responses
    return figures | _concentration_figures(rows)


def _concentration_figures(rows: Sequence[GroupRow]) -> dict[str, float]:
    """Return the mean concentration; empty if no group has TopK(mu)."""
    values = [row.concentration for row in rows if row.concentration is not None]
    if values:
        return {metric_names.CONCENTRATION: sum(values) / len(values)}
    return {}


def trained_figures(batch: Sequence[TrajectoryFacts]) -> dict[str, float]:
    """Return the mean length of the responses that are trained on."""
    return {metric_names.RESPONSE_LENGTH_TRAINED: sum(t.sampled for t in batch) / len(batch)}


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
    figures: dict[str, float] = {}
    for name, file_rewards in rewards.items():
        figures[metric_names.file_prompts(name)] = len(file_rewards) / group_size
        if file_rewards:
            figures[metric_names.file_reward(name)] = sum(file_rewards) / len(file_rewards)
    return figures


def selection_figures(
    rows: Sequence[GroupRow], selection: Selection, rounds: int
) -> dict[str, float]:
    """Return the counts of the filter of groups, and the mean reward of the groups that train."""
    trained = GroupRow.total([rows[i] for i in selection.positions])
    return {
        metric_names.REWARD_TRAINED: trained.reward / trained.responses,
        metric_names.GENERATION_ROUNDS: rounds,
        metric_names.GROUPS_GENERATED: len(rows),
        metric_names.GROUPS_DROPPED: selection.dropped,
        metric_names.GROUPS_SURPLUS: selection.surplus,
        metric_names.GROUPS_FILLED: selection.filled,
    }


def speed_figures(tokens: float, seconds: float, waited: float) -> dict[str, float]:
    """Return the speed of generation. ``waited``: the seconds in which the trainer only waited for responses."""
    figures = {metric_names.GENERATION_SECONDS: seconds, metric_names.GENERATION_WAITED: waited}
    if seconds > 0:
        figures[metric_names.TOKENS_PER_SECOND] = tokens / seconds
        figures[metric_names.GENERATION_OVERLAPPED] = max(0.0, 1 - waited / seconds)
    return figures


def routing_figures(
    batch: Sequence[TrajectoryFacts], recorded: Collection[int], form: Form
) -> dict[str, float]:
    """Return the metrics of recorded routing. ``recorded``: positions with a recording, on any rank."""
    recorded_responses = [batch[position] for position in recorded]
    # A recording has no row for the last token of a response.
    rows = sum(t.length - 1 for t in batch)
    recorded_rows = sum(t.length - 1 for t in recorded_responses)
    usable_rows = recorded_rows - sum(t.discarded_rows for t in recorded_responses)
    tokens = sum(t.length for t in recorded_responses)
    return {
        metric_names.ROUTING_BYTES_PER_TOKEN: recorded_rows * form.row_bytes / tokens,
        metric_names.ROUTING_UNRECORDED: 1 - usable_rows / rows,
        metric_names.ROUTING_DISCARDED: recorded_rows - usable_rows,
    }


# --- the staleness of a batch's tokens, and its bound
#
# The batch of step n trains weight version n - 1. The staleness of a token is n - 1 minus the version that sampled it:
# 0 in synchronous runs, up to 1 if generation runs one step ahead. At staleness 0, trainer and servers must agree about
# the probabilities of tokens; ``GapGuard`` checks this.


class StalenessError(RunError):
    """A token of the batch was sampled by a weight version that is newer or staler than the step allows."""


def staleness_figures(batch: Sequence[TrajectoryFacts], step: int) -> dict[str, float]:
    """Return mean and largest staleness of the response tokens of the batch of ``step``, in weight versions."""
    total_staleness = 0
    tokens = 0
    largest_staleness = 0
    for trajectory in batch:
        for span in trajectory.version_spans:
            span_tokens = span.end - span.start
            staleness = step - 1 - span.weight_version
            total_staleness += staleness * span_tokens
            tokens += span_tokens
            largest_staleness = max(largest_staleness, staleness)
    return {
        metric_names.STALENESS: total_staleness / tokens,
        metric_names.STALENESS_MAX: largest_staleness,
    }


def interruption_figures(batch: Sequence[TrajectoryFacts]) -> dict[str, float]:
    """Return the share of responses that a weight update interrupted, and the number of tokens prefilled again.

    After an update in the middle of a turn, the engine prefills all earlier tokens of the response again. The dict is
    empty if no response was interrupted.
    """
    interrupted_responses = [t for t in batch if t.interruptions]
    if not interrupted_responses:
        return {}
    recomputed_tokens = sum(sum(t.interruptions) for t in interrupted_responses)
    return {
        metric_names.INTERRUPTED: len(interrupted_responses) / len(batch),
        metric_names.RECOMPUTED_TOKENS: recomputed_tokens,
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


def with_stale_gap_renamed(
    learned: Mapping[str, float], batch_figures: Mapping[str, float]
) -> dict[str, float]:
    """Return the ``learned`` metrics with the first mini-batch's gap renamed to ``GAP_STALE`` if the batch is stale.

    The gap compares trainer and engine at equal weights only if the batch is not stale. Otherwise it also contains the
    weight updates since the batch was sampled.
    """
    figures = dict(learned)
    if batch_figures[metric_names.STALENESS_MAX] > 0 and metric_names.GAP_ON_POLICY in figures:
        figures[metric_names.GAP_STALE] = figures.pop(metric_names.GAP_ON_POLICY)
    return figures
