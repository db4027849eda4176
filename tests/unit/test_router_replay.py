"""Router replay without a model: which experts a router chooses, and which part of a recording a rank's
routers get.

Three tokens choose two of four experts each. The top-2 of SCORES are (1, 2), (0, 3), (3, 0).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.data.packing import PackedBatch, pack
from megatron_dppo.trainer import router_replay
from megatron_dppo.trainer.context_parallel import TokenShare
from megatron_dppo.trainer.router_replay import (
    ChunkState,
    LayerReplay,
    ModelReplay,
    Recording,
    attach,
)
from tests.messages import mentioning
from tests.small_shapes import MOE
from tests.trajectories import trajectory

CPU = torch.device("cpu")
SCORES = torch.tensor([[0.0, 0.6, 0.3, 0.1], [0.5, 0.1, 0.0, 0.4], [0.3, 0.1, 0.0, 0.6]])
NATURAL = [[1, 2], [0, 3], [3, 0]]
EXPERTS = torch.tensor(  # [token, layer, choice]
    [[[0, 3], [2, 1]], [[1, 2], [1, 2]], [[2, 1], [0, 1]]], dtype=torch.uint8
)
SHAPE = replace(MOE, num_layers=2, num_experts=4)


def topk(scores: Tensor, k: int, num_groups: Any = None, group_topk: Any = None) -> Any:
    return tuple(scores.topk(k))


def choose(router: LayerReplay, scores: Tensor = SCORES) -> tuple[Tensor, Tensor]:
    return router.get_replay_topk(scores, 2, default_compute_topk=topk)


def test_recorded_experts_where_there_are_any_else_the_top_k() -> None:
    state = ChunkState(CPU)
    router = LayerReplay(state, 1)
    state.replay(Recording(EXPERTS, torch.tensor([True, False, True])), compares=True)
    scores = SCORES.clone().requires_grad_()
    weights, experts = choose(router, scores)
    assert experts.tolist() == [[2, 1], [0, 3], [0, 1]]
    assert weights.tolist() == SCORES.gather(1, experts).tolist()
    weights.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 0, 0]]
    # Tokens 0 and 2 are compared. The recorded experts of token 0 are its top-2, in another order.
    assert state.counts.tolist() == [1, 2]
    choose(router)
    assert state.counts.tolist() == [2, 4]
    state.replay(state.recording, compares=False)
    assert choose(router)[1].tolist() == experts.tolist()
    assert state.counts.tolist() == [2, 4]
    assert router.target_topk_idx is None


def test_without_a_recording_routers_choose_by_themselves() -> None:
    state = ChunkState(CPU)
    assert not state.compares
    assert choose(LayerReplay(state, 0))[1].tolist() == NATURAL
    assert state.counts.tolist() == [0, 0]


def test_groups_of_experts_reach_the_router_s_own_choice() -> None:
    groups = []

    def grouped(scores: Tensor, k: int, num_groups: Any, group_topk: Any) -> Any:
        groups.append((k, num_groups, group_topk))
        return topk(scores, k)

    state = ChunkState(CPU)
    for recording in (None, Recording(EXPERTS, torch.tensor([True] * 3))):
        state.replay(recording, compares=True)
        LayerReplay(state, 0).get_replay_topk(SCORES, 2, 4, 3, grouped)
    assert groups == [(2, 4, 3)] * 2


def test_choices_are_counted_in_integers_on_the_device() -> None:
    counts = ChunkState(torch.device("meta")).counts
    assert (counts.dtype, counts.device.type) == (torch.int64, "meta")  # 2^24 are soon compared


def test_a_rank_without_routers_takes_a_recording_of_no_layers() -> None:
    topology: Any = SimpleNamespace(tp_size=1, tp_rank=0)
    replay = ModelReplay([chunk()], SHAPE, topology, share=TokenShare(), device=CPU)
    replay.load([batch(np.zeros((3, 0, 2)))])
    assert replay.layers == []


def chunk(*routed: bool, first: int = 1) -> Any:
    """Return layers with or without a router, numbered from ``first`` on. Megatron-Core's numbers begin at 1."""
    layers = [
        SimpleNamespace(
            layer_number=first + i,
            mlp=SimpleNamespace(router=SimpleNamespace()) if has_router else SimpleNamespace(),
        )
        for i, has_router in enumerate(routed)
    ]
    return SimpleNamespace(decoder=SimpleNamespace(layers=layers))


