"""The parts of trajectories that ranks exchange: how columns are split, which stages need which part, and in which
pieces the parts are sent. No process group is needed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_dppo.data.columns import Column, Form, ReadBy, Rows, has_repeats, usable_rows
from megatron_dppo.data.trajectory import Outline, Trajectory
from megatron_dppo.loop.exchange import (
    ColumnPart,
    HostGroup,
    PartDirectory,
    Share,
    Stages,
    host_groups,
    with_room,
)
from megatron_dppo.trainer.run_export import SEQUENCES_TO_CHECK, examples_of
from tests.trajectories import same, trajectory

# 5 tokens without the last one, 3 layers, 2 experts.
ROUTED = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
FORMS = {"routed_experts": Form("uint8", (3, 2)), "rollout_log_probs": Form("float32", ())}
STAGES = Stages(2, [[1], [0, 2]])


def example_trajectory() -> Trajectory:
    whole = trajectory([1, 2], [3, 4, 5], routed_experts=ROUTED, weight_version=[6, 6, 7])
    return replace(whole, problem_id=8, sample_index=2, reward=0.1, finish_reason="length")


def test_an_outline_tells_what_the_trajectory_does_and_survives_json():
    whole = example_trajectory()
    outline = Outline.of(whole)
    for name in ("problem_id", "sample_index", "length", "sampled", "reward", "advantage"):
        assert getattr(outline, name) == getattr(whole, name)
    assert (outline.truncated, outline.version_spans) == (True, whole.version_spans)
    assert str(outline) == str(whole) == "response 2 to problem 8"
    assert Outline.from_json(json.loads(json.dumps(outline))) == outline


def test_rows_of_other_weights_than_the_tokens_are_discarded_and_counted():
    whole = example_trajectory()
    # The engine recorded all rows under version 7, but version 6 sampled two of the tokens.
    usable = usable_rows(whole.loss_mask, whole.columns)
    assert Outline.of(whole).discarded_rows == 2 == len(usable) - usable.sum()
    assert trajectory([1, 2], [3], routed_experts=ROUTED[:2]).discarded_rows == 0
    joined = whole.with_columns(routing_version=np.array([6, -1, 7], np.int32))
    assert usable_rows(joined.loss_mask, joined.columns).tolist() == [True, True, False, True]
    assert joined.discarded_rows == 1


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_an_expert_that_stands_twice_is_found_wherever(dtype):
    routed = np.arange(24, dtype=dtype).reshape(3, 1, 8)
    assert not has_repeats(routed)
    for i, j in ((0, 1), (0, 7), (3, 6), (6, 7)):
        again = routed.copy()
        again[2, 0, j] = again[2, 0, i]
        assert has_repeats(again), (i, j)
    assert not has_repeats(routed[..., :1])
    assert not has_repeats(routed[:0])


def test_a_stage_gets_its_layers_alone_and_all_stages_make_the_whole():
    whole = example_trajectory()
    parts = STAGES.split(5, whole)
    assert parts[ColumnPart(5, "routed_experts", 0)].tolist() == ROUTED[:, [1]].tolist()
    assert parts[ColumnPart(5, "routed_experts", 1)].tolist() == ROUTED[:, [0, 2]].tolist()
    assert ColumnPart(5, "rollout_log_probs", 1) not in parts
    assert STAGES.needs(ColumnPart(5, "routed_experts", 1), 1)
    assert not STAGES.needs(ColumnPart(5, "routed_experts", 1), 0)
    assert STAGES.needs(ColumnPart(5, "token_ids"), 1)
    assert same(STAGES.trajectory(Outline.of(whole), parts), whole)
    second_parts = {part: array for part, array in parts.items() if STAGES.needs(part, 1)}
    stage_trajectory = whole.with_columns(routed_experts=ROUTED[:, [0, 2]])
    assert same(STAGES.trajectory(Outline.of(whole), second_parts), stage_trajectory)
    first_parts = {part: array for part, array in parts.items() if STAGES.needs(part, 0)}
    stage_trajectory = whole.with_columns(routed_experts=ROUTED[:, [1]])
    stage_trajectory = stage_trajectory.without("rollout_log_probs")
    assert same(STAGES.trajectory(Outline.of(whole), first_parts), stage_trajectory)
    assert Stages().split(0, whole).keys() == {
        ColumnPart(0, n) for n in ("token_ids", "loss_mask", *whole.columns)
    }


LOSS_READS = (
    "rollout_log_probs", "recomputed_log_probs", "reference_log_probs", "topk_ids", "topk_log_probs",
)  # fmt: skip


@pytest.mark.parametrize("layers", [(), [[0], [], [1, 2]]])
def test_what_the_loss_reads_goes_to_the_last_stage_alone(layers):
    stages = Stages(3, layers)
    for name in LOSS_READS:
        assert stages.parts(4, name) == [ColumnPart(4, name)]
        assert [stages.needs(ColumnPart(4, name), s) for s in range(3)] == [False, False, True], (
            name
        )
        assert Stages().needs(ColumnPart(4, name), 0)  # the first stage is the last
    for name in ("token_ids", "loss_mask", "weight_version"):
        assert all(stages.needs(ColumnPart(4, name), s) for s in range(3)), name
    recorded = stages.parts(4, "routed_experts")
    readers = [[s for s in range(3) if stages.needs(part, s)] for part in recorded]
    assert readers == ([[0], [1], [2]] if layers else [[0, 1, 2]])


def test_a_column_says_which_stages_read_it():
    for read_by, expected in (
        (ReadBy.FIRST, [True, False, False]),
        (ReadBy.LAST, [False, False, True]),
        (ReadBy.ALL, [True, True, True]),
    ):
        assert [read_by.includes(stage, 3) for stage in range(3)] == expected
        assert read_by.includes(0, 1)
    assert Column("made_up", ("uint8",), Rows.INPUT).read_by is ReadBy.ALL


def test_a_share_has_an_aligned_span_for_each_part():
    directory = PartDirectory([Outline.of(example_trajectory())], STAGES, FORMS)
    parts = [
        ColumnPart(0, "loss_mask"),
        ColumnPart(0, "rollout_log_probs"),
        ColumnPart(0, "routed_experts", 1),
    ]
    assert [directory.shape(p) for p in parts] == [(5,), (3,), (4, 2, 2)]
    share = directory.share(parts)
    assert share == Share(dict(zip(parts, [(0, 5), (64, 76), (128, 144)], strict=True)), 192)
    buffer = np.zeros(share.size, np.uint8)
    views = directory.views(share, buffer)
    views[parts[1]][:] = [1.0, 2.0, 3.0]
    assert buffer[64:76].view(np.float32).tolist() == [1, 2, 3]
    assert not buffer[:64].any()
    assert directory.share([]) == Share({}, 0)
    single_parts = [[part] for part in parts]
    assert list(share.pieces(parts, 75)) == single_parts
    for limit in (76, 143):
        assert list(share.pieces(parts, limit)) == [parts[:2], parts[2:]]
    assert list(share.pieces(parts, 144)) == [parts]
    assert list(share.pieces(parts[1:], 80)) == [parts[1:]]
    assert list(share.pieces([], 1)) == []
    assert [share.extent(piece) for piece in (parts[:1], parts[1:], parts)] == [
        (0, 5),
        (64, 144),
        (0, 144),
    ]


def test_one_rank_of_a_host_receives_for_its_replica_there():
    """Ranks 2 and 3 are of one replica and share the memory of host "b", so rank 2 receives for both.
    If host "b" has no room for the parts, each of these ranks receives for itself."""
    # Replica, stage, host and free bytes of each rank.
    rows = [[0, 0, "a", 100], [1, 0, "a", 100], [0, 1, "b", 60], [0, 1, "b", 50], [1, 1, "b", 90]]
    groups = host_groups(rows)
    assert groups[2] == HostGroup(0, (2, 3), frozenset([1]), "b", 50)
    assert [group.head for group in groups] == [0, 1, 2, 4]
    stage_of = [0, 0, 1, 1, 1]
    # The bytes for each head. A rank that is alone in its group takes no shared memory.
    sizes = {0: 10**6, 1: 10**6, 2: 50, 4: 10**6}
    assert with_room(groups, sizes, stage_of) == groups
    single_ranks = with_room(groups, {**sizes, 2: 51}, stage_of)
    assert [group.ranks for group in single_ranks] == [(0,), (1,), (2,), (3,), (4,)]
    assert single_ranks[3].stages == {1}


def test_an_example_is_a_copy_without_columns():
    whole = example_trajectory()
    assert examples_of({3: whole, SEQUENCES_TO_CHECK: whole}) == [
        (3, [1, 2, 3, 4, 5], [False, False, True, True, True])
    ]
