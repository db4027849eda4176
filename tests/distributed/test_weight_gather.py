"""Rank 0 gathers whole tensors. One process is the reference for tensors, checksums and received bytes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.checkpoint_conversion.gathering import Buffers, gather
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.gather_plan import elements_held, gather_plan, hf_buckets_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, local_parameters
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.weights.checksums import EngineTensors, ExpectedChecksums
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

SHAPE = ModelShape(
    family="qwen3_moe", num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2, head_dim=16,
    ffn_hidden_size=64, vocab_size=515, tied_embeddings=False, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
    max_position_embeddings=64, dtype="float32", num_experts=4, experts_per_token=2, moe_ffn_hidden_size=48,
)  # fmt: skip
BUCKET_BYTES = 60_000
ENGINE_RANKS = (1, 2)

TWO = {
    "TP2 ETP2": Layout(tensor=2, expert_tensor=2),
    "PP2": Layout(pipeline=2),
    "PP2 VPP2": Layout(pipeline=2, virtual_pipeline=2),
    "EP2": Layout(data=2, expert=2),
    "CP2 EP2": Layout(context=2, expert=2),
    "TP2 EP2": Layout(tensor=2, expert=2),
}
FOUR = {
    "TP2 PP2 ETP2": Layout(tensor=2, pipeline=2, expert_tensor=2),
    "TP2 PP2 EP2": Layout(tensor=2, pipeline=2, expert=2),
    "TP2 EP2 ETP2": Layout(tensor=2, data=2, expert=2, expert_tensor=2),
    "EP4": Layout(data=4, expert=4),
    "CP2 DP2 EP2": Layout(context=2, data=2, expert=2),
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
        plan = hf_buckets_plan(SHAPE, layout, BUCKET_BYTES, 4)
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


@pytest.mark.parametrize(("world", "layouts"), [(2, TWO), (4, FOUR)])
def test_rank_0_gathers_all_tensors(world: int, layouts: dict[str, Layout]) -> None:
    cases = {name: asdict(layout) for name, layout in layouts.items()}
    ranks = run_ranks("tests.distributed.test_weight_gather:gather_worker", world, cases)
    full = weights()
    for name, layout in layouts.items():
        reports = [rank[name] for rank in ranks]
        assert all(r["is_right"] for r in reports), name
        assert [sorted(r["names"]) for r in reports] == [sorted(full), *([[]] * (world - 1))], name
        missing = sum(t.elements - elements_held(t)[0] for t in gather_plan(SHAPE, layout))
        assert [r["received"] for r in reports] == [4 * missing, *([0] * (world - 1))], name
        for i, engine_ranks in enumerate(ENGINE_RANKS):
            dense = ExpectedChecksums(
                EngineTensors(SHAPE, EngineLayout(engine_ranks), "cpu"), torch.float32
            )
            dense.add(full.items())
            assert dense.digests([reports[0]["partials"][i]]) == dense.digests([dense.partial()])
