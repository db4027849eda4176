"""Batches of trajectories in files: nothing is lost, and errors name damaged files and undeclared columns."""

import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from megatron_dppo.data.batch_file import BatchFormatError, SavedBatch, load_batch, save_batch
from megatron_dppo.data.trajectory import Trajectory
from tests.messages import mentioning
from tests.trajectories import masked, same


def trajectory(i: int, response: list[int], **columns) -> Trajectory:
    n = len(response)
    return Trajectory.of_response(
        [1, 2, 3][: i + 1],
        response,
        problem_id=10 + i,
        sample_index=i,
        finish_reason="length" if i else "stop",
        reward=0.25 * i,
        advantage=0.1 - i,
        columns={
            "rollout_log_probs": [-0.5 * (j + 1) for j in range(n)],
            "weight_version": [4] + [5] * (n - 1),
            **columns,
        },
    )


def save_and_load(folder: Path, batch: list[Trajectory]) -> list[Trajectory]:
    """Save ``batch``, and return the batch that is then loaded."""
    save_batch(folder, 1, batch)
    return load_batch(folder, 1)


def content_of(folder: Path, batch: list[Trajectory]) -> dict[str, np.ndarray]:
    return load(save_batch(folder, 1, batch).read_bytes())


def read_back(folder: Path, arrays: dict[str, np.ndarray]) -> list[Trajectory]:
    """Write ``arrays`` as the file of a batch, and return the batch that is then loaded."""
    (folder / "step_000001.safetensors").write_bytes(save(arrays))
    return load_batch(folder, 1)


def partly_routed_batch(dtype: type = np.uint8) -> list[Trajectory]:
    """Return three trajectories, of which the second alone has recorded routing."""
    routed = np.tile(np.array([3, 250], dtype), (3, 4, 1))
    second = trajectory(1, [9, 4], routed_experts=routed)
    return [trajectory(0, [7, 8]), second, trajectory(2, [5])]


def all_same(loaded: list[Trajectory], expected: list[Trajectory]) -> bool:
    return all(same(a, b) for a, b in zip(loaded, expected, strict=True))


def test_a_ragged_batch_comes_back_as_it_went(tmp_path):
    batch = [trajectory(0, [7, 8]), trajectory(1, [9]), trajectory(2, [4, 5, 6])]
    assert all_same(save_and_load(tmp_path, batch), batch)


def test_several_turns_and_the_tool_s_output_between_them_come_back(tmp_path):
    tokens, mask = [1, 2, 7, 8, 30, 31, 9], [False, False, True, True, False, False, True]
    whole = masked(tokens, mask, problem_id=3, rollout_log_probs=[-1.0, -2.0, -3.0])
    batch = [whole, trajectory(0, [7]).without("weight_version")]
    assert all_same(save_and_load(tmp_path, batch), batch)
    assert whole.prompt_ids.tolist() == [1, 2]
    assert whole.response_ids.tolist() == [7, 8, 9]


def test_an_empty_batch_comes_back_empty(tmp_path):
    assert save_and_load(tmp_path, []) == []


def test_numbers_have_their_types_whatever_they_are_written_as(tmp_path):
    whole = trajectory(0, [5]).scored(1, 0)
    for batch in ([], [whole]):
        arrays = content_of(tmp_path, batch)
        assert (arrays["trajectories"].dtype, arrays["scores"].dtype) == (np.int64, np.float64)


def test_a_batch_s_folder_is_made(tmp_path):
    saved = save_batch(tmp_path / "run" / "batches", 3, [trajectory(0, [5])])
    assert saved.is_file()


def test_the_text_is_left_out(tmp_path):
    (loaded,) = save_and_load(tmp_path, [Trajectory.of_response([1], [2], text="two")])
    assert loaded.text == ""