def test_each_router_reads_its_own_layer() -> None:
    # A pipeline's second chunk: layers 2..5, counted from 0, of a model with routers in layers 1, 3, 5.
    state, part = ChunkState(CPU), chunk(False, True, False, True, first=3)
    assert attach(part, state, (1, 3, 5)) == [1, 2]
    state.replay(Recording(EXPERTS, torch.tensor([True] * 3)), compares=False)
    for layer, column in ((1, 0), (3, 1)):
        router = part.decoder.layers[layer].mlp.router.router_replay
        assert choose(router)[1].tolist() == EXPERTS[:, column].tolist()
    with pytest.raises(ValueError, match=mentioning("layer 2", "[2, 3, 5]")):
        attach(part, state, (2, 3, 5))
    with pytest.raises(ValueError, match=mentioning("layer 3")):
        attach(part, state, (5,))


def batch(*routed: Any, pad_multiple: int = 1, input_rows: Any = None) -> PackedBatch:
    """Return one sequence of four tokens for each of ``routed``: its three recorded rows, or None."""
    samples = [
        trajectory([7, 7], [8, 8], routed_experts=None if r is None else np.array(r, np.uint8))
        for r in routed
    ]
    return pack(samples, pad_multiple=pad_multiple, input_rows=input_rows)


def model_replay(chunks: Sequence[Any]) -> ModelReplay:
    topology: Any = SimpleNamespace(tp_size=1, tp_rank=0)
    return ModelReplay(chunks, SHAPE, topology, share=TokenShare(), device=CPU)


def run_routers(
    replay: ModelReplay, part: Any, micro_batch: int, tokens: int, number: int = 0
) -> Any:
    """Run a forward pass of chunk ``number``. Return the experts that its routers choose, by layer, and the output."""
    scores = torch.tensor([[0.0, 0.1, 0.2, 0.3]]).expand(tokens, -1).clone().requires_grad_()
    choices = []

    def run() -> Tensor:
        results = [choose(layer.mlp.router.router_replay, scores) for layer in part.decoder.layers]
        choices.extend(experts.tolist() for _, experts in results)
        return torch.stack([weights for weights, _ in results]).sum()

    return choices, replay.forward(number, micro_batch, run)


