"""Signals that end a program wait for the end of a block, and the owner of a test cluster raises Interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.system.processes import held_back
from tools.slurm_cluster.signals import Interrupted, raise_interrupted


@pytest.fixture
def handlers():
    """Set the default handlers, even for signals that this process ignores. Restore its handlers afterwards."""
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


def test_one_from_another_process_waits_too_and_spares_what_the_block_started(
    handlers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child interrupts itself, then this process, as a terminal does."""
    raised: list[int] = []
    code = (
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
        "os.kill(os.getppid(), signal.SIGINT); open('done', 'w').close()"
    )
    marker, handler = tmp_path / "after", signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    with held_back():
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
        marker.touch()
    assert (tmp_path / "done").exists()
    assert marker.exists()
    assert raised == [signal.SIGINT]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.getsignal(signal.SIGINT) == handler


def test_what_is_ignored_is_ignored_in_the_block_too(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with held_back():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
