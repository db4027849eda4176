"""One process of the preflight's all-reduce; prints its result as a line of JSON.

Bandwidth is the bus bandwidth of a ring: ``2 (n - 1) / n * bytes / seconds``, which does not depend on how
many take part.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_BYTES = {"nccl": 256 << 20, "gloo": 4 << 20}
_ROUNDS = 5
_TIMEOUT = timedelta(seconds=60)


def main() -> None:
    """Join, measure among this node's processes and among all, check the sum."""
    backend = os.environ["PREFLIGHT_BACKEND"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=_TIMEOUT)
    result = {"backend": backend, "processes": world}
    if here > 1 and world > here:
        groups = [
            dist.new_group(list(range(first, first + here))) for first in range(0, world, here)
        ]
        result["node_gb_s"] = _measure(groups[rank // here], here, device, _BYTES[backend])
    result["all_gb_s"] = _measure(dist.group.WORLD, world, device, _BYTES[backend])
    dist.destroy_process_group()
    print(json.dumps(result))


def _measure(group: object, size: int, device: torch.device, count: int) -> float:
    """Bus bandwidth in GB/s. Raises RuntimeError where the sum is wrong."""
    data = torch.ones(count // 4, dtype=torch.float32, device=device)
    dist.all_reduce(data, group=group)
    if not bool((data == size).all()):
        raise RuntimeError(f"the sum over {size} processes is {data.unique().tolist()[:4]}")
    _wait(device)
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        dist.all_reduce(data, group=group)
    _wait(device)
    seconds = (time.perf_counter() - started) / _ROUNDS
    return 2 * (size - 1) / size * count / seconds / 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
