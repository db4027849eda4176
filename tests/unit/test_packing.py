"""Packing: every number below is laid out by hand; the properties hold for any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.data.packing import TrainingSample, pack, unpack_responses


def sample(prompt, response, index=0, advantage=1.0, **fields) -> TrainingSample:
    fields = {
        "rollout_log_probs": [-0.5 * (j + 1) for j in range(len(response))],
        "recomputed_log_probs": None,
        "topk_ids": None,
        "topk_log_probs": None,
        **fields,
    }
    return TrainingSample(prompt, response, advantage, index=index, **fields)


def test_entry_t_concerns_the_next_token_of_the_same_sequence():
    batch = pack(
        [
            sample([11, 12, 13], [21, 22], index=7, advantage=2.0),
            sample([14], [23, 24, 25], index=3, advantage=-1.0),
        ],
        pad_multiple=4,
    )
    assert batch.token_ids.tolist() == [11, 12, 13, 21, 22, 14, 23, 24, 25, 0, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert batch.target_ids.tolist() == [12, 13, 21, 22, 0, 23, 24, 25, 0, 0, 0, 0]
    # The last prompt token predicts the first response token; the last token predicts nothing.
    assert batch.loss_mask.int().tolist() == [0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0]
    assert batch.rollout_log_probs.tolist() == [0, 0, -0.5, -1, 0, -0.5, -1, -1.5, 0, 0, 0, 0]
    assert batch.advantages.tolist() == [0, 0, 2, 2, 0, -1, -1, -1, 0, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 5, 9, 12]
    assert batch.sequence_index.tolist() == [7, 3, -1]
    assert batch.max_seqlen == 5
    assert batch.num_tokens == 12
    assert batch.recomputed_log_probs is None
    assert batch.rollout_topk_ids is None


def test_no_padding_sequence_where_the_tokens_fill_the_multiple():
    batch = pack([sample([1, 2], [3, 4])], pad_multiple=4)
    assert batch.cu_seqlens.tolist() == [0, 4]
    assert batch.sequence_index.tolist() == [0]


def test_dtypes():
    fields = {
        "recomputed_log_probs": [-0.25],
        "topk_ids": np.array([[4, 5]], np.int32),
        "topk_log_probs": np.array([[-0.5, -1.5]], np.float32),
    }
    batch = pack([sample([1], [2], **fields)])
    for name in ("token_ids", "position_ids", "target_ids", "rollout_topk_ids", "sequence_index"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in (
        "rollout_log_probs",
        "advantages",
        "recomputed_log_probs",
        "rollout_topk_log_probs",
    ):
        assert getattr(batch, name).dtype == torch.float32, name
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.loss_mask.dtype == batch.rollout_topk_valid.dtype == torch.bool


def test_topk_rows_stand_with_their_targets_and_missing_ids_are_invalid():
    first = sample(
        [9, 9],
        [5, 6],
        topk_ids=np.array([[5, 8], [7, -1]], np.int32),
        topk_log_probs=np.array([[-0.25, -2.0], [-0.125, -np.inf]], np.float32),
    )
    batch = pack([first], pad_multiple=3)
    assert batch.rollout_topk_ids.tolist() == [[0, 0], [5, 8], [7, 0], [0, 0], [0, 0], [0, 0]]
    assert batch.rollout_topk_log_probs.tolist()[1:3] == [[-0.25, -2.0], [-0.125, 0.0]]
    assert batch.rollout_topk_valid.int().tolist() == [
        [0, 0],
        [1, 1],
        [1, 0],
        [0, 0],
        [0, 0],
        [0, 0],
    ]


def test_an_untrained_sample_keeps_its_tokens_and_loses_its_columns():
    batch = pack(
        [
            sample([1], [2, 3], train=False, recomputed_log_probs=[-0.5, float("nan")]),
            sample([4], [5], recomputed_log_probs=[-0.75]),
        ]
    )
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.target_ids.tolist() == [2, 3, 0, 5, 0]
    assert batch.loss_mask.tolist() == [False, False, False, True, False]
    assert batch.rollout_log_probs.tolist() == [0, 0, 0, -0.5, 0]
    assert batch.recomputed_log_probs.tolist() == [0, 0, 0, -0.75, 0]
    assert batch.advantages.tolist() == [0, 0, 0, 1, 0]


def test_an_empty_pack_is_padding_with_the_columns_of_its_peers():
    plain = pack([], pad_multiple=4)
    assert plain.token_ids.tolist() == [0, 0, 0, 0]
    assert plain.cu_seqlens.tolist() == [0, 4]
    assert plain.sequence_index.tolist() == [-1]
    assert not plain.loss_mask.any()
    assert plain.recomputed_log_probs is None
    assert plain.rollout_topk_ids is None
    full = pack([], pad_multiple=2, topk=3, recomputed=True)
    assert full.recomputed_log_probs.tolist() == [0, 0]
    assert full.rollout_topk_ids.shape == (2, 3)
    assert not full.rollout_topk_valid.any()


def test_to_moves_tensors_and_keeps_what_is_not_there():
    batch = pack([sample([1], [2])]).to("meta")
    assert batch.token_ids.device.type == batch.loss_mask.device.type == "meta"
    assert batch.max_seqlen == 2
    assert batch.rollout_topk_ids is None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sample([], [1]), "prompt is empty"),
        (
            lambda: sample([1], [2, 3], rollout_log_probs=[-1.0]),
            "1 rows of rollout_log_probs for 2",
        ),
        (lambda: sample([1], [2], recomputed_log_probs=[]), "0 rows of recomputed_log_probs for 1"),
        (lambda: sample([1], [2], topk_ids=np.zeros((1, 2), np.int32)), "go together"),
        (lambda: pack([], pad_multiple=0), "pad_multiple must be at least 1, got 0"),
        (
            lambda: pack([sample([1], [2], 4), sample([1], [2], 5, recomputed_log_probs=[-1.0])]),
            r"recomputed_log_probs must come with every sample .* samples \[4\] lack it",
        ),
        (
            lambda: pack([with_topk(2), with_topk(3)]),
            r"different widths in one pack: \[\(2,\), \(3,\)\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def with_topk(k: int) -> TrainingSample:
    ids, log_probs = np.arange(k, dtype=np.int32)[None], np.zeros((1, k), np.float32)
    return sample([1], [2], topk_ids=ids, topk_log_probs=log_probs)


@st.composite
def samples(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=12))
    return [
        sample(
            [draw(st.integers(1, 99)) for _ in range(p)],
            [draw(st.integers(1, 99)) for _ in range(r)],
            index=i,
            train=draw(st.booleans()),
        )
        for i, (p, r) in enumerate(shapes)
    ]


@settings(max_examples=60, deadline=None)
@given(samples(), st.integers(1, 16))
def test_every_sequence_survives_packing(batch_samples, pad_multiple):
    batch = pack(batch_samples, pad_multiple=pad_multiple)
    assert batch.num_tokens % pad_multiple == 0
    assert batch.num_tokens - sum(s.length for s in batch_samples) <= pad_multiple
    ends = batch.cu_seqlens.tolist()
    for s, start, end in zip(batch_samples, ends, ends[1:], strict=False):
        tokens = [*s.prompt_ids, *s.response_ids]
        assert batch.token_ids[start:end].tolist() == tokens
        assert batch.target_ids[start:end].tolist() == [*tokens[1:], 0]
        assert batch.position_ids[start:end].tolist() == list(range(len(tokens)))
        trained = batch.loss_mask[start:end]
        assert batch.target_ids[start:end][trained].tolist() == list(s.response_ids) * s.train
        kept = batch.rollout_log_probs[start:end][trained].tolist()
        assert kept == list(s.rollout_log_probs) * s.train
    trained_tokens = sum(len(s.response_ids) * s.train for s in batch_samples)
    assert int(batch.loss_mask.sum()) == trained_tokens


@settings(max_examples=60, deadline=None)
@given(samples(), st.integers(1, 8))
def test_unpacking_finds_what_predicts_each_response_token(batch_samples, pad_multiple):
    batch = pack(batch_samples, pad_multiple=pad_multiple)
    unpacked = unpack_responses(batch_samples, batch.target_ids)
    assert [t.tolist() for t in unpacked] == [list(s.response_ids) for s in batch_samples]
