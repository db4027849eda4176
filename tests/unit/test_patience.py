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
def run_process(code: str) -> Iterator[int]:
    """Run ``code`` in a process on one core. Yield the process's id when the code begins."""
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
    """Return the share of the clock's time that counts against the limit of a process with ``code``.

    ``others`` is the number of busy processes on the same core.
    """
    with ExitStack() as stack:
        pid = stack.enter_context(run_process(code))
        for _ in range(others):
            stack.enter_context(run_process(SPIN))
        patience = Patience(1e9, lambda: family_of(pid))
        began = time.monotonic()
        while time.monotonic() < began + clock_s:
            patience.is_exhausted()
            time.sleep(0.05)
        return patience._spent / (patience._looked - began)


def test_time_in_the_queue_for_a_processor_does_not_count():
    """With four other processes on its core, the process has at most a fifth of the core."""
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
    family_before = set(family_of(os.getpid()))
    code = "import sys; print(sys.stdin.read() * 40_000); print('a', file=sys.stderr); sys.exit(3)"
    result = run_patiently([sys.executable, "-c", code], text_input="words\n")
    assert (result.returncode, len(result.stdout), result.stderr) == (3, 240_001, "a\n")
    with pytest.raises(subprocess.CalledProcessError):
        run_patiently([sys.executable, "-c", "raise SystemExit(1)"], check=True)
    # The command waits for a child that hangs: both must be killed.
    sleeping_child = f"[sys.executable, '-c', 'import time; {SLEEP}']"
    code = f"import subprocess, sys; subprocess.run({sleeping_child})"
    with pytest.raises(subprocess.TimeoutExpired):
        run_patiently([sys.executable, "-c", code], 1.5)
    assert set(family_of(os.getpid())) <= family_before
