"""The tests' own waits: a busy machine does not exhaust them, a process that hangs does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.messages import mentioning
from tests.patience import Patience, family_of, run_patiently, wait_healthy
from tests.unit.test_engine_child_server import SmallServer

CORE = min(os.sched_getaffinity(0))
SPIN, SLEEP = "while True: pass", "time.sleep(600)"


@contextmanager
def started(code: str) -> Iterator[int]:
    """A process on one core, which has begun with ``code``."""
    command = [sys.executable, "-c", f"import time\nprint(flush=True)\n{code}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        os.sched_setaffinity(process.pid, {CORE})
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def share_spent(code: str, clock_s: float, others: int = 0) -> float:
    """How much of a limit the process uses up, as a share of the time by the clock."""
    with ExitStack() as stack:
        pid = stack.enter_context(started(code))
        for _ in range(others):
            stack.enter_context(started(SPIN))
        patience = Patience(1e9, lambda: family_of(pid))
        began = time.monotonic()
        while time.monotonic() < began + clock_s:
            patience.is_exhausted()
            time.sleep(0.05)
        return patience._spent / (patience._looked - began)


def test_time_in_the_queue_for_a_processor_does_not_count():
    """With four others on its core it has a fifth of it at most."""
    assert share_spent(SPIN, 4.0, others=4) < 0.5


def test_a_process_that_waits_for_nothing_uses_its_limit_up():
    assert share_spent(SLEEP, 2.0) > 0.8


def test_a_server_that_does_not_come_up_is_found_and_ended(tmp_path: Path):
    server = SmallServer(tmp_path / "small.log", SLEEP.replace("time", "__import__('time')", 1))
    server.start()
    try:
        with pytest.raises(AssertionError, match=mentioning("1.5 s")):
            wait_healthy(server, 1.5)
        assert server.poll() is not None
    finally:
        server.kill()
    assert family_of(server.pid) == []


def test_a_command_has_its_output_read_and_is_killed_when_its_own_time_is_used_up():
    family = set(family_of(os.getpid()))
    talk = "import sys; print(sys.stdin.read() * 40_000); print('a', file=sys.stderr); sys.exit(3)"
    done = run_patiently([sys.executable, "-c", talk], text_input="words\n")
    assert (done.returncode, len(done.stdout), done.stderr) == (3, 240_001, "a\n")
    with pytest.raises(subprocess.CalledProcessError):
        run_patiently([sys.executable, "-c", "raise SystemExit(1)"], check=True)
    begun = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; " + SLEEP
    with pytest.raises(subprocess.TimeoutExpired):
        run_patiently([sys.executable, "-c", begun + "'])"], 1.5)
    assert set(family_of(os.getpid())) <= family
