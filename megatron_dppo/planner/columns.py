"""Bytes of a rollout batch's per-token columns: on the wire from the engines, and in the ranks' host memory."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.data.columns import (
    ROLLOUT_LOG_PROBS,
    ROUTED_EXPERTS,
    TOPK_IDS,
    TOPK_LOG_PROBS,
    WEIGHT_VERSION,
    Column,
    Form,
    Rows,
)
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.planner.job import RolloutJob

_TOKEN = 4 + 1
"""Token id int32 and loss mask, bytes."""
_BASE64 = 4 / 3


@dataclass(frozen=True)
class ColumnBytes:
    """Of one rollout batch. ``routing`` and ``topk``: in memory, once; ``*_wire``: as servers of a run answer.
    ``replicas``: what only the replica that trains holds, tokens included, all replicas together.
    """

    routing: float
    routing_wire: float
    topk: float
    topk_wire: float
    replicas: float


def column_bytes(shape: ModelShape, rollout: RolloutJob) -> ColumnBytes:
    """Rows x bytes of a row, by the declarations in ``data/columns.py``, at the mean lengths.

    Routing (R3): layers x experts of a token, uint8 up to 256 experts, for every token but the last; the same beside
    the JSON on the wire. Top-K: K ids int32 and K log-probabilities fp32 for every sampled token; on the wire base64.
    """
    routing = topk = 0.0
    if rollout.routing:
        routing = _rows(ROUTED_EXPERTS, rollout) * routing_bytes_per_token(shape)
    if rollout.topk:
        forms = [Form(c.dtypes[0], (rollout.topk,)) for c in (TOPK_IDS, TOPK_LOG_PROBS)]
        topk = _rows(TOPK_IDS, rollout) * sum(form.row_bytes for form in forms)
    sampled = _rows(ROLLOUT_LOG_PROBS, rollout)
    plain = [Form(c.dtypes[0], ()).row_bytes for c in (ROLLOUT_LOG_PROBS, WEIGHT_VERSION)]
    return ColumnBytes(
        routing=routing,
        routing_wire=routing,
        topk=topk,
        topk_wire=topk * _BASE64,
        replicas=rollout.tokens * _TOKEN + routing + topk + sampled * sum(plain),
    )


def routing_bytes_per_token(shape: ModelShape) -> int:
    """Of the recorded experts in memory."""
    narrow, wide = ROUTED_EXPERTS.dtypes
    trailing = (len(shape.moe_layers), shape.experts_per_token)
    return Form(narrow if shape.num_experts <= 256 else wide, trailing).row_bytes


def _rows(column: Column, rollout: RolloutJob) -> float:
    """Rows of a rollout batch."""
    each = rollout.mean_response if column.rows is Rows.SAMPLED else rollout.mean_length - 1
    return rollout.responses * each
