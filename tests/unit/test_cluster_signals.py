"""When a signal ends the owner of a test cluster: not between a resource and its owner."""

from __future__ import annotations

import signal

import pytest

from tools.slurm_cluster.signals import Interrupted, held_back, raise_interrupted


@pytest.fixture
def handlers():
    """The usual ones, whatever this process was started to ignore; its own are put back afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [
        (signal.SIGINT, "Ctrl-C", 130),
        (signal.SIGTERM, "SIGTERM", 143),
        (signal.SIGHUP, "SIGHUP", 129),
    ],
)
def test_a_signal_waits_for_the_end_of_a_block(handlers, number, name, code):
    raise_interrupted()
    reached = []

    def block() -> None:
        with held_back():
            signal.raise_signal(number)
            reached.append("the block's end")

    with pytest.raises(Interrupted) as ended:
        block()
    assert reached == ["the block's end"]
    assert (ended.value.name, ended.value.code) == (name, code)
    with pytest.raises(Interrupted):
        signal.raise_signal(number)


def test_what_is_ignored_stays_ignored(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_interrupted()
    signal.raise_signal(signal.SIGHUP)
