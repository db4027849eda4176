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
        trajectories: responses; the ``group_size`` responses to one prompt are adjacent.
        scores: score of each trajectory.
        group_size: responses per prompt.
        algorithm: settings of advantages and length penalties.
        credit: ``trajectory`` gives a response one advantage; any other value also gives each turn an advantage.
        most_tokens: ``rollout.max_response_tokens``, the scale of the length penalties.
    """
    if not trajectories:
        return []
    zeroes_truncated = algorithm.truncated_responses == "zero-reward"
    rewards_before_penalties: list[float] = []
    rewards: list[float] = []
    for t, score in zip(trajectories, scores, strict=True):
        reward = math.fsum([*t.turn_rewards, score.value])
        rewards_before_penalties.append(reward)
        if zeroes_truncated and t.truncated:
            # Do not set the reward to 0: this would raise a negative reward.
            reward = min(0.0, reward)
        rewards.append(reward - length_penalties(t.sampled, most_tokens, algorithm))
    advantages = group_relative(rewards, group_size, algorithm.advantage).tolist()
    scored: list[Trajectory] = []
    rows = zip(trajectories, rewards, advantages, scores, strict=True)
    for t, reward, advantage, score in rows:
        scored.append(t.scored(reward, advantage, components=score.components, reason=score.reason))
    if credit == "trajectory":
        return scored
    returns: list[list[float]] = []
    for t, score, reward_before in zip(scored, scores, rewards_before_penalties, strict=True):
        penalty = t.reward - reward_before
        returns.append(returns_by_turn(t, score.value, penalty))
    turn_advantages = turn_relative(returns, group_size, algorithm.advantage)
    credited: list[Trajectory] = []
    for t, own_returns, own_advantages in zip(scored, returns, turn_advantages, strict=True):
        credited.append(t.credited(own_returns, own_advantages))
    return credited


def length_penalties(tokens: int, most_tokens: int, algorithm: AlgorithmConfig) -> float:
    """Return the length penalty of a response of ``tokens`` tokens.

    The penalty has two terms. The soft overlong penalty (DAPO, arXiv 2503.14476, Eq. 13) is 0 up to ``overlong_tokens``
    before the limit, then grows linearly, and is 1 from the limit on. The other term is ``length_penalty`` times
    ``tokens / most_tokens``.
    """
    overlong = 0.0
    if algorithm.overlong_tokens:
        first_penalised = most_tokens - algorithm.overlong_tokens
        overlong = min(max(tokens - first_penalised, 0) / algorithm.overlong_tokens, 1.0)
    return overlong + algorithm.length_penalty * tokens / most_tokens


def returns_by_turn(t: Trajectory, score: float, penalty: float) -> list[float]:
    """Return the return of each turn of ``t``, in the order of the tokens.

    The return of a turn is a sum of three terms: the environment's rewards of this turn and of all later turns in the
    order of sampling; the ``score`` of the run's rewards; the ``penalty``. Score and penalty belong to the end of the
    episode, so every turn has them. The return of the first turn is the whole reward.

    Args:
        t: the scored trajectory.
        score: value of the run's rewards for the whole response.
        penalty: at most 0: the reward after penalties (length, truncation) minus the reward before them.
    """
    rewards = t.turn_rewards
    # The place of each turn of ``rewards`` in the order of sampling. The first turn was also sampled first.
    places = t.turn_times or range(len(rewards))
    returns = [t.reward]
    for turn_place in places[1:]:
        terms = [score, penalty]
        for reward, place in zip(rewards, places, strict=True):
            if place >= turn_place:
                terms.append(reward)
        # fsum rounds once, so that equal returns are exactly equal and give no advantage.
        returns.append(math.fsum(terms))
    return returns
