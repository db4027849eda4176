"""A bucket of weights that another process opens by its handle: CUDA IPC on a GPU, a file in /dev/shm on a CPU.

``python -m megatron_dppo.diagnostics.gpu_check.parts.handles`` is the other process, which reads the handle from stdin.
"""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from megatron_dppo.diagnostics.gpu_check import Bench, Row, part

BUCKET_BYTES = 64 << 20


@part("a bucket of weights opened by its handle in another process", 120.0)
def handles(bench: Bench) -> Iterator[Row]:
    """Yield whether the other process hashes the bytes that this one wrote."""
    import torch

    from megatron_dppo.engine.shared_buckets import WireHeader, shared_empty, shared_payloads
    from megatron_dppo.tensor_hash import tiled_hash

    device = "cuda" if bench.gpus else "cpu"
    data = shared_empty(BUCKET_BYTES, device)
    data.random_(0, 256)
    elements = BUCKET_BYTES // 4
    header = WireHeader(("a", "b"), ("bfloat16",) * 2, ((elements,), (elements,)), BUCKET_BYTES)
    (payload,) = shared_payloads(header, torch.bfloat16, data, ranks=1)
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
    yield Row(f"{BUCKET_BYTES >> 20} MiB on {device}", text, "the same hash", is_equal)


def _open(payload: str) -> dict[str, Any]:
    """Open a payload of this machine's own making, with a CUDA device named by its UUID as SGLang accepts it."""
    import torch
    from torch.multiprocessing import reductions

    rebuild = reductions.rebuild_cuda_tensor
    indices = {
        str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())
    }

    def rebuild_by_uuid(*arguments: Any) -> Any:
        device = indices[arguments[6]]
        return rebuild(*(*arguments[:6], device, *arguments[7:]))

    reductions.rebuild_cuda_tensor = rebuild_by_uuid
    return dict(pickle.loads(base64.b64decode(payload)))


def main() -> None:
    """Print the hash and the device of the bucket whose handle stands on standard input."""
    from megatron_dppo.tensor_hash import tiled_hash

    data = _open(sys.stdin.read())["flattened_tensor"]
    print(json.dumps({"hash": tiled_hash(data), "device": str(data.device)}))


if __name__ == "__main__":
    main()
