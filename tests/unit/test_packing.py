"""Packing: examples that are written by hand, and properties of any batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.data.columns import Form
from megatron_dppo.data.packing import pack, unpack_sampled
from megatron_dppo.data.trajectory import Trajectory, forms_of
from tests.messages import mentioning
from tests.trajectories import masked
from tests.trajectories import trajectory as sample


def test_entry_t_concerns_the_next_token_of_the_same_sequence():
    batch = pack(
        [sample([11, 12, 13], [21, 22], advantage=2.0), sample([14], [23, 24, 25], advantage=-1.0)],
        indices=[7, 3],
        pad_multiple=4,
    )
    assert batch.token_ids.tolist() == [11, 12, 13, 21, 22, 14, 23, 24, 25, 0, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert batch.target_ids.tolist() == [12, 13, 21, 22, 0, 23, 24, 25, 0, 0, 0, 0]
    # The last prompt token predicts the first response token; the last token predicts nothing.
    assert batch.loss_mask.int().tolist() == [0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0]
    assert batch.columns["rollout_log_probs"].tolist() == [
        0,
        0,
        -0.5,
        -1,
        0,
        -0.5,
        -1,
        -1.5,
        0,
        0,
        0,
        0,
    ]
    assert batch.advantages.tolist() == [0, 0, 2, 2, 0, -1, -1, -1, 0, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 5, 9, 12]
    assert batch.sequence_index.tolist() == [7, 3, -1]
    assert batch.max_seqlen == 5
    assert batch.num_tokens == 12
    assert batch.columns.keys() == {"rollout_log_probs"}
    assert batch.valid == {}


def test_a_tool_s_output_between_two_turns_trains_nothing():
    mask = [False, True, True, False, False, True]
    turns = masked(
        [1, 21, 22, 31, 32, 23], mask, rollout_log_probs=[-1.0, -2.0, -3.0], advantage=2.0
    )
    batch = pack([turns, sample([4], [5])], pad_multiple=10)
    assert batch.target_ids.tolist() == [21, 22, 31, 32, 23, 0, 5, 0, 0, 0]
    assert batch.loss_mask.int().tolist() == [1, 1, 0, 0, 1, 0, 1, 0, 0, 0]
    assert batch.advantages.tolist() == [2, 2, 0, 0, 2, 0, 1, 0, 0, 0]
    assert batch.columns["rollout_log_probs"].tolist() == [-1, -2, 0, 0, -3, 0, -0.5, 0, 0, 0]
    first, second = unpack_sampled([turns, sample([4], [5])], batch.target_ids)
    assert (first.tolist(), second.tolist()) == ([21, 22, 23], [5])


def test_no_padding_sequence_where_the_tokens_fill_the_multiple():
    batch = pack([sample([1, 2], [3, 4])], pad_multiple=4)
    assert batch.cu_seqlens.tolist() == [0, 4]
    assert batch.sequence_index.tolist() == [0]


def test_dtypes():
    columns: dict[str, Any] = {
        "recomputed_log_probs": [-0.25],
        "topk_ids": np.array([[4, 5]], np.int32),
        "topk_log_probs": np.array([[-0.5, -1.5]], np.float32),
    }
    batch = pack([sample([1], [2], **columns)])
    for name in ("token_ids", "position_ids", "target_ids", "sequence_index"):
        assert getattr(batch, name).dtype == torch.int64, name
    assert batch.advantages.dtype == torch.float32
    for name in ("rollout_log_probs", "recomputed_log_probs", "topk_log_probs"):
        assert batch.columns[name].dtype == torch.float32, name
    assert batch.columns["topk_ids"].dtype == torch.int32
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.loss_mask.dtype == torch.bool


def test_topk_rows_stand_with_their_targets_and_there_are_no_ids_elsewhere():
    first = sample(
        [9, 9],
        [5, 6],
        topk_ids=np.array([[5, 8], [7, -1]], np.int32),
        topk_log_probs=np.array([[-0.25, -2.0], [-0.125, -3.0]], np.float32),
    )
    batch = pack([first], pad_multiple=3)
    no_ids = [-1, -1]
    assert batch.columns["topk_ids"].tolist() == [no_ids, [5, 8], [7, -1], no_ids, no_ids, no_ids]
    assert batch.columns["topk_log_probs"].tolist() == [
        [0, 0], [-0.25, -2.0], [-0.125, -3.0], [0, 0], [0, 0], [0, 0],
    ]  # fmt: skip


def test_what_does_not_train_keeps_its_tokens_and_loses_its_columns():
    batch = pack(
        [
            sample([1], [2, 3], recomputed_log_probs=[-0.5, float("nan")]),
            sample([4], [5], recomputed_log_probs=[-0.75]),
        ],
        trains=[False, True],
    )
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.target_ids.tolist() == [2, 3, 0, 5, 0]
    assert batch.loss_mask.tolist() == [False, False, False, True, False]
    assert batch.columns["rollout_log_probs"].tolist() == [0, 0, 0, -0.5, 0]
    assert batch.columns["recomputed_log_probs"].tolist() == [0, 0, 0, -0.75, 0]
    assert batch.advantages.tolist() == [0, 0, 0, 1, 0]


def test_an_empty_pack_is_padding_with_the_columns_of_its_peers():
    plain = pack([], pad_multiple=4)
    assert plain.token_ids.tolist() == [0, 0, 0, 0]
    assert plain.cu_seqlens.tolist() == [0, 4]
    assert plain.sequence_index.tolist() == [-1]
    assert not plain.loss_mask.any()
    assert plain.columns == {}
    routed = np.zeros((1, 2, 1), np.uint8)
    peers = [with_topk(3).with_columns(recomputed_log_probs=[-1.0], routed_experts=routed)]
    full = pack([], pad_multiple=2, forms=forms_of(peers))
    assert full.columns["recomputed_log_probs"].tolist() == [0, 0]
    assert full.columns["topk_ids"].tolist() == [[-1, -1, -1]] * 2
    assert full.columns["topk_log_probs"].tolist() == [[0, 0, 0]] * 2
    assert "routed_experts" not in full.columns  # peers need not have this column
    assert forms_of(peers)["topk_ids"] == Form("int32", (3,))


def test_versions_stay_behind():
    assert "weight_version" not in pack([sample([1], [2], weight_version=[3])]).columns


def test_to_moves_tensors_and_keeps_what_is_not_there():
    batch = pack([sample([1], [2])]).to("meta")
    assert batch.token_ids.device.type == batch.loss_mask.device.type == "meta"
    assert batch.columns["rollout_log_probs"].device.type == "meta"
    assert batch.max_seqlen == 2
    assert "topk_ids" not in batch.columns


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sample([], [1]), "the prompt is empty"),
        (
            lambda: sample([1], [2, 3], rollout_log_probs=[-1.0]),
            "1 rows of rollout_log_probs, expected 2",
        ),
        (
            lambda: sample([1], [2], recomputed_log_probs=[]),
            "0 rows of recomputed_log_probs, expected 1",
        ),
        (lambda: pack([], pad_multiple=0), "pad_multiple must be at least 1, got 0"),
        (
            lambda: pack([sample([1], [2]), sample([1], [2], recomputed_log_probs=[-1.0])]),
            "recomputed_log_probs: 1 of 2 trajectories have none",
        ),
        (
            lambda: pack([with_topk(2), with_topk(3)]),
            r"topk_ids of different forms in one batch: int32 \[2\], int32 \[3\]",
        ),
        (
            lambda: pack([with_topk(2).with_columns(topk_ids=np.zeros((1, 3), np.int32))]),
            "topk_log_probs has topk 2, another column 3",
        ),
        (lambda: pack([sample([1], [2])]).column("topk_ids"), "the micro-batch has no topk_ids"),
    ],
)
def test_what_does_not_fit_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def with_topk(k: int) -> Trajectory:
    ids, log_probs = np.arange(k, dtype=np.int32)[None], np.zeros((1, k), np.float32)
    return sample([1], [2], topk_ids=ids, topk_log_probs=log_probs)


@st.composite
def batches(draw):
    """Draw trajectories with any loss masks, and which of them train."""
    masks = draw(st.lists(st.lists(st.booleans(), max_size=14), max_size=12))
    trajectories = []
    for mask in masks:
        tokens = [draw(st.integers(1, 99)) for _ in range(len(mask) + 1)]
        log_probs = np.array([-draw(st.integers(1, 99)) for _ in range(sum(mask))], np.float32)
        trajectory = masked(tokens, [False, *mask], rollout_log_probs=log_probs, advantage=1.0)
        trajectories.append(trajectory)
    return trajectories, [draw(st.booleans()) for _ in trajectories]


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 16))
def test_every_sequence_survives_packing(batch_and_trains, pad_multiple):
    trajectories, trains = batch_and_trains
    batch = pack(trajectories, trains=trains, pad_multiple=pad_multiple)
    assert batch.num_tokens % pad_multiple == 0
    assert batch.num_tokens - sum(t.length for t in trajectories) <= pad_multiple
    ends = batch.cu_seqlens.tolist()
    for t, is_trained, start, end in zip(trajectories, trains, ends, ends[1:], strict=False):
        tokens = t.token_ids.tolist()
        assert batch.token_ids[start:end].tolist() == tokens
        assert batch.target_ids[start:end].tolist() == [*tokens[1:], 0]
        assert batch.position_ids[start:end].tolist() == list(range(len(tokens)))
        trained = batch.loss_mask[start:end]
        assert batch.target_ids[start:end][trained].tolist() == t.response_ids.tolist() * is_trained
        log_probs = batch.columns["rollout_log_probs"][start:end][trained].tolist()
        assert log_probs == t.columns["rollout_log_probs"].tolist() * is_trained
    trained_tokens = sum(
        t.sampled for t, trained in zip(trajectories, trains, strict=True) if trained
    )
    assert int(batch.loss_mask.sum()) == trained_tokens


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 4), st.integers(1, 3))
def test_the_shares_of_the_input_s_columns_are_the_whole(batch_and_trains, parts, multiple):
    trajectories, trains = batch_and_trains
    routed = [
        t.with_columns(
            routed_experts=np.arange(6 * (t.length - 1), dtype=np.uint8).reshape(-1, 3, 2) % 7
        )
        for t in trajectories
    ]
    options = {"trains": trains, "pad_multiple": parts * multiple}
    undivided = pack(routed, **options)
    shares = [
        pack(
            routed,
            **options,
            input_rows=lambda cu, part=part: torch.arange(cu[-1]).chunk(parts)[part],  # type: ignore[misc]
        )
        for part in range(parts)
    ]
    if trajectories:
        for packed in shares:  # a column with a row for each sampled token is not divided
            assert torch.equal(*(p.columns["rollout_log_probs"] for p in (packed, undivided)))
        for tensors in ("columns", "valid"):
            rows = [getattr(packed, tensors)["routed_experts"] for packed in shares]
            assert {len(r) for r in rows} == {undivided.num_tokens // parts}
            assert torch.equal(torch.cat(rows), getattr(undivided, tensors)["routed_experts"])


def test_a_batch_with_further_columns_keeps_its_own():
    batch = pack([sample([1], [2])])
    extended = batch.with_columns(recomputed_log_probs=torch.tensor([-0.25, 0]))
    assert {n: rows.tolist() for n, rows in extended.columns.items()} == {
        "rollout_log_probs": [-0.5, 0],
        "recomputed_log_probs": [-0.25, 0],
    }
    assert "recomputed_log_probs" not in batch.columns


def test_what_is_left_out_takes_its_validity_along():
    routed = np.zeros((1, 2, 1), np.uint8)
    batch = pack([sample([1], [2], routed_experts=routed)])
    assert {n: rows.tolist() for n, rows in batch.valid.items()} == {
        "routed_experts": [True, False]
    }
    remaining = batch.without("routed_experts")
    assert (remaining.columns.keys(), remaining.valid) == ({"rollout_log_probs"}, {})
    assert batch.without("rollout_log_probs").valid.keys() == {"routed_experts"}


def test_a_pack_whose_padding_would_be_no_sequence_s_is_refused():
    with pytest.raises(ValueError, match=mentioning(3, "sequence_multiple", 2)):
        pack([], pad_multiple=3, sequence_multiple=2)


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 8))
def test_unpacking_finds_what_predicts_each_sampled_token(batch_and_trains, pad_multiple):
    trajectories, _ = batch_and_trains
    batch = pack(trajectories, pad_multiple=pad_multiple)
    unpacked = unpack_sampled(trajectories, batch.target_ids)
    assert [t.tolist() for t in unpacked] == [t.response_ids.tolist() for t in trajectories]
