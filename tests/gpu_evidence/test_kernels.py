"""The Triton kernels of the project and of its libraries: compiled for GPUs, or run in Triton's interpreter."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import pytest
import torch

from tests.gpu_evidence.te_sources import te_sources
from tests.ranks import run_ranks

HERE = "tests.gpu_evidence.test_kernels"
ARCHITECTURES = (
    pytest.param(80, marks=pytest.mark.slow),
    90,
    pytest.param(100, marks=pytest.mark.slow),
)
COLUMNS = 151936 // 4
"""Columns of a rank's logits of Qwen3 at TP4."""
VALUES_A_THREAD = 4096 // 256
ITEM_BITS = {"float32": 32, "bfloat16": 16}


def launch_own(architecture: int) -> list[dict[str, Any]]:
    """Launch the project's kernels with and without entropy, for both types of logits. Return the compiled kernels."""
    from megatron_dppo.tensor_hash import run_of
    from megatron_dppo.tensor_hash.tile_sums_triton import start
    from megatron_dppo.vocab_parallel.backends import BACKENDS, RowGradient
    from tests.gpu_evidence.launches import compiled_for

    backend, zeros = BACKENDS["triton"], torch.zeros(2)
    found = []
    with compiled_for(architecture) as kernels:
        for dtype in (torch.bfloat16, torch.float32):
            logits = torch.zeros(2, COLUMNS, dtype=dtype)
            for entropy in (zeros, None):
                backend.forward(
                    logits, COLUMNS, 1.25, torch.zeros(2, 3).long(), entropy is not None
                )
                gradient = RowGradient(zeros.double(), zeros.long(), zeros, entropy, entropy)
                backend.backward(logits, COLUMNS, 1.25, gradient, logits)
                found += [
                    {**asdict(kernel), "dtype": str(dtype).removeprefix("torch.")}
                    for kernel in kernels
                ]
                kernels.clear()
        start([run_of(torch.zeros(8, 8), 0, 64)])
        found += [asdict(kernel) for kernel in kernels]
    return found


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda number: f"sm_{number}")
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The project's kernels, compiled for an architecture with an empty cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        (kernels,) = run_ranks(f"{HERE}:launch_own", 1, request.param, own_interpreter=True)
    return kernels


def test_the_statistics_kernels(own: list[dict[str, Any]]) -> None:
    """No register is spilled, logits move by 128 bits, and at least five programs of eight warps fit on an SM."""
    rows = [kernel for kernel in own if kernel["name"] != "tile_sums_kernel"]
    assert [kernel["name"] for kernel in rows] == ["forward_kernel", "backward_kernel"] * 4
    for kernel in rows:
        accesses, name = kernel["accesses"], kernel["name"]
        # The forward kernel reads two vectors a thread, whatever the type of the logits.
        backward_accesses = VALUES_A_THREAD * ITEM_BITS[kernel["dtype"]] // 128
        wide = 2 if name == "forward_kernel" else backward_accesses
        assert kernel["local_bytes"] == 0, kernel
        assert not accesses.keys() & {"LDL.32", "LDL.64", "LDL.128", "STL.32", "STL.64", "STL.128"}
        assert accesses["LDG.128"] == wide, kernel
        assert accesses.get("LDG.16", 0) == 0, kernel
        if name == "forward_kernel":
            # One load for a row: the column that is left out.
            assert accesses.get("LDG.32", 0) + accesses.get("LDG.64", 0) == 1, kernel
        else:
            assert accesses["STG.128"] == wide, kernel
            # One load for each number of a row.
            assert accesses["LDG.32"] + accesses["LDG.64"] <= 7, kernel
        assert kernel["warps"] == 8
        assert kernel["registers"] <= (40 if name == "forward_kernel" else 48), kernel
        assert kernel["divisions"] == 0
        # A bfloat16 gradient is rounded to nearest even; Triton's interpreter cuts it off, which doubles its error.
        rounded = name == "backward_kernel" and kernel["dtype"] == "bfloat16"
        assert bool(kernel["narrowings"]) == rounded, kernel
        assert set(kernel["narrowings"]) <= {"cvt.rn.bf16.f32", "cvt.rn.bf16x2.f32"}, kernel


