"""Which responses of a step are kept as text, and how they get to rank 0."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.trajectory import Trajectory, TrajectoryFacts
from megatron_dppo.loop.rollouts.sources import RolloutBatch
from megatron_dppo.loop.run_data import RunData
from megatron_dppo.metrics.samples import TRAINING, Sample, shortened
from megatron_dppo.rewards import find_reward
from megatron_dppo.trainer.collectives import all_gather_json
from megatron_dppo.types import Problem

KEPT = 4
"""Responses of a training step, and of an evaluation on one set; the most masked one comes on top."""
_KINDS: tuple[Callable[[TrajectoryFacts | Sample], bool], ...] = (
    lambda t: t.reward > 0,
    lambda t: t.reward == 0 and not t.truncated,
    lambda t: t.truncated,
)


def chosen(responses: Sequence[TrajectoryFacts | Sample], step: int) -> list[int]:
    """Positions of at most ``KEPT`` responses: one that earned something, one that ended by itself and
    earned nothing, and a truncated one, where there are any; the others as they come.

    Drawn by the step's number: every rank chooses alike, and each step shows other problems.
    """
    order = list(range(len(responses)))
    random.Random(step).shuffle(order)
    firsts = [next((p for p in order if kind(responses[p])), None) for kind in _KINDS]
    return list(dict.fromkeys([*(p for p in firsts if p is not None), *order]))[:KEPT]


class SampleMaker:
    """Makes the samples of a run from its trajectories. ``data``: its problems and tokenizer."""

    def __init__(self, config: TrainConfig, data: RunData) -> None:
        self._zeroed = config.algorithm.truncated_responses == "zero-reward"
        self._reward = find_reward(config.reward.name)
        self._data = data
        self._problems = {p.problem_id: p for p in data.train.problems}
        self._taken: dict[int, Sample] = {}

    def take(self, step: int, batch: RolloutBatch) -> None:
        """Choose those of a batch before a learner empties it: what trains nothing goes nowhere else."""
        positions = [p for p in chosen(batch.outlines, step) if p in batch.trajectories]
        self._taken = {p: self._trained(step, batch.trajectories[p]) for p in positions}

    def of_step(
        self, step: int, trajectories: Mapping[int, Trajectory], masked: Mapping[int, int]
    ) -> list[Sample]:
        """Those of the batch that was taken, and of its responses the one with the most masked tokens. Collective.

        ``trajectories``: this rank's, by position in the batch. ``masked``: tokens of each response that the loss
        masked, as far as this rank computed it.
        """
        most = max(masked, key=lambda p: masked[p], default=None)
        further = {}
        if most is not None and most in trajectories:
            further = {most: self._trained(step, trajectories[most])}
        rows = [[[p, s.to_json()] for p, s in part.items()] for part in (self._taken, further)]
        shares = all_gather_json([*rows, list(masked.items())])
        counts = {p: count for *_, pairs in shares for p, count in pairs}
        candidates = {p: line for _, lines, _ in shares for p, line in lines}
        lines = {p: line for taken, *_ in shares for p, line in taken}
        if candidates:
            most = max(candidates, key=lambda p: counts[p])
            lines.setdefault(most, candidates[most])
        return [Sample.from_json(line | {"masked": counts.get(p, 0)}) for p, line in lines.items()]

    def of_evaluation(
        self, step: int, name: str, problems: Sequence[Problem], scored: Sequence[Trajectory]
    ) -> list[Sample]:
        """Those of a held-out set's responses on this rank. ``problems``: of the same responses."""
        return [
            self._sample(step, name, problems[i], scored[i], None) for i in chosen(scored, step)
        ]

    def _trained(self, step: int, t: Trajectory) -> Sample:
        return self._sample(step, TRAINING, self._problems[t.problem_id], t, t.advantage)

    def _sample(
        self, step: int, name: str, problem: Problem, t: Trajectory, advantage: float | None
    ) -> Sample:
        response = self._data.text_of(t.response_ids)
        if t.truncated and self._zeroed:
            reason = "cut off at the length limit, which earns 0 (algorithm.truncated_responses)"
        else:
            reason = self._reward.reason(t.text or response, problem.answer, t.reward)
        return Sample(
            step=step,
            set=name,
            problem=t.problem_id,
            sample=t.sample_index,
            prompt=shortened(self._data.text_of(t.prompt_ids)),
            response=shortened(response),
            answer=problem.answer,
            reward=t.reward,
            reason=reason,
            truncated=t.truncated,
            tokens=t.sampled,
            advantage=advantage,
        )
