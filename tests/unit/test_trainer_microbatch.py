"""Packed micro-batches as the model and the schedules take them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import megatron_dppo.trainer  # noqa: F401  (adapts megatron before it is imported)
from megatron_dppo.data.packing import pack
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.trainer.step import NonFiniteLossError, check_micro_batches, model_inputs, pad_to
from tests.trajectories import trajectory


def make_batch(pad_multiple: int = 1):
    def sample(prompt: list[int], response: list[int]) -> Trajectory:
        n = len(response)
        ids, log_probs = np.tile(np.array([3, 4], np.int32), (n, 1)), np.zeros((n, 2), np.float32)
        return trajectory(prompt, response, topk_ids=ids, topk_log_probs=log_probs)

    both = [sample([1], [2, 3]), sample([5, 6], [7])]
    return pack(both, indices=[4, 9], pad_multiple=pad_multiple)


def test_model_inputs_are_one_row_of_packed_sequences() -> None:
    inputs = model_inputs(make_batch())
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 5, 6, 7]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]
    packed = inputs["packed_seq_params"]
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 3, 6]
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 4
    assert inputs["attention_mask"] is None


def test_padding_is_one_more_sequence_without_loss() -> None:
    padded = pad_to(make_batch(), 10)
    assert padded.num_tokens == 10
    assert padded.token_ids.tolist() == [1, 2, 3, 5, 6, 7, 0, 0, 0, 0]
    assert padded.target_ids.tolist() == [2, 3, 0, 6, 7, 0, 0, 0, 0, 0]
    assert padded.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3]
    assert padded.cu_seqlens.tolist() == [0, 3, 6, 10]
    assert padded.cu_seqlens.dtype == torch.int32
    assert padded.max_seqlen == 4
    assert padded.sequence_index.tolist() == [4, 9, -1]
    assert padded.loss_mask.tolist() == [True, True, False, False, True] + [False] * 5
    assert padded.advantages.tolist() == [1, 1, 0, 0, 1] + [0] * 5
    assert (padded.loss_mask.dtype, padded.advantages.dtype) == (torch.bool, torch.float32)
    assert padded.columns["rollout_log_probs"].tolist() == [-0.5, -1, 0, 0, -0.5] + [0] * 5
    assert padded.columns["topk_ids"].tolist()[4:] == [[3, 4]] + [[-1, -1]] * 5
    assert padded.columns["topk_log_probs"].shape == (10, 2)
    same = make_batch()
    assert pad_to(same, 6) is same


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_padding_has_no_recorded_routing(dtype) -> None:
    routed = np.array([[[3, 1]], [[0, 2]]], dtype)
    padded = pad_to(pack([trajectory([1], [2, 3], routed_experts=routed)]), 5)
    assert padded.columns["routed_experts"].tolist() == [[[3, 1]], [[0, 2]], *[[[0, 0]]] * 3]
    assert padded.valid["routed_experts"].tolist() == [True, True, False, False, False]


def test_counts_and_lengths_are_checked() -> None:
    check_micro_batches([make_batch(4)] * 4, pad_multiple=4, count_multiple=2)
    with pytest.raises(ValueError, match=r"3 micro-batches, .* 2"):
        check_micro_batches([make_batch()] * 3, pad_multiple=1, count_multiple=2)
    with pytest.raises(ValueError, match="0 micro-batches"):
        check_micro_batches([], pad_multiple=1, count_multiple=1)
    with pytest.raises(ValueError, match=r"micro-batch 0 .*6 tokens, .* 4"):
        check_micro_batches([make_batch()], pad_multiple=4, count_multiple=1)


def test_error_names_the_places() -> None:
    culprits = [{"dp_rank": 1, "micro_batch": 2, "sequences": [4, 9]}]
    text = str(NonFiniteLossError(float("nan"), culprits))
    assert "data-parallel rank 1, micro-batch 2, sequences [4, 9]" in text
    assert "norm nan" in text
    assert "is finite" in str(NonFiniteLossError(float("inf"), []))


def test_a_rank_s_own_rows_are_computed_where_the_whole_pack_lies() -> None:
    both = [trajectory([1], [2, 3]), trajectory([5, 6], [7] * 11)]
    whole = pack(both, sequence_multiple=4, pad_multiple=4)  # 4 + 16 tokens
    own = whole.rows(torch.tensor([1, 2, 8, 9]))
    inputs = model_inputs(whole, own)
    assert inputs["input_ids"].tolist() == [[2, 3, 7, 7]]
    assert inputs["position_ids"].tolist() == [[1, 2, 4, 5]]
    packed = inputs["packed_seq_params"]
    # All four are one tensor, so that Transformer Engine assumes no padding.
    assert packed.cu_seqlens_q is packed.cu_seqlens_kv_padded
    assert packed.cu_seqlens_q_padded is packed.cu_seqlens_kv
    assert packed.cu_seqlens_q.tolist() == [0, 4, 20]
    # A rank that has all tokens omits the padded boundaries: Transformer Engine would compare them on the device.
    alone = model_inputs(whole)["packed_seq_params"]
    assert alone.cu_seqlens_q_padded is None
    assert alone.cu_seqlens_kv_padded is None
    assert alone.cu_seqlens_kv is whole.cu_seqlens


@pytest.mark.parametrize(
    ("lengths", "table"), [([8], 8), ([9], 16), ([5, 3], 16), ([5, 4], 8), ([1], 1), ([16, 16], 16)]
)
def test_tables_of_positions_have_few_lengths_and_never_the_pack_s(
    lengths: list[int], table: int
) -> None:
    packed = pack(
        [trajectory([1], [2] * (n - 1)) if n > 1 else trajectory([1], []) for n in lengths]
    )
    assert model_inputs(packed)["packed_seq_params"].max_seqlen_q == table


def test_sequences_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3, 3\] tokens, .* 4"):
        check_micro_batches([make_batch()], pad_multiple=1, count_multiple=1, sequence_multiple=4)
