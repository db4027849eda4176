"""Columns reach the ranks that train on them, unchanged, and no other ranks.

The reference is the whole batch, which every rank can make by itself. As input, a rank gets only
its own part of the batch, as after generation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from tests.small_config import small_config
from tests.trajectories import same

MODULE = "tests.distributed.test_column_exchange"
GROUP, GROUPS, LAYERS, TOP_K = 4, 6, 3, 2
LAYERS_OF_STAGES = [[1], [0, 2]]
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "DP2": (2, {"data": 2}),
    "TP2": (2, {"tensor": 2}),
    "TP2 DP2": (4, {"tensor": 2, "data": 2}),
    "CP2 DP2": (4, {"context": 2, "data": 2}),
    "PP2 DP2": (4, {"pipeline": 2, "data": 2}),
    "DP4": (4, {"data": 4}),
}


def whole_batch(experts: int) -> list:
    """Return 24 trajectories. Three have no recording, and two weight versions sampled one of them."""
    from megatron_dppo.data.trajectory import Trajectory

    rng = np.random.default_rng(5)
    dtype = np.uint8 if experts <= 256 else np.uint16
    batch = []
    for i in range(GROUPS * GROUP):
        prompt, response = 2 + i % 3, int(rng.integers(2, 9))
        shape = (prompt + response - 1, LAYERS, experts)
        columns = {
            "routed_experts": rng.random(shape).argsort(-1)[..., :TOP_K].astype(dtype),
            "rollout_log_probs": -rng.random(response, np.float32),
            "topk_ids": rng.permuted(np.tile(np.arange(16, dtype=np.int32), (response, 1)), axis=1)[
                :, :3
            ],
            "topk_log_probs": -rng.random((response, 3), np.float32),
            "weight_version": [0 if i == 7 else 1, *[1] * (response - 1)],
        }
        if i in (3, 8, 20):
            del columns["routed_experts"]
        batch.append(
            Trajectory.of_response(
                [3] * prompt,
                [5] * response,
                problem_id=100 + i // GROUP,
                sample_index=i % GROUP,
                columns=columns,
                advantage=1.0,
            )
        )
    return batch


def sizes() -> dict[str, int]:
    return {"moe_layers": LAYERS, "experts_per_token": TOP_K}


def topology_of(sizes: dict[str, int]):
    from megatron_dppo.model.layout import Layout
    from megatron_dppo.trainer.topology import init_distributed, init_topology

    layout = Layout(**sizes)
    init_distributed(layout.world_size)
    return init_topology(layout)


def announce_groups(whole: list, topology) -> tuple[list, dict]:
    """Announce the leaders' groups, as a run does. Return the outlines, and this rank's trajectories by position."""
    from megatron_dppo.loop.ownership import announce

    own = [t for i, t in enumerate(whole) if (i // GROUP) % topology.dp_size == topology.dp_rank]
    return announce(own if topology.is_leader else [], topology, GROUP, range(GROUPS))


def announce_problems(whole: list, outlines: list, own: dict, topology) -> list[int]:
    """Return the wrong positions. Every rank must have the outlines, and only the leader the whole trajectories."""
    from megatron_dppo.data.trajectory import Outline

    def is_right(position: int) -> bool:
        mine = (position // GROUP) % topology.dp_size == topology.dp_rank
        if topology.is_leader and mine:
            return same(own[position], whole[position])
        return position not in own

    expected = [Outline.of(t) for t in whole]
    return [i for i in range(len(whole)) if outlines[i] != expected[i] or not is_right(i)]


def stages_of(topology):
    """Return the stages of ``topology``. Of two stages, the first has layer 1 and the second has layers 0 and 2."""
    from megatron_dppo.loop.exchange import Stages

    return Stages(2, LAYERS_OF_STAGES) if topology.pp_size > 1 else Stages()


def needed_by(t, topology):
    """Return the trajectory ``t`` as a rank of this stage receives it."""
    recorded = t.columns.get("routed_experts")
    if topology.pp_size > 1 and topology.pp_rank == 0:  # The first of two stages computes no loss.
        t = t.without("rollout_log_probs", "topk_ids", "topk_log_probs")
    if topology.pp_size == 1 or recorded is None:
        return t
    return t.with_columns(routed_experts=recorded[:, LAYERS_OF_STAGES[topology.pp_rank]])


def check_delivery(topology, experts: int, *, gather: bool) -> dict[str, Any]:
    """Deliver by the plan of a real step. Return what is wrong on this rank, and its figures.

    ``wrong`` has positions; -1: packed micro-batches differ, -2: forms differ, -3: other trajectories arrived.
    """
    from megatron_dppo.data.columns import Form
    from megatron_dppo.loop.batch_layout import BatchLayout
    from megatron_dppo.loop.exchange import ColumnExchange
    from megatron_dppo.loop.learning import pack_mini_batch, plan_mini_batches
    from megatron_dppo.loop.rollout_figures import routing_figures

    config = small_config(
        Path("unused"),
        Path("unused"),
        rollout={"prompts_per_step": GROUPS, "group_size": GROUP, "router_replay": True},
        training={"prompts_per_mini_batch": 2},
    )
    whole = whole_batch(experts)
    outlines, own = announce_groups(whole, topology)
    wrong = announce_problems(whole, outlines, own, topology)
    layout = BatchLayout(topology.dp_rank, topology.dp_size, pad_multiple=topology.tp_size)
    sections = (config.training, config.rollout, config.algorithm)
    plans = plan_mini_batches(outlines, *sections, layout)
    needed = [set().union(*(p.of_rank(r) for p in plans)) for r in range(topology.dp_size)]
    exchange = ColumnExchange(topology, sizes(), stages_of(topology))
    delivery = exchange.deliver(outlines, own, needed, gather=gather)
    everything = gather and topology.rank == 0
    expected = {
        position: t if everything else needed_by(t, topology)
        for position, t in enumerate(whole)
        if everything or position in needed[topology.dp_rank]
    }
    if delivery.trajectories.keys() != expected.keys():
        wrong.append(-3)
    wrong += [p for p, t in delivery.trajectories.items() if not same(t, expected[p])]
    for plan in plans:
        got, dense = (
            pack_mini_batch(batch, plan, layout, config.algorithm, delivery.forms)
            for batch in (delivery.trajectories, expected)
        )
        for a, b in zip(got.micro_batches, dense.micro_batches, strict=True):
            for x, y in ((a.columns, b.columns), (a.valid, b.valid)):
                if x.keys() != y.keys() or not all(torch.equal(x[n], y[n]) for n in x):
                    wrong.append(-1)
    dtype = "uint8" if experts <= 256 else "uint16"
    if delivery.forms != {
        "rollout_log_probs": Form("float32", ()),
        "routed_experts": Form(dtype, (LAYERS, TOP_K)),
        "topk_ids": Form("int32", (3,)),
        "topk_log_probs": Form("float32", (3,)),
        "weight_version": Form("int32", ()),
    }:
        wrong.append(-2)
    recorded = delivery.positions["routed_experts"]
    figures = routing_figures(outlines, recorded, delivery.forms["routed_experts"])
    return {"wrong": wrong, "figures": figures, "needed": len(needed[topology.dp_rank])}


def delivery_worker(
    layouts: dict[str, dict[str, int]], piece_bytes: int, free_bytes: int
) -> dict[str, Any]:
    from megatron_dppo.loop import exchange
    from megatron_dppo.system.scratch import SHARED_MEMORY, private_name
    from megatron_dppo.trainer.topology import destroy_topology

    exchange.PIECE_BYTES = piece_bytes
    exchange.free_bytes = lambda: free_bytes  # type: ignore[misc,assignment]
    out = {}
    for name, layout in layouts.items():
        topology = topology_of(layout)
        for experts, gather in ((8, False), (300, True)):
            out[f"{name}, {experts} experts"] = check_delivery(topology, experts, gather=gather)
        destroy_topology()
    assert not list(SHARED_MEMORY.glob(f"{private_name()}buffer-*"))
    return out


def expected_figures(experts: int) -> dict[str, float]:
    """Return the figures without the exchange. Of all rows that predict, those of three responses have no recording,
    and the response of two versions loses the row of its first token."""
    batch = whole_batch(experts)
    rows = sum(t.length - 1 for t in batch)
    recorded = [t for t in batch if "routed_experts" in t.columns]
    usable = sum(t.length - 1 for t in recorded) - 1
    payload = sum(t.columns["routed_experts"].nbytes for t in recorded)
    return {
        "r3/bytes_per_token": payload / sum(t.length for t in recorded),
        "r3/unrecorded_share": 1 - usable / rows,
        "r3/discarded_tokens": 1,
    }


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "piece_bytes", "free_bytes"),
    [(2, 100, 2**30), (2, 2**28, 2**30), (4, 100, 2**30), (4, 100, 0)],
)
def test_every_rank_has_what_it_trains_on_and_nothing_else(
    world_size: int, piece_bytes: int, free_bytes: int
) -> None:
    """Ranks of a host share one copy. If the shared memory has no room, each rank receives its own copy."""
    layouts = {n: layout for n, (world, layout) in LAYOUTS.items() if world == world_size}
    worker = f"{MODULE}:delivery_worker"
    for rank, found in enumerate(run_ranks(worker, world_size, layouts, piece_bytes, free_bytes)):
        assert found
        for name, report in found.items():
            assert report["wrong"] == [], (rank, name)
            experts = int(name.split(", ")[1].split()[0])
            assert report["figures"] == pytest.approx(expected_figures(experts)), name
            assert 0 < report["needed"] <= GROUPS * GROUP


FAULTS = {
    "a bit flipped on its way": (
        "sample 4 (response 0 to problem 101): the rollout_log_probs that rank 3 received has the hash"
    ),
    "a complete column of some": "topk_ids: 1 of 24 trajectories have none, expected all or none",
    "another model's": "sample 4 (response 0 to problem 101): routed_experts has moe_layers 2, expected 3",
    "another K": "sample 4 (response 0 to problem 101): topk_ids is int32 [rows, 2], expected int32 [rows, 3] as in "
    "other trajectories",
}


def fault_worker() -> dict[str, str]:
    """Return the text of each fault's error in TP2 DP2."""
    topology = topology_of({"tensor": 2, "data": 2})
    return {fault: error_of(fault, topology) for fault in FAULTS}


