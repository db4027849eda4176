"""What a rollout batch is, and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_dppo.config.schema import RolloutConfig
from megatron_dppo.data.batch_file import BatchFormatError, SavedBatch, batch_path
from megatron_dppo.data.columns import LOSS_COLUMNS
from megatron_dppo.data.sampling import Sampler
from megatron_dppo.data.trajectory import Outline, Trajectory
from megatron_dppo.loop.rollouts.exchange import announce, own_positions
from megatron_dppo.loop.rollouts.figures import generated_figures, rows_of, staleness_figures
from megatron_dppo.trainer.collectives import on_every_rank
from megatron_dppo.trainer.topology import Topology
from megatron_dppo.types import Problem


@dataclass(frozen=True)
class RolloutBatch:
    """What a step trains on.

    ``outlines``: of all trajectories, groups adjacent, the same on every rank. ``trajectories``: by position, those
    that this rank holds as a leader; a learner takes them out as it delivers them.
    ``figures``: metrics of the batch and of how it came about.
    ``sampler``: the data's position right after this batch, where a run resumed after this step goes on.
    """

    outlines: list[Outline]
    trajectories: dict[int, Trajectory]
    figures: dict[str, float]
    sampler: dict[str, Any]


class RolloutSource(Protocol):
    """Where rollout batches come from. Every method is collective."""

    def collect(self, step: int) -> RolloutBatch:
        """The batch of ``step``; steps are asked for in order."""

    def settle(self, version: int) -> None:
        """Wait until nothing generates any more; the trainer holds weights ``version`` by now."""

    def run_ahead(self) -> None:
        """Have the next batch generated in the background, where the configuration allows it."""


class ReplayedRollouts:
    """The batches in the folder ``rollout.replay_from`` (``rollout.save`` of the run that generated them).

    Each leader reads the trajectories that it would have generated, and no others. The batches are checked against
    the training ``problems`` that ``sampler`` draws.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        topology: Topology,
        problems: Sequence[Problem],
        sampler: Sampler,
    ) -> None:
        assert rollout.replay_from is not None
        self._folder = Path(rollout.replay_from)
        self._rollout = rollout
        self._topology = topology
        self._problems = problems
        self._sampler = sampler
        self._prompts = {p.problem_id: list(p.prompt_ids) for p in problems}

    def collect(self, step: int) -> RolloutBatch:
        """The saved batch of ``step``. Raises BatchFormatError, on all ranks, where it is not there or another's."""
        drawn, size = self._sampler.next(self._rollout.prompts_per_step), self._rollout.group_size
        wanted = [self._problems[i] for i in drawn]
        trajectories = on_every_rank(lambda: self._read(step, wanted), error=BatchFormatError)
        outlines, by_position = announce(trajectories, self._topology, size, range(len(wanted)))
        figures = generated_figures(rows_of(outlines, size)) | staleness_figures(outlines, step)
        return RolloutBatch(outlines, by_position, figures, self._sampler.state_dict())

    def _read(self, step: int, wanted: Sequence[Problem]) -> list[Trajectory]:
        """This rank's trajectories, of the checked batch."""
        try:
            saved = SavedBatch(self._folder, step)
        except FileNotFoundError as error:
            raise BatchFormatError(
                f"rollout.replay_from: no batch of step {step} in {self._folder} "
                f"({batch_path(self._folder, step)})"
            ) from error
        size = self._rollout.group_size
        if len(saved.problems) != len(wanted) * size:
            raise BatchFormatError(
                f"rollout.replay_from: the batch of step {step} in {self._folder} has {len(saved.problems)} "
                f"responses, expected {len(wanted)} prompts x group_size {size}"
            )
        if not self._rollout.drop_zero_variance_groups:
            # What a filter replaced depends on rewards of responses that are not in the file.
            self._check_order(step, saved.problems, wanted)
        groups = own_positions(range(len(wanted)), self._topology)
        positions = (p * size + sample for p in groups for sample in range(size))
        # What the loss saw is of the run that saved them.
        trajectories = saved.read(positions, without=LOSS_COLUMNS)
        self._check_prompts(step, trajectories)
        return trajectories

    def settle(self, version: int) -> None:
        """Nothing generates."""

    def run_ahead(self) -> None:
        """Nothing is to be generated."""

    def _check_order(self, step: int, problems: Sequence[int], wanted: Sequence[Problem]) -> None:
        answered = list(dict.fromkeys(problems))
        expected = list(dict.fromkeys(p.problem_id for p in wanted))
        if answered != expected:
            raise BatchFormatError(
                f"rollout.replay_from: the batch of step {step} in {self._folder} answers problems "
                f"{answered[:5]}..., expected {expected[:5]}...: it was saved with other data or another seed, "
                "or with rollout.drop_zero_variance_groups"
            )

    def _check_prompts(self, step: int, batch: Sequence[Trajectory]) -> None:
        for trajectory in batch:
            if self._prompts.get(trajectory.problem_id) != trajectory.prompt_ids.tolist():
                raise BatchFormatError(
                    f"rollout.replay_from: problem {trajectory.problem_id} in the batch of step {step} in "
                    f"{self._folder} has another prompt in data.train, or none: it was saved with other data"
                )
