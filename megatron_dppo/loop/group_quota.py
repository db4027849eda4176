"""Dynamic sampling: which groups make a rollout batch when zero-variance groups are dropped and replaced.

A group whose responses all earn the same reward has no advantage: it takes a place in the batch and teaches nothing.
Candidates are judged in the order in which the sampler handed out their problems, never in the order in which they
were finished, so neither chance nor the length of responses decides which groups are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.config.schema import RolloutConfig


@dataclass(frozen=True)
class Selection:
    """The candidates that make the batch, and counts of the other candidates.

    Attributes:
        positions: positions of the batch's groups among the candidates, ascending.
        filled: zero-variance groups in the batch, because no generation round was left.
        dropped: zero-variance groups that are not in the batch.
        surplus: groups with different rewards that are not in the batch.
    """

    positions: tuple[int, ...]
    filled: int = 0
    dropped: int = 0
    surplus: int = 0


@dataclass(frozen=True)
class GroupQuota:
    """How many groups a batch needs and how many to generate for it.

    Attributes:
        wanted: groups in the batch.
        filtering: whether zero-variance groups are dropped. Without it, one round generates ``wanted`` groups and
            the batch has all of them.
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

    def ask(self, flat: Sequence[bool], rounds: int) -> int:
        """Return how many groups to generate next; 0 when the batch is complete or no round is left.

        ``flat``: whether each group of the ``rounds`` so far has zero variance.
        """
        if not self.filtering:
            return 0 if rounds else self.wanted
        missing_groups = self.wanted - (len(flat) - sum(flat))
        if missing_groups <= 0 or rounds >= self.max_rounds:
            return 0
        # Round before ceil, so that 10 x 1.1 is 11, not 12.
        return math.ceil(round(missing_groups * self.oversampling, 6))

    def choose(self, flat: Sequence[bool]) -> Selection:
        """Select the batch, once ``ask`` returns 0. ``flat`` as in ``ask``, with at least ``wanted`` groups."""
        if not self.filtering:
            return Selection(tuple(range(len(flat))))
        useful: list[int] = []
        useless: list[int] = []
        for position, is_flat in enumerate(flat):
            (useless if is_flat else useful).append(position)
        chosen_positions = useful[: self.wanted]
        filling_positions = useless[: self.wanted - len(chosen_positions)]
        return Selection(
            positions=tuple(sorted(chosen_positions + filling_positions)),
            filled=len(filling_positions),
            dropped=len(useless) - len(filling_positions),
            surplus=len(useful) - len(chosen_positions),
        )
