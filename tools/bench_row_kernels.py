"""Time the Triton kernels of the policy statistics on a GPU, for several numbers of lanes and warps.

    python tools/bench_row_kernels.py --dtype bfloat16

Each line has the time and the bandwidth: the forward kernel reads the logits once, the backward kernel reads and writes
them once. The first line is a copy of the logits on the same GPU.
"""

from __future__ import annotations

import argparse
import math

import torch
import triton

from megatron_dppo.vocab_parallel import backends
from megatron_dppo.vocab_parallel.row_stats_triton import backward_kernel, forward_kernel

SCALE = 1.25


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    return parser.parse_args()


def report(label: str, ms: float, moved_bytes: int) -> None:
    print(f"{label:48s} {ms:7.3f} ms {moved_bytes / ms / 1e6:7.0f} GB/s", flush=True)


def milliseconds(run) -> float:
    return triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median")


class Kernels:
    """The two kernels on one matrix of random logits."""

    def __init__(self, tokens: int, vocab: int, dtype: torch.dtype) -> None:
        self.rows, self.vocab = tokens, vocab
        self.logits = (torch.randn(tokens, vocab, device="cuda") * 3).to(dtype)
        self.gradient = torch.empty_like(self.logits)
        self.ids = torch.randint(vocab, (tokens,), device="cuda")
        self.top = torch.empty(tokens, device="cuda")
        self.sums = [torch.empty(tokens, device="cuda", dtype=torch.float64) for _ in range(3)]
        self.row_values = torch.randn(5, tokens, device="cuda")

    @property
    def bytes(self) -> int:
        return self.logits.nbytes

    def forward(self, lanes: int, warps: int, *, entropy: bool) -> None:
        forward_kernel[(self.rows,)](
            self.logits, self.ids, self.top, *self.sums, self.vocab, self.vocab, SCALE * math.log2(math.e),
            LANES=lanes, VECTOR=backends.VECTOR_BYTES // self.logits.itemsize, ENTROPY=entropy, SQUARES=False,
            num_warps=warps,
        )  # fmt: skip

    def backward(self, block: int, warps: int) -> None:
        backward_kernel[(self.rows, triton.cdiv(self.vocab, block))](
            self.logits, self.gradient, self.ids, *self.row_values, self.vocab, self.vocab, SCALE,
            BLOCK=block, ENTROPY=True, num_warps=warps,
        )  # fmt: skip


def main() -> None:
    options = parse()
    kernels = Kernels(options.tokens, options.vocab, getattr(torch, options.dtype))
    copy_ms = milliseconds(lambda: kernels.gradient.copy_(kernels.logits))
    report("copy", copy_ms, 2 * kernels.bytes)
    for entropy in (False, True):
        for lanes, warps in ((256, 4), (256, 8), (512, 8), (512, 16), (1024, 8), (1024, 16)):
            ms = milliseconds(lambda: kernels.forward(lanes, warps, entropy=entropy))  # noqa: B023
            label = f"forward{' with entropy' if entropy else ''}, {lanes} lanes, {warps} warps"
            report(label, ms, kernels.bytes)
    for block, warps in ((1024, 4), (4096, 8), (8192, 8)):
        ms = milliseconds(lambda: kernels.backward(block, warps))  # noqa: B023
        report(f"backward, {block} columns, {warps} warps", ms, 2 * kernels.bytes)


if __name__ == "__main__":
    main()
