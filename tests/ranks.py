"""Run a function in several gloo processes and hand back what each returned.

``run_ranks("tests.distributed.test_x:worker", 2, arg, key=...)`` starts two interpreters that import
the module and call ``worker(arg, key=...)`` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
Arguments travel as JSON; results as ``torch.save`` files of tensors and plain values, read with
``weights_only``. When a rank fails, the others are killed and the failing rank's output is the error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_dppo.system.network import hold_port
from megatron_dppo.system.processes import end_now

ROOT = Path(__file__).resolve().parent.parent


class RankFailedError(AssertionError):
    """A rank raised, was killed, or ran out of time; the message holds the end of its output."""


def run_ranks(
    target: str, world_size: int, *args: Any, timeout: float = 300, **kwargs: Any
) -> list[Any]:
    """Results of ``target`` ("package.module:function") by rank. Raises RankFailedError."""
    import torch

    with tempfile.TemporaryDirectory() as folder, hold_port("127.0.0.1", 0) as held:
        call, port = json.dumps([args, kwargs]), int(held.getsockname()[1])
        processes = _start(target, world_size, call, port, Path(folder))
        try:
            codes = _wait(processes, timeout)
        finally:
            _kill(processes)
        if any(code != 0 for code in codes):
            raise RankFailedError(_report(codes, Path(folder)))
        return [
            torch.load(Path(folder) / f"result{r}.pt", weights_only=True) for r in range(world_size)
        ]


def _start(
    target: str, world_size: int, call: str, port: int, folder: Path
) -> list[subprocess.Popen]:
    processes = []
    for rank in range(world_size):
        env = dict(
            os.environ,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
            PYTHONPATH=f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        )
        with open(folder / f"log{rank}", "wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.ranks", target, call, str(folder / f"result{rank}.pt")],
                    env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip
    return processes


def _wait(processes: list[subprocess.Popen], timeout: float) -> list[int | None]:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [p.poll() for p in processes]
        if all(c is not None for c in codes):
            break
        if any(c not in (None, 0) for c in codes):
            time.sleep(1.0)  # the others may be about to say why
            break
        time.sleep(0.05)
    return [p.poll() for p in processes]


def _kill(processes: list[subprocess.Popen]) -> None:
    for p in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(p.pid, signal.SIGKILL)
        p.wait()


def _report(codes: list[int | None], folder: Path) -> str:
    blocks = [f"exit codes by rank {codes} (None: still running at the time limit)"]
    for rank, code in enumerate(codes):
        if code != 0:
            text = (folder / f"log{rank}").read_text(errors="replace")
            blocks.append(f"--- rank {rank}, exit code {code}\n{text[-6000:]}")
    return "\n".join(blocks)


def _main() -> None:
    target, call, result = sys.argv[1:]
    module, function = target.split(":")
    args, kwargs = json.loads(call)
    value = getattr(importlib.import_module(module), function)(*args, **kwargs)
    import torch

    torch.save(value, result)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    end_now(0)


if __name__ == "__main__":
    _main()
