"""The tokens that each rank holds under context parallelism: packs laid out by hand, and random packs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.data.packing import pack
from megatron_dppo.trainer.context_parallel import TokenShare, gathered_rows, own_rows
from tests.trajectories import trajectory


def bounds(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def rows_by_definition(lengths: list[int], size: int, rank: int) -> list[int]:
    """Of each sequence's 2 C chunks, a rank holds chunk number ``rank`` and the chunk as far from the end."""
    rows, start = [], 0
    for length in lengths:
        chunks = np.split(np.arange(start, start + length), 2 * size)
        rows += [*chunks[rank], *chunks[2 * size - 1 - rank]]
        start += length
    return rows


def test_two_ranks_deal_four_chunks_of_each_sequence() -> None:
    # The example of Transformer Engine's documentation: sequences of 8 and 4 tokens.
    cu_seqlens = bounds(8, 4)
    assert own_rows(cu_seqlens, 12, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert own_rows(cu_seqlens, 12, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert gathered_rows(cu_seqlens, 12, 2).tolist() == [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]


def test_uneven_and_empty_sequences_over_three_ranks() -> None:
    cu_seqlens = bounds(6, 0, 12)
    assert own_rows(cu_seqlens, 18, 3, 0).tolist() == [0, 5, 6, 7, 16, 17]
    assert own_rows(cu_seqlens, 18, 3, 1).tolist() == [1, 4, 8, 9, 14, 15]
    assert own_rows(cu_seqlens, 18, 3, 2).tolist() == [2, 3, 10, 11, 12, 13]


def test_one_rank_holds_everything() -> None:
    assert own_rows(bounds(3, 2), 5, 1, 0).tolist() == [0, 1, 2, 3, 4]
    assert TokenShare().rows(bounds(3, 2)).tolist() == [0, 1, 2, 3, 4]
    assert TokenShare().sequence_multiple == 1


def test_sequence_parallelism_cuts_a_rank_s_own_rows() -> None:
    cu_seqlens = bounds(8, 8)  # 16 tokens: a multiple of 8, which four ranks divide into chunks
    shares = [TokenShare(2, cp, 2, tp) for cp in range(2) for tp in range(2)]
    assert {s.sequence_multiple for s in shares} == {4}
    assert [s.rows(cu_seqlens).tolist() for s in shares] == [
        [0, 1, 6, 7],
        [8, 9, 14, 15],
        [2, 3, 4, 5],
        [10, 11, 12, 13],
    ]


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5), st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_rows_are_dealt_by_definition(size: int, multiples: list[int]) -> None:
    lengths = [2 * size * n for n in multiples]
    cu_seqlens, tokens = bounds(*lengths), sum(lengths)
    parts = [own_rows(cu_seqlens, tokens, size, rank).tolist() for rank in range(size)]
    assert parts == [rows_by_definition(lengths, size, rank) for rank in range(size)]
    assert sorted(row for part in parts for row in part) == list(range(tokens))


def test_every_rank_has_the_same_work_under_a_causal_mask() -> None:
    cu_seqlens = bounds(48, 16, 8)
    positions = torch.cat([torch.arange(n) for n in (48, 16, 8)])
    work = {int((positions[own_rows(cu_seqlens, 72, 4, r)] + 1).sum()) for r in range(4)}
    assert len(work) == 1


def test_sequences_are_padded_at_their_ends_and_targets_stay_their_own() -> None:
    sequences = [trajectory([11, 12], [21, 22, 23]), trajectory([14], [24])]
    batch = pack(sequences, indices=[7, 3], sequence_multiple=4, pad_multiple=8)
    assert batch.cu_seqlens.tolist() == [0, 8, 12, 16]
    assert batch.sequence_index.tolist() == [7, 3, -1]
    assert batch.max_seqlen == 8
    assert batch.token_ids.tolist() == [11, 12, 21, 22, 23, 0, 0, 0, 14, 24, 0, 0, 0, 0, 0, 0]
    assert batch.target_ids.tolist() == [12, 21, 22, 23, 0, 0, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0]
    assert batch.position_ids.tolist() == [*range(8), *range(4), *range(4)]
    assert batch.loss_mask.nonzero().flatten().tolist() == [1, 2, 3, 8]
    assert batch.columns["rollout_log_probs"].nonzero().flatten().tolist() == [1, 2, 3, 8]
    second_part = batch.rows(own_rows(batch.cu_seqlens, 16, 2, 1))
    assert second_part.token_ids.tolist() == [21, 22, 23, 0, 24, 0, 0, 0]
    # The last token of a chunk predicts the first token of the next chunk, which another rank holds.
    first_part = batch.rows(own_rows(batch.cu_seqlens, 16, 2, 0))
    assert first_part.token_ids.tolist() == [11, 12, 0, 0, 14, 0, 0, 0]
    assert first_part.target_ids.tolist() == [12, 21, 0, 0, 24, 0, 0, 0]
    assert first_part.position_ids.tolist() == [0, 1, 6, 7, 0, 3, 0, 3]
    assert torch.equal(first_part.cu_seqlens, batch.cu_seqlens)


@pytest.mark.parametrize("share", [TokenShare(2, 1), TokenShare(2, 0, 2, 1)])
def test_recorded_routing_is_laid_out_where_its_tokens_are(share: TokenShare) -> None:
    def expert_numbers(length: int) -> np.ndarray:
        return np.arange(length - 1, dtype=np.uint8).reshape(-1, 1, 1) + 1

    sequences = [
        trajectory([1, 2], [3, 4, 5], routed_experts=expert_numbers(5)),
        trajectory([1], [2] * 8, routed_experts=expert_numbers(9)),
    ]
    multiple = share.sequence_multiple
    multiples: dict[str, Any] = {
        "sequence_multiple": multiple,
        "pad_multiple": multiple * share.sequence_size,
    }
    whole = pack(sequences, **multiples)
    part = pack(sequences, **multiples, input_rows=share.rows)
    rows = share.rows(whole.cu_seqlens)
    for tensors in ("columns", "valid"):
        expected = getattr(whole, tensors)["routed_experts"]
        assert torch.equal(getattr(part, tensors)["routed_experts"], expected[rows])
    # The columns that the loss reads have all rows on every rank.
    assert torch.equal(part.columns["rollout_log_probs"], whole.columns["rollout_log_probs"])