@pytest.fixture
def single_process() -> Iterator[None]:
    """A process group with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_process")
def test_each_micro_batch_replays_its_own_in_both_passes_and_is_compared_once() -> None:
    part = chunk(True, True)
    replay = model_replay([part])
    assert router_replay.RouterReplay.global_router_replay_instances == []
    first, second = EXPERTS.tolist(), EXPERTS.flip(1).tolist()
    replay.load([batch(first), batch(second), batch(None)])
    # The last token has no row, so its router chooses.
    by_layer = [[*EXPERTS[:, layer].tolist(), [3, 2]] for layer in (0, 1)]
    choices, output = run_routers(replay, part, 0, 4)
    assert choices == by_layer
    assert run_routers(replay, part, 1, 4)[0] == by_layer[::-1]
    assert run_routers(replay, part, 2, 4)[0] == [[[3, 2]] * 4] * 2
    # Each of 2 x 3 x 2 recorded choices is compared. None is (3, 2), the router's own choice.
    assert replay.agreement().values() == {"r3/agreement": 0, "r3/compared": 12}
    # The backward pass of the first micro-batch recomputes its routing after the other forward passes.
    recomputed: list[Any] = []
    for layer in part.decoder.layers:

        def note_choices(_: Tensor, router: LayerReplay = layer.mlp.router.router_replay) -> None:
            _, experts = choose(router, torch.zeros(4, 4))
            recomputed.append(experts[:3].tolist())

        output.register_hook(note_choices)
    output.backward()
    assert recomputed == [rows[:3] for rows in by_layer]
    assert replay.agreement().values()["r3/compared"] == 12
    replay.load([])
    assert replay.agreement().values()["r3/compared"] == 0
    replay.unload()
    assert choose(part.decoder.layers[0].mlp.router.router_replay)[1].tolist() == NATURAL
    with pytest.raises(IndexError):
        replay.forward(0, 0, lambda: torch.zeros(1))


@pytest.mark.usefixtures("single_process")
def test_chunks_get_their_layers_and_agreement_counts_all_of_them() -> None:
    parts = [chunk(True), chunk(True, first=2)]
    replay = model_replay(parts)
    natural = [[[3, 2], [2, 3]]] * 2 + [[[3, 1], [0, 1]]]
    replay.load([batch(natural)])
    assert run_routers(replay, parts[0], 0, 4)[0] == [[[3, 2], [3, 2], [3, 1], [3, 2]]]
    assert run_routers(replay, parts[1], 0, 4, number=1)[0] == [[[2, 3], [2, 3], [0, 1], [3, 2]]]
    assert replay.agreement().values() == {"r3/agreement": 4, "r3/compared": 6}


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "rows", "compared"),
    [
        ((2, 0), True, [0, 1], 2),
        ((2, 1), True, [2], 1),  # and the last token, which has no recording
        ((2, 0), False, [0, 1, 2], 3),
        ((2, 1), False, [0, 1, 2], 0),  # the same tokens again: rank 0 has counted them
    ],
)
def test_sequence_parallel_ranks_get_their_own_tokens(
    tp, sequence_parallel, rows, compared
) -> None:
    part = chunk(True)
    whole = replace(SHAPE, num_layers=1)
    topology: Any = SimpleNamespace(tp_size=tp[0], tp_rank=tp[1])
    share = TokenShare(1, 0, *tp) if sequence_parallel else TokenShare()
    replay = ModelReplay([part], whole, topology, share=share, device=CPU)
    tokens = 2 if sequence_parallel else 4
    expected = [EXPERTS[row, 0].tolist() for row in rows]
    for rows_of in (None, share.rows):  # the batch has all rows, or only this rank's
        replay.load([batch(EXPERTS[:, :1].tolist(), pad_multiple=2, input_rows=rows_of)])
        assert run_routers(replay, part, 0, tokens)[0] == [
            expected + [[3, 2]] * (tokens - len(rows))
        ]
        assert replay.agreement().values()["r3/compared"] == compared


def test_recordings_of_another_model_are_refused() -> None:
    replay = model_replay([chunk(True, True)])
    good = EXPERTS.tolist()
    with pytest.raises(ValueError, match=mentioning("(1, 2)", "(2, 2)")):
        replay.load([batch(good), batch(EXPERTS[:, :1].tolist())])
    with pytest.raises(ValueError, match=mentioning("(2, 1)", "(2, 2)")):
        replay.load([batch(EXPERTS[..., :1].tolist())])
    with pytest.raises(ValueError, match=mentioning("expert 4", "0..3")):
        replay.load([batch((EXPERTS + 1).tolist())])
    dense = replace(SHAPE, num_experts=0, experts_per_token=0)
    topology: Any = SimpleNamespace(tp_size=1, tp_rank=0)
    with pytest.raises(ValueError, match=mentioning("qwen3_moe")):
        ModelReplay([chunk(False)], dense, topology, share=TokenShare(), device=CPU)


def test_a_recording_of_this_ranks_layers_alone_is_read_like_one_of_all() -> None:
    """The stage has only layer 1 of two layers with routers. A token goes to three experts."""
    shape = replace(SHAPE, experts_per_token=3)
    topology: Any = SimpleNamespace(tp_size=1, tp_rank=0)
    replay = ModelReplay([chunk(True, first=2)], shape, topology, share=TokenShare(), device=CPU)
    own = [[[2, 1, 0]], [[1, 2, 3]], [[0, 1, 3]]]
    for routed in (own, [[[3, 2, 1], row[0]] for row in own]):
        replay.load([batch(routed)])
        ((recording,),) = replay._recordings
        assert recording is not None
        assert recording.experts[:3].tolist() == own
