"""What every rank knows of a trajectory: enough to plan a step, none of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from megatron_dppo.data.columns import Column, Rows
from megatron_dppo.data.trajectory import FINISH_REASONS, FinishReason, Trajectory, VersionSpan


@dataclass(frozen=True)
class Outline:
    """The properties of the Trajectory of the same names. ``length``: S; ``sampled``: N."""

    problem_id: int
    sample_index: int
    length: int
    sampled: int
    finish_reason: FinishReason
    reward: float
    advantage: float
    version_spans: tuple[VersionSpan, ...]

    @classmethod
    def of(cls, t: Trajectory) -> Self:
        """Of a trajectory."""
        scores = t.finish_reason, t.reward, t.advantage
        return cls(t.problem_id, t.sample_index, t.length, t.sampled, *scores, t.version_spans)

    def __str__(self) -> str:
        return f"response {self.sample_index} to problem {self.problem_id}"

    @property
    def truncated(self) -> bool:
        """Whether it hit the length limit instead of ending by itself."""
        return self.finish_reason == "length"

    def to_json(self) -> list[Any]:
        """A row for other ranks."""
        reason = FINISH_REASONS.index(self.finish_reason)
        numbers = self.problem_id, self.sample_index, self.length, self.sampled, reason
        return [*numbers, self.reward, self.advantage, self.version_spans]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Self:
        """What ``to_json`` gave."""
        problem, sample, length, sampled, reason, reward, advantage, spans = row
        versions = tuple(VersionSpan(*span) for span in spans)
        finish = FINISH_REASONS[reason]
        return cls(problem, sample, length, sampled, finish, reward, advantage, versions)


Known = Outline | Trajectory
"""What a plan and the figures of a batch are made from."""


def rows_of_column(column: Column, known: Known) -> int:
    """Rows that the column has of a trajectory."""
    return known.sampled if column.rows is Rows.SAMPLED else known.length - 1
