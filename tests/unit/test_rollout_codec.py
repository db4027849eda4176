import numpy as np
import pytest

from megatron_dppo.data.rollout_codec import (
    RolloutFormatError,
    decode,
    encode,
    load_batch,
    save_batch,
)
from megatron_dppo.types import Rollout, VersionSpan


def rollout(i: int, response: list[int], **extra) -> Rollout:
    return Rollout(
        problem_id=10 + i, sample_index=i, prompt_ids=[1, 2, 3][: i + 1], response_ids=response,
        rollout_log_probs=[-0.5 * (j + 1) for j in range(len(response))], finish_reason="length" if i else "stop",
        text="", weight_versions=[VersionSpan(4, 0, 1), VersionSpan(5, 1, len(response))], reward=0.25 * i,
        advantage=0.1 - i, **extra,
    )  # fmt: skip


def test_a_ragged_batch_comes_back_as_it_went():
    batch = [rollout(0, [7, 8]), rollout(1, [9]), rollout(2, [4, 5, 6])]
    assert decode(encode(batch)) == batch


def test_an_empty_batch_comes_back_empty():
    assert decode(encode([])) == []


def test_topk_and_routing_keep_dtype_and_rows():
    batch = [
        rollout(i, [3] * n, topk_ids=np.full((n, 2), i, np.int32), topk_log_probs=np.full((n, 2), -1.5, np.float32),
                routed_experts=np.tile(np.array([i, i + 1], np.uint8), (i + n, 4, 1)))
        for i, n in enumerate([2, 1])
    ]  # fmt: skip
    for got, expected in zip(decode(encode(batch)), batch, strict=True):
        for name in ("topk_ids", "topk_log_probs", "routed_experts"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
            assert getattr(got, name).dtype == getattr(expected, name).dtype


def test_topk_for_some_rollouts_only_is_refused():
    batch = [rollout(0, [7], topk_ids=np.zeros((1, 2), np.int32)), rollout(1, [9])]
    with pytest.raises(ValueError, match="topk_ids: 1 of 2 rollouts have none"):
        encode(batch)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_some_rollouts_may_have_no_recorded_routing(dtype):
    routed = np.tile(np.array([3, 250], dtype), (3, 4, 1))
    batch = [rollout(0, [7, 8]), rollout(1, [9, 4], routed_experts=routed), rollout(2, [5])]
    got = decode(encode(batch))
    assert [r.routed_experts is None for r in got] == [True, False, True]
    np.testing.assert_array_equal(got[1].routed_experts, routed)
    assert got[1].routed_experts.dtype == dtype


def test_the_order_in_memory_does_not_matter():
    routed = np.array([[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 1], [2, 3]]], np.uint8)
    layers_first = np.ascontiguousarray(routed.transpose(1, 0, 2)).transpose(1, 0, 2)
    assert not layers_first.flags["C_CONTIGUOUS"]
    (got,) = decode(encode([rollout(0, [7, 8], routed_experts=layers_first)]))
    np.testing.assert_array_equal(got.routed_experts, routed)


def test_a_file_with_one_expert_twice_is_refused(tmp_path):
    save_batch(tmp_path, 2, [rollout(0, [7, 8], routed_experts=np.ones((2, 4, 2), np.uint8))])
    with pytest.raises(
        RolloutFormatError, match=r"rollout 0: a token is routed to the same expert"
    ):
        load_batch(tmp_path, 2)


def test_a_damaged_file_is_named(tmp_path):
    path = save_batch(tmp_path, 3, [rollout(0, [7, 8])])
    assert load_batch(tmp_path, 3) == [rollout(0, [7, 8])]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RolloutFormatError, match="step_000003"):
        load_batch(tmp_path, 3)
