"""The row kernels compiled: in C++ for this machine's CPU, in Triton for GPUs; and which backend runs."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
from pathlib import Path

import torch
from torch import Tensor

from megatron_dppo.system.compute import KernelBuildError, build_library
from megatron_dppo.vocab_parallel.row_kernels import (
    Backend,
    EagerBackend,
    RowGradient,
    Rows,
    gather_owned,
)

log = logging.getLogger(__name__)
SOURCE = Path(__file__).parent / "row_stats.cpp"
CPP_DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def load_kernels() -> ctypes.CDLL:
    """The row kernels of this package. Raises as ``build_library``; the failure is not cached."""
    return _declared(build_library(SOURCE))


class CppBackend:
    """See ``row_kernels.Backend``."""

    def unavailable(self, logits: Tensor) -> str | None:
        """Other devices and dtypes, or a machine on which the kernels cannot be built (which is
        logged, once).
        """
        if logits.device.type != "cpu":
            return f"the C++ kernels run on the CPU, and the logits are on {logits.device}"
        if logits.dtype not in CPP_DTYPES:
            return f"the C++ kernels take float32 and bfloat16 logits, and these are {logits.dtype}"
        return _build_failure()

    def forward(
        self, logits: Tensor, real: int, scale: float, columns: Tensor, with_entropy: bool
    ) -> Rows:
        """See ``row_kernels.Backend``."""
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
        """See ``row_kernels.Backend``."""
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


# Triton's interpreter, in which the tests run these, cuts float32 off to bfloat16 where compiled code rounds to nearest
# (``cvt.rn.bf16``): its bfloat16 gradients err by more than twice what a GPU's do.

BLOCK = 4096
WARPS = 8
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonBackend:
    """See ``row_kernels.Backend``."""

    def unavailable(self, logits: Tensor) -> str | None:
        """No Triton, float64 logits, or a CPU without the interpreter."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if logits.dtype not in TRITON_DTYPES:
            return f"the Triton kernels take float32, bfloat16 and float16, not {logits.dtype}"
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if logits.device.type != "cuda" and not interpreted:
            return f"the logits are on {logits.device}, and TRITON_INTERPRET=1 is not set"
        return None

    def forward(
        self, logits: Tensor, real: int, scale: float, columns: Tensor, with_entropy: bool
    ) -> Rows:
        """See ``row_kernels.Backend``."""
        from megatron_dppo.vocab_parallel.row_stats_triton import forward_kernel

        rows = len(logits)
        top = logits.new_empty(rows, dtype=torch.float32)
        total = logits.new_empty(rows, dtype=torch.float64)
        weighted = torch.empty_like(total) if with_entropy else total
        if rows:
            left_out = columns[:, 0] if columns.shape[1] else columns.new_full((rows,), -1)
            forward_kernel[(rows,)](
                logits,
                left_out.contiguous(),
                top,
                total,
                weighted,
                logits.shape[1],
                real,
                scale,
                BLOCK=BLOCK,
                ENTROPY=with_entropy,
                num_warps=WARPS,
            )
        log_total = total.log()
        lse = top.double() * scale + log_total
        plogp = None
        if with_entropy:
            plogp = torch.where(total > 0, weighted / total - log_total, 0.0)
        return lse, plogp, gather_owned(logits, columns)

    def backward(
        self, logits: Tensor, real: int, scale: float, gradient: RowGradient, out: Tensor
    ) -> None:
        """See ``row_kernels.Backend``."""
        from megatron_dppo.vocab_parallel.row_stats_triton import backward_kernel

        rows, columns = logits.shape
        if not rows:
            return
        # The shift in units of the logits, and what its rounding took away.
        shift = (gradient.lse / scale).float()
        rest = (shift.double() * scale - gradient.lse).float()
        g = (gradient.log_prob * scale).float().contiguous()
        h, constant = g, -g
        if gradient.entropy is not None:
            assert gradient.entropy_value is not None
            h = (gradient.entropy * scale).float()
            constant = -(g + h * gradient.entropy_value.float())
        backward_kernel[(rows, (columns + BLOCK - 1) // BLOCK)](
            logits,
            out,
            gradient.targets.contiguous(),
            shift,
            rest,
            g,
            constant.contiguous(),
            (-h).contiguous(),
            columns,
            real,
            scale,
            BLOCK=BLOCK,
            ENTROPY=gradient.entropy is not None,
            num_warps=WARPS,
        )


BACKENDS: dict[str, Backend] = {
    "eager": EagerBackend(),
    "cpp": CppBackend(),
    "triton": TritonBackend(),
}
PREFERENCE = {"cpu": ("cpp", "eager"), "cuda": ("triton", "eager")}
"""By device: the first that is available runs; eager always is."""


def choose(logits: Tensor, name: str | None = None) -> Backend:
    """The backend ``name``, or the first available one for the device of ``logits``.

    Raises ValueError for an unknown name, or where the named one cannot take ``logits``.
    """
    if name is not None:
        if name not in BACKENDS:
            raise ValueError(f"unknown policy_stats backend {name!r}; known: {', '.join(BACKENDS)}")
        reason = BACKENDS[name].unavailable(logits)
        if reason is not None:
            raise ValueError(f"policy_stats backend {name!r} cannot run: {reason}")
        return BACKENDS[name]
    for candidate in PREFERENCE.get(logits.device.type, ("eager",)):
        if BACKENDS[candidate].unavailable(logits) is None:
            return BACKENDS[candidate]
    return BACKENDS["eager"]
