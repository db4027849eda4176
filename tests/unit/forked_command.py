"""The command that tests of forks start: it prints how it was started, and then ends as its first argument says."""

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
    ending = sys.argv[1]
    report = {
        "input": sys.stdin.read(),
        "arguments": sys.argv[1:],
        "shown": Path("/proc/self/cmdline").read_text().split("\0")[0],
        "parent": os.getppid(),
        "leads_session": os.getsid(0) == os.getpid(),
        "variable": os.environ.get("FORKED_KEY"),
        "draws": [random.random(), np.random.random()],
    }
    child = None
    if ending == "waits":
        child = subprocess.Popen(["sleep", "600"])
        report["child"] = child.pid
    print(json.dumps(report), flush=True)
    if ending == "fails":
        raise ValueError("this command fails")
    if child is not None:
        time.sleep(600)
    sys.exit(3)


if __name__ == "__main__":
    main()
