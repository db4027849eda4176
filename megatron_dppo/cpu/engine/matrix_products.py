"""Matrix products whose rows do not depend on the number of other rows in the product.

A library chooses its kernel by the shape of the whole product. So the last bits of a token's logits depend on the other
requests in its batch. Products of blocks with a fixed shape all use the same kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 16
"""Rows of a block: larger blocks waste work on small batches, smaller blocks slow large batches down."""


_overrides: list[torch.library.Library] = []


def blocked_mm(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b of ``[M, K]`` and ``[K, N]`` in blocks of ``ROWS`` rows, the last one padded with zeros."""
    rows, width = a.shape
    padding = -rows % ROWS
    if padding:
        a = torch.cat([a, a.new_zeros(padding, width)])
    # Call aten::mm.out: ``enable`` replaces aten::mm, but not this operator.
    out = a.new_empty(rows + padding, b.shape[1])
    for start in range(0, rows, ROWS):
        torch.mm(a[start : start + ROWS], b, out=out[start : start + ROWS])
    return out[:rows]


def blocked_addmm(
    bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Compute beta bias + alpha a @ b by ``blocked_mm``."""
    product = blocked_mm(a, b)
    if alpha != 1:
        product = alpha * product
    if beta != 1:
        bias = beta * bias
    return product + bias


def enable() -> None:
    """Replace all matrix products of this process on a CPU by blocked products. A second call has no effect."""
    if _overrides:
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", blocked_mm, "CPU")
    library.impl("addmm", blocked_addmm, "CPU")
    # Keep the library object: its overrides are removed with it.
    _overrides.append(library)
