"""``PhaseTimer``: phases never overlap, and their sum is all of the time."""

import pytest

from megatron_dppo.metrics.phase_timer import PhaseTimer
from tests.patience import Clock


@pytest.fixture
def clock():
    return Clock()


def test_phases_add_up_to_the_wall_clock(clock):
    timer = PhaseTimer(clock)
    with timer("generate"):
        clock.now += 3
    clock.now += 0.5
    with timer("train"):
        clock.now += 2
        with timer("sync"):
            clock.now += 1
        clock.now += 4
    with timer("generate"):
        clock.now += 1
    assert timer.finish_step() == {
        "time/other_s": 0.5,
        "time/generate_s": 4,
        "time/train_s": 6,
        "time/sync_s": 1,
    }
    assert timer.finish_step() == {"time/other_s": 0}


def test_time_before_an_exception_counts(clock):
    timer = PhaseTimer(clock)

    def engine_dies():
        with timer("step"), timer("generate"):
            clock.now += 3
            raise ConnectionError

    with pytest.raises(ConnectionError):
        engine_dies()
    clock.now += 1
    assert timer.finish_step() == {"time/other_s": 1, "time/step_s": 0, "time/generate_s": 3}


def test_an_open_phase_is_split_between_the_steps(clock):
    timer = PhaseTimer(clock)
    with timer("generate"):
        clock.now += 2
        assert timer.finish_step()["time/generate_s"] == 2
        clock.now += 5
    assert timer.finish_step()["time/generate_s"] == 5
