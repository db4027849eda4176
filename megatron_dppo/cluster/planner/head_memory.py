"""Memory of the last stage's head: final norm, a chunk of logits, statistics of the policy."""

from __future__ import annotations

from megatron_dppo.cluster.planner.facts import TrainerFacts
from megatron_dppo.model.splits import padded_vocab_size

_STATISTICS = 8 + 8 + 8 + 8 + 6 * 4
"""Bytes of statistics per token: log-sum-exp fp64; place, target id and its column int64; and six fp32 rows (log pi,
mu, advantage, loss, mask, gradient)."""


_TOPK = 8 + 8 + 4 + 4 + 8 + 4 + 4
"""Bytes per token and Top-K id: ids and columns int64, owned and reduced logits fp32, log pi fp64 and fp32, mu."""


def logits_bytes(trainer: TrainerFacts) -> int:
    """Return the bytes of the logits of one chunk of a micro-batch: tokens / CP x padded vocabulary / TP logits.

    ``vocab_parallel/head.py`` keeps the logits of one chunk from the forward to the backward pass. The logits of other
    chunks and all gradients overwrite them, and the kernels hold rows in registers. The matrix products of the backward
    pass copy fp32 logits to the model's dtype.
    """
    tensor = trainer.layout.tensor
    columns = padded_vocab_size(trainer.shape.vocab_size, tensor) // tensor
    copy_bytes = 0
    if trainer.logit_bytes > trainer.item_bytes:
        copy_bytes = trainer.item_bytes
    return (
        min(trainer.rank_tokens, trainer.chunk_tokens)
        * columns
        * (trainer.logit_bytes + copy_bytes)
    )


def statistics_bytes(trainer: TrainerFacts, topk: int) -> int:
    """Return the bytes of the statistics of a micro-batch.

    Tensor-parallel ranks also reduce a packed row: 3 fp32 for each rank (``vocab_parallel/wire.py``). Context-parallel
    ranks compute the statistics of their own tokens and gather all of them, because each rank needs the loss of all
    tokens.
    """
    slots = 0
    if trainer.layout.tensor > 1:
        slots = 12 * trainer.layout.tensor
    return trainer.tokens * (_STATISTICS + slots + _TOPK * (topk + 1 if topk else 0))


def head_bytes(trainer: TrainerFacts, topk: int) -> int:
    """Return the bytes that the last stage keeps between the last layer and its backward pass, without the logits.

    The bytes are those of one micro-batch. The final norm counts like a layer's norm; with sequence parallelism, its
    output is gathered: tokens x hidden.
    """
    hidden = trainer.shape.hidden_size
    rows = 1.0
    if trainer.sequence_parallel:
        rows = 1 / trainer.layout.tensor
    norm_bytes = 2 * trainer.item_bytes if trainer.transformer_engine else 8 + trainer.item_bytes
    norm = trainer.rank_tokens * rows * (hidden * norm_bytes + 4)
    gathered = 0
    if trainer.sequence_parallel:
        gathered = trainer.rank_tokens * hidden * trainer.item_bytes
    return round(norm) + gathered + statistics_bytes(trainer, topk)
