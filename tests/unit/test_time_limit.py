"""A limit on the processor time of a block of Python, in the thread that runs it and nowhere else."""

from __future__ import annotations

import threading
import time

import pytest

from megatron_dppo.system.time_limit import TimeLimitError, cpu_time_limit


def loop_for_ever() -> None:
    while True:
        pass


def use_processor(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_block_that_does_not_end_is_ended():
    with pytest.raises(TimeLimitError), cpu_time_limit(0.1):
        loop_for_ever()
    use_processor(0.6)


def catch_every_exception() -> None:
    while True:
        try:
            loop_for_ever()
        except Exception:
            continue


def test_code_that_catches_every_exception_is_ended():
    with pytest.raises(TimeLimitError), cpu_time_limit(0.1):
        catch_every_exception()


def test_a_block_that_waits_is_not_ended():
    with cpu_time_limit(0.1):
        time.sleep(0.8)


def test_blocks_of_other_threads_go_on():
    ends = []

    def work() -> None:
        with cpu_time_limit(60.0):
            use_processor(0.5)
            ends.append("whole")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    with pytest.raises(TimeLimitError), cpu_time_limit(0.1):
        loop_for_ever()
    for thread in threads:
        thread.join()
    assert ends == ["whole", "whole"]


def test_the_error_of_a_block_is_its_own():
    with pytest.raises(KeyError), cpu_time_limit(5.0):
        raise KeyError("x")


def test_many_blocks_are_watched_one_after_another():
    for _ in range(2000):
        with cpu_time_limit(5.0):
            pass
