"""The file that shows that a process is alive, and the action when its content no longer changes."""

from __future__ import annotations

import threading
from pathlib import Path

from megatron_dppo.system.processes import Heartbeat, call_when_unchanged


def test_how_long_a_heartbeat_stands_still(tmp_path: Path):
    clock, path = [0.0], tmp_path / "beat"
    heartbeat = Heartbeat(path, lambda: clock[0])
    clock[0] = 10.0
    assert heartbeat.unchanged_s() == 10.0  # the file does not exist yet
    path.write_text("1")
    assert heartbeat.unchanged_s() == 0.0
    clock[0] = 14.0
    assert heartbeat.unchanged_s() == 4.0
    path.write_text("2")
    assert heartbeat.unchanged_s() == 0.0


def test_call_when_unchanged(tmp_path: Path):
    acted = threading.Event()
    call_when_unchanged(tmp_path / "beat", acted.set, patience_s=0.0)
    assert acted.wait(60)
