"""Recorded routing: what is refused, which rows hold, and where they stand in a pack."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo.data.packing import TrainingSample, pack
from megatron_dppo.data.routing import check_recording, is_unwritten, usable_rows
from megatron_dppo.engine.requests import RoutedShape
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.types import Rollout, VersionSpan


def sample(prompt: int, response: int, routed=None, valid=None, index: int = 0) -> TrainingSample:
    return TrainingSample(
        prompt_ids=[7] * prompt,
        response_ids=[8] * response,
        advantage=1.0,
        rollout_log_probs=[-1.0] * response,
        recomputed_log_probs=None,
        topk_ids=None,
        topk_log_probs=None,
        index=index,
        routed_experts=routed,
        routed_valid=valid,
    )


def test_row_t_is_the_routing_of_token_t():
    first = np.array([[[3, 1], [4, 5]], [[0, 2], [5, 4]]], np.uint8)  # 3 tokens, 2 layers
    last = np.array([[[6, 7], [1, 0]]], np.uint8)  # 2 tokens
    batch = pack([sample(1, 2, first), sample(2, 1), sample(1, 1, last)], pad_multiple=5)
    none = [[0, 0], [0, 0]]
    assert batch.routed_experts.tolist() == [
        [[3, 1], [4, 5]], [[0, 2], [5, 4]], none,  # the last token of a sequence has none
        none, none, none,  # without a recording
        [[6, 7], [1, 0]], none,
        none, none,  # padding
    ]  # fmt: skip
    assert batch.routed_valid.int().tolist() == [1, 1, 0, 0, 0, 0, 1, 0, 0, 0]
    assert batch.routed_experts.numpy().dtype == np.uint8
    bare = batch.without_routing()
    assert bare.routed_experts is None
    assert bare.routed_valid is None


def test_rows_that_do_not_hold_are_left_out():
    routed = np.array([[[300]], [[2]], [[511]]], np.uint16)
    batch = pack([sample(2, 2, routed, np.array([True, False, True]))])
    assert batch.routed_experts.tolist() == [[[300]], [[0]], [[511]], [[0]]]
    assert batch.routed_valid.tolist() == [True, False, True, False]
    assert batch.routed_experts.numpy().dtype == np.uint16


def test_no_recording_no_column():
    for samples in ([], [sample(1, 2)]):
        batch = pack(samples, pad_multiple=4)
        assert batch.routed_experts is None
        assert batch.routed_valid is None


def test_recordings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"sample 3: 4 rows of routed_experts for 4 tokens, expec"):
        sample(2, 2, np.zeros((4, 1, 1), np.uint8), index=3)
    with pytest.raises(ValueError, match=r"sample 0: 2 rows of routed_valid for 4 tokens"):
        sample(2, 2, np.zeros((3, 1, 1), np.uint8), np.ones(2, bool))
    with pytest.raises(ValueError, match="recordings of different shapes in one pack"):
        pack([sample(1, 1, np.zeros((1, 2, 1), np.uint8)),
              sample(1, 1, np.zeros((1, 3, 1), np.uint8))])  # fmt: skip


@pytest.mark.parametrize(
    ("routed", "told"),
    [
        ([[[0, 8]]], r"outside 0\.\.7"),
        ([[[-1, 2]]], r"outside 0\.\.7"),
        ([[[1, 2], [0, 0]]], "same expert twice"),
        ([[[5, 1, 5]]], "same expert twice"),
        (np.zeros((3, 2, 2)), "all 0"),
    ],
)
def test_what_no_router_chooses_is_refused(routed, told):
    with pytest.raises(ValueError, match=told):
        check_recording(np.array(routed, np.int32), 8)


def test_what_a_router_chooses_passes():
    check_recording(np.array([[[0, 7], [7, 0]]]), 8)
    check_recording(np.zeros((3, 2, 1), np.int32), 8)
    check_recording(np.zeros((0, 2, 2), np.int32), 8)


def test_zeros_of_one_expert_a_token_are_unwritten_only_where_they_are_many():
    assert is_unwritten(np.zeros((9, 2, 1)))
    assert not is_unwritten(np.zeros((8, 2, 1)))
    assert not is_unwritten(np.eye(9)[:, :1, None])


def test_rows_that_other_weights_used_are_dropped():
    """Three prompt tokens, five response tokens: 0 and 1 by version 4, 2 by 5, 3 and 4 by 6."""
    spans = [VersionSpan(4, 0, 2), VersionSpan(5, 2, 3), VersionSpan(6, 3, 5)]
    rollout = Rollout(0, 0, [1] * 3, [2] * 5, [-1.0] * 5, "stop", "", spans)
    # Row 2 predicts response token 0, row 4 token 2, row 5 token 3.
    assert usable_rows(rollout).tolist() == [True, True, False, False, False, True, True]
    rollout.weight_versions = spans[:1]
    assert usable_rows(rollout).all()


def test_a_token_of_qwen3_30b_a3b_takes_384_bytes():
    """48 layers, 8 of 128 experts a token."""
    shape = ModelShape(
        family="qwen3_moe", num_layers=48, hidden_size=2048, num_attention_heads=32,
        num_query_groups=4, head_dim=128, ffn_hidden_size=6144, vocab_size=151936,
        tied_embeddings=False, norm_eps=1e-6, rope_theta=1e6, rope_scaling=None,
        max_position_embeddings=40960, dtype="bfloat16", num_experts=128, experts_per_token=8,
    )  # fmt: skip
    recorded = RoutedShape(48, tuple(range(48)), 8, 128)
    rng = np.random.default_rng(0)
    routed = rng.random((19, 48, 128)).argsort(-1)[..., :8].astype(recorded.dtype)
    batch = pack([sample(10, 10, routed)])
    assert shape.moe_layers == recorded.moe_layers
    assert batch.routed_experts.nbytes / batch.num_tokens == 384
    assert np.array_equal(batch.routed_experts[:19].numpy(), routed)
