"""Each sending rank gathers the tensors of which it holds the most. One process is the reference for tensors,
checksums and received bytes."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.checkpoint_conversion.gathering import Buffers, gather
from megatron_dppo.engine.checksums import EngineTensors, ExpectedChecksums
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.gather_plan import elements_held, gather_plan, hf_buckets_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, local_parameters
from megatron_dppo.model.shape import ModelShape
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

SHAPE = ModelShape(
    family="qwen3_moe", num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2, head_dim=16,
    ffn_hidden_size=64, vocab_size=515, tied_embeddings=False, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
    max_position_embeddings=64, dtype="float32", num_experts=4, experts_per_token=2, moe_ffn_hidden_size=48,
)  # fmt: skip
BUCKET_BYTES = 60_000
ENGINE_RANKS = (1, 2)

# Name -> layout, and the ranks that send.
TWO = {
    "TP2 ETP2": (Layout(tensor=2, expert_tensor=2), [0]),
    "PP2": (Layout(pipeline=2), [0, 1]),
    "PP2 VPP2": (Layout(pipeline=2, virtual_pipeline=2), [0, 1]),
    "EP2": (Layout(data=2, expert=2), [0, 1]),
    "CP2 EP2": (Layout(context=2, expert=2), [0, 1]),
    "TP2 EP2": (Layout(tensor=2, expert=2), [0, 1]),
}
FOUR = {
    "TP2 PP2 ETP2": (Layout(tensor=2, pipeline=2, expert_tensor=2), [0, 2]),
    "TP2 PP2 EP2": (Layout(tensor=2, pipeline=2, expert=2), [0, 1, 2, 3]),
    "TP2 EP2 ETP2": (Layout(tensor=2, data=2, expert=2, expert_tensor=2), [0, 2]),
    "EP4": (Layout(data=4, expert=4), [0, 1, 2, 3]),
    "CP2 DP2 EP2": (Layout(context=2, data=2, expert=2), [0, 1]),
}


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(dims, generator=generator) for n, dims in hf_tensors(SHAPE).items()}


def shards(layout: Layout, rank: int, full: dict[str, torch.Tensor]) -> dict[Any, torch.Tensor]:
    held = {}
    for parameter in local_parameters(SHAPE, layout, rank):
        local = torch.zeros(parameter.shape)
        for segment in parameter.segments:
            segment.of_local(local).copy_(segment.of_hf(full[segment.hf_name]))
        held[parameter.chunk, parameter.name] = local
    return held


def gather_worker(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Gather in each layout. Return this rank's tensor names, received bytes, whether all tensors were right, and
    partial checksums."""
    dist.init_process_group("gloo")
    rank, full = dist.get_rank(), weights()
    report = {}
    for name, sizes in layouts.items():
        layout = Layout(**sizes)
        plan = hf_buckets_plan(SHAPE, layout, BUCKET_BYTES, 4, spread=True)
        expected = [
            ExpectedChecksums(EngineTensors(SHAPE, EngineLayout(n), "cpu"), torch.float32)
            for n in ENGINE_RANKS
        ]
        got, received, previous, is_right = [], 0, [], True
        for gathered in gather(plan, rank, shards(layout, rank, full), Buffers()):
            # The previous bucket must be unchanged: it may still be on its way to the engines.
            is_right &= all(torch.equal(t, full[n]) for n, t in [*previous, *gathered.tensors])
            previous = gathered.tensors or previous
            got += [n for n, _ in gathered.tensors]
            received += gathered.received
            for each in expected:
                each.add(gathered.tensors)
        report[name] = {
            "names": got,
            "received": received,
            "is_right": is_right,
            "partials": [each.partial() for each in expected],
        }
    return report


@pytest.mark.parametrize(("world", "cases"), [(2, TWO), (4, FOUR)])
def test_each_rank_sends_its_own_and_together_they_send_all(
    world: int, cases: dict[str, tuple[Layout, list[int]]]
) -> None:
    layouts = {name: asdict(layout) for name, (layout, _) in cases.items()}
    ranks = run_ranks("tests.distributed.test_weight_gather:gather_worker", world, layouts)
    full = weights()
    for name, (layout, expected_senders) in cases.items():
        reports = [rank[name] for rank in ranks]
        assert all(r["is_right"] for r in reports), name
        assert sorted(n for r in reports for n in r["names"]) == sorted(full), name
        assert [i for i, r in enumerate(reports) if r["names"]] == expected_senders, name
        # Not a byte more than the bound.
        bound = 4 * fewest_gathered_elements(SHAPE, layout)
        assert sum(r["received"] for r in reports) == bound, name
        for i, engine_ranks in enumerate(ENGINE_RANKS):
            dense = ExpectedChecksums(
                EngineTensors(SHAPE, EngineLayout(engine_ranks), "cpu"), torch.float32
            )
            dense.add(full.items())
            together = dense.digests([r["partials"][i] for r in reports])
            assert together == dense.digests([dense.partial()]), name


def fewest_gathered_elements(shape: ModelShape, layout: Layout) -> int:
    """Return the fewest elements that a gather of whole tensors can move: those that each largest holder lacks."""
    return sum(
        tensor.elements - max(elements_held(tensor).values())
        for tensor in gather_plan(shape, layout)
    )


def test_the_bound_counts_what_the_best_holder_lacks() -> None:
    total = sum(math.prod(dims) for dims in hf_tensors(SHAPE).values())
    assert fewest_gathered_elements(SHAPE, Layout()) == 0
    assert fewest_gathered_elements(SHAPE, Layout(pipeline=4)) == 0
    assert fewest_gathered_elements(SHAPE, Layout(data=4, expert=4)) == 0
    # TP2 halves every matrix except the routers. Each rank has whole norms and routers. Of the 515 rows of each of the
    # two vocabulary matrices, the first rank holds 258 and lacks 257.
    whole = 4 * (2 * 64 + 2 * 16 + 4 * 64) + 64
    vocabulary = 2 * 515 * 64
    halves = (total - whole - vocabulary) // 2
    assert fewest_gathered_elements(SHAPE, Layout(tensor=2, expert_tensor=2)) == (
        halves + 2 * 257 * 64
    )
