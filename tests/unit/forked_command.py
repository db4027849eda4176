"""The command of a test of forks: it writes what it was started with, then does what its first word says."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np


def main() -> None:
    how = sys.argv[1]
    found = {
        "input": sys.stdin.read(),
        "arguments": sys.argv[1:],
        "shown": Path("/proc/self/cmdline").read_text().split("\0")[0],
        "parent": os.getppid(),
        "leads_session": os.getsid(0) == os.getpid(),
        "variable": os.environ.get("FORKED_KEY"),
        "draws": [random.random(), np.random.random()],
    }
    child = None
    if how == "waits":
        child = subprocess.Popen(["sleep", "600"])
        found["child"] = child.pid
    print(json.dumps(found), flush=True)
    if how == "fails":
        raise ValueError("this command fails")
    if child is not None:
        time.sleep(600)
    sys.exit(3)


if __name__ == "__main__":
    main()
