"""Worker processes: calls, ends, and the pool that replaces them."""

import os
import signal
import sys
import time

import pytest

from megatron_dppo.system.workers import WorkerLostError, WorkerPool, WorkerProcess, connect

MODULE = "tests.unit.test_workers"


def start_worker(largest_answer: int | None = None) -> WorkerProcess:
    return WorkerProcess(MODULE, b"word", environment=os.environ, largest_answer=largest_answer)


@pytest.fixture
def worker():
    started_worker = start_worker(largest_answer=1000)
    yield started_worker
    started_worker.kill()


def test_answers_belong_to_their_calls_in_any_order(worker):
    first, second = worker.call(b"later"), worker.call(b"now")
    assert worker.ready.result(60) == b"word"
    assert (second.result(60), first.result(60)) == (b"now", b"later")


def test_an_answer_to_no_call_is_dropped(worker):
    assert worker.ask(b"forge", 60) == b"forge"
    assert worker.ask(b"now", 60) == b"now"


@pytest.mark.parametrize(
    ("content", "code"), [(b"exit", 3), (b"abort", -signal.SIGABRT), (b"huge", None)]
)
def test_the_end_of_a_worker_is_the_answer_to_all_its_calls(worker, content, code):
    calls = [worker.call(b"later"), worker.call(content)]
    for call in calls:
        with pytest.raises(WorkerLostError) as lost:
            call.result(60)
        assert code in (None, lost.value.code)
    assert worker.is_dead
    assert worker.ended.result(60).output.startswith("printed\n")
    with pytest.raises(WorkerLostError):
        worker.ask(b"now", 60)


def test_a_worker_that_does_not_answer_in_time_is_killed(worker):
    assert worker.ready.result(60) == b"word"
    with pytest.raises(TimeoutError):
        worker.ask(b"later", 0.1)
    assert worker.is_dead
    assert worker.ended.result(60).code == -signal.SIGKILL


def test_a_pool_shares_its_workers_and_replaces_the_dead():
    pool = WorkerPool(start_worker, 2)
    first, second, third = pool.take(), pool.take(), pool.take()
    assert first is not second
    assert third in (first, second)
    assert sorted(worker.users for worker in pool.workers) == [1, 2]
    second.kill()
    fresh = pool.replace(second)
    assert fresh not in (first, second)
    assert pool.workers == [first, fresh]
    pool.release(fresh)
    assert pool.take() is fresh
    pool.close()
    assert all(worker.is_dead for worker in (first, fresh))
    assert pool.replace(fresh) is fresh
    with pytest.raises(WorkerLostError):
        pool.take()


def main() -> None:
    """Answer each call by its content; ``later`` follows the next call."""
    connection = connect(sys.argv[1])
    start = connection.receive()
    connection.answer(start, start.content)
    print("printed", flush=True)
    delayed_calls = []
    while True:
        call = connection.receive()
        if call.content == b"later":
            delayed_calls.append(call)
            continue
        if call.content == b"exit":
            sys.exit(3)
        if call.content == b"abort":
            os.abort()
        if call.content == b"huge":
            connection.answer(call, bytes(1001))
            time.sleep(60)
        if call.content == b"forge":
            connection.answer(type(call)(call.number + 1, b""), b"forged")
        connection.answer(call, call.content)
        for delayed_call in delayed_calls:
            connection.answer(delayed_call, delayed_call.content)


if __name__ == "__main__":
    main()
