"""Which groups make a rollout batch when zero-variance groups are dropped and replaced (dynamic sampling).

A group whose responses all earn the same has no advantage: it costs a place in the batch and teaches nothing.
Candidates are judged in the order in which the sampler handed out their problems, never in the order in which
they were finished, so neither chance nor the length of responses decides which of them are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.config.schema import RolloutConfig


@dataclass(frozen=True)
class Selection:
    """Positions of the candidates that make the batch, in order, and what became of the others.

    ``filled``: zero-variance groups that were kept because the rounds were used up. ``dropped``: groups without
    spread. ``surplus``: groups with spread that no place was left for.
    """

    kept: tuple[int, ...]
    filled: int = 0
    dropped: int = 0
    surplus: int = 0


@dataclass(frozen=True)
class GroupQuota:
    """``wanted`` groups. Without ``filtering`` one round asks for them and all are kept.

    With it, a round asks for ``oversampling`` times the groups that still lack, ``max_rounds`` times at most.
    """

    wanted: int
    filtering: bool = False
    oversampling: float = 1.0
    max_rounds: int = 1

    @classmethod
    def of(cls, rollout: RolloutConfig) -> GroupQuota:
        """As the run's configuration says."""
        return cls(
            rollout.prompts_per_step,
            rollout.drop_zero_variance_groups,
            rollout.oversampling,
            rollout.max_generation_rounds,
        )

    def ask(self, flat: Sequence[bool], rounds: int) -> int:
        """Groups to generate next, 0 when there is nothing more to do.

        ``flat``: whether each group of the ``rounds`` so far is without spread.
        """
        if not self.filtering:
            return 0 if rounds else self.wanted
        missing = self.wanted - (len(flat) - sum(flat))
        if missing <= 0 or rounds >= self.max_rounds:
            return 0
        return math.ceil(round(missing * self.oversampling, 6))  # 10 x 1.1 is 11, not 12

    def choose(self, flat: Sequence[bool]) -> Selection:
        """The batch, once ``ask`` wants no more. ``flat`` as there, at least ``wanted`` groups."""
        if not self.filtering:
            return Selection(tuple(range(len(flat))))
        useful = [i for i, is_flat in enumerate(flat) if not is_flat]
        useless = [i for i, is_flat in enumerate(flat) if is_flat]
        kept = useful[: self.wanted]
        filling = useless[: self.wanted - len(kept)]
        return Selection(
            kept=tuple(sorted(kept + filling)),
            filled=len(filling),
            dropped=len(useless) - len(filling),
            surplus=len(useful) - len(kept),
        )
