"""Recorded routing reaches the ranks that train on it, unchanged, and no others.

The twin is the whole batch, which every rank can make by itself; a rank is given only what it would
have after the exchange of rollouts.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks

MODULE = "tests.distributed.test_routing_exchange"
GROUP, GROUPS, LAYERS, TOP_K = 4, 6, 3, 2
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "DP2": (2, {"data": 2}),
    "TP2": (2, {"tensor": 2}),
    "TP2 DP2": (4, {"tensor": 2, "data": 2}),
    "PP2 DP2": (4, {"pipeline": 2, "data": 2}),
    "DP4": (4, {"data": 4}),
}


def whole_batch(experts: int) -> list:
    """24 rollouts, three of them without a recording, one sampled by two weight versions."""
    from megatron_dppo.types import Rollout, VersionSpan

    rng = np.random.default_rng(5)
    dtype = np.uint8 if experts <= 256 else np.uint16
    rollouts = []
    for i in range(GROUPS * GROUP):
        prompt, response = 2 + i % 3, int(rng.integers(2, 9))
        shape = (prompt + response - 1, LAYERS, experts)
        routed = rng.random(shape).argsort(-1)[..., :TOP_K].astype(dtype)
        spans = [VersionSpan(0, 0, 1), VersionSpan(1, 1, response)] if i == 7 else []
        rollouts.append(
            Rollout(
                problem_id=100 + i // GROUP,
                sample_index=i % GROUP,
                prompt_ids=[3] * prompt,
                response_ids=[5] * response,
                rollout_log_probs=[-1.0] * response,
                finish_reason="stop",
                text="",
                weight_versions=spans,
                routed_experts=None if i in (3, 8, 20) else routed,
                advantage=1.0,
            )
        )
    return rollouts


def model_shape(experts: int):
    from megatron_dppo.model.shape import ModelShape

    return ModelShape(
        family="qwen3_moe", num_layers=LAYERS, hidden_size=8, num_attention_heads=2,
        num_query_groups=2, head_dim=4, ffn_hidden_size=8, vocab_size=16, tied_embeddings=False,
        norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_position_embeddings=64,
        dtype="float32", num_experts=experts, experts_per_token=TOP_K,
    )  # fmt: skip


def topology_of(sizes: dict[str, int]):
    from megatron_dppo.model.layout import Layout
    from megatron_dppo.trainer.topology import init_distributed, init_topology

    layout = Layout(**sizes)
    init_distributed(layout.world_size)
    return init_topology(layout)


def after_exchange(whole: list, topology) -> list:
    """What this rank has when rollouts have been exchanged: leaders the recordings of their groups."""
    own = copy.deepcopy(whole)
    for position, rollout in enumerate(own):
        mine = (position // GROUP) % topology.dp_size == topology.dp_rank
        if not (topology.is_leader and mine):
            rollout.routed_experts = None
    return own


def run_config():
    from megatron_dppo.config import schema as s

    return s.TrainConfig(
        run=s.RunConfig(directory="unused", steps=1),
        model=s.ModelConfig(hf_checkpoint="unused", dtype="float32"),
        data=s.DataConfig(train="unused"),
        rollout=s.RolloutConfig(
            prompts_per_step=GROUPS, group_size=GROUP, max_response_tokens=8, router_replay=True
        ),
        training=s.TrainingConfig(prompts_per_mini_batch=2, micro_batch_tokens=32),
        optimizer=s.OptimizerConfig(lr=1e-3),
    )


def same(a, b) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and bool((a == b).all())


def check_delivery(topology, experts: int, *, gather: bool) -> dict[str, Any]:
    """Deliver by the plan of a real step; what is wrong on this rank."""
    from megatron_dppo.loop.batches import (
        BatchLayout,
        pack_mini_batch,
        plan_mini_batches,
        training_samples,
    )
    from megatron_dppo.loop.rollouts.routing_exchange import RoutingExchange

    whole, config = whole_batch(experts), run_config()
    own = after_exchange(whole, topology)
    layout = BatchLayout(topology.dp_rank, topology.dp_size, pad_multiple=topology.tp_size)
    plans = plan_mini_batches(own, config, layout)
    needed = [set().union(*(p.of_rank(r) for p in plans)) for r in range(topology.dp_size)]
    exchange = RoutingExchange(topology, model_shape(experts))
    figures = exchange.deliver(own, needed, gather=gather)
    everything = gather and topology.rank == 0
    wrong = [
        position
        for position, rollout in enumerate(own)
        if not same(
            rollout.routed_experts,
            whole[position].routed_experts
            if everything or position in needed[topology.dp_rank]
            else None,
        )
    ]
    for plan in plans:
        got, expected = (
            pack_mini_batch(training_samples(batch, config), plan, layout) for batch in (own, whole)
        )
        for a, b in zip(got.micro_batches, expected.micro_batches, strict=True):
            if not same(a.routed_experts, b.routed_experts) or not same(
                a.routed_valid, b.routed_valid
            ):
                wrong.append(-1)
    return {"wrong": wrong, "figures": figures, "needed": len(needed[topology.dp_rank])}


def delivery_worker(layouts: dict[str, dict[str, int]]) -> dict[str, Any]:
    from megatron_dppo.trainer.topology import destroy_topology

    out = {}
    for name, sizes in layouts.items():
        topology = topology_of(sizes)
        for experts, gather in ((8, False), (300, True)):
            out[f"{name}, {experts} experts"] = check_delivery(topology, experts, gather=gather)
        destroy_topology()
    return out


def expected_figures(experts: int) -> dict[str, float]:
    """By hand: rows that predict, less three responses' and the two-version response's first token."""
    batch = whole_batch(experts)
    rows = sum(r.length - 1 for r in batch)
    recorded = [r for r in batch if r.routed_experts is not None]
    usable = sum(r.length - 1 for r in recorded) - 1
    payload = sum(r.routed_experts.nbytes for r in recorded)
    return {
        "r3/bytes_per_token": payload / sum(r.length for r in recorded),
        "r3/unrecorded_share": 1 - usable / rows,
        "r3/discarded_tokens": 1,
    }


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_has_what_it_trains_on_and_nothing_else(world_size: int) -> None:
    layouts = {n: sizes for n, (world, sizes) in LAYOUTS.items() if world == world_size}
    for rank, found in enumerate(run_ranks(f"{MODULE}:delivery_worker", world_size, layouts)):
        assert found
        for name, report in found.items():
            assert report["wrong"] == [], (rank, name)
            experts = int(name.split(", ")[1].split()[0])
            assert report["figures"] == pytest.approx(expected_figures(experts)), name
            assert 0 < report["needed"] <= GROUPS * GROUP


FAULTS = {
    "a bit flipped on its way": (
        "sample 6 (problem 101, response 2): the recorded routing that rank 3 received has the hash"
    ),
    "nothing recorded": "no response of the batch has recorded routing",
    "another model's": "sample 4 (problem 101, response 0): recorded routing is uint8 [",
}


def fault_worker() -> dict[str, str]:
    """The errors' texts, with each fault planted in TP2 DP2."""
    topology = topology_of({"tensor": 2, "data": 2})
    return {fault: error_of(fault, topology) for fault in FAULTS}


