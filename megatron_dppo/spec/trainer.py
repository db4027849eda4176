"""The trainer of a run: its layout, and the settings that follow from the layout."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.config.schema import PolicyConfig
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shape import ModelShape


@dataclass(frozen=True)
class TrainerSpec:
    """The trainer of a run.

    Attributes:
        layout: the parallel layout.
        sequence_parallel: whether tensor-parallel ranks divide the tokens between the linear layers.
        distributed_optimizer: whether ranks with the same weights divide the optimizer's state.
        token_multiple: the tokens of a micro-batch are padded to a multiple of this number, so that ranks divide them
            evenly and FP8 kernels take them.
    """

    layout: Layout
    sequence_parallel: bool
    distributed_optimizer: bool
    token_multiple: int

    @classmethod
    def of(cls, config: PolicyConfig, shape: ModelShape) -> TrainerSpec:
        """Return the trainer of a configuration. Raises LayoutError if the sizes do not fit each other."""
        sizes = config.parallel.sizes
        sequence_parallel = sizes.sequence_parallel(shape)
        multiple = config.token_multiple
        if sizes.context > 1:
            # Context parallelism cuts each sequence into 2 C chunks for C ranks.
            multiple *= 2 * sizes.context
        if sequence_parallel:
            multiple *= sizes.tensor
        return cls(Layout.of(sizes), sequence_parallel, config.distributed_optimizer, multiple)
