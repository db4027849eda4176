"""Run a function in several gloo processes, and return the result of each process.

``run_ranks("tests.distributed.test_x:worker", 2, arg, key=...)`` starts two processes that import the module and call
``worker(arg, key=...)`` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. Arguments travel as JSON; results as
``torch.save`` files of tensors and plain values, read with ``weights_only``. When a rank fails, the others are killed
and the failing rank's output is the error.

Ranks are forked from a server that has imported the libraries and computed nothing. A rank imports the libraries
itself, in five seconds of a core, only if a test needs a new interpreter (``own_interpreter``).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron_dppo.system.ports import hold_port
from megatron_dppo.system.processes import end_now
from tests.patience import Patience, family_of

ROOT = Path(__file__).resolve().parent.parent


class RankFailedError(AssertionError):
    """A rank raised, was killed, or ran out of time; the message holds the end of its output."""


_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["megatron_dppo.loop.run", "tests.tiny_models"])
_NEW = multiprocessing.get_context("spawn")


def run_ranks(
    target: str,
    world_size: int,
    *args: Any,
    timeout: float = 300,
    own_interpreter: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Return the results of ``target`` ("package.module:function") by rank. Raises RankFailedError.

    ``own_interpreter``: whether each rank is a new interpreter, for tests of the imports of libraries.
    """
    import torch

    with tempfile.TemporaryDirectory() as folder, hold_port("127.0.0.1", 0) as held:
        call, port = json.dumps([args, kwargs]), int(held.getsockname()[1])
        if not own_interpreter:
            _start_server()
        context = _NEW if own_interpreter else _SERVER
        processes = [
            context.Process(
                target=_run_rank, args=(target, call, _environment(rank, world_size, port), folder)
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, timeout)
            codes = [process.exitcode for process in processes]
        finally:
            _kill(processes)
        if any(code != 0 for code in codes):
            raise RankFailedError(_report(codes, Path(folder)))
        return [
            torch.load(Path(folder) / f"result{r}.pt", weights_only=True) for r in range(world_size)
        ]


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        **_one_thread(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _one_thread() -> dict[str, str]:
    # OpenMP reads its variable when torch is imported: the server must have it.
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def _start_server() -> None:
    before = dict(os.environ)
    os.environ.update(_one_thread())
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _wait(processes: Sequence[BaseProcess], timeout: float) -> None:
    patience = Patience(timeout, lambda: [pid for p in processes for pid in family_of(p.pid or 0)])
    while not patience.is_exhausted():
        codes = [p.exitcode for p in processes]
        if all(c is not None for c in codes):
            return
        if any(c not in (None, 0) for c in codes):
            time.sleep(1.0)  # other ranks may be about to print the reason
            return
        time.sleep(0.05)


def _kill(processes: Sequence[BaseProcess]) -> None:
    """Kill each rank and all processes in its group."""
    for process in processes:
        if process.pid is None:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.exitcode is None:
            process.kill()  # the rank has no group yet
        process.join()


def _report(codes: list[int | None], folder: Path) -> str:
    blocks = [f"exit codes by rank {codes} (None: still running at the time limit)"]
    for rank, code in enumerate(codes):
        if code != 0:
            text = (folder / f"log{rank}").read_text(errors="replace")
            blocks.append(f"--- rank {rank}, exit code {code}\n{text[-6000:]}")
    return "\n".join(blocks)


def _run_rank(target: str, call: str, environment: Mapping[str, str], folder: str) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    rank = environment["RANK"]
    log = os.open(Path(folder) / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    module, function = target.split(":")
    args, kwargs = json.loads(call)
    value = getattr(importlib.import_module(module), function)(*args, **kwargs)
    import torch

    torch.save(value, Path(folder) / f"result{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    end_now(0)
