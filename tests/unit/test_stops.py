"""Signals and deadlines that request a stop of the supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_dppo.launch.stops import OVERTIME, TIME, Stop, StopRequests


def test_signals_and_deadlines_come_in_order_and_patient_ones_once():
    clock = [100.0]
    cancelled = Stop("cancelled", 143, insists=True)
    stops = StopRequests(
        {signal.SIGUSR1: TIME, signal.SIGUSR2: cancelled},
        {TIME: 110.0, OVERTIME: 120.0},
        lambda: clock[0],
    )
    previous_handler = signal.getsignal(signal.SIGUSR1)
    with stops.listening():
        assert stops.requested() == []
        clock[0] = 110.0
        assert stops.requested() == [TIME]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stops.requested() == [TIME]
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stops.requested() == [TIME, cancelled, cancelled]
        clock[0] = 119.9
        assert OVERTIME not in stops.requested()
        clock[0] = 120.0
        assert stops.requested()[-1] == OVERTIME
    assert signal.getsignal(signal.SIGUSR1) == previous_handler


def test_a_time_limit_that_moves_moves_what_did_not_come_yet():
    clock = [100.0]
    stops = StopRequests({}, {TIME: 110.0, OVERTIME: 170.0}, lambda: clock[0])
    stops.move_deadlines({TIME: 310.0, OVERTIME: 370.0})
    clock[0] = 309.9
    assert stops.requested() == []
    clock[0] = 310.0
    assert stops.requested() == [TIME]
    stops.move_deadlines({})
    assert stops.requested() == [TIME]


STOPPED_PROGRAM = """
import sys, time
from megatron_dppo.launch.stops import exit_by_code, terminal_stops
exit_by_code()
print("ready", flush=True)
if sys.argv[1] == "before the run":
    time.sleep(60)
stops = terminal_stops()
with stops.listening():
    print("listening", flush=True)
    while not stops.requested():
        time.sleep(0.001)
    code = stops.requested()[0].code
print("cleaning up", flush=True)
time.sleep(0.2)
print("clean", flush=True)
sys.exit(code)
"""


@pytest.mark.parametrize("moment", ["before the run", "in the run"])
def test_two_hundred_sigterms_end_in_a_shell_s_exit_code(moment):
    """The signals continue until the process has ended, and must not interrupt the clean-up after the run."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED_PROGRAM, moment], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    awaited_line = {"before the run": "ready", "in the run": "listening"}[moment]
    while process.stdout.readline().strip() != awaited_line:
        assert process.poll() is None
    for _ in range(200):
        if process.poll() is not None:
            break
        process.terminate()
        time.sleep(0.002)
    output = process.stdout.read()
    assert process.wait() == 143
    assert ("clean\n" in output) == (moment == "in the run")
