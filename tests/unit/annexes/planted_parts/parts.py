"""Parts of a GPU check with one outcome each."""

import os
import signal
import subprocess
import sys
import time

from megatron_dppo.diagnostics.gpu_check import CheckRow, LackingError, at_most, part


@part("what is well", 100.0)
def good(bench):
    (bench.folder / "curve.png").write_bytes(b"")
    (bench.folder / "numbers.json").write_text("{}")
    yield at_most("error", 0.25, 0.5, " nats")
    yield CheckRow("GPUs", str(bench.gpus))
    if bench.overrides:
        yield CheckRow("overrides", " ".join(bench.overrides))


@part("what is not here", 110.0)
def lacking(bench):
    yield CheckRow("a little", "seen")
    raise LackingError("no second GPU")


@part("what a crash leaves", 120.0)
def crashing(bench):
    yield CheckRow("before", "seen")
    print("about to die", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    yield CheckRow("after", "never")


@part("what a hang leaves", 200.0)
def hanging(bench):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield CheckRow("child", str(child.pid))
    time.sleep(600)


@part("what is wrong", 300.0)
def wrong(bench):
    yield at_most("error", float("nan"), 0.5)
    raise LackingError("the rest")
