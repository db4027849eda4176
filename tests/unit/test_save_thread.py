"""Saves of checkpoints run in one thread, in order."""

import threading
from collections.abc import Iterator

import pytest

from megatron_dppo.trainer.checkpoint.saving import SaveThread


@pytest.fixture
def thread() -> Iterator[SaveThread]:
    """A thread that is closed after the test."""
    thread = SaveThread()
    yield thread
    thread.close()


def test_all_saves_run_in_one_thread(thread: SaveThread):
    threads: list[threading.Thread] = []
    for count in (1, 2, 3):
        ended = threading.Event()

        def save(ended: threading.Event = ended) -> None:
            threads.append(threading.current_thread())
            ended.set()

        thread.start(save)
        assert ended.wait(60)
        assert len(threads) == count
    assert len(set(threads)) == 1
    assert threads[0] is not threading.main_thread()


def test_a_save_begins_after_the_one_before_it(thread: SaveThread):
    may_end, ended = threading.Event(), threading.Event()
    events: list[str] = []

    def first() -> None:
        may_end.wait(60)
        events.append("first ends")

    def second() -> None:
        events.append("second begins")
        ended.set()

    thread.start(first)
    thread.start(second)
    may_end.set()
    assert ended.wait(60)
    assert events == ["first ends", "second begins"]


def test_close_lets_the_last_save_end(thread: SaveThread):
    may_end, ended = threading.Event(), threading.Event()

    def save() -> None:
        may_end.wait(60)
        ended.set()

    thread.start(save)
    thread.close()
    may_end.set()
    assert ended.wait(60)
