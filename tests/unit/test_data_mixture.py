"""Several training files make one set, keep their shares, and go on in the same order after a restart."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.config.data_files import label_of
from megatron_dppo.data.problems import ProblemSet
from megatron_dppo.data.records import FilePart
from megatron_dppo.data.sampling import TrainingFiles, WeightedSampler, joined
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.loop.rollout_figures import file_figures


def part(*ids: int, records: int, sha256: str = "a") -> ProblemSet:
    problems = tuple(Problem(i, f"p{i}", "1", (5,)) for i in ids)
    return ProblemSet(problems, records - len(ids), sha256, records, bad_answers=1)


def test_problems_count_on_from_file_to_file():
    one, other = part(0, 2, records=3), part(1, records=2, sha256="b")
    joined_set = joined([one, other, one])
    assert [p.problem_id for p in joined_set.problems] == [0, 2, 4, 5, 7]
    assert [p.prompt for p in joined_set.problems] == ["p0", "p2", "p1", "p0", "p2"]
    assert (joined_set.dropped, joined_set.records, joined_set.bad_answers) == (3, 8, 3)
    assert joined_set.sha256 != joined([other, one, one]).sha256
    assert joined([one]) is one


def test_a_joined_set_places_a_problem_in_its_file():
    one = replace(part(0, 2, records=3), parts=(FilePart("a.jsonl", 3, "line"),))
    other = replace(
        part(0, records=4), parts=(FilePart("b.csv", 2, "row"), FilePart("c.jsonl", 2, "line"))
    )
    assert one.location("a.jsonl (q)", 2) == "a.jsonl (q), line 3"
    places = [joined([one, other]).line_of(i) for i in range(7)]
    assert places == [
        "a.jsonl, line 1", "a.jsonl, line 2", "a.jsonl, line 3", "b.csv, row 1", "b.csv, row 2",
        "c.jsonl, line 1", "c.jsonl, line 2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name"),
    [("data/math/", "math"), ("data/part-*.parquet", "part"), ("data/math/*.jsonl", "math"),
     ("data/a.jsonl", "a"), ("*", "data"), ("*.jsonl.gz", "data")],
)  # fmt: skip
def test_folders_and_globs_have_names_for_metrics(path, name):
    assert TrainingFiles([label_of(path)], [1]).names == [name]


def test_what_each_file_gave_to_a_batch():
    files = TrainingFiles(["data/a.jsonl", "b.parquet", "c.jsonl"], [3, 2, 4])
    assert [files.of(i) for i in range(9)] == ["a"] * 3 + ["b"] * 2 + ["c"] * 4
    batch = [
        Trajectory.of_response([5], [6], problem_id=i, reward=reward)
        for i, reward in [(2, 1.0), (2, 0.0), (3, 1.0), (3, 1.0), (0, 0.0), (0, 0.0)]
    ]
    assert file_figures(batch, files, group_size=2) == {
        "data/a/prompts": 2.0,
        "data/a/reward": 0.25,
        "data/b/prompts": 1.0,
        "data/b/reward": 1.0,
        "data/c/prompts": 0.0,
    }
    assert file_figures(batch, TrainingFiles(["a"], [9]), group_size=2) == {}
    assert TrainingFiles(["x/a.jsonl", "y/a.jsonl"], [1, 1]).names == ["a-0", "a-1"]


def test_three_to_one_by_hand():
    # The file that lacks most draws of its share is next. The files lack (3/4, 1/4) -> file 0; (2/4, 2/4) ->
    # file 0, the first of both; (1/4, 3/4) -> file 1; (1, 0) -> file 0. Then the order repeats.
    sampler = WeightedSampler([2, 9], [3, 1], seed=0, shuffle=False)
    assert sampler.next(8) == [0, 1, 2, 0, 1, 0, 3, 1]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 10)), min_size=1, max_size=4),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_shares_are_kept_and_each_file_goes_through_its_epochs(files, sizes):
    counts, weights = zip(*files, strict=True)
    sampler = WeightedSampler(counts, weights, seed=3)
    indices = [i for n in sizes for i in sampler.next(n)]
    start = 0
    for count, weight in files:
        own_indices = [i - start for i in indices if start <= i < start + count]
        expected_draws = len(indices) * weight / sum(weights)
        assert abs(len(own_indices) - expected_draws) < max(1, len(files) - 1) + 1e-6
        for epoch in range(len(own_indices) // count):
            assert sorted(own_indices[epoch * count : (epoch + 1) * count]) == list(range(count))
        start += count


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 50), st.booleans(), st.integers(0, 99))
def test_a_resumed_sampler_goes_on_exactly(draws_before, shuffle, seed):
    def make_sampler() -> WeightedSampler:
        return WeightedSampler([5, 3, 7], [0.3, 1.1, 0.7], seed, shuffle)

    sampler, resumed_sampler = make_sampler(), make_sampler()
    sampler.next(draws_before)
    resumed_sampler.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert [resumed_sampler.next(7) for _ in range(5)] == [sampler.next(7) for _ in range(5)]


def test_the_same_draws_in_other_portions():
    one, other = (WeightedSampler([5, 3], [1, 2], seed=1) for _ in range(2))
    assert one.next(30) == [i for n in (1, 2, 3, 4, 20) for i in other.next(n)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [2.0, 1.0]}, r"saved with weights \[2.0, 1.0\], this run has \[1.0, 2.0\]"),
        ({"extra": 1}, "keys .*extra"),
        ({"files": []}, "0 files, this run has 2"),
    ],
)
def test_a_foreign_state_is_refused(change, message):
    sampler = WeightedSampler([5, 3], [1, 2], seed=1)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    with pytest.raises(ValueError, match="saved with count=5, this run has 4"):
        WeightedSampler([4, 3], [1, 2], seed=1).load_state_dict(sampler.state_dict())
