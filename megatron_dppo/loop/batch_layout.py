"""The micro-batches of this trainer: how trajectories are divided among its ranks, and packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dppo.data import balancing, packing
from megatron_dppo.data.columns import Form
from megatron_dppo.data.trajectory import Trajectory, TrajectoryFacts
from megatron_dppo.model.shape import TOKENS, SequenceCost, forward_flops
from megatron_dppo.trainer.trainer import Trainer


@dataclass(frozen=True)
class BatchLayout:
    """The constraints of this trainer on micro-batches.

    ``count_multiple``: the number of micro-batches is a multiple of this number, because the interleaved schedule takes
    them in rounds of the pipeline's size.
    ``pad_multiple``: a micro-batch is padded to a multiple of this number of tokens, because ranks that share the
    tokens need equally many.
    ``sequence_multiple``: each sequence is padded to a multiple of this number, for the same reason.
    ``input_rows``: selects this rank's rows of columns with a row for each input token; None: all rows.
    ``cost``: returns the cost of a sequence. Ranks and micro-batches get about equal sums of costs.
    """

    dp_rank: int
    dp_size: int
    count_multiple: int = 1
    pad_multiple: int = 1
    sequence_multiple: int = 1
    input_rows: packing.InputRows | None = None
    cost: SequenceCost = TOKENS

    @classmethod
    def of(cls, trainer: Trainer) -> BatchLayout:
        """Return the constraints of ``trainer``."""
        return cls(
            dp_rank=trainer.topology.dp_rank,
            dp_size=trainer.topology.dp_size,
            count_multiple=trainer.micro_batch_multiple,
            pad_multiple=trainer.pad_multiple,
            sequence_multiple=trainer.share.sequence_multiple,
            input_rows=trainer.input_rows,
            cost=forward_flops(trainer.shape),
        )

    def divide(
        self, trajectories: Sequence[TrajectoryFacts], micro_batch_tokens: int
    ) -> tuple[list[list[list[int]]], list[float]]:
        """Return positions in ``trajectories`` by data-parallel rank and micro-batch, and the cost of each trajectory.

        Every rank computes the same division. The branches of a trajectory stay in one micro-batch, because some rules
        need the whole response.
        """
        lengths: list[int] = []
        costs: list[float] = []
        for trajectory in trajectories:
            branches = [
                packing.padded_length(n, self.sequence_multiple) for n in trajectory.branch_lengths
            ]
            lengths.append(sum(branches))
            costs.append(sum(map(self.cost, branches)))
        positions = balancing.plan_mini_batch(
            lengths, costs, self.dp_size, micro_batch_tokens, self.count_multiple
        )
        return positions, costs

    def pack(
        self,
        batch: Mapping[int, Trajectory] | Sequence[Trajectory],
        positions: Sequence[int],
        trains: Sequence[bool] | None = None,
        forms: Mapping[str, Form] | None = None,
    ) -> packing.PackedBatch:
        """Pack the trajectories at ``positions`` of ``batch``. ``trains``, ``forms``: as in ``packing.pack``."""
        return packing.pack(
            [batch[position] for position in positions],
            indices=positions,
            trains=trains,
            pad_multiple=self.pad_multiple,
            sequence_multiple=self.sequence_multiple,
            forms=forms,
            input_rows=self.input_rows,
        )