def error_of(fault: str, topology) -> str:
    from megatron_dppo.data.trajectory import Outline
    from megatron_dppo.loop import exchange

    transfer = exchange.transfer

    def transfer_with_flip(directory, shares, arrays, buffer, rank):
        transfer(directory, shares, arrays, buffer, rank)
        spans = shares[rank].spans
        begin, _ = next(spans[part] for part in spans if part.name == "rollout_log_probs")
        buffer[begin + 1] ^= 1

    whole = whole_batch(8)
    flips = fault == "a bit flipped on its way" and topology.rank == 3  # Rank 3 leads no group.
    if fault == "a complete column of some":
        whole[4] = whole[4].without("topk_ids")
    if fault == "another model's":
        whole[4] = whole[4].with_columns(routed_experts=whole[4].columns["routed_experts"][:, :2])
    if fault == "another K":
        whole[4] = whole[4].with_columns(topk_ids=whole[4].columns["topk_ids"][:, :2])
    outlines, own = [Outline.of(t) for t in whole], dict(enumerate(whole))
    try:
        with (
            patch.object(exchange, "free_bytes", lambda: 0),  # each rank receives for itself
            patch.object(exchange, "transfer", transfer_with_flip if flips else transfer),
        ):
            exchange.ColumnExchange(topology, sizes()).deliver(
                outlines, own, [range(4), range(4, 24)]
            )
    except exchange.ExchangeError as error:
        return str(error)
    return "no error"


@pytest.mark.distributed
def test_a_fault_is_one_error_on_all_ranks() -> None:
    errors_by_rank = run_ranks(f"{MODULE}:fault_worker", 4)
    assert all(errors == errors_by_rank[0] for errors in errors_by_rank)
    for fault, beginning in FAULTS.items():
        assert beginning in errors_by_rank[0][fault], fault
        assert "\n" not in errors_by_rank[0][fault]
