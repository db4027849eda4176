"""A rollout batch in figures, from a row for each generated group: what one rank tells the others of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_dppo.loop.rollouts.zero_variance import Selection
from megatron_dppo.metrics import names
from megatron_dppo.types import Rollout


class GroupRow(NamedTuple):
    """Sums over a group's responses. ``flat``: all of them earned the same."""

    responses: int
    reward: float
    flat: bool
    tokens: int
    truncated: int

    @classmethod
    def of(cls, group: Sequence[Rollout]) -> GroupRow:
        """Of one group, once it is verified."""
        return cls(
            responses=len(group),
            reward=sum(r.reward for r in group),
            flat=all(r.reward == group[0].reward for r in group),
            tokens=sum(len(r.response_ids) for r in group),
            truncated=sum(r.truncated for r in group),
        )


def rows_of(rollouts: Sequence[Rollout], group_size: int) -> list[GroupRow]:
    """A row for each group of a batch, groups adjacent."""
    return [GroupRow.of(rollouts[i : i + group_size]) for i in range(0, len(rollouts), group_size)]


def generated_figures(rows: Sequence[GroupRow]) -> dict[str, float]:
    """The policy as all generated groups show it: what is dropped later would bias the curves."""
    responses = sum(row.responses for row in rows)
    return {
        names.REWARD: sum(row.reward for row in rows) / responses,
        names.ZERO_VARIANCE_GROUPS: sum(row.flat for row in rows) / len(rows),
        names.RESPONSE_LENGTH: sum(row.tokens for row in rows) / responses,
        names.TRUNCATED: sum(row.truncated for row in rows) / responses,
        names.TOKENS: sum(row.tokens for row in rows),
    }


def selection_figures(
    rows: Sequence[GroupRow], selection: Selection, rounds: int
) -> dict[str, float]:
    """What the filter did, and the mean reward of what it left to train on."""
    kept = [rows[i] for i in selection.kept]
    return {
        names.REWARD_TRAINED: sum(r.reward for r in kept) / sum(r.responses for r in kept),
        names.GENERATION_ROUNDS: rounds,
        names.GROUPS_GENERATED: len(rows),
        names.GROUPS_DROPPED: selection.dropped,
        names.GROUPS_SURPLUS: selection.surplus,
        names.GROUPS_FILLED: selection.filled,
    }


def speed_figures(tokens: float, seconds: float, waited: float) -> dict[str, float]:
    """``seconds`` that the generation took, of which the trainer ``waited`` for it and did nothing else."""
    figures = {names.GENERATION_SECONDS: seconds, names.GENERATION_WAITED: waited}
    if seconds > 0:
        figures[names.TOKENS_PER_SECOND] = tokens / seconds
        figures[names.GENERATION_OVERLAPPED] = max(0.0, 1 - waited / seconds)
    return figures
