"""A rollout batch in figures, from a row for each generated group: what one rank tells the others of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from megatron_dppo.data.columns import Form
from megatron_dppo.data.mixture import TrainingFiles
from megatron_dppo.data.outline import Known
from megatron_dppo.data.routing import discarded_rows
from megatron_dppo.loop.rollouts.zero_variance import Selection
from megatron_dppo.metrics import names


class GroupRow(NamedTuple):
    """Sums over a group's responses. ``flat``: all of them earned the same."""

    responses: int
    reward: float
    flat: bool
    tokens: int
    truncated: int

    @classmethod
    def of(cls, group: Sequence[Known]) -> GroupRow:
        """Of one group, once it is verified."""
        return cls(
            responses=len(group),
            reward=sum(t.reward for t in group),
            flat=all(t.reward == group[0].reward for t in group),
            tokens=sum(t.sampled for t in group),
            truncated=sum(t.truncated for t in group),
        )


def rows_of(batch: Sequence[Known], group_size: int) -> list[GroupRow]:
    """A row for each group of a batch, groups adjacent."""
    return [GroupRow.of(batch[i : i + group_size]) for i in range(0, len(batch), group_size)]


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


def file_figures(batch: Sequence[Known], files: TrainingFiles, group_size: int) -> dict[str, float]:
    """The trained prompts of each training file and what they earned; nothing where there is one file.

    A file that no prompt of the batch is from has 0 prompts and no reward.
    """
    if len(files.names) == 1:
        return {}
    rewards: dict[str, list[float]] = {name: [] for name in files.names}
    for trajectory in batch:
        rewards[files.of(trajectory.problem_id)].append(trajectory.reward)
    figures = {names.file_prompts(name): len(own) / group_size for name, own in rewards.items()}
    means = {names.file_reward(name): sum(own) / len(own) for name, own in rewards.items() if own}
    return figures | means


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


def routing_figures(
    batch: Sequence[Known], recorded: Collection[int], form: Form
) -> dict[str, float]:
    """The recorded routing of a batch. ``recorded``: positions with a recording, wherever it lies."""
    with_routing = [batch[position] for position in recorded]
    rows = sum(t.length - 1 for t in batch)
    recorded_rows = sum(t.length - 1 for t in with_routing)
    usable = recorded_rows - sum(discarded_rows(t.version_spans) for t in with_routing)
    tokens = sum(t.length for t in with_routing)
    return {
        names.ROUTING_BYTES_PER_TOKEN: recorded_rows * form.row_bytes / tokens,
        names.ROUTING_UNRECORDED: 1 - usable / rows,
        names.ROUTING_DISCARDED: recorded_rows - usable,
    }