def test_topk_and_routing_keep_dtype_and_rows(tmp_path):
    batch = [
        trajectory(i, [3] * n, topk_ids=np.tile(np.array([i, 9], np.int32), (n, 1)),
               topk_log_probs=np.full((n, 2), -1.5, np.float32),
               routed_experts=np.tile(np.array([i, i + 1], np.uint8), (i + n, 4, 1)))
        for i, n in enumerate([2, 1])
    ]  # fmt: skip
    assert all_same(save_and_load(tmp_path, batch), batch)


def test_a_complete_column_of_some_trajectories_only_is_refused(tmp_path):
    batch = [trajectory(0, [7], topk_ids=np.zeros((1, 2), np.int32)), trajectory(1, [9])]
    with pytest.raises(ValueError, match=mentioning("topk_ids", 1, 2)):
        save_batch(tmp_path, 1, batch)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_some_trajectories_may_have_no_recorded_routing(tmp_path, dtype):
    batch = partly_routed_batch(dtype)
    loaded = save_and_load(tmp_path, batch)
    assert ["routed_experts" in t.columns for t in loaded] == [False, True, False]
    assert all_same(loaded, batch)


def test_the_order_in_memory_does_not_matter(tmp_path):
    routed = np.array([[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 1], [2, 3]]], np.uint8)
    layers_first = np.ascontiguousarray(routed.transpose(1, 0, 2)).transpose(1, 0, 2)
    assert not layers_first.flags["C_CONTIGUOUS"]
    (loaded,) = save_and_load(tmp_path, [trajectory(0, [7, 8], routed_experts=layers_first)])
    np.testing.assert_array_equal(loaded.columns["routed_experts"], routed)


def test_a_file_with_one_expert_twice_is_refused(tmp_path):
    save_batch(tmp_path, 2, [trajectory(0, [7, 8], routed_experts=np.ones((2, 4, 2), np.uint8))])
    with pytest.raises(
        BatchFormatError, match=mentioning("response 0", "problem 10", "routed_experts")
    ):
        load_batch(tmp_path, 2)


def test_single_trajectories_are_read_from_a_file(tmp_path):
    batch = partly_routed_batch()
    save_batch(tmp_path, 2, batch)
    saved = SavedBatch(tmp_path, 2)
    assert saved.problems == [10, 11, 12]
    assert all_same(saved.read([1]), [batch[1]])
    assert all_same(saved.read([2, 0]), [batch[2], batch[0]])
    assert saved.read([]) == []
    (bare,) = saved.read([1], without=("routed_experts",))
    assert same(bare, batch[1].without("routed_experts"))
    with pytest.raises(BatchFormatError, match=r"step_000002\.safetensors: .*index 3"):
        saved.read([3])


def test_what_is_not_read_takes_no_memory(tmp_path):
    size = 2**17
    column = np.tile(np.array([1, 2], np.int32), (size, 1))
    batch = [
        trajectory(i, [7] * size, topk_ids=column, topk_log_probs=-column.astype(np.float32))
        for i in range(6)
    ]
    save_batch(tmp_path, 1, batch)
    whole = (tmp_path / "step_000001.safetensors").stat().st_size
    del batch
    tracemalloc.start()
    loaded = SavedBatch(tmp_path, 1).read([4])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert loaded[0].columns["topk_ids"].nbytes == column.nbytes
    assert peak < 0.4 * whole  # one of six trajectories, and the memory of its check


def test_an_error_in_one_trajectory_is_that_of_its_reader(tmp_path):
    bad = trajectory(1, [7, 8], routed_experts=np.ones((3, 4, 2), np.uint8))
    save_batch(tmp_path, 2, [trajectory(0, [7, 8]), bad])
    saved = SavedBatch(tmp_path, 2)
    assert all_same(saved.read([0]), [trajectory(0, [7, 8])])
    with pytest.raises(
        BatchFormatError, match=mentioning("step_000002", "response 1", "problem 11")
    ):
        saved.read([1])


