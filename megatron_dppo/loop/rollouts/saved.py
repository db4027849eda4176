"""Rollout batches that an earlier run saved, in place of generating."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.config.schema import RolloutConfig
from megatron_dppo.data.columns import LOSS_COLUMNS
from megatron_dppo.data.outline import Outline
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.data.trajectory_codec import BatchFormatError, load_batch
from megatron_dppo.loop.rollouts.figures import generated_figures, rows_of
from megatron_dppo.loop.rollouts.sources import ProblemFeed, RolloutBatch
from megatron_dppo.loop.rollouts.staleness import staleness_figures
from megatron_dppo.types import Problem


class ReplayedRollouts:
    """The batches in the folder ``rollout.replay_from`` (``rollout.save`` of the run that generated them).

    ``problems``: the training data, which the batches are checked against.
    """

    def __init__(
        self, rollout: RolloutConfig, feed: ProblemFeed, problems: Sequence[Problem]
    ) -> None:
        assert rollout.replay_from is not None
        self._folder = Path(rollout.replay_from)
        self._rollout = rollout
        self._feed = feed
        self._prompts = {p.problem_id: list(p.prompt_ids) for p in problems}

    def collect(self, step: int) -> RolloutBatch:
        """The saved batch of ``step``. Raises BatchFormatError where it is not there or another's."""
        wanted = self._feed.next(self._rollout.prompts_per_step)
        try:
            saved = load_batch(self._folder, step)
        except FileNotFoundError as error:
            raise BatchFormatError(
                f"rollout.replay_from: no batch of step {step} in {self._folder} ({error.filename})"
            ) from error
        batch = [t.without(*LOSS_COLUMNS) for t in saved]  # of the run that saved them
        size = self._rollout.group_size
        if len(batch) != len(wanted) * size:
            raise BatchFormatError(
                f"rollout.replay_from: the batch of step {step} in {self._folder} has {len(batch)} "
                f"responses, expected {len(wanted)} prompts x group_size {size}"
            )
        self._check_prompts(step, batch)
        if not self._rollout.drop_zero_variance_groups:
            # What a filter replaced depends on rewards of responses that are not in the file.
            self._check_order(step, batch, wanted)
        figures = generated_figures(rows_of(batch, size)) | staleness_figures(batch, step)
        outlines = [Outline.of(t) for t in batch]
        return RolloutBatch(outlines, dict(enumerate(batch)), figures, self._feed.position())

    def settle(self, version: int) -> None:
        """Nothing generates."""

    def run_ahead(self) -> None:
        """Nothing is to be generated."""

    def _check_order(
        self, step: int, batch: Sequence[Trajectory], wanted: Sequence[Problem]
    ) -> None:
        found = list(dict.fromkeys(t.problem_id for t in batch))
        expected = list(dict.fromkeys(p.problem_id for p in wanted))
        if found != expected:
            raise BatchFormatError(
                f"rollout.replay_from: the batch of step {step} in {self._folder} answers problems "
                f"{found[:5]}..., expected {expected[:5]}...: it was saved with other data or another seed, "
                "or with rollout.drop_zero_variance_groups"
            )

    def _check_prompts(self, step: int, batch: Sequence[Trajectory]) -> None:
        for trajectory in batch:
            if self._prompts.get(trajectory.problem_id) != trajectory.prompt_ids.tolist():
                raise BatchFormatError(
                    f"rollout.replay_from: problem {trajectory.problem_id} in the batch of step {step} in "
                    f"{self._folder} has another prompt in data.train, or none: it was saved with other data"
                )
