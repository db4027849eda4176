"""Ranks that die at a chosen point of a weight update. Each rank is a fork of one process with all imports.

``python -m tests.integration.dying_ranks URL MODEL WEIGHTS`` reads names of points, POINTS or PARKED, in lines of
standard input. For each line, a rank updates the server at URL, which serves MODEL, to the weights in the folder
WEIGHTS, and is killed at that point. After the rank's death the name is printed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from megatron_dppo.weights import verification
from megatron_dppo.weights.distributed import DistributedStrategy
from megatron_dppo.weights.engines import Engines
from megatron_dppo.weights.transaction import WeightUpdater
from tests.integration import weight_server
from tests.integration.weight_server import Source, engine_weights, read, updater


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def at(owner: Any, name: str, *, call: int = 1, is_after: bool = False) -> Callable[[Source], None]:
    """Die in the ``call``-th call of ``owner.name``, before or after the method's own work."""

    def plant(source: Source) -> None:
        original, calls = getattr(owner, name), count(1)

        def dying(*arguments: Any, **options: Any) -> Any:
            is_last = next(calls) == call
            if is_last and not is_after:
                die()
            result = original(*arguments, **options)
            if is_last:
                die()
            return result

        setattr(owner, name, dying)

    return plant


def in_stream(source: Source) -> None:
    source.between = die


POINTS: dict[str, Callable[[Source], None]] = {
    "paused": at(WeightUpdater, "_pause", is_after=True),
    "joining": at(Engines, "arrive"),
    "receiving": at(DistributedStrategy, "_receive"),
    "streaming": in_stream,
    "arrived": at(DistributedStrategy, "arrive", is_after=True),
    "verifying": at(verification, "compare_tensors"),
    "committing": at(Engines, "commit"),
    "half committed": at(Engines, "set_version", call=2, is_after=True),
    "committed": at(Engines, "commit", is_after=True),
}
PARKED = "parked"
"""The point in the trainer's turn on shared devices: the server has released its memory."""


def main() -> None:
    url, model, folder = sys.argv[1:]
    for line in sys.stdin:
        point = line.strip()
        child = os.fork()
        if child == 0:
            # The thread of the runner does not survive a fork.
            weight_server.RUNNER = weight_server.AsyncRunner()
            run_until_death(url, model, Path(folder), point)
        os.waitpid(child, 0)
        print(point, flush=True)


def run_until_death(url: str, model: str, folder: Path, point: str) -> NoReturn:
    engine = weight_server.RUNNER.run(engine_weights(url, model))
    source = Source(folder, weights=read(folder))
    updates = updater(engine, source)
    if point == PARKED:
        updates.release_memory(["kv_cache", "weights"])
        die()
    POINTS[point](source)
    updates.update(99)
    raise AssertionError(f"{point}: the update went through")


if __name__ == "__main__":
    main()
