"""The checksums that the trainer expects of an engine equal the checksums of tensors built by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo import tensor_hash as hashing
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.kernels import KernelBuildError
from megatron_dppo.tensor_hash import (
    TiledHash,
    add_parts,
    add_placed,
    run_of,
    sums_by_torch,
    sums_on_cpu,
    tiled_hash,
)
from megatron_dppo.weights.checksums import EngineTensors, ExpectedChecksums, IncompleteWeightsError
from tests.messages import mentioning
from tests.ranks import run_ranks


def model_shape(family: str = "qwen3_moe", *, tied: bool = False, vocab: int = 100) -> ModelShape:
    shared: dict[str, Any] = {"shared_ffn_hidden_size": 4, "gates_shared_expert": True}
    moe: dict[str, Any] = {"num_experts": 3, "experts_per_token": 2, "moe_ffn_hidden_size": 4}
    return ModelShape(
        family=family,
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=2,
        ffn_hidden_size=6,
        vocab_size=vocab,
        tied_embeddings=tied,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=64,
        dtype="float32",
        **({} if family == "qwen2" else moe),
        **(shared if family == "qwen2_moe" else {}),
    )


def weights(shape: ModelShape) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(size) for name, size in hf_tensors(shape).items()}


def digests(shape: ModelShape, tensors: dict[str, Tensor], ranks: int = 1) -> list[dict[str, str]]:
    expected = ExpectedChecksums(EngineTensors(shape, EngineLayout(ranks), "cpu"), torch.float32)
    for item in tensors.items():
        expected.add([item])
    return expected.digests([expected.partial()])


# Tensor names that SGLang 0.5.23's /weights_checker answered for such models.
MOE_NAMES = {
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.0.self_attn.k_norm.weight",
    "model.layers.0.mlp.experts.w13_weight",
    "model.layers.0.mlp.experts.w2_weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.post_attention_layernorm.weight",
    "model.norm.weight",
    "lm_head.weight",
}
QWEN2_TIED_NAMES = {
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.self_attn.qkv_proj.bias",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.post_attention_layernorm.weight",
    "model.norm.weight",
}


QWEN2_MOE_NAMES = {
    *(name for name in MOE_NAMES if "q_norm" not in name and "k_norm" not in name),
    "model.layers.0.self_attn.qkv_proj.bias",
    "model.layers.0.mlp.shared_expert.gate_up_proj.weight",
    "model.layers.0.mlp.shared_expert.down_proj.weight",
    "model.layers.0.mlp.shared_expert_gate.weight",
}


@pytest.mark.parametrize(
    ("family", "tied", "names"),
    [
        ("qwen3_moe", False, MOE_NAMES),
        ("qwen3_moe", True, MOE_NAMES),
        ("olmoe", False, MOE_NAMES),
        ("qwen2_moe", False, QWEN2_MOE_NAMES),
        ("qwen2", True, QWEN2_TIED_NAMES),
    ],
)
def test_engine_tensor_names(family: str, tied: bool, names: set[str]) -> None:
    shape = model_shape(family, tied=tied)
    assert set(digests(shape, weights(shape))[0]) == names


def test_an_expert_parallel_rank_holds_whole_experts_and_its_share_of_the_rest() -> None:
    shape = replace(model_shape(), num_experts=4, moe_ffn_hidden_size=32)
    hf = weights(shape)
    expected = ExpectedChecksums(EngineTensors(shape, EngineLayout(4, 2), "cpu"), torch.float32)
    expected.add(hf.items())
    ranks = expected.digests([expected.partial()])
    tp_digests = digests(shape, hf, 4)
    attention, mlp = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.experts."
    assert [rank[attention] for rank in ranks] == [rank[attention] for rank in tp_digests]
    for number, rank in enumerate(ranks):
        group, share = divmod(number, 2)
        rows = slice(16 * share, 16 * share + 16)
        w13 = torch.zeros(2, 128, 8)
        w2 = torch.zeros(2, 8, 64)
        for local, expert in enumerate((2 * group, 2 * group + 1)):
            # Two ranks share an expert of 32 rows. A CPU engine pads it to 32 rows for each of the four ranks, so each
            # of the two holds 64 rows of gate and 64 of up, 16 of them real.
            w13[local, :16] = hf[f"{mlp}{expert}.gate_proj.weight"][rows]
            w13[local, 64:80] = hf[f"{mlp}{expert}.up_proj.weight"][rows]
            w2[local, :, :16] = hf[f"{mlp}{expert}.down_proj.weight"][:, rows]
        assert rank[f"{mlp}w13_weight"] == tiled_hash(w13)
        assert rank[f"{mlp}w2_weight"] == tiled_hash(w2)


@pytest.mark.parametrize("output_per_replica", [False, True])
def test_an_attention_replica_holds_attention_and_embedding_whole(output_per_replica: bool) -> None:
    # SGLang pads a vocabulary of 100 tokens, and then cannot gather the logits of a replica alone.
    vocab = 128 if output_per_replica else 100
    shape = replace(model_shape(vocab=vocab), num_experts=4, moe_ffn_hidden_size=32)
    hf = weights(shape)
    layout = EngineLayout(4, 2, 2, output_per_replica)
    expected = ExpectedChecksums(EngineTensors(shape, layout, "cpu"), torch.float32)
    expected.add(hf.items())
    ranks = expected.digests([expected.partial()])
    two_ranks, four_ranks = digests(shape, hf, 2), digests(shape, hf, 4)
    table = EngineTensors(shape, EngineLayout(4, 2), "cpu")
    without_replicas = ExpectedChecksums(table, torch.float32)
    without_replicas.add(hf.items())
    experts = without_replicas.digests([without_replicas.partial()])
    attention = ("model.embed_tokens.weight", "model.layers.0.self_attn.qkv_proj.weight")
    assert two_ranks[0][attention[1]] != two_ranks[1][attention[1]]
    for number, rank in enumerate(ranks):
        for name in (*attention, "model.layers.0.self_attn.o_proj.weight"):
            assert rank[name] == two_ranks[number % 2][name]
        output = two_ranks[number % 2] if output_per_replica else four_ranks[number]
        assert rank["lm_head.weight"] == output["lm_head.weight"]
        for name in ("w13_weight", "w2_weight"):
            full_name = f"model.layers.0.mlp.experts.{name}"
            assert rank[full_name] == experts[number][full_name]


def test_fused_tensors_of_a_mixture_on_one_rank() -> None:
    shape = model_shape()
    hf = weights(shape)
    (got,) = digests(shape, hf)
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    qkv = torch.cat([hf[f"{attention}{x}_proj.weight"] for x in "qkv"])
    experts = [f"{mlp}experts.{e}." for e in range(3)]
    # A CPU engine pads the 4 intermediate rows of each matrix to 32.
    w13 = torch.zeros(3, 64, 8)
    w2 = torch.zeros(3, 8, 32)
    for number, e in enumerate(experts):
        w13[number, :4], w13[number, 32:36] = hf[f"{e}gate_proj.weight"], hf[f"{e}up_proj.weight"]
        w2[number, :, :4] = hf[f"{e}down_proj.weight"]
    head = torch.cat([hf["lm_head.weight"], torch.zeros(28, 8)])
    assert got[f"{attention}qkv_proj.weight"] == tiled_hash(qkv)
    assert got[f"{mlp}experts.w13_weight"] == tiled_hash(w13)
    assert got[f"{mlp}experts.w2_weight"] == tiled_hash(w2)
    assert got["lm_head.weight"] == tiled_hash(head)
    assert got[f"{mlp}gate.weight"] == tiled_hash(hf[f"{mlp}gate.weight"])


def test_a_cuda_engine_pads_no_experts() -> None:
    shape = model_shape()
    hf = weights(shape)
    expected = ExpectedChecksums(EngineTensors(shape), torch.float32)
    expected.add(hf.items())
    mlp = "model.layers.0.mlp."
    down = torch.stack([hf[f"{mlp}experts.{e}.down_proj.weight"] for e in range(3)])
    got = expected.digests([expected.partial()])
    assert got[0][f"{mlp}experts.w2_weight"] == tiled_hash(down)


def test_two_ranks_hold_slices() -> None:
    shape = model_shape(tied=True, vocab=130)
    hf = weights(shape)
    got = digests(shape, hf, ranks=2)
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    q, k, v = (hf[f"{attention}{x}_proj.weight"] for x in "qkv")
    for rank in range(2):
        own_q, own_kv = slice(4 * rank, 4 * rank + 4), slice(2 * rank, 2 * rank + 2)
        assert got[rank][f"{attention}qkv_proj.weight"] == tiled_hash(
            torch.cat([q[own_q], k[own_kv], v[own_kv]])
        )
        o = hf[f"{attention}o_proj.weight"]
        assert got[rank][f"{attention}o_proj.weight"] == tiled_hash(o[:, own_q])
        experts = [f"{mlp}experts.{e}." for e in range(3)]
        w13 = torch.zeros(3, 2, 32, 8)
        w2 = torch.zeros(3, 8, 32)
        for number, e in enumerate(experts):
            for half, x in enumerate(("gate", "up")):
                w13[number, half, :2] = hf[f"{e}{x}_proj.weight"][own_kv]
            w2[number, :, :2] = hf[f"{e}down_proj.weight"][:, own_kv]
        assert got[rank][f"{mlp}experts.w13_weight"] == tiled_hash(w13)
        assert got[rank][f"{mlp}experts.w2_weight"] == tiled_hash(w2)
        # 130 rows are padded to 192, 96 a rank: rank 1 holds 34 rows and 62 of zeros. The tied head is a copy.
        embedding = torch.cat([hf["model.embed_tokens.weight"], torch.zeros(62, 8)])
        assert got[rank]["model.embed_tokens.weight"] == tiled_hash(
            embedding[96 * rank : 96 * rank + 96]
        )
        assert got[rank]["lm_head.weight"] == got[rank]["model.embed_tokens.weight"]


def test_four_ranks_share_two_key_value_heads() -> None:
    shape = model_shape()
    hf = weights(shape)
    got = digests(shape, hf, ranks=4)
    q, k, v = (hf[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    for rank in range(4):
        q_rows, head = slice(2 * rank, 2 * rank + 2), slice(2 * (rank // 2), 2 * (rank // 2) + 2)
        assert got[rank]["model.layers.0.self_attn.qkv_proj.weight"] == tiled_hash(
            torch.cat([q[q_rows], k[head], v[head]])
        )


def test_vocabulary_padding_grows_where_ranks_do_not_divide_it() -> None:
    # 3 ranks do not divide 128 rows, so 100 rows are padded to 192.
    shape = replace(model_shape(), num_attention_heads=6, moe_ffn_hidden_size=6, num_query_groups=3)
    hf = weights(shape)
    got = digests(shape, hf, ranks=3)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shards = [hf[name][:64], torch.cat([hf[name][64:], torch.zeros(28, 8)]), torch.zeros(64, 8)]
        assert [rank[name] for rank in got] == [tiled_hash(tensor) for tensor in shards]


def test_order_of_arrival_does_not_matter() -> None:
    shape = model_shape()
    hf = weights(shape)
    names = list(hf)
    random.Random(3).shuffle(names)
    assert digests(shape, {n: hf[n] for n in names}, 2) == digests(shape, hf, 2)


def test_senders_add_up_through_json() -> None:
    shape = model_shape()
    hf = weights(shape)
    tensors = EngineTensors(shape, EngineLayout(2), "cpu")
    senders = [ExpectedChecksums(tensors, torch.float32) for _ in range(3)]
    generator = random.Random(5)
    for item in hf.items():
        generator.choice(senders).add([item])
    partials = [json.loads(json.dumps(sender.partial())) for sender in senders]
    assert senders[0].digests(partials) == digests(shape, hf, 2)
    repeated_name = partials[1][0][-1]
    with pytest.raises(IncompleteWeightsError, match=f"{repeated_name} "):
        senders[0].digests([*partials, [[repeated_name], []]])
    with pytest.raises(IncompleteWeightsError, match="were never sent"):
        senders[0].digests(partials[1:])


def test_parts_at_odd_places_are_refused() -> None:
    # A head has three bf16 values, so the keys begin in the middle of a word of 32 bits.
    shape = replace(model_shape("qwen2"), head_dim=3, num_attention_heads=1, num_query_groups=1)
    with pytest.raises(IncompleteWeightsError, match=r"k_proj\.bias "):
        ExpectedChecksums(EngineTensors(shape, EngineLayout(1), "cpu"), torch.bfloat16)


def test_incomplete_streams_are_refused() -> None:
    shape = model_shape()
    hf = weights(shape)
    lost_name = "model.layers.0.mlp.experts.1.up_proj.weight"
    with pytest.raises(IncompleteWeightsError, match=f": {lost_name}"):
        digests(shape, {n: t for n, t in hf.items() if n != lost_name})
    expected = ExpectedChecksums(EngineTensors(shape, EngineLayout(1), "cpu"), torch.float32)
    with pytest.raises(IncompleteWeightsError, match=r"model.norm.weight "):
        expected.add([("model.norm.weight", hf["model.norm.weight"])] * 2)
    with pytest.raises(IncompleteWeightsError, match=mentioning("model.layers.0.mlp.bias")):
        expected.add([("model.layers.0.mlp.bias", torch.ones(8))])
    with pytest.raises(IncompleteWeightsError, match=r"\(7,\) torch.float32, expected \(8,\)"):
        digests(shape, {**hf, "model.norm.weight": torch.ones(7)})
    with pytest.raises(IncompleteWeightsError, match=r"torch.bfloat16, expected"):
        digests(shape, {**hf, "model.norm.weight": torch.ones(8, dtype=torch.bfloat16)})


def test_ranks_that_do_not_divide_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match="tp_size"):
        EngineTensors(model_shape(), EngineLayout(3))


# The hashes of these tensors by SGLang 0.5.23's Triton kernel, run by Triton's interpreter.
SGLANG_HASHES = [
    (5, torch.float32, "98ecaf9cc4c20941"),
    (8192, torch.float32, "2c80ed1d0d9c171f"),
    (24579, torch.float32, "f5952d5483c41c0f"),
    (40001, torch.bfloat16, "d049468e180c054a"),
]


@pytest.mark.parametrize(("count", "dtype", "value"), SGLANG_HASHES)
@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("kernel", [True, False], ids=["C++", "torch"])
def test_tiled_hash_is_the_cuda_engines(
    count: int,
    dtype: torch.dtype,
    value: str,
    pieces: int,
    kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not kernel:
        monkeypatch.setattr(hashing, "_kernel", lambda: None)
    tensor = (torch.arange(count) * 2654435761 % 65521).to(dtype)
    step = max(2, count // pieces // 2 * 2)
    starts = list(range(0, count, step))
    random.Random(1).shuffle(starts)
    hashes = [TiledHash(tensor.nbytes) for _ in range(2)]
    for i, start in enumerate(starts):
        hashes[i % 2].add(tensor[start : start + step], start * dtype.itemsize)
    hashes[0].merge(json.loads(json.dumps(hashes[1].state())))
    assert hashes[0].hexdigest() == value
    assert tiled_hash(tensor) == value


def test_kernel_and_torch_agree_on_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "BLOCK_TILES", 2)
    data = torch.arange(50_001, dtype=torch.int32).view(torch.uint8)
    for first in (0, 1, 8191, 8192, 100_000):
        for count in (1, 100, 8191, 8192, 8193, 50_001):
            for total in (first + count, first + count + 9, 1 << 20):
                run = run_of(data[: 4 * count], first, total)
                (got,) = sums_on_cpu([run])
                assert got == sums_by_torch(run)
                assert all(0 <= x < 1 << 32 for _, *sums in got[1] for x in sums)


def test_torch_reads_words_that_begin_anywhere_in_memory() -> None:
    data = torch.arange(20, dtype=torch.uint8)
    for offset in range(8):
        part = data[offset : offset + 12]
        assert sums_by_torch(run_of(part, 5, 99)) == sums_by_torch(run_of(part.clone(), 5, 99))


BLOCKS = {
    "a row of tiles": lambda t: t,
    "rows of a matrix": lambda t: t[20:700],
    "columns of a matrix": lambda t: t[:, 64:192],
    "columns of a stack": lambda t: t.view(4, 250, 256)[:, :, 128:],
    "a block in the middle of three": lambda t: t.view(10, 100, 256)[:, 30:60],
    "a transpose, which is no block": lambda t: t.T,
    "a part of each dimension": lambda t: t.view(10, 100, 256)[:7, 30:60, :128],
    "an odd number of values": lambda t: t[:, :3],
    "a row": lambda t: t[5],
    "a column": lambda t: t[:, 4:6],
}


# Views that are hashed as a copy, because they are not one block of equally distant rows.
COPIED_VIEWS = {"a transpose, which is no block", "a part of each dimension"}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_tensors_are_hashed_where_they_lie(name: str) -> None:
    whole = (torch.arange(1000 * 256) * 40503 % 4099).to(torch.bfloat16).view(1000, 256)
    part = BLOCKS[name](whole)
    copy = part.contiguous()
    assert tiled_hash(part) == tiled_hash(copy)
    is_view = run_of(part, 0, -(-part.numel() // 2)).data.data_ptr() == part.data_ptr()
    has_whole_words = part.shape[-1] % 2 == 0
    assert is_view == (has_whole_words and name not in COPIED_VIEWS)


def test_parts_of_many_tensors_are_hashed_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = hashing._kernel()

    def counted(*arguments: Any) -> Any:
        calls.append(arguments[0])
        return kernel(*arguments)

    monkeypatch.setattr(hashing, "_kernel", lambda: counted)
    tensors = [torch.randn(n, 256) for n in (1, 33, 400)]
    hashes = [TiledHash(t.nbytes) for t in tensors]
    halves = [(h, t[: len(t) // 2 or 1], 0) for h, t in zip(hashes, tensors, strict=True)]
    rest = [
        (h, t[len(t) // 2 :], len(t) // 2 * 1024)
        for h, t in zip(hashes, tensors, strict=True)
        if len(t) > 1
    ]
    finish = add_parts([*halves, *rest, (hashes[0], torch.empty(0), 0)])
    assert calls == [5]
    finish()
    monkeypatch.undo()
    assert [h.hexdigest() for h in hashes] == [tiled_hash(t) for t in tensors]


def compare_triton_sums() -> list[bool]:
    """Worker: return whether the Triton kernel and the C++ loop give equal sums, for parts at every kind of place."""
    from megatron_dppo.tensor_hash.tile_sums_triton import start

    matrix = torch.arange(300 * 128, dtype=torch.int32).view(300, 128) * -1640531527
    wide = matrix.view(3, -1)[:, 5:10005]  # rows longer than a tile
    parts = [
        matrix.view(-1)[:1],
        matrix.view(-1)[:8192],
        matrix,
        matrix[:, 5:70],
        matrix[7:9, 1:2],
        wide,
    ]
    runs = [
        run_of(part, first, first + part.numel() + beyond)
        for part in parts
        for first in (0, 8191, 8192 * 3 + 17)
        for beyond in (0, 20_000)
    ]
    got, expected = start(runs)(), sums_on_cpu(runs)
    return [a == b for a, b in zip(got, expected, strict=True)]


def test_the_triton_kernel_agrees_with_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    worker = "tests.unit.test_engine_checksums:compare_triton_sums"
    (are_equal,) = run_ranks(worker, 1, own_interpreter=True)
    assert are_equal == [True] * 36


def test_parts_may_share_words() -> None:
    """Parts of any number of bytes, also several within a word, and the last within the tensor's short last word."""
    data = torch.arange(1, 60_004, dtype=torch.int64).to(torch.uint8)
    for ends in ([1, 2, 3, 60_003], [5, 6, 8, 40_001, 60_002, 60_003], [60_001, 60_002, 60_003]):
        hashes = [TiledHash(60_003) for _ in range(2)]
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            hashes[i % 2].add(data[start:end], start)
        hashes[1].merge(json.loads(json.dumps(hashes[0].state())))
        assert hashes[1].hexdigest() == tiled_hash(data)
    with pytest.raises(ValueError, match=mentioning(10)):
        TiledHash(10).add(torch.ones(2, dtype=torch.bfloat16), 8)
    assert tiled_hash(torch.empty(0)) == "0" * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_parts_that_are_no_run_of_bytes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns, every second row, and a box of a matrix: together they are the matrix."""
    monkeypatch.setattr(hashing, "SCATTERED_WORDS", 5000)
    rows, columns = 301, 310
    tensor = torch.arange(rows * columns).view(rows, columns).to(dtype)
    places = torch.empty(3 + tensor.numel(), device="meta")[3:].view(rows, columns)
    vector = torch.cat([torch.ones(3, dtype=dtype), tensor.flatten()])
    tensor_hash = TiledHash(vector.nbytes)
    tensor_hash.add(vector[:3], 0)
    for cut in (
        (slice(None), slice(0, 99)),
        (slice(0, None, 2), slice(99, None)),
        (slice(1, 200, 2), slice(99, None)),
        (slice(201, None, 2), slice(99, 200)),
        (slice(201, None, 2), slice(200, None)),
    ):
        add_placed([(tensor_hash, tensor[cut], places[cut])])()
    assert tensor_hash.hexdigest() == tiled_hash(vector)


def test_one_word_worked_by_the_formula() -> None:
    """The tensor is one float32 value: v = 1.0 at i = 0, with n = 1."""

    def mix(x: int, *steps: tuple[int, int], bits: int) -> int:
        for shift, factor in steps:
            x = ((x ^ (x >> shift)) * factor) % (1 << bits)
        return x

    def fmix(x: int) -> int:
        x = mix(x, (16, 0x85EBCA6B), (13, 0xC2B2AE35), bits=32)
        return x ^ (x >> 16)

    first = 0x243F6A88
    second = (first * 0x9E3779B1 & 0xFFFFFFFF) ^ 0xDEADBEEF
    high, low = (fmix(4 ^ fmix(0x3F800000 ^ seed)) for seed in (first, second))
    total = mix((high << 32) + low, (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), bits=64)
    assert tiled_hash(torch.ones(1)) == f"{total ^ (total >> 31):016x}"


def test_views_are_hashed_as_what_they_show() -> None:
    base = torch.arange(64.0)
    for view in (
        base.view(8, 8)[:, ::4],
        base.view(8, 8)[:, ::8],
        base.view(1, 64)[:, ::2],
        base.view(8, 8)[:2, :4],
        base.view(4, 4, 4)[:, :, :2],
        base.view(4, 4, 4)[:, :2],
        base.view(8, 8).T,
    ):
        assert tiled_hash(view) == tiled_hash(view.clone(memory_format=torch.contiguous_format))


def test_bytes_are_padded_to_a_word_and_an_empty_part_adds_nothing() -> None:
    for count in (5, 6, 7, 8):
        data = torch.arange(1, count + 1, dtype=torch.uint8)
        padded = torch.cat([data, torch.zeros(8 - count, dtype=torch.uint8)])
        assert tiled_hash(data) == tiled_hash(padded)
    whole = TiledHash(8)
    whole.add(torch.empty(0, dtype=torch.uint8), 4)
    assert whole.state() == [0, [], []]


def test_on_a_cpu_the_compiled_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("torch was used")

    monkeypatch.setattr(hashing, "sums_by_torch", fail)
    assert len(tiled_hash(torch.ones(3))) == 16


def test_a_missing_compiler_is_told_and_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(source: object) -> None:
        raise KernelBuildError("not found on PATH: g++")

    monkeypatch.setattr(hashing, "build_library", fail)
    assert hashing._kernel.__wrapped__() is None
    assert "PATH: g++" in caplog.text


def test_a_lone_slice_is_hashed_where_it_lies() -> None:
    """The stride of a dimension of size 1 does not matter, because there is no second index."""
    whole = torch.arange(3 * 4 * 64, dtype=torch.bfloat16)
    for part in (
        # The stride of the first dimension is 4 rows.
        whole.view(3, 4, 64)[:1, :2, :8],
        # The stride of the last dimension is 256 values.
        whole.view(3, 4, 64).permute(1, 2, 0)[:, :8, :1],
    ):
        run = run_of(part, 0, part.numel() // 2)
        assert run.data.data_ptr() == part.data_ptr()
        assert sums_by_torch(run) == sums_by_torch(run_of(part.clone(), 0, part.numel() // 2))


def test_what_is_no_block_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    part = torch.arange(12, dtype=torch.float32).view(3, 4).T
    expected = run_of(part.contiguous(), 0, 12).data.tolist()

    def fail(*arguments: object) -> None:
        raise AssertionError("copied twice")

    monkeypatch.setattr(Tensor, "clone", fail)
    monkeypatch.setattr(torch, "cat", fail)
    assert run_of(part, 0, 12).data.tolist() == expected


def test_a_kernel_that_leaves_out_a_part_is_refused() -> None:
    edges = [[(3, 0), (5, 2)], []]
    words = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert hashing.collect(edges, [9, 8], words) == [(9, [(3, 1, 2), (5, 3, 4)]), (8, [])]
    with pytest.raises(ValueError, match="shorter"):
        hashing.collect(edges, [9], words)


@pytest.mark.parametrize(
    ("value", "signed"), [(0, 0), (0x7FFFFFFF, 2**31 - 1), (0x80000000, -(2**31)), (0xFFFFFFFF, -1)]
)
def test_factors_are_numbers_that_int32_holds(value: int, signed: int) -> None:
    assert hashing._signed(value) == signed
