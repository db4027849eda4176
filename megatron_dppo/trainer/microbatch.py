"""A packed micro-batch as the arguments of GPTModel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_dppo.data.columns import declared
from megatron_dppo.data.packing import PackedBatch


def model_inputs(batch: PackedBatch) -> dict[str, Any]:
    """Arguments of ``GPTModel.forward``: one row of T tokens, sequences told apart by cu_seqlens.

    No labels: the last stage returns logits, [1, T, V / TP] in the model's dtype.
    """
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )
    return {
        "input_ids": batch.token_ids[None],
        "position_ids": batch.position_ids[None],
        "attention_mask": None,
        "packed_seq_params": packed,
    }


def pad_to(batch: PackedBatch, tokens: int) -> PackedBatch:
    """``batch`` made ``tokens`` long by one more sequence at its end, of token 0, without loss."""
    missing = tokens - batch.num_tokens
    if missing == 0:
        return batch

    def longer(value: Tensor, fill: int = 0) -> Tensor:
        return F.pad(value, (0, 0) * (value.dim() - 1) + (0, missing), value=fill)

    return replace(
        batch,
        token_ids=longer(batch.token_ids),
        position_ids=torch.cat([batch.position_ids, torch.arange(missing)]),
        target_ids=longer(batch.target_ids),
        cu_seqlens=F.pad(batch.cu_seqlens, (0, 1), value=tokens),
        max_seqlen=max(batch.max_seqlen, missing),
        loss_mask=longer(batch.loss_mask),
        advantages=longer(batch.advantages),
        sequence_index=F.pad(batch.sequence_index, (0, 1), value=-1),
        columns={n: longer(x, declared(n).fill) for n, x in batch.columns.items()},
        valid={n: longer(x) for n, x in batch.valid.items()},
    )


def check_micro_batches(
    batches: list[PackedBatch], *, pad_multiple: int, count_multiple: int
) -> None:
    """Raise ValueError unless the batches fit sequence parallelism and the pipeline's schedule."""
    if not batches or len(batches) % count_multiple:
        raise ValueError(
            f"{len(batches)} micro-batches, expected a positive multiple of {count_multiple}"
        )
    for i, batch in enumerate(batches):
        if batch.num_tokens % pad_multiple:
            raise ValueError(
                f"micro-batch {i} has {batch.num_tokens} tokens, expected a multiple of "
                f"{pad_multiple}: pack with pad_multiple={pad_multiple}"
            )
