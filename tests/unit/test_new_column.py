"""A column that only this file declares. It is requested from the engine, parsed, exchanged, saved and packed without a
change in the package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from megatron_dppo.data.batch_file import load_batch, save_batch
from megatron_dppo.data.columns import COLUMNS, Column, Rows, declare
from megatron_dppo.data.packing import pack
from megatron_dppo.data.trajectory import Trajectory, forms_of
from megatron_dppo.engine.protocol import (
    SOURCES,
    Answered,
    ColumnSource,
    GenerationRequest,
    SamplingParams,
    decode_base64,
    provide,
    request_body,
)
from tests.messages import mentioning
from tests.ranks import run_ranks
from tests.trajectories import parse_answers, same, same_column
from tests.unit.test_engine_protocol import b64

MODULE = "tests.unit.test_new_column"
WIDTH = 2


def declare_hidden() -> None:
    """Declare the column ``hidden``: two numbers for each sampled token."""
    declare(Column("hidden", ("float16",), Rows.SAMPLED, ("width",), fill=-1))

    def parse(meta: Any, answered: Answered, width: int) -> dict[str, np.ndarray]:
        shape = (len(answered.response_ids), width)
        return {"hidden": decode_base64(meta["hidden"], "<f2", shape)}

    provide("hidden", ColumnSource(lambda width: {"return_hidden": width}, parse))


@pytest.fixture
def hidden() -> Iterator[None]:
    declare_hidden()
    yield
    del COLUMNS["hidden"], SOURCES["hidden"]


def parse_response(tokens: list[int], values: list[list[float]]) -> Trajectory:
    """Return the trajectory of an engine's response to a prompt of three tokens."""
    request = GenerationRequest(
        "a", (4, 5, 6), SamplingParams(len(tokens)), {"hidden": WIDTH}, problem_id=len(tokens)
    )
    assert json.loads(request_body([request], "a-00"))["return_hidden"] == WIDTH
    answer = {
        "text": "",
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "weight_versions": [{"version": "0", "start": 0, "end": len(tokens)}],
            "hidden": b64(values, "<f2"),
        },
    }
    (trajectory,) = parse_answers(orjson.dumps(answer), [request], versions=range(1))
    return trajectory


def batch() -> list[Trajectory]:
    return [parse_response([7, 8], [[0.5, 1.5], [2.5, 3.5]]), parse_response([9], [[4.5, 5.5]])]


PACKED = [
    [-1, -1], [-1, -1], [0.5, 1.5], [2.5, 3.5], [-1, -1],
    [-1, -1], [-1, -1], [4.5, 5.5], [-1, -1],
]  # fmt: skip
"""The packed column, written by hand. A token's row is at the token before it, and -1 is the declared fill."""


@pytest.mark.usefixtures("hidden")
def test_from_an_answer_through_a_file_to_a_micro_batch(tmp_path):
    trajectories = batch()
    save_batch(tmp_path, 1, trajectories)
    read = load_batch(tmp_path, 1)
    assert all(same(a, b) for a, b in zip(read, trajectories, strict=True))
    packed = pack(read)
    assert packed.columns["hidden"].tolist() == PACKED
    assert packed.columns["hidden"].dtype == torch.float16
    empty = pack([], pad_multiple=3, forms=forms_of(read))
    assert empty.columns["hidden"].tolist() == [[-1, -1]] * 3


@pytest.mark.usefixtures("hidden")
def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match=mentioning("column 'hidden'")):
        declare_hidden()
    with pytest.raises(ValueError, match=mentioning("source 'hidden'")):
        provide("hidden", SOURCES["topk"])


def exchange_worker() -> dict[str, Any]:
    """Each of two leaders generates one trajectory and trains on the other's."""
    from megatron_dppo.loop.exchange import ColumnExchange
    from megatron_dppo.loop.ownership import announce
    from megatron_dppo.model.layout import Layout
    from megatron_dppo.trainer.topology import init_distributed, init_topology

    declare_hidden()
    layout = Layout(data=2)
    init_distributed(layout.world_size)
    topology = init_topology(layout)
    own_trajectory = batch()[topology.dp_rank]
    outlines, own_trajectories = announce([own_trajectory], topology, 1, range(2))
    delivery = ColumnExchange(topology, {"width": WIDTH}).deliver(
        outlines, own_trajectories, [{1}, {0}]
    )
    other = 1 - topology.dp_rank
    expected = batch()[other].columns["hidden"]
    packed = pack([delivery.trajectories[other]], indices=[other], forms=delivery.forms)
    return {
        "before": list(own_trajectories),
        "after": list(delivery.trajectories),
        "unchanged": same_column(delivery.trajectories[other].columns["hidden"], expected),
        "form": [delivery.forms["hidden"].dtype, list(delivery.forms["hidden"].trailing)],
        "packed": packed.columns["hidden"],
    }


@pytest.mark.distributed
def test_through_the_exchange_to_the_replica_that_trains():
    first, second = run_ranks(f"{MODULE}:exchange_worker", 2)
    assert (first["before"], second["before"]) == ([0], [1])
    assert (first["after"], second["after"]) == ([1], [0])
    for found in (first, second):
        assert found["unchanged"]
        assert found["form"] == ["float16", [WIDTH]]
    assert first["packed"].tolist() == PACKED[5:]
    assert second["packed"].tolist() == PACKED[:5]
