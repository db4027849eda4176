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
                routed_experts=np.full((i + 1 + n - 1, 4, 2), i, np.uint8))
        for i, n in enumerate([2, 1])
    ]  # fmt: skip
    for got, expected in zip(decode(encode(batch)), batch, strict=True):
        for name in ("topk_ids", "topk_log_probs", "routed_experts"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
            assert getattr(got, name).dtype == getattr(expected, name).dtype


def test_routing_for_some_rollouts_only_is_refused():
    batch = [rollout(0, [7], topk_ids=np.zeros((1, 2), np.int32)), rollout(1, [9])]
    with pytest.raises(ValueError, match="topk_ids: 1 of 2 rollouts have none"):
        encode(batch)


def test_a_damaged_file_is_named(tmp_path):
    path = save_batch(tmp_path, 3, [rollout(0, [7, 8])])
    assert load_batch(tmp_path, 3) == [rollout(0, [7, 8])]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RolloutFormatError, match="step_000003"):
        load_batch(tmp_path, 3)
