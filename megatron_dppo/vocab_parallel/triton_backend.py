"""The row kernels in Triton, for GPUs.

Not yet run on a GPU: tested in Triton's interpreter on the CPU only, so correctness of the
arithmetic is known and speed is not. The interpreter cuts float32 off to bfloat16 where compiled code
rounds to nearest (``cvt.rn.bf16``): its bfloat16 gradients are the float32 ones truncated, bit for
bit, and err by more than twice what a GPU's, rounded as the other backends', do.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_dppo.vocab_parallel.eager_backend import gather_owned

if TYPE_CHECKING:
    from megatron_dppo.vocab_parallel.backends import RowGradient, Rows

BLOCK = 4096
WARPS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonBackend:
    """Implements ``backends.Backend``."""

    def unavailable(self, logits: Tensor) -> str | None:
        """No Triton, float64 logits, or a CPU without the interpreter."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if logits.dtype not in DTYPES:
            return f"the Triton kernels take float32, bfloat16 and float16, not {logits.dtype}"
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if logits.device.type != "cuda" and not interpreted:
            return f"the logits are on {logits.device}, and TRITON_INTERPRET=1 is not set"
        return None

    def forward(
        self, logits: Tensor, real: int, scale: float, columns: Tensor, with_entropy: bool
    ) -> Rows:
        """See ``backends.Backend.forward``."""
        from megatron_dppo.vocab_parallel.kernels.row_stats_triton import forward_kernel

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
        """See ``backends.Backend.backward``."""
        from megatron_dppo.vocab_parallel.kernels.row_stats_triton import backward_kernel

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
