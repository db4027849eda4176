"""Bytes of a rollout batch's per-token columns: in the servers' HTTP replies, and in the ranks' host memory."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.cluster.planner.facts import RolloutFacts
from megatron_dppo.data.columns import (
    ROLLOUT_LOG_PROBS,
    ROUTED_EXPERTS,
    TEACHER_LOG_PROBS,
    TEACHER_TOPK_IDS,
    TEACHER_TOPK_LOG_PROBS,
    TOPK_IDS,
    TOPK_LOG_PROBS,
    WEIGHT_VERSION,
    Column,
    Form,
    Rows,
)
from megatron_dppo.model.shape import ModelShape

_TOKEN = 4 + 1
"""Bytes of a token: its int32 id and its loss mask."""


_BASE64 = 4 / 3
"""Characters of base64 for each byte."""
_SCORE_TEXT = 36
"""Characters of a token's score in JSON: ``[-0.6931471824645996, 12345, null],``."""


@dataclass(frozen=True)
class ColumnBytes:
    """Bytes of the columns of one rollout batch.

    Attributes:
        routing, topk, teacher: bytes of one copy in memory: routing, TopK(mu), a teacher's scores.
        routing_wire, topk_wire, teacher_wire: bytes in the HTTP replies of the servers.
        replicas: bytes of tokens and of all columns. Each row goes only to the replica that trains on the row, so the
            sum over all replicas is one copy.
    """

    routing: float
    routing_wire: float
    topk: float
    topk_wire: float
    teacher: float
    teacher_wire: float
    replicas: float


def column_bytes(shape: ModelShape, rollout: RolloutFacts) -> ColumnBytes:
    """Return rows x bytes of a row for each column that ``data/columns.py`` declares, at the mean lengths.

    Routing (R3): layers x experts of a token, uint8 up to 256 experts, for each token but the last. A server sends
    these bytes outside the JSON. Top-K: K int32 ids and K fp32 log-probabilities for each sampled token. A server sends
    these in base64. A teacher: likewise, with one more fp32 log-probability for each sampled token, which a server
    sends as text.
    """
    routing = topk = teacher_topk = 0.0
    if rollout.routing:
        routing = _rows(ROUTED_EXPERTS, rollout) * routing_bytes_per_token(shape)
    if rollout.topk:
        forms = [Form(c.dtypes[0], (rollout.topk,)) for c in (TOPK_IDS, TOPK_LOG_PROBS)]
        topk = _rows(TOPK_IDS, rollout) * sum(form.row_bytes for form in forms)
    sampled_rows = _rows(ROLLOUT_LOG_PROBS, rollout)
    teacher = teacher_wire = 0.0
    if rollout.teacher_topk is not None:
        columns = (TEACHER_TOPK_IDS, TEACHER_TOPK_LOG_PROBS)
        forms = [Form(c.dtypes[0], (rollout.teacher_topk,)) for c in columns]
        teacher_topk = sampled_rows * sum(form.row_bytes for form in forms)
        teacher = teacher_topk + sampled_rows * Form(TEACHER_LOG_PROBS.dtypes[0], ()).row_bytes
        teacher_wire = teacher_topk * _BASE64 + sampled_rows * _SCORE_TEXT
    row_sizes = [Form(c.dtypes[0], ()).row_bytes for c in (ROLLOUT_LOG_PROBS, WEIGHT_VERSION)]
    return ColumnBytes(
        routing=routing,
        routing_wire=routing,
        topk=topk,
        topk_wire=topk * _BASE64,
        teacher=teacher,
        teacher_wire=teacher_wire,
        replicas=rollout.tokens * _TOKEN + routing + topk + teacher + sampled_rows * sum(row_sizes),
    )


def routing_bytes_per_token(shape: ModelShape) -> int:
    """Return the bytes of a token's routing capture in memory."""
    narrow_dtype, wide_dtype = ROUTED_EXPERTS.dtypes
    dtype = narrow_dtype if shape.num_experts <= 256 else wide_dtype
    row_shape = (len(shape.moe_layers), shape.experts_per_token)
    return Form(dtype, row_shape).row_bytes


def _rows(column: Column, rollout: RolloutFacts) -> float:
    """Return the rows of a column: one for each sampled token, or one for each token but the last."""
    rows = rollout.mean_response if column.rows is Rows.SAMPLED else rollout.mean_length - 1
    return rollout.responses * rows
