"""Make the samples of a run: a few responses of each training step and evaluation, with reward and reason."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from megatron_dppo.config.data_schema import RewardConfig
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.trajectory import Problem, Trajectory, TrajectoryFacts
from megatron_dppo.loop.credit import length_penalties
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.loop.rollout_sources import RolloutBatch
from megatron_dppo.metrics.samples import TRAINING, Sample, shortened
from megatron_dppo.rewards import Reward, find_reward
from megatron_dppo.trainer.collectives import all_gather_json

KEPT = 4
"""Number of responses kept of a training step, and of an evaluation on one set. The response with the most masked
tokens is kept in addition."""


_DIGITS = 9
"""Decimal places of a reward that is computed back from its sum with penalties."""


def _is_right(response: TrajectoryFacts | Sample, mean_reward: float) -> bool:
    return response.reward > mean_reward


def _is_wrong(response: TrajectoryFacts | Sample, mean_reward: float) -> bool:
    return response.reward <= mean_reward and not response.truncated


def _is_truncated(response: TrajectoryFacts | Sample, mean_reward: float) -> bool:
    return response.truncated


_KINDS = (_is_right, _is_wrong, _is_truncated)
"""``sample_positions`` selects one response of each kind."""


def sample_positions(responses: Sequence[TrajectoryFacts | Sample], step: int) -> list[int]:
    """Return the positions of at most ``KEPT`` responses.

    The first positions select one response of each kind, if the batch has the kind. The kinds are: a reward above the
    mean; a reward of at most the mean, not truncated; truncated. Responses in random order follow. The step's
    number seeds the order, so that every rank selects the same responses, and each step shows other problems.
    """
    order = list(range(len(responses)))
    random.Random(step).shuffle(order)
    mean = sum(t.reward for t in responses) / max(1, len(responses))
    positions: list[int] = []
    for is_of_kind in _KINDS:
        positions += [p for p in order if is_of_kind(responses[p], mean)][:1]
    # A response can be of two kinds: drop its second position.
    return list(dict.fromkeys([*positions, *order]))[:KEPT]


class SampleMaker:
    """Makes the samples of a run from its trajectories.

    Args:
        reward: the run's rewards.
        data: the run's problems and tokenizer.
        zeroes_truncated: whether truncated responses earn at most 0.
        is_only_reward: whether no other reward and no environment adds to the first reward.
        length_penalty: returns the length penalty of a training response from its number of tokens.
    """

    def __init__(
        self,
        reward: RewardConfig,
        data: RunData,
        *,
        zeroes_truncated: bool,
        is_only_reward: bool = True,
        length_penalty: Callable[[int], float] = lambda tokens: 0.0,
    ) -> None:
        self._length_penalty = length_penalty
        self._zeroes_truncated = zeroes_truncated
        self._is_only_reward = is_only_reward
        self._rewards = reward
        self._data = data
        self._problems = {p.problem_id: p for p in data.train.problems}
        self._batch_samples: dict[int, Sample] = {}
        """Samples that ``take`` made of the current batch, by position in the batch."""

    @classmethod
    def of(cls, config: TrainConfig, data: RunData) -> Self:
        """Return the maker for a run or an evaluation of ``config``."""
        return cls(
            config.reward,
            data,
            zeroes_truncated=config.algorithm.truncated_responses == "zero-reward",
            is_only_reward=config.environment.name is None and not config.reward.further,
            length_penalty=partial(
                length_penalties,
                most_tokens=config.rollout.max_response_tokens,
                algorithm=config.algorithm,
            ),
        )

    def take(self, step: int, batch: RolloutBatch) -> None:
        """Make the samples of a batch before the learner removes its trajectories.

        Responses that do not train are delivered to no rank, so they are not available later.
        """
        self._batch_samples = {}
        for position in sample_positions(batch.outlines, step):
            if position in batch.trajectories:
                sample = self._training_sample(step, batch.trajectories[position])
                self._batch_samples[position] = sample

    def of_step(
        self, step: int, trajectories: Mapping[int, Trajectory], masked: Mapping[int, int]
    ) -> list[Sample]:
        """Return the samples of ``take``, and a sample of the response with the most masked tokens. Collective.

        ``trajectories``: this rank's trajectories, by position in the batch. ``masked``: the number of masked tokens of
        each response whose loss this rank computed, by position.
        """
        # Each rank proposes its response with the most masked tokens.
        own_candidate: list[tuple[int, dict[str, Any]]] = []
        position = max(masked, key=masked.__getitem__, default=None)
        if position is not None and position in trajectories:
            candidate = self._training_sample(step, trajectories[position])
            own_candidate.append((position, candidate.to_json()))
        # JSON has no integer keys: send pairs.
        own_lines = [(p, sample.to_json()) for p, sample in self._batch_samples.items()]
        lines: dict[int, dict[str, Any]] = {}
        candidates: dict[int, dict[str, Any]] = {}
        counts: dict[int, int] = {}
        shares = all_gather_json([own_lines, own_candidate, list(masked.items())])
        for rank_lines, rank_candidate, rank_counts in shares:
            lines.update(rank_lines)
            candidates.update(rank_candidate)
            counts.update(rank_counts)
        if candidates:
            most_masked = max(candidates, key=counts.__getitem__)
            lines.setdefault(most_masked, candidates[most_masked])
        samples: list[Sample] = []
        for position, line in lines.items():
            samples.append(Sample.from_json({**line, "masked": counts.get(position, 0)}))
        return samples

    def of_evaluation(
        self, step: int, name: str, problems: Sequence[Problem], scored: Sequence[Trajectory]
    ) -> list[Sample]:
        """Return samples of a held-out set's responses on this rank. ``problems``: the problem of each response."""
        samples: list[Sample] = []
        for i in sample_positions(scored, step):
            samples.append(self._sample(step, name, problems[i], scored[i], None))
        return samples

    def of_response(self, name: str, problem: Problem, scored: Trajectory) -> Sample:
        """Return the sample of one response to a problem of the held-out set ``name``, before any step."""
        return self._sample(0, name, problem, scored, None)

    def _training_sample(self, step: int, t: Trajectory) -> Sample:
        return self._sample(step, TRAINING, self._problems[t.problem_id], t, t.advantage)

    def _sample(
        self, step: int, name: str, problem: Problem, t: Trajectory, advantage: float | None
    ) -> Sample:
        # All tokens after the prompt: in an episode, the text between the turns too.
        response = self._data.text_of(t.token_ids[len(t.prompt_ids) :])
        if t.truncated and self._zeroes_truncated:
            limit = t.ended_by or "cut off at the length limit"
            reason = f"{limit}, which earns at most 0 (algorithm.truncated_responses)"
        else:
            penalty = self._length_penalty(t.sampled) if name == TRAINING else 0.0
            reason = t.reason or self._reason(t, response, problem, penalty)
            if t.ended_by:
                reason += f"; {t.ended_by}"
        if len(t.branch_lengths) > 1:
            reason += f"; {len(t.branch_lengths)} branches, end to end"
        if len(t.turn_rewards) > 1:
            rewards_text = ", ".join(f"{reward:g}" for reward in t.turn_rewards)
            reason += f"; by turn: {rewards_text}"
        if "advantages" in t.columns and advantage is not None:
            advantages_text = ", ".join(f"{a:+.3g}" for a in t.advantages_by_turn)
            reason += f"; A by turn: {advantages_text}"
        return Sample(
            step=step,
            set=name,
            problem=t.problem_id,
            sample=t.sample_index,
            prompt=shortened(self._data.text_of(t.prompt_ids)),
            response=shortened(response),
            answer=self._reward_of(problem)[1].final(problem.answer),
            reward=t.reward,
            reason=reason,
            truncated=t.truncated,
            tokens=t.sampled,
            advantage=advantage,
            components=dict(t.components),
        )

    def _reward_of(self, problem: Problem) -> tuple[str, Reward]:
        """The first reward that scores the problem, with its name."""
        name, *_ = self._rewards.names_for(problem.metadata)
        return name, find_reward(self._rewards.terms[name].name)

    def _reason(self, t: Trajectory, response: str, problem: Problem, penalty: float) -> str:
        """Return the first reward's reason for its value.

        ``penalty``: the length penalty in the trajectory's reward.
        If the environment gave the reward, or if the first reward's value is unknown, only name the environment or the
        reward. The value may be unknown because a response from a file has only the sum of all rewards.
        """
        if not t.wants_score:
            return "by the environment"
        name, reward = self._reward_of(problem)
        value = t.components.get(name)
        # Only responses that this run scored have turn rewards. With several rewards, such a response has the value as
        # a component. So turn rewards without the component mean that there is no other reward.
        if value is None and (t.turn_rewards or self._is_only_reward):
            terms = [t.reward, penalty, *(-reward for reward in t.turn_rewards)]
            # The reward was rounded when the penalty was subtracted. Without this rounding, 0 might become 1e-17.
            value = round(math.fsum(terms), _DIGITS)
        if value is None:
            return f"by {name}"
        answer = reward.final(problem.answer)
        read_text = self._data.reader.text_of(t).answer
        return reward.reason(read_text, answer, value)
