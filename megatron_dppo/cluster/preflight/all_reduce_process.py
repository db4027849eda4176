"""One process of the preflight's all-reduce: measures bandwidths and prints them as a line of JSON."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_COLLECTIVE_TIMEOUT = timedelta(seconds=60)
_BYTES = {"nccl": 256 << 20, "gloo": 4 << 20}
_ROUNDS = 5


def exchange() -> None:
    """Run one process: join, measure among this node's processes and among all, print the result as a line of JSON.

    Bandwidth is the bus bandwidth of a ring, ``2 (n - 1) / n * bytes / seconds``, which does not depend on the number
    of processes.
    """
    import torch
    import torch.distributed as dist

    backend = os.environ["PREFLIGHT_BACKEND"]
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    local = int(os.environ["LOCAL_RANK"])
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
    result = {"backend": backend, "processes": world}
    if local_world > 1 and world > local_world:
        groups: list[Any] = []
        for start in range(0, world, local_world):
            groups.append(dist.new_group(list(range(start, start + local_world))))
        result["node_gb_s"] = _bandwidth(
            groups[rank // local_world], local_world, device, _BYTES[backend]
        )
    result["all_gb_s"] = _bandwidth(dist.group.WORLD, world, device, _BYTES[backend])
    dist.destroy_process_group()
    print(json.dumps(result))


def _bandwidth(group: object, size: int, device: torch.device, count: int) -> float:
    """Measure the bus bandwidth in GB/s. Raises RuntimeError where the sum is wrong."""
    import torch
    import torch.distributed as dist

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    data = torch.ones(count // 4, dtype=torch.float32, device=device)
    dist.all_reduce(data, group=group)
    if not bool((data == size).all()):
        raise RuntimeError(f"the sum over {size} processes is {data.unique().tolist()[:4]}")
    wait()
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        dist.all_reduce(data, group=group)
    wait()
    seconds = (time.perf_counter() - started) / _ROUNDS
    return 2 * (size - 1) / size * count / seconds / 1e9


if __name__ == "__main__":
    exchange()
