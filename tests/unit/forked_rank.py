"""The program of the forked ranks in tests. The file that its argument names says how the ranks end."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from megatron_dppo.system.secret_variables import hide_secrets


def main() -> int:
    rank = os.environ["RANK"]
    initial_environment = Path("/proc/self/environ").read_text(errors="replace")
    print(
        rank, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], os.environ.get("HF_TOKEN"),
        "4711" in initial_environment, os.getsid(0) == os.getpid(), sys.stdin.read() == "", flush=True,
    )  # fmt: skip
    ending = Path(sys.argv[1]).read_text()
    if ending == "killed" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "killed once" and rank == "1" and os.environ["MEGATRON_DPPO_START"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "killed once" and os.environ["MEGATRON_DPPO_START"] == "1":
        time.sleep(600)
    if ending == "raises" and rank == "1":
        raise ValueError("this rank fails")
    if ending == "server" and rank == "1":
        os.kill(os.getppid(), signal.SIGKILL)
    if ending in ("waits", "killed", "raises", "server"):
        time.sleep(600)
    return 0


if __name__ == "__main__":
    hide_secrets()
    sys.exit(main())
