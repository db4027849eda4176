"""The two row kernels of the statistics, forward and backward, and the choice of their backend.

Backends are in plain torch, in C++ for this machine's CPU, and in Triton for GPUs.

Legend: T = tokens, C = columns of the local shard, N = requested columns of each row; p, z and H: probability, logit
and entropy; a: the sampled token.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_dppo.system.kernels import KernelBuildError, build_library


@dataclass(frozen=True)
class RowGradient:
    """The inputs of the backward pass for each row.

    ``lse`` float64 [T]: log-sum-exp over the whole vocabulary at the temperature. ``targets`` int64 [T]: the sampled
    token's column in this shard, -1 if another rank owns the token. ``grad_log_prob`` [T]: dL/d log pi(a).
    ``grad_entropy`` and ``entropy`` [T]: dL/dH and H, or None.
    """

    lse: Tensor
    targets: Tensor
    grad_log_prob: Tensor
    grad_entropy: Tensor | None
    entropy: Tensor | None


RowStats = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""The result of the forward kernel: lse, sum p log p, sum p^2, and z at the requested columns.

lse float64 [T] is log sum exp(scale z) over this shard's columns, without each row's first requested column. The two
sums, float64 [T] or None, are over the same columns as lse, and the p of these columns sum to 1. z is float32 (float64
for float64 logits) [T, N], and 0 at column -1.
"""


class Backend(Protocol):
    """Row kernels over one shard ``logits`` [T, C]. The first ``real`` columns are tokens, the rest is padding."""

    def unsupported_reason(self, logits: Tensor) -> str | None:
        """Return why this backend does not support ``logits``; None if it does."""

    def forward(
        self,
        logits: Tensor,
        real: int,
        scale: float,
        columns: Tensor,
        with_entropy: bool,
        with_squares: bool = False,
    ) -> RowStats:
        """Compute ``RowStats`` of this shard at ``columns`` int64 [T, N]; -1 for an id that another rank owns.

        The sums leave out the first requested column, the sampled token's. So the probability of all other tokens has
        full relative precision, even if the sampled token's probability is nearly 1.
        """

    def backward(
        self, logits: Tensor, real: int, scale: float, gradient: RowGradient, out: Tensor
    ) -> None:
        """Write dL/dz into ``out`` [T, C]; ``out`` may be ``logits``. Rows without a gradient get 0 for any logits.

        dL/dz_j = scale [ g (1[j = a] - p_j) - h p_j (log p_j + H) ], g = dL/d log pi(a), h = dL/dH; 0 in padding.
        """


BLOCK_BYTES = 4 << 20
"""Temporary memory of one block of rows; small enough to stay in a CPU's cache."""