def test_a_damaged_file_is_named(tmp_path):
    path = save_batch(tmp_path, 3, [trajectory(0, [7, 8])])
    assert all_same(load_batch(tmp_path, 3), [trajectory(0, [7, 8])])
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(BatchFormatError, match="step_000003"):
        load_batch(tmp_path, 3)


def test_rows_that_are_too_few_and_columns_that_nobody_declared_are_refused(tmp_path):
    arrays = content_of(tmp_path, [trajectory(0, [7, 8])])
    with_missing_row = {**arrays, "column.weight_version": arrays["column.weight_version"][:1]}
    with pytest.raises(BatchFormatError, match="1 rows, expected 2"):
        read_back(tmp_path, with_missing_row)
    with_unknown_column = {**arrays, "column.mood": np.zeros(2), "present.mood": np.ones(1, bool)}
    with pytest.raises(BatchFormatError, match=mentioning("'mood'")):
        read_back(tmp_path, with_unknown_column)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def hashed_batch() -> list[Trajectory]:
    routed = np.tile(np.array([3, 250], np.uint8), (3, 4, 1))
    topk = {
        "topk_ids": np.array([[4, 5]], np.int32),
        "topk_log_probs": np.zeros((1, 2), np.float32),
    }
    second = {name: np.repeat(array, 2, 0) for name, array in topk.items()}
    return [
        trajectory(0, [7, 8], **second),
        trajectory(1, [9, 4], routed_experts=routed, **second),
        trajectory(2, [5], **topk),
    ]


def test_every_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    """The test flips every third bit of the header and every seventh of the rest. Only flips in padding and in names of
    hashes may stay unnoticed."""
    batch = hashed_batch()
    path = save_batch(tmp_path, 3, batch)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    bits = [*range(0, 8 * header, 3), *range(8 * header, 8 * len(content), 7)]
    refused = 0
    for bit in bits:
        path.write_bytes(flipped(content, bit))
        try:
            assert all_same(load_batch(tmp_path, 3), batch), bit
        except BatchFormatError:
            refused += 1
    assert refused > 0.97 * len(bits)


def test_a_bit_of_mu_is_told_with_its_trajectory(tmp_path):
    batch = hashed_batch()
    path = save_batch(tmp_path, 3, batch)
    content = path.read_bytes()
    place = content.rindex(batch[1].columns["rollout_log_probs"].tobytes())
    path.write_bytes(flipped(content, 8 * place + 20))
    saved = SavedBatch(tmp_path, 3)
    assert all_same(saved.read([0]), batch[:1])  # the bytes of this trajectory are intact
    with pytest.raises(BatchFormatError, match=mentioning("step_000003", "rollout_log_probs")):
        saved.read([1])
    assert saved.read([1], without={"rollout_log_probs"})  # without the damaged column


def test_a_file_without_hashes_is_refused(tmp_path):
    batch = hashed_batch()
    path = save_batch(tmp_path, 3, batch)
    arrays = {n: a for n, a in load(path.read_bytes()).items() if not n.startswith("hash.")}
    path.write_bytes(save(arrays))
    with pytest.raises(BatchFormatError, match=mentioning("step_000003", "arrays", "hash")):
        load_batch(tmp_path, 3)


def test_a_kill_inside_a_save_leaves_whole_batches(tmp_path):
    """The program saves the same steps again and again, so that a kill interrupts the replacement of a file."""
    program = (
        "import sys; from tests.unit.test_batch_file import hashed_batch, save_batch\n"
        "while True: [save_batch(sys.argv[1], step, hashed_batch() * 50) for step in (1, 2, 3)]"
    )
    expected = hashed_batch() * 50
    for kill in range(3):
        with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as process:
            while not (tmp_path / "step_000003.safetensors").exists() and process.poll() is None:
                time.sleep(0.01)
            time.sleep(0.05 + 0.013 * kill)
            process.kill()
        for step in (1, 2, 3):
            assert all_same(load_batch(tmp_path, step), expected)
        (tmp_path / "step_000003.safetensors").unlink()
