"""Memory of the last stage's head: final norm, logits, statistics of the policy."""

from __future__ import annotations

from megatron_dppo.model.splits import padded_vocab_size
from megatron_dppo.planner.job import TrainerJob

_STATISTICS = 8 + 8 + 8 + 6 * 4
"""Bytes per token beside the logits: log-sum-exp fp64, target id and its column int64, and fp32 rows (log pi, mu,
advantage, loss, mask, gradient)."""
_TOPK = 8 + 8 + 4 + 4 + 8 + 4 + 4
"""Bytes per token and Top-K id: ids and columns int64, owned and reduced logits fp32, log pi fp64 and fp32, mu."""


def logits_bytes(job: TrainerJob) -> int:
    """Logits of one micro-batch: tokens x padded vocabulary / TP, in the model's type.

    ``vocab_parallel/policy_stats.py`` reads them where they are and writes their gradient over them; no fp32 copy is
    made (``fp32_output=False`` in ``trainer/step.py``; the kernels hold rows in registers).
    """
    tensor = job.layout.tensor
    columns = padded_vocab_size(job.shape.vocab_size, tensor) // tensor
    return job.tokens * columns * job.item_bytes


def statistics_bytes(job: TrainerJob, topk: int) -> int:
    """Statistics, and the packed row that tensor-parallel ranks reduce: 3 fp32 a rank (``vocab_parallel/wire.py``)."""
    slots = 12 * job.layout.tensor if job.layout.tensor > 1 else 0
    return job.tokens * (_STATISTICS + slots + _TOPK * (topk + 1 if topk else 0))


def head_bytes(job: TrainerJob, topk: int) -> int:
    """All that the last stage holds of one micro-batch between the last layer and its backward pass.

    Final norm as ``kernels`` counts norms; with sequence parallelism the output layer gathers its input once more,
    tokens x hidden, into a buffer that forward and backward share.
    """
    hidden = job.shape.hidden_size
    rows = 1 / job.layout.tensor if job.sequence_parallel else 1.0
    kept = 2 * job.item_bytes if job.transformer_engine else 8 + job.item_bytes
    norm = job.tokens * rows * (hidden * kept + 4)
    return round(norm) + logits_bytes(job) + statistics_bytes(job, topk)