class EagerBackend:
    """The reference backend, in plain torch. It computes a block of rows at a time and runs on every device."""

    def unsupported_reason(self, logits: Tensor) -> str | None:
        """Return None: this backend is always available."""
        return None

    def forward(
        self,
        logits: Tensor,
        real: int,
        scale: float,
        columns: Tensor,
        with_entropy: bool,
        with_squares: bool = False,
    ) -> RowStats:
        """See ``Backend``."""
        lse = logits.new_empty(len(logits), dtype=torch.float64)
        plogp = torch.empty_like(lse) if with_entropy else None
        squares = torch.empty_like(lse) if with_squares else None
        left_out = columns[:, :1]
        for rows in _blocks(logits):
            z = logits[rows, :real].to(_compute_dtype(logits), copy=True)
            if real:
                index = left_out[rows]
                # Every row scatters one value: a row whose index is -1 rewrites column 0 unchanged.
                value = torch.where(index < 0, z[:, :1], -math.inf)
                z.scatter_(1, index.clamp(min=0), value)
            top = z.amax(-1) if real else z.new_full((len(z),), -math.inf)
            # A row that has only -inf has no maximum to subtract.
            top = torch.where(top == -math.inf, 0.0, top)
            z.sub_(top[:, None]).mul_(scale)
            weights = z.exp()
            # p = weights / total, and log p = z - log(total).
            total = weights.sum(-1, dtype=torch.float64)
            lse[rows] = total.log() + top.double() * scale
            if squares is not None:
                squared = weights.square().sum(-1, dtype=torch.float64)
                squares[rows] = torch.where(total > 0, squared / total.square(), 0.0)
            if plogp is not None:
                # The clamp makes the product of z = -inf and a weight of 0 zero, not NaN.
                weighted = weights.mul_(z.clamp_(min=-1e4)).sum(-1, dtype=torch.float64)
                plogp[rows] = torch.where(total > 0, weighted / total - total.log(), 0.0)
        return lse, plogp, squares, gather_owned(logits, columns)

    def backward(
        self, logits: Tensor, real: int, scale: float, gradient: RowGradient, out: Tensor
    ) -> None:
        """See ``Backend``."""
        has_gradient = gradient.grad_log_prob != 0
        if gradient.grad_entropy is not None:
            has_gradient = has_gradient | (gradient.grad_entropy != 0)
        out[:, real:] = 0
        # A shard that has only padding owns no target.
        if not real:
            return
        for rows in _blocks(logits):
            # Skip a block without gradients on a CPU only. On a GPU the test would cost a device sync.
            on_cpu = logits.device.type == "cpu"
            if on_cpu and not has_gradient[rows].any():
                out[rows, :real] = 0
                continue
            result = self._dlogits(logits[rows, :real], scale, gradient, rows)
            out[rows, :real] = torch.where(has_gradient[rows, None], result, 0.0).to(out.dtype)

    def _dlogits(self, logits: Tensor, scale: float, gradient: RowGradient, rows: slice) -> Tensor:
        """Return dL/dz of ``rows``, whose logits are ``logits`` [rows, real]."""
        dtype = _compute_dtype(logits)
        # Compute scale z - lse in two steps, so that a large lse loses no precision. First subtract ``shift``, which is
        # lse / scale rounded, from the unscaled logits. Then add ``rest``, which corrects the rounding error.
        shift = (gradient.lse[rows] / scale).to(dtype)
        rest = (shift.double() * scale - gradient.lse[rows]).to(dtype)
        log_p = logits.to(dtype, copy=True).sub_(shift[:, None]).mul_(scale).add_(rest[:, None])
        p = log_p.exp()
        g = gradient.grad_log_prob[rows].to(dtype)
        factor = -g[:, None]
        if gradient.grad_entropy is not None:
            assert gradient.entropy is not None
            h = gradient.grad_entropy[rows].to(dtype)
            entropy = gradient.entropy[rows].to(dtype)
            # The product of p = 0 and log p = -inf must be 0, not NaN.
            log_p = torch.where(p > 0, log_p, 0.0)
            factor = factor - h[:, None] * (log_p + entropy[:, None])
        result = p.mul_(factor)
        targets = gradient.targets[rows]
        target_gradient = torch.where(targets >= 0, g, 0.0)
        result.scatter_add_(1, targets.clamp(min=0)[:, None], target_gradient[:, None])
        return result.mul_(scale)


def gather_owned(logits: Tensor, columns: Tensor) -> Tensor:
    """Return ``logits`` [T, C] at ``columns`` int64 [T, N], 0 where the column is -1."""
    values = logits.gather(1, columns.clamp(min=0)).to(_compute_dtype(logits))
    return values.masked_fill_(columns < 0, 0.0)


