"""Rewards and advantages of scored responses: penalties, returns by turn, and advantages within groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_dppo.algorithms.advantages import group_relative, turn_relative
from megatron_dppo.config.data_schema import Credit
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.rewards.verifier import Score


def with_rewards(
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    group_size: int,
    algorithm: AlgorithmConfig,
    credit: Credit = "trajectory",
    *,
    most_tokens: int,
) -> list[Trajectory]:
    """Return the trajectories with their rewards and advantages.

    Args:
        trajectories: responses; those of one prompt (``group_size`` of them) are adjacent.
        scores: score of each trajectory.
        group_size: responses per prompt.
        algorithm: settings of advantages and length penalties.
        credit: ``trajectory`` gives a response one advantage; otherwise each turn also has its own.
        most_tokens: ``rollout.max_response_tokens``, the scale of the length penalties.
    """
    if not trajectories:
        return []
    zeroes_truncated = algorithm.truncated_responses == "zero-reward"
    # Values are rewards before penalties.
    values: list[float] = []
    rewards: list[float] = []
    for t, score in zip(trajectories, scores, strict=True):
        value = math.fsum([*t.turn_rewards, score.value])
        values.append(value)
        penalty = length_penalties(t.sampled, most_tokens, algorithm)
        if zeroes_truncated and t.truncated:
            # A truncated response earns at most 0: where rewards may be negative, exactly 0 would be a prize.
            value = min(0.0, value)
        rewards.append(value - penalty)
    advantages = group_relative(rewards, group_size, algorithm.advantage).tolist()
    scored: list[Trajectory] = []
    rows = zip(trajectories, rewards, advantages, scores, strict=True)
    for t, reward, advantage, score in rows:
        scored.append(t.scored(reward, advantage, components=score.components, reason=score.reason))
    if credit == "trajectory":
        return scored
    returns: list[list[float]] = []
    for t, score, value in zip(scored, scores, values, strict=True):
        returns.append(returns_by_turn(t, score.value, t.reward - value))
    by_turn = turn_relative(returns, group_size, algorithm.advantage)
    return [t.credited(g, a) for t, g, a in zip(scored, returns, by_turn, strict=True)]


def length_penalties(tokens: int, most_tokens: int, algorithm: AlgorithmConfig) -> float:
    """Return the length penalty of a response of ``tokens`` tokens.

    The penalty is the sum of the soft overlong penalty (DAPO, arXiv 2503.14476, Eq. 13: 0 up to ``overlong_tokens``
    before the limit, then linear, 1 from the limit on) and ``length_penalty`` times ``tokens / most_tokens``.
    """
    overlong = 0.0
    if algorithm.overlong_tokens:
        begins = most_tokens - algorithm.overlong_tokens
        overlong = min(max(tokens - begins, 0) / algorithm.overlong_tokens, 1.0)
    return overlong + algorithm.length_penalty * tokens / most_tokens


def returns_by_turn(t: Trajectory, score: float, lost: float) -> list[float]:
    """Return the return of each turn of ``t``, in the order of its turns: the rewards from that turn on.

    The return of the first turn is the whole reward. The turn that was sampled last also has the ``score`` of the run's
    rewards and ``lost`` (at most 0), the part of the reward that a truncated response lost.
    """
    rewards = t.turn_rewards
    times = t.turn_times or range(len(rewards))
    returns = [t.reward]
    for start_time in times[1:]:
        terms = [score, lost]
        for reward, time in zip(rewards, times, strict=True):
            if time >= start_time:
                terms.append(reward)
        # fsum rounds once, so that equal returns are exactly equal and give no advantage.
        returns.append(math.fsum(terms))
    return returns
