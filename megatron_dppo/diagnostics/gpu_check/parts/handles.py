"""Check that another process can open a message of weights by its handle: CUDA IPC on a GPU, /dev/shm on a CPU.

``python -m megatron_dppo.diagnostics.gpu_check.parts.handles`` is the other process. It reads the handle from stdin.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from megatron_dppo.diagnostics.gpu_check import Bench, CheckRow, part

MESSAGE_BYTES = 64 << 20


@part("a message of weights opened by its handle in another process", 120.0)
def handles(bench: Bench) -> Iterator[CheckRow]:
    """Yield whether the other process computes the hash of the bytes that this process wrote."""
    import torch

    from megatron_dppo.tensor_hash import tiled_hash
    from megatron_dppo.weights.shared_bytes import SharedBytes, shared_empty, shared_payloads

    device = bench.device
    data = shared_empty(MESSAGE_BYTES, device)
    data.random_(0, 256)
    (payload,) = shared_payloads([[SharedBytes("a message", data)]])
    if bench.gpus:
        torch.cuda.synchronize()
    reader = subprocess.run(
        [sys.executable, "-m", __name__],
        input=payload,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(reader.stdout.splitlines()[-1])
    is_equal = found["hash"] == tiled_hash(data)
    text = f"{'the same' if is_equal else 'another'} hash on {found['device']}"
    yield CheckRow(f"{MESSAGE_BYTES >> 20} MiB on {device}", text, "the same hash", is_equal)


def main() -> None:
    """Read a bucket's handle from standard input, and print the bucket's hash and device."""
    import torch

    from megatron_dppo.tensor_hash import tiled_hash
    from megatron_dppo.weights.shared_bytes import MESSAGES, open_payload

    index_by_uuid = {}
    for index in range(torch.cuda.device_count()):
        index_by_uuid[str(torch.cuda.get_device_properties(index).uuid)] = index
    ((_, data),) = open_payload(sys.stdin.read(), index_by_uuid)[MESSAGES]
    print(json.dumps({"hash": tiled_hash(data), "device": str(data.device)}))


if __name__ == "__main__":
    main()
