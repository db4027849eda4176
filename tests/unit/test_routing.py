"""Recorded routing: which recordings are refused, which rows are usable, and where a packed batch has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_dppo.data.columns import check_recording, is_unwritten, usable_rows
from megatron_dppo.data.packing import pack
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.protocol import RoutedShape
from tests.messages import mentioning
from tests.small_shapes import MOE
from tests.trajectories import trajectory


def sample(prompt: int, response: int, routed=None, versions=None) -> Trajectory:
    return trajectory([7] * prompt, [8] * response, routed_experts=routed, weight_version=versions)


def test_row_t_is_the_routing_of_token_t():
    first = np.array([[[3, 1], [4, 5]], [[0, 2], [5, 4]]], np.uint8)  # 3 tokens, 2 layers
    last = np.array([[[6, 7], [1, 0]]], np.uint8)  # 2 tokens
    batch = pack([sample(1, 2, first), sample(2, 1), sample(1, 1, last)], pad_multiple=5)
    none = [[0, 0], [0, 0]]
    assert batch.columns["routed_experts"].tolist() == [
        [[3, 1], [4, 5]], [[0, 2], [5, 4]], none,  # the last token of a sequence has none
        none, none, none,  # without a recording
        [[6, 7], [1, 0]], none,
        none, none,  # padding
    ]  # fmt: skip
    assert batch.valid["routed_experts"].int().tolist() == [1, 1, 0, 0, 0, 0, 1, 0, 0, 0]
    assert batch.columns["routed_experts"].numpy().dtype == np.uint8
    bare = batch.without("routed_experts")
    assert "routed_experts" not in bare.columns
    assert bare.valid == {}


def test_rows_that_do_not_hold_are_left_out():
    """Row 1 predicts the first of two response tokens, which older weights sampled."""
    routed = np.array([[[300]], [[2]], [[511]]], np.uint16)
    batch = pack([sample(2, 2, routed, [6, 7])])
    assert batch.columns["routed_experts"].tolist() == [[[300]], [[0]], [[511]], [[0]]]
    assert batch.valid["routed_experts"].tolist() == [True, False, True, False]
    assert batch.columns["routed_experts"].numpy().dtype == np.uint16


def test_routing_of_a_response_without_a_gradient_is_replayed_too():
    routed = np.array([[[3]], [[2]]], np.uint8)
    batch = pack([sample(1, 2, routed)], trains=[False])
    assert batch.columns["routed_experts"].tolist() == [[[3]], [[2]], [[0]]]
    assert batch.valid["routed_experts"].tolist() == [True, True, False]


def test_no_recording_no_column():
    for trajectories in ([], [sample(1, 2)]):
        batch = pack(trajectories, pad_multiple=4)
        assert "routed_experts" not in batch.columns
        assert batch.valid == {}


def test_recordings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=mentioning(4, "routed_experts", 3)):
        sample(2, 2, np.zeros((4, 1, 1), np.uint8))
    with pytest.raises(ValueError, match=mentioning("(3, 1)", "[rows, moe_layers,")):
        sample(2, 2, np.zeros((3, 1), np.uint8))
    with pytest.raises(ValueError, match=mentioning("routed_experts", "int32", "uint8", "uint16")):
        sample(2, 2, np.zeros((3, 1, 1), np.int32))
    with pytest.raises(ValueError, match=mentioning("routed_experts")):
        pack([sample(1, 1, np.zeros((1, 2, 1), np.uint8)),
              sample(1, 1, np.zeros((1, 3, 1), np.uint8))])  # fmt: skip


@pytest.mark.parametrize(
    ("routed", "message"),
    [
        ([[[0, 8]]], r"outside 0\.\.7"),
        ([[[-1, 2]]], r"outside 0\.\.7"),
        ([[[1, 2], [0, 0]]], "same expert twice"),
        ([[[5, 1, 5]]], "same expert twice"),
        (np.zeros((3, 2, 2)), "all 0"),
    ],
)
def test_what_no_router_chooses_is_refused(routed, message):
    with pytest.raises(ValueError, match=message):
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
    """Of five response tokens, version 4 sampled 0 and 1, version 5 sampled 2, and version 6 sampled 3 and 4."""
    mixed = sample(3, 5, versions=[4, 4, 5, 6, 6])
    # Row 2 predicts response token 0, row 4 token 2, row 5 token 3.
    expected = [True, True, False, False, False, True, True]
    assert usable_rows(mixed.loss_mask, mixed.columns).tolist() == expected
    for unmixed in (sample(3, 5, versions=[4] * 5), sample(3, 5)):
        assert usable_rows(unmixed.loss_mask, unmixed.columns).all()


def test_rows_between_two_turns_hold():
    """Tokens 1 and 4 were sampled, by versions 1 and 2; 2 and 3 are a tool's output."""
    mask = np.array([False, True, False, False, True])
    versions = {"weight_version": np.array([1, 2], np.int32)}
    assert usable_rows(mask, versions).tolist() == [False, True, True, True]


def test_a_token_of_qwen3_30b_a3b_takes_384_bytes():
    """In each of 48 layers, a token has 8 of 128 experts, with one byte each."""
    shape = replace(MOE, num_layers=48, num_experts=128, experts_per_token=8)
    recorded = RoutedShape(48, tuple(range(48)), 8, 128)
    rng = np.random.default_rng(0)
    routed = rng.random((19, 48, 128)).argsort(-1)[..., :8].astype(recorded.dtype)
    batch = pack([sample(10, 10, routed)])
    assert shape.moe_layers == recorded.moe_layers
    assert batch.columns["routed_experts"].nbytes / batch.num_tokens == 384
    assert np.array_equal(batch.columns["routed_experts"][:19].numpy(), routed)


def test_a_stored_recording_may_name_every_expert_of_its_type():
    for routed in (np.array([[[255, 254]]], np.uint8), np.array([[[65535, 0]]], np.uint16)):
        trajectory([1], [2], routed_experts=routed).check()
    with pytest.raises(ValueError, match="same expert twice"):
        trajectory([1], [2], routed_experts=np.array([[[255, 255]]], np.uint8)).check()