def _compute_dtype(logits: Tensor) -> torch.dtype:
    if logits.dtype == torch.float64:
        return torch.float64
    return torch.float32


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Divide the rows into blocks. On a CPU a block has BLOCK_BYTES in float32, on other devices a sixteenth of the
    rows.
    """
    rows, columns = logits.shape
    step = rows // 16
    if logits.device.type == "cpu":
        step = BLOCK_BYTES // (4 * max(columns, 1))
    step = max(1, step)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


log = logging.getLogger(__name__)
SOURCE = Path(__file__).parent / "row_stats.cpp"
CPP_DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def load_kernels() -> ctypes.CDLL:
    """Return the library of the C++ row kernels. Raises as ``build_library``; the failure is not cached."""
    library = build_library(SOURCE)
    _declare_arguments(library)
    return library


class CppBackend:
    """The backend of CPUs, in C++; see ``Backend``."""

    def unsupported_reason(self, logits: Tensor) -> str | None:
        """See ``Backend``. Reasons: another device or dtype, or kernels that do not build here (logged once)."""
        if logits.device.type != "cpu":
            return f"the C++ kernels run on the CPU, and the logits are on {logits.device}"
        if logits.dtype not in CPP_DTYPES:
            return f"the C++ kernels take float32 and bfloat16 logits, and these are {logits.dtype}"
        return _build_failure()

    def forward(
        self,
        logits: Tensor,
        real: int,
        scale: float,
        columns: Tensor,
        with_entropy: bool,
        with_squares: bool = False,
    ) -> RowStats:
        """See ``Backend``."""
        lse = torch.empty(len(logits), dtype=torch.float64)
        plogp = torch.empty_like(lse) if with_entropy else None
        squares = torch.empty_like(lse) if with_squares else None
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
            _pointer(squares),
            _pointer(values),
        )
        return lse, plogp, squares, values

    def backward(
        self, logits: Tensor, real: int, scale: float, gradient: RowGradient, out: Tensor
    ) -> None:
        """See ``Backend``."""
        # Keep references to converted copies until the kernel has read them.
        targets = gradient.targets.contiguous()
        grad_log_prob = gradient.grad_log_prob.float().contiguous()
        grad_entropy = None
        entropy = None
        if gradient.grad_entropy is not None:
            grad_entropy = gradient.grad_entropy.float().contiguous()
            entropy = gradient.entropy
        load_kernels().row_stats_backward(
            logits.dtype == torch.bfloat16,
            _pointer(logits),
            _pointer(out),
            *logits.shape,
            real,
            scale,
            _pointer(gradient.lse),
            _pointer(targets),
            _pointer(grad_log_prob),
            _pointer(grad_entropy),
            _pointer(entropy),
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


def _declare_arguments(library: ctypes.CDLL) -> None:
    """Declare the types of the kernels' arguments, in the order of their definitions in row_stats.cpp."""
    pointer = ctypes.c_void_p
    integer = ctypes.c_int64
    library.row_stats_forward.argtypes = [
        ctypes.c_int,
        pointer,
        integer,
        integer,
        integer,
        ctypes.c_double,
        pointer,
        integer,
        pointer,
        pointer,
        pointer,
        pointer,
    ]
    library.row_stats_backward.argtypes = [
        ctypes.c_int,
        pointer,
        pointer,
        integer,
        integer,
        integer,
        ctypes.c_double,
        pointer,
        pointer,
        pointer,
        pointer,
        pointer,
    ]
    library.row_stats_forward.restype = None
    library.row_stats_backward.restype = None


