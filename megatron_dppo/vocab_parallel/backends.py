"""The two row kernels that every backend implements, and which backend runs.

Legend: T = tokens, C = columns of the local shard, R = real columns of it (those below the true
vocabulary's end).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_dppo.vocab_parallel import cpp_backend, eager_backend, triton_backend


@dataclass(frozen=True)
class RowGradient:
    """What the backward pass knows of each row.

    ``lse`` float64 [T]: log-sum-exp over the whole vocabulary at the temperature. ``targets`` int64
    [T]: the sampled token's column in this shard, -1 where another rank owns it. ``log_prob`` [T]:
    dL/d log pi(a). ``entropy`` and ``entropy_value`` [T]: dL/dH and H, or None.
    """

    lse: Tensor
    targets: Tensor
    log_prob: Tensor
    entropy: Tensor | None
    entropy_value: Tensor | None


Rows = tuple[Tensor, Tensor | None, Tensor]
"""float64 [T]: lse = log sum exp(scale z) over this shard's columns but each row's first asked one;
float64 [T] or None: sum p log p with p normalised over the same columns; float32 (float64 for
float64 logits) [T, N]: z at the asked columns, 0 at -1.
"""


class Backend(Protocol):
    """Row kernels over one shard ``logits`` [T, C] of which the first ``real`` columns count."""

    def unavailable(self, logits: Tensor) -> str | None:
        """Why this backend cannot take ``logits``; None where it can."""

    def forward(
        self, logits: Tensor, real: int, scale: float, columns: Tensor, with_entropy: bool
    ) -> Rows:
        """``Rows`` of this shard; ``columns`` int64 [T, N], -1 where another rank owns the id.

        The first of them, the sampled token's, is left out of the sums: what is not the token is
        then known to its own relative precision, however near 1 the token's probability is.
        """

    def backward(
        self, logits: Tensor, real: int, scale: float, gradient: RowGradient, out: Tensor
    ) -> None:
        """Write dL/dz into ``out`` [T, C], which may be ``logits``. Rows without a gradient are
        written, not read.

        dL/dz_j = scale [ g (1[j = a] - p_j) - h p_j (log p_j + H) ], g = dL/d log pi(a), h = dL/dH;
        0 in padding.
        """


BACKENDS: dict[str, Backend] = {
    "eager": eager_backend.EagerBackend(),
    "cpp": cpp_backend.CppBackend(),
    "triton": triton_backend.TritonBackend(),
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
