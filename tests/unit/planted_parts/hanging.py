"""A part that never ends, and whose own child does not either."""

import subprocess
import sys
import time

from megatron_dppo.gpu_check.part import Row

SHOWS = "what a hang leaves"
LIMIT_S = 200.0


def run(site):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield Row("child", str(child.pid))
    time.sleep(600)
