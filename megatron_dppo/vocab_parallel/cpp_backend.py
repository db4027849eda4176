"""The row kernels compiled for this machine's CPU; float32 and bfloat16."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_dppo.system.toolchain import KernelBuildError, build_library

if TYPE_CHECKING:
    from megatron_dppo.vocab_parallel.backends import RowGradient, Rows

log = logging.getLogger(__name__)
SOURCE = Path(__file__).parent / "kernels" / "row_stats.cpp"
DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def load_kernels() -> ctypes.CDLL:
    """The row kernels of this package. Raises as ``build_library``; the failure is not cached."""
    return _declared(build_library(SOURCE))


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


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.row_stats_forward.argtypes = [
        ctypes.c_int, pointer, integer, integer, integer, ctypes.c_double,
        pointer, integer, pointer, pointer, pointer,
    ]  # fmt: skip
    library.row_stats_backward.argtypes = [
        ctypes.c_int, pointer, pointer, integer, integer, integer, ctypes.c_double,
        pointer, pointer, pointer, pointer, pointer,
    ]  # fmt: skip
    library.row_stats_forward.restype = library.row_stats_backward.restype = None
    return library
