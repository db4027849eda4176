"""Errors of the trainer."""

from __future__ import annotations

from typing import Any

from megatron_dppo.system.errors import RunError


class UnusableGpuError(RunError):
    """There is a GPU that torch can't use, so that training would go on on CPUs unasked."""


class NonFiniteLossError(RunError, ValueError):
    """A loss or the gradient norm is not finite; raised on every rank before the optimiser step.

    ``culprits``: for each micro-batch with a non-finite loss {"dp_rank", "micro_batch",
    "sequences"} (positions in the batch); empty if only the gradient norm is not finite.
    """

    def __init__(self, grad_norm: float, culprits: list[dict[str, Any]]) -> None:
        self.grad_norm = grad_norm
        self.culprits = culprits
        places = [
            f"data-parallel rank {c['dp_rank']}, micro-batch {c['micro_batch']}, "
            f"sequences {c['sequences']}"
            for c in culprits
        ]
        where = "; ".join(places) or "every micro-batch's loss is finite"
        super().__init__(
            f"loss or gradient is not finite (gradient norm {grad_norm}), nothing was updated: "
            f"{where}"
        )


class NonFiniteLogProbsError(RunError, ValueError):
    """Log-probabilities asked for without training come from logits that are no distribution: NaN,
    +inf, or nothing but -inf. Raised on every rank alike.
    """