LANES = 512
"""Lanes of a row in the forward kernel. 512 is fastest on an H100 (docs/evidence/gpu_first_day.md)."""
VECTOR_BYTES = 16
"""Bytes of a row that a lane reads at a time."""
BLOCK = 4096
"""Columns of a program of the backward kernel."""
WARPS = 8
LOG2_E = math.log2(math.e)
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonBackend:
    """The backend of GPUs, in Triton; see ``Backend``.

    The tests run the kernels in Triton's interpreter. The interpreter truncates float32 to bfloat16, and compiled code
    rounds to nearest (``cvt.rn.bf16``). So bfloat16 gradients have errors in the interpreter that are more than twice
    the errors on a GPU.
    """

    def unsupported_reason(self, logits: Tensor) -> str | None:
        """See ``Backend``. Reasons: no Triton, float64 logits, or a CPU without the interpreter."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if logits.dtype not in TRITON_DTYPES:
            return f"the Triton kernels take float32, bfloat16 and float16, not {logits.dtype}"
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if logits.device.type != "cuda" and not is_interpreted:
            return f"the logits are on {logits.device}, and TRITON_INTERPRET=1 is not set"
        return None

    def forward(
        self,
        logits: Tensor,
        real: int,
        scale: float,
        columns: Tensor,
        with_entropy: bool,
        with_squares: bool = False,
    ) -> RowStats:
        """See ``Backend``."""
        from megatron_dppo.vocab_parallel.row_stats_triton import forward_kernel

        rows = len(logits)
        top = logits.new_empty(rows, dtype=torch.float32)
        total = logits.new_empty(rows, dtype=torch.float64)
        # The kernel writes only requested sums, so any tensor can stand for a sum that is not requested.
        weighted = total
        if with_entropy:
            weighted = torch.empty_like(total)
        squared = total
        if with_squares:
            squared = torch.empty_like(total)
        if rows:
            forward_kernel[(rows,)](
                logits,
                columns[:, 0].contiguous(),
                top,
                total,
                weighted,
                squared,
                logits.shape[1],
                real,
                scale * LOG2_E,
                LANES=LANES,
                VECTOR=VECTOR_BYTES // logits.itemsize,
                ENTROPY=with_entropy,
                SQUARES=with_squares,
                num_warps=WARPS,
            )
        log_total = total.log()
        lse = top.double() * scale + log_total
        plogp = None
        if with_entropy:
            # The kernel's e and d give p = e / total and log p = scale d - log total; ``weighted`` is the sum of e d.
            plogp = torch.where(total > 0, scale * weighted / total - log_total, 0.0)
        squares = None
        if with_squares:
            squares = torch.where(total > 0, squared / total.square(), 0.0)
        return lse, plogp, squares, gather_owned(logits, columns)

    def backward(
        self, logits: Tensor, real: int, scale: float, gradient: RowGradient, out: Tensor
    ) -> None:
        """See ``Backend``."""
        from megatron_dppo.vocab_parallel.row_stats_triton import backward_kernel

        rows, columns = logits.shape
        if not rows:
            return
        # Subtract lse in two steps, as ``EagerBackend`` does.
        shift = (gradient.lse / scale).float()
        rest = (shift.double() * scale - gradient.lse).float()
        # The kernel computes dL/dz = p (a + b log p), plus g at the sampled token. a = -(g + h H) and b = -h; g and h
        # contain the factor ``scale``. Without entropy the kernel does not read b, so any tensor can stand for b.
        g = (gradient.grad_log_prob * scale).float().contiguous()
        a = -g
        b = a
        if gradient.grad_entropy is not None:
            assert gradient.entropy is not None
            h = (gradient.grad_entropy * scale).float()
            a = -(g + h * gradient.entropy.float())
            b = -h
        backward_kernel[(rows, (columns + BLOCK - 1) // BLOCK)](
            logits,
            out,
            gradient.targets.contiguous(),
            shift,
            rest,
            g,
            a.contiguous(),
            b.contiguous(),
            columns,
            real,
            scale,
            BLOCK=BLOCK,
            ENTROPY=gradient.grad_entropy is not None,
            num_warps=WARPS,
        )


BACKENDS: dict[str, Backend] = {
    "eager": EagerBackend(),
    "cpp": CppBackend(),
    "triton": TritonBackend(),
}
PREFERENCE = {"cpu": ("cpp", "eager"), "cuda": ("triton", "eager")}
"""Backends of each device, in the order of preference; eager is always available."""


def choose(logits: Tensor, name: str | None = None) -> Backend:
    """Return the backend ``name``. None: the first available backend for the device of ``logits``.

    Raises ValueError for an unknown name, or if the backend ``name`` does not support ``logits``.
    """
    if name is not None:
        if name not in BACKENDS:
            raise ValueError(f"unknown policy_stats backend {name!r}; known: {', '.join(BACKENDS)}")
        reason = BACKENDS[name].unsupported_reason(logits)
        if reason is not None:
            raise ValueError(f"policy_stats backend {name!r} cannot run: {reason}")
        return BACKENDS[name]
    for candidate in PREFERENCE.get(logits.device.type, ("eager",)):
        if BACKENDS[candidate].unsupported_reason(logits) is None:
            return BACKENDS[candidate]
    return BACKENDS["eager"]
