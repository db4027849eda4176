"""Row kernels of policy_stats in Triton. Imported only where Triton runs: on a GPU, or in its
interpreter (TRITON_INTERPRET=1).
"""

import triton
import triton.language as tl


@triton.jit
def forward_kernel(  # noqa: PLR0913, PLR0917
    logits,
    left_out,
    top_out,
    sum_out,
    weighted_out,
    squared_out,
    columns,
    real,
    scale,
    BLOCK: tl.constexpr,  # noqa: N803
    ENTROPY: tl.constexpr,  # noqa: N803
    SQUARES: tl.constexpr,  # noqa: N803
):
    """One row but its column ``left_out`` (int64; -1: none): its maximum, sum of e^d, of d e^d and of e^2d,
    with d = scale (z - maximum).

    One maximum for each block, not for each lane: the exponentials of rescaling stay few.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    skipped = tl.load(left_out + row)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float64)
    weighted = tl.full((), 0.0, tl.float64)
    squared = tl.full((), 0.0, tl.float64)
    for start in range(0, real, BLOCK):
        inside = start + lane < real
        z = tl.load(logits + row * columns + start + lane, mask=inside, other=float("-inf"))
        # Not by the load's mask, which would no longer be one for 128 bits.
        z = tl.where(start + lane == skipped, float("-inf"), z.to(tl.float32))
        new_top = tl.maximum(top, tl.max(z, axis=0))
        # A row that is -inf so far has no maximum to subtract.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        d = (z - shift) * scale
        e = tl.exp(d)
        drop = tl.where(top == float("-inf"), 0.0, (top - shift) * scale)
        factor = tl.exp(drop).to(tl.float64)
        if ENTROPY:
            # d = -inf meets e = 0: their product is 0, not NaN.
            part = tl.sum(e * tl.where(e == 0.0, 0.0, d), axis=0)
            weighted = (weighted + drop.to(tl.float64) * total) * factor + part.to(tl.float64)
        if SQUARES:
            squared = squared * factor * factor + tl.sum(e * e, axis=0).to(tl.float64)
        total = total * factor + tl.sum(e, axis=0).to(tl.float64)
        top = new_top
    tl.store(top_out + row, top)
    tl.store(sum_out + row, total)
    if ENTROPY:
        tl.store(weighted_out + row, weighted)
    if SQUARES:
        tl.store(squared_out + row, squared)


@triton.jit
def backward_kernel(  # noqa: PLR0913, PLR0917
    logits,
    out,
    targets,
    shifts,
    rests,
    gradients,
    constants,
    entropy_gradients,
    columns,
    real,
    scale,
    BLOCK: tl.constexpr,  # noqa: N803
    ENTROPY: tl.constexpr,  # noqa: N803
):
    """One block of one row: p (a + b log p), plus the sampled token's gradient; 0 in padding.

    ``gradients`` scale g, ``constants`` a, ``entropy_gradients`` b; all float32. A row whose
    gradients are 0 is written without being read. ``out`` may be ``logits``.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gradients + row)
    used = g != 0.0
    if ENTROPY:
        b = tl.load(entropy_gradients + row)
        used = used | (b != 0.0)
    value = tl.zeros((BLOCK,), tl.float32)
    if used:
        z = tl.load(logits + row * columns + column, mask=column < real, other=float("-inf")).to(
            tl.float32
        )
        log_p = (z - tl.load(shifts + row)) * scale + tl.load(rests + row)
        p = tl.exp(log_p)
        factor = tl.full((BLOCK,), 0.0, tl.float32) + tl.load(constants + row)
        if ENTROPY:
            factor += b * tl.where(p == 0.0, 0.0, log_p)
        value = p * factor + tl.where(column == tl.load(targets + row), g, 0.0)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=column < columns)
