"""Row kernels of policy_stats in Triton. Only processes with a GPU or with Triton's interpreter (TRITON_INTERPRET=1)
import this module.

``columns`` is the length of a row of logits. The first ``real`` columns are tokens, the rest is padding.
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
    scale_log2,
    LANES: tl.constexpr,  # noqa: N803
    VECTOR: tl.constexpr,  # noqa: N803
    ENTROPY: tl.constexpr,  # noqa: N803
    SQUARES: tl.constexpr,  # noqa: N803
):
    """Compute sums over one row of ``logits`` except its column ``left_out`` (int64; -1: no column).

    The sums are of e (``total``), of e d (``weighted``) and of e^2 (``squared``), with d = z - maximum and
    e = 2^(scale_log2 d). Each lane sums its own columns in float32, with the maximum of its own columns in place of
    the row's maximum. So no thread waits for another thread before the end of the row. The lanes' sums are added in
    float64. A lane reads VECTOR neighbouring columns at a time: 128 bits.
    """
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    skipped = tl.load(left_out + row)
    top = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    squared = tl.zeros((LANES,), tl.float32)
    for start in range(0, real, LANES * VECTOR):
        column = start + offsets
        # The mask of the load does not exclude the left-out column: a mask by columns would prevent loads of 128 bits.
        z = tl.load(logits + row * columns + column, mask=column < real, other=float("-inf"))
        z = z.to(tl.float32)
        if (skipped >= start) & (skipped < start + LANES * VECTOR):
            z = tl.where(column == skipped, float("-inf"), z)
        new_top = tl.maximum(top, tl.max(z, axis=1))
        # A lane that has read only -inf has no maximum to subtract.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        d = z - shift[:, None]
        e = tl.exp2(d * scale_log2)
        # Convert the lane's sums to the new maximum. An earlier column's d becomes d + drop, with drop <= 0, and its e
        # becomes e factor. So the sum of e d becomes (sum of e d + drop sum of e) factor.
        drop = tl.where(top == float("-inf"), 0.0, top - shift)
        factor = tl.exp2(drop * scale_log2)
        if ENTROPY:
            # The product of e = 0 and d = -inf would be NaN.
            part = tl.sum(e * tl.maximum(d, -1e30), axis=1)
            weighted = (weighted + drop * total) * factor + part
        if SQUARES:
            squared = squared * factor * factor + tl.sum(e * e, axis=1)
        total = total * factor + tl.sum(e, axis=1)
        top = new_top
    # Convert the lanes' sums to the row's maximum and add them.
    row_top = tl.max(top, axis=0)
    row_shift = tl.where(row_top == float("-inf"), 0.0, row_top)
    lane_drop = tl.where(top == float("-inf"), 0.0, top - row_shift)
    lane_factor = tl.exp2(lane_drop * scale_log2).to(tl.float64)
    lane_total = total.to(tl.float64)
    tl.store(top_out + row, row_top)
    tl.store(sum_out + row, tl.sum(lane_total * lane_factor, axis=0))
    if ENTROPY:
        lane_weighted = weighted.to(tl.float64) + lane_drop.to(tl.float64) * lane_total
        tl.store(weighted_out + row, tl.sum(lane_weighted * lane_factor, axis=0))
    if SQUARES:
        tl.store(
            squared_out + row, tl.sum(squared.to(tl.float64) * lane_factor * lane_factor, axis=0)
        )


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
    """Write one block of one row of dL/dz: p (a + b log p), plus g at the sampled token; 0 in padding.

    log p = scale (z - shift) + rest. ``shifts``, ``rests``, ``gradients`` (g), ``constants`` (a) and
    ``entropy_gradients`` (b) are float32 and have one number for each row. If g = b = 0, the caller's a is 0 too,
    so the row is 0 and its logits are not read. ``out`` may be ``logits``.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gradients + row)
    has_gradient = g != 0.0
    if ENTROPY:
        b = tl.load(entropy_gradients + row)
        has_gradient = has_gradient | (b != 0.0)
    value = tl.zeros((BLOCK,), tl.float32)
    if has_gradient:
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