def error_of(fault: str, topology) -> str:
    from megatron_dppo.loop.rollouts.routing_exchange import RoutingExchange, RoutingExchangeError

    class Flipping(RoutingExchange):
        def _split(self, rollouts, positions, buffer):
            return super()._split(rollouts, positions, buffer ^ (torch.arange(len(buffer)) == 9))

    own = after_exchange(whole_batch(8), topology)
    flips = fault == "a bit flipped on its way" and topology.rank == 3  # which leads nobody
    if fault == "nothing recorded":
        for rollout in own:
            rollout.routed_experts = None
    if fault == "another model's" and own[4].routed_experts is not None:
        own[4].routed_experts = own[4].routed_experts[:, :2]
    exchange = (Flipping if flips else RoutingExchange)(topology, model_shape(8))
    try:
        exchange.deliver(own, [range(6), range(6, 24)])
    except RoutingExchangeError as error:
        return str(error)
    return "no error"


@pytest.mark.distributed
def test_a_fault_is_one_error_on_all_ranks() -> None:
    told = run_ranks(f"{MODULE}:fault_worker", 4)
    assert all(errors == told[0] for errors in told)
    for fault, beginning in FAULTS.items():
        assert beginning in told[0][fault], fault
        assert "\n" not in told[0][fault]
