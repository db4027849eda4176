"""One process of the preflight's all-reduce. It measures bandwidths and prints them as a line of JSON."""

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
    """Measure the bandwidth among this node's processes and among all processes, and print both as a line of JSON.

    Bandwidth is the bus bandwidth of a ring, ``2 (n - 1) / n * bytes / seconds``. The factor ``2 (n - 1) / n`` makes
    the bandwidths of different numbers ``n`` of processes comparable.
    """
    import torch
    import torch.distributed as dist

    backend = os.environ["PREFLIGHT_BACKEND"]
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    node_size = int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
    result = {"backend": backend, "processes": world_size}
    if node_size > 1 and world_size > node_size:
        # torch requires that every process creates every group.
        node_groups: list[Any] = []
        for first_rank in range(0, world_size, node_size):
            node_groups.append(dist.new_group(list(range(first_rank, first_rank + node_size))))
        node_group = node_groups[rank // node_size]
        result["node_gb_s"] = _bandwidth(node_group, node_size, device, _BYTES[backend])
    result["all_gb_s"] = _bandwidth(dist.group.WORLD, world_size, device, _BYTES[backend])
    dist.destroy_process_group()
    print(json.dumps(result))


def _bandwidth(group: object, size: int, device: torch.device, data_bytes: int) -> float:
    """Measure the bus bandwidth in GB/s among the ``size`` processes of ``group``.

    Raises RuntimeError if the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    data = torch.ones(data_bytes // 4, dtype=torch.float32, device=device)
    # This all-reduce is not timed: in it, NCCL sets up its connections.
    dist.all_reduce(data, group=group)
    if not bool((data == size).all()):
        raise RuntimeError(f"the sum over {size} processes is {data.unique().tolist()[:4]}")
    wait()
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        dist.all_reduce(data, group=group)
    wait()
    seconds = (time.perf_counter() - started) / _ROUNDS
    return 2 * (size - 1) / size * data_bytes / seconds / 1e9


if __name__ == "__main__":
    exchange()
