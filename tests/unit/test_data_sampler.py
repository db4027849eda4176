"""The order of the problems: whole epochs, given by the seed, and resumable at any position."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.data.sampling import ProblemSampler


def test_unshuffled_order_goes_round():
    sampler = ProblemSampler(3, seed=0, shuffle=False)
    assert [sampler.next(2) for _ in range(4)] == [[0, 1], [2, 0], [1, 2], [0, 1]]
    assert sampler.state_dict()["epoch"] == 2


def test_a_batch_may_be_longer_than_an_epoch():
    assert ProblemSampler(2, seed=0, shuffle=False).next(5) == [0, 1, 0, 1, 0]


def test_seeds_and_epochs_differ():
    sampler, same_seed, other_seed = (ProblemSampler(50, seed) for seed in (1, 1, 2))
    epoch = sampler.next(50)
    assert epoch == same_seed.next(50)
    assert epoch != other_seed.next(50)
    assert epoch != sampler.next(50)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**31), st.lists(st.integers(0, 40), max_size=8))
def test_every_epoch_holds_every_problem_once(count, seed, sizes):
    sampler = ProblemSampler(count, seed)
    indices = [i for n in sizes for i in sampler.next(n)]
    for start in range(0, len(indices) - count + 1, count):
        assert sorted(indices[start : start + count]) == list(range(count))
    assert sampler.state_dict()["epoch"] == len(indices) // count


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(0, 99), st.booleans(), st.integers(0, 100))
def test_a_resumed_sampler_goes_on_exactly(count, seed, shuffle, draws_before):
    sampler = ProblemSampler(count, seed, shuffle)
    sampler.next(draws_before)
    resumed_sampler = ProblemSampler(count, seed, shuffle)
    resumed_sampler.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert [resumed_sampler.next(7) for _ in range(9)] == [sampler.next(7) for _ in range(9)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 9}, "saved with count=9, this run has 5"),
        ({"seed": 9}, "saved with seed=9, this run has 1"),
        ({"shuffle": False}, "saved with shuffle=False, this run has True"),
        ({"position": 5}, "position 5 of 5 problems"),
        ({"epoch": -1}, "epoch -1"),
        ({"extra": 1}, "keys .*extra"),
    ],
)
def test_a_foreign_state_is_refused(change, message):
    sampler = ProblemSampler(5, seed=1)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})
