"""Memory of the last stage's head: final norm, a chunk of logits, statistics of the policy."""

from __future__ import annotations

from megatron_dppo.cluster.planner.facts import TrainerFacts
from megatron_dppo.model.splits import padded_vocab_size

_STATISTICS = 8 + 8 + 8 + 8 + 6 * 4
"""Bytes of statistics per token: log-sum-exp, fp64; the token's position, the target's id and the target's column,
int64; and six fp32 values (log pi, mu, advantage, loss, mask, gradient)."""


_TOPK = 8 + 8 + 4 + 4 + 8 + 4 + 4
"""Bytes per token and Top-K id: id and column, int64; the rank's own logit and the reduced logit, fp32; log pi, fp64
and fp32; mu, fp32."""


def logits_bytes(trainer: TrainerFacts) -> int:
    """Return the bytes of the logits of one chunk: tokens of the chunk x padded vocabulary / TP x bytes of a logit.

    A chunk has ``head.chunk_tokens`` tokens, or all of the rank's tokens of a micro-batch if these are fewer.
    ``vocab_parallel/head.py`` has one buffer for logits, and keeps it from the forward to the backward pass. The logits
    and gradients of all chunks are written to this buffer. The kernels hold rows in registers, so they need no second
    buffer. The matrix products of the backward pass copy fp32 logits to the model's dtype, unless the model is fp32.
    """
    tensor = trainer.layout.tensor
    columns = padded_vocab_size(trainer.shape.vocab_size, tensor) // tensor
    bytes_per_logit = trainer.logit_bytes
    if trainer.logit_bytes > trainer.item_bytes:
        bytes_per_logit += trainer.item_bytes
    chunk_tokens = min(trainer.rank_tokens, trainer.config.head.chunk_tokens)
    return chunk_tokens * columns * bytes_per_logit


def statistics_bytes(trainer: TrainerFacts, topk: int) -> int:
    """Return the bytes of the statistics of a micro-batch; ``topk``: K of TopK(mu), 0 for none.

    Tensor-parallel ranks also reduce a packed row for each token: 3 fp32 values for each rank
    (``vocab_parallel/wire.py``). A context-parallel rank computes the statistics of its own tokens. It then gathers the
    statistics of all tokens, because each rank needs the loss of all tokens. With Top-K, the target counts as one more
    id.
    """
    bytes_per_token = _STATISTICS
    if trainer.layout.tensor > 1:
        bytes_per_token += 3 * 4 * trainer.layout.tensor
    if topk:
        bytes_per_token += _TOPK * (topk + 1)
    return trainer.tokens * bytes_per_token


def head_bytes(trainer: TrainerFacts, topk: int) -> int:
    """Return the bytes that the last stage keeps between the last layer and its backward pass, without the logits.

    Only one micro-batch counts. The final norm keeps the same tensors as a layer's norm (``activations.py``). With
    sequence parallelism, the norm's output is gathered: tokens x hidden.
    """
    hidden = trainer.shape.hidden_size
    # Transformer Engine keeps input and output. torch keeps two fp32 tensors and the output. Both also keep an fp32
    # scale for each row.
    bytes_per_element = 8 + trainer.item_bytes
    if trainer.transformer_engine:
        bytes_per_element = 2 * trainer.item_bytes
    norm: float = trainer.rank_tokens * (hidden * bytes_per_element + 4)
    gathered = 0
    if trainer.sequence_parallel:
        norm /= trainer.layout.tensor
        gathered = trainer.rank_tokens * hidden * trainer.item_bytes
    return round(norm) + gathered + statistics_bytes(trainer, topk)
