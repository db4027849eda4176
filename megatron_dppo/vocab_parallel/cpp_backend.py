"""The row kernels compiled for this machine's CPU; float32 and bfloat16."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_dppo.vocab_parallel.cpp_build import KernelBuildError, load_kernels

if TYPE_CHECKING:
    from megatron_dppo.vocab_parallel.backends import RowGradient, Rows

log = logging.getLogger(__name__)
DTYPES = (torch.float32, torch.bfloat16)


class CppBackend:
    """Implements ``backends.Backend``."""

    def unavailable(self, logits: Tensor) -> str | None:
        """Other devices and dtypes, or a machine on which the kernels cannot be built (which is
        logged, once).
        """
        if logits.device.type != "cpu":
            return f"the C++ kernels run on the CPU, and the logits are on {logits.device}"
        if logits.dtype not in DTYPES:
            return f"the C++ kernels take float32 and bfloat16 logits, and these are {logits.dtype}"
        return _build_failure()

    def forward(
        self, logits: Tensor, real: int, scale: float, columns: Tensor, with_entropy: bool
    ) -> Rows:
        """See ``backends.Backend.forward``."""
        lse = torch.empty(len(logits), dtype=torch.float64)
        plogp = torch.empty_like(lse) if with_entropy else None
        columns = columns.contiguous()
        values = torch.empty(columns.shape, dtype=torch.float32)
        load_kernels().row_stats_forward(
            logits.dtype == torch.bfloat16,
            _pointer(logits),
            *logits.shape,
            real,
            scale,
            _pointer(columns),
            columns.shape[1],
            _pointer(lse),
            _pointer(plogp),
            _pointer(values),
        )
        return lse, plogp, values

    def backward(
        self, logits: Tensor, real: int, scale: float, gradient: RowGradient, out: Tensor
    ) -> None:
        """See ``backends.Backend.backward``."""
        # Named, so that a converted copy lives until the kernel has read it.
        targets = gradient.targets.contiguous()
        log_prob = gradient.log_prob.float().contiguous()
        entropy = None if gradient.entropy is None else gradient.entropy.float().contiguous()
        value = None if entropy is None else gradient.entropy_value
        load_kernels().row_stats_backward(
            logits.dtype == torch.bfloat16,
            _pointer(logits),
            _pointer(out),
            *logits.shape,
            real,
            scale,
            _pointer(gradient.lse),
            _pointer(targets),
            _pointer(log_prob),
            _pointer(entropy),
            _pointer(value),
        )


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@functools.cache
def _build_failure() -> str | None:
    try:
        load_kernels()
    except KernelBuildError as error:
        log.warning(
            "policy_stats runs on its slower eager backend: the C++ kernels did not build: %s",
            error,
        )
        return f"the C++ kernels did not build: {error}"
    return None
