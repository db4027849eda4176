"""The demo on Slurm, ended early from its terminal: in order, within seconds, and nothing is left of its cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dppo.demo import material
from tests.patience import run_patiently
from tests.slurm.conftest import ROOT
from tests.unit.config_files import write_checkpoint
from tools.slurm_cluster.leftovers import processes_of
from tools.slurm_cluster.shell import run

pytestmark = pytest.mark.slurm
CTRL_C = b"\x03"
FOLLOWED = "is followed"


def write_material(folder: Path) -> None:
    """Write the part of the demo's material that ``submit`` reads."""
    seed_folder = folder / material.ROOT / "seed-1"
    write_checkpoint(seed_folder / "warm")
    for name in ("train", "held_out"):
        (seed_folder / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (seed_folder / material.STAMP).write_text(json.dumps(material.fingerprint(1, [])))


class Demo:
    """The demo as the foreground process of a terminal."""

    def __init__(self, folder: Path) -> None:
        self._terminal, end = os.openpty()
        # A shell starts background jobs with Ctrl-C ignored. These tests may be such a job.
        default_signals = "--default-signal=INT,TERM,HUP"
        demo = (sys.executable, "-m", "examples.tiny_moe.slurm_demo")
        words = ("setsid", "--ctty", "env", default_signals, *demo)
        self.process = subprocess.Popen(
            [*words, "--directory", str(folder / "run")],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=end,
            stdout=end,
            stderr=end,
        )
        os.close(end)
        self.text = ""

    def read_until(self, words: str) -> None:
        """Read until the terminal shows ``words``."""
        while words not in self.text:
            more = self._read()
            assert more, self.text
            self.text += more

    def end(self, how: bytes | signal.Signals) -> float:
        """End the demo by a key, or by a signal to the demo alone. Return the seconds that this takes."""
        began = time.monotonic()
        if isinstance(how, bytes):
            os.write(self._terminal, how)
        else:
            self.process.send_signal(how)
        while more := self._read():
            self.text += more
        self.process.wait()
        os.close(self._terminal)
        return time.monotonic() - began

    def _read(self) -> str:
        try:
            return os.read(self._terminal, 4096).decode(errors="replace")
        except OSError:  # no process has the terminal open
            return ""

    def configuration(self) -> Path:
        """Return the cluster's slurm.conf once all configuration files are written. ``hosts`` is the last of them."""
        while not (found := list(Path("/tmp").glob(f"slurm-{self.process.pid}-*/etc/hosts"))):
            assert self.process.poll() is None, self.text
            time.sleep(0.005)
        return found[0].with_name("slurm.conf")


@pytest.mark.parametrize(
    ("shown", "how", "code"),
    [("Slurm starts", CTRL_C, 130), ("Slurm starts", signal.SIGTERM, 143), (FOLLOWED, CTRL_C, 130)],
)
def test_it_ends_in_order_and_leaves_nothing(tmp_path, shown, how, code):
    write_material(tmp_path)
    demo = Demo(tmp_path)
    demo.read_until(shown)
    configuration = demo.configuration()
    network = re.search(r"\(10\.(\d+)\.0\.254\)", configuration.read_text())
    if shown == FOLLOWED:
        demo.read_until(" (or watch")
        command = re.search(r"second terminal: (.*) \(or watch", demo.text)[1]
        status = run_patiently(["bash", "-c", command], cwd="/", check=True)
        assert "state: job 1 " in status.stdout
    end_s = demo.end(how)
    assert demo.process.returncode == code, demo.text
    assert "no job and no process of a cluster is left" in demo.text
    assert "Traceback" not in demo.text
    assert ("job 1 is cancelled" in demo.text) == (shown == FOLLOWED)
    assert end_s < 60  # seconds; a quiet machine needs far fewer
    assert processes_of(configuration) == []
    assert not configuration.parents[1].exists()
    if network is not None:
        assert f"slurm{network.group(1)}:" not in run("ip", "-o", "link")
