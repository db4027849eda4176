"""Files of scored responses: responses are read as they were written, and torn or damaged frames are not read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.data.response_frames import (
    ScoredResponse,
    append_frame,
    open_frames,
    read_frames,
)
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.rewards.verifier import Score


def response(number: int) -> ScoredResponse:
    columns = {
        "rollout_log_probs": np.array([-0.5, -float(number)], np.float32),
        "weight_version": np.array([3, 4], np.int32),
    }
    trajectory = Trajectory.of_response(
        [1, 2, number], [7, 8], problem_id=number, sample_index=1, columns=columns, text="a\ud83d"
    ).stamped({"temperature": 1.0}, 9)
    score = Score(0.5, components={"format": 1.0}, reason="half")
    return ScoredResponse((number, 1), trajectory, asdict(score))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "step" / "rank0.frames"
    with open_frames(path) as file:
        for number in range(3):
            append_frame(file, response(number))
    return path


def read_keys(path: Path) -> list[int]:
    return [found.key[0] for found in read_frames(path)]


def test_a_response_is_read_as_it_was_kept(path: Path) -> None:
    responses = list(read_frames(path))
    assert len(responses) == 3
    for number, stored in enumerate(responses):
        expected = response(number)
        assert stored.key == (number, 1)
        assert Score(**stored.score) == Score(**expected.score)
        assert stored.trajectory.digests() == expected.trajectory.digests()
        assert stored.trajectory.stamp == expected.trajectory.stamp
        assert stored.trajectory.text == expected.trajectory.text
        assert stored.trajectory.version_spans == expected.trajectory.version_spans


def test_a_torn_frame_ends_the_file_and_is_replaced_by_the_next(path: Path) -> None:
    whole = path.read_bytes()
    for cut in (1, 30, 200):
        path.write_bytes(whole[:-cut])
        assert read_keys(path) == [0, 1]
        with open_frames(path) as file:
            append_frame(file, response(5))
        assert read_keys(path) == [0, 1, 5]


def test_a_damaged_frame_is_not_used(path: Path) -> None:
    whole = path.read_bytes()
    size = len(whole) // 3
    for offset in range(0, size, 7):
        damaged = bytearray(whole)
        damaged[size + offset] ^= 4
        path.write_bytes(damaged)
        assert 1 not in read_keys(path)
        assert read_keys(path)[:1] == [0]
