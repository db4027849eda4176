"""Dynamic sampling: which groups make a rollout batch when zero-variance groups are dropped and replaced.

A group whose responses all earn the same reward has no advantage: it takes a place in the batch and teaches nothing.
Candidates are judged in the sampler's order of their problems, never in the order of completion. So chance and the
length of responses do not decide which groups are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.config.schema import RolloutConfig


@dataclass(frozen=True)
class Selection:
    """The candidates that make the batch, and counts of zero-variance and of unused groups.

    Attributes:
        positions: positions of the batch's groups among the candidates, ascending.
        filled: number of zero-variance groups that fill the batch, because no generation round was left.
        dropped: number of zero-variance groups that are not in the batch.
        surplus: number of groups with different rewards that are not in the batch.
    """

    positions: tuple[int, ...]
    filled: int = 0
    dropped: int = 0
    surplus: int = 0


@dataclass(frozen=True)
class GroupQuota:
    """How many groups a batch needs and how many to generate for it.

    Attributes:
        wanted: number of groups in the batch.
        filtering: whether zero-variance groups are dropped. If not, one round generates ``wanted`` groups, and all of
            them are in the batch.
        oversampling: with filtering, a round generates this multiple of the missing groups.
        max_rounds: with filtering, the largest number of rounds.
    """

    wanted: int
    filtering: bool = False
    oversampling: float = 1.0
    max_rounds: int = 1

    @classmethod
    def of(cls, rollout: RolloutConfig) -> GroupQuota:
        """Return the quota of the run's configuration."""
        return cls(
            rollout.prompts_per_step,
            rollout.drop_zero_variance_groups,
            rollout.oversampling,
            rollout.max_generation_rounds,
        )

    def next_count(self, flat: Sequence[bool], rounds: int) -> int:
        """Return how many groups to generate next; 0 if the batch is complete or no round is left.

        ``flat``: for each group that was generated so far, whether it has zero variance. ``rounds``: the number of
        rounds so far.
        """
        if not self.filtering:
            # The first round is the only round.
            return self.wanted if rounds == 0 else 0
        useful_groups = len(flat) - sum(flat)
        missing_groups = self.wanted - useful_groups
        if missing_groups <= 0 or rounds >= self.max_rounds:
            return 0
        # In floating point 10 x 1.1 is slightly above 11. Round first, so that ceil returns 11, not 12.
        return math.ceil(round(missing_groups * self.oversampling, 6))

    def choose(self, flat: Sequence[bool]) -> Selection:
        """Select the batch, once ``next_count`` returns 0.

        ``flat``: for each generated group, whether it has zero variance; at least ``wanted`` groups.
        The batch has the first groups with different rewards. Only if these are too few, zero-variance groups fill it.
        """
        if not self.filtering:
            return Selection(tuple(range(len(flat))))
        useful_positions: list[int] = []
        flat_positions: list[int] = []
        for position, is_flat in enumerate(flat):
            if is_flat:
                flat_positions.append(position)
            else:
                useful_positions.append(position)
        chosen_positions = useful_positions[: self.wanted]
        filling_positions = flat_positions[: self.wanted - len(chosen_positions)]
        return Selection(
            positions=tuple(sorted(chosen_positions + filling_positions)),
            filled=len(filling_positions),
            dropped=len(flat_positions) - len(filling_positions),
            surplus=len(useful_positions) - len(chosen_positions),
        )