def test_the_checksum_kernel(own: list[dict[str, Any]]) -> None:
    (kernel,) = [kernel for kernel in own if kernel["name"] == "tile_sums_kernel"]
    assert kernel["local_bytes"] == 0
    assert kernel["registers"] <= 48, kernel  # ten programs of four warps on an SM
    assert kernel["divisions"] <= 1, "a 64-bit division a tile, none a word"
    assert kernel["accesses"]["LDG.32"] == 8 + 2  # words of a thread; its part and tile


def launch_permutation(architecture: int, sources: str) -> list[dict[str, Any]]:
    """Launch Transformer Engine's kernels as Megatron-Core's fused permutation does, for a rank of the MoE recipe:
    4,096 tokens, 128 experts, 8 a token, bf16, probabilities in float32. Return the compiled kernels."""
    sys.path.insert(0, sources)
    from tests.gpu_evidence.launches import compiled_for
    from tests.gpu_evidence.te_sources import import_te

    import_te()
    from transformer_engine.pytorch.triton import permutation

    tokens, experts, hidden, out = 4096, 128, 2048, 8 * 4096
    with compiled_for(architecture) as kernels:
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        y = torch.empty(out, hidden, dtype=torch.bfloat16, device="cuda")
        probs = torch.empty(tokens, experts, device="cuda")
        routing = torch.empty(tokens, experts, dtype=torch.bool, device="cuda")
        rows = permutation.make_row_id_map(routing, tokens, experts)
        _, _, permuted = permutation.permute_with_mask_map(
            x, rows, probs, None, tokens, experts, out, hidden, None
        )
        permutation.unpermute_with_mask_map(y, rows, None, permuted, tokens, experts, hidden)
        permutation.unpermute_with_mask_map(y, rows, probs, None, tokens, experts, hidden)
        permutation.unpermute_with_mask_map_bwd_with_merging_probs(
            x, rows, y, probs, tokens, experts, out, hidden
        )
        splits = torch.empty(experts, dtype=torch.int64, device="cuda")
        chunks = permutation.make_chunk_sort_map(splits, splits, out, experts)
        permutation.sort_chunks_by_map(y, chunks, permuted, out, hidden, True)
    return [asdict(kernel) for kernel in kernels]


PERMUTATION = {
    *("_row_id_map_pass_1_kernel", "_row_id_map_pass_2_kernel", "_row_id_map_pass_3_kernel"),
    *("_permute_kernel", "_unpermute_kernel", "_unpermute_bwd_with_merging_probs_kernel"),
    *("_make_chunk_sort_map_kernel", "_sort_chunks_by_map_kernel"),
}


def test_transformer_engines_permutation_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (kernels,) = run_ranks(
        f"{HERE}:launch_permutation", 1, 90, str(te_sources()), own_interpreter=True
    )
    assert {kernel["name"] for kernel in kernels} == PERMUTATION
    for kernel in kernels:
        assert kernel["local_bytes"] == 0, kernel


SHAPES = ([1], [5], [8192], [8193], [3, 7], [40001], [2, 3, 4097], [130, 64])


def interpreted_hashes() -> list[tuple[str, str]]:
    """Return two hashes of tensors of several shapes and types: by SGLang's interpreted kernel, and by the project."""
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    from megatron_dppo.tensor_hash import tiled_hash

    torch.Tensor.is_cuda = True  # what the launch asks of its tensor
    draw, hashes = torch.Generator().manual_seed(7), []
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn):
            tensor = torch.randn(shape, generator=draw).to(dtype)
            theirs = gpu_tensor_hash(tensor, block_words=4096, reduce_chunk=4)
            hashes.append((f"{theirs:016x}", tiled_hash(tensor.cpu())))
    return hashes


def test_the_engines_hash_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hashes of every shape and type are equal, also if a size ends in the middle of a word or of a tile."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (hashes,) = run_ranks(f"{HERE}:interpreted_hashes", 1, own_interpreter=True)
    assert len({theirs for theirs, _ in hashes}) == len(SHAPES) * 4
    for theirs, ours in hashes:
        assert theirs == ours
