"""A trainer rank of the benchmark: it generates if it leads a replica, then ranks exchange the responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from data_plane_benchmark.meters import Meter, ReceivedBytes
from data_plane_benchmark.synthetic import Size
from megatron_dppo.config.data_schema import RewardTerm
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.answer_parsing import AnswerParser, ReceivedAnswer
from megatron_dppo.engine.client import EngineClient
from megatron_dppo.engine.errors import EngineAnswerError
from megatron_dppo.fleet.generation import GenerationLimits, generate_many
from megatron_dppo.loop.credit import with_rewards
from megatron_dppo.loop.exchange import ColumnExchange, Delivery
from megatron_dppo.loop.learning import (
    BatchLayout,
    MiniBatchPlan,
    pack_mini_batch,
    plan_mini_batches,
)
from megatron_dppo.loop.ownership import announce, own_positions
from megatron_dppo.rewards import RewardInput
from megatron_dppo.rewards.verifier import Verifier
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.trainer.topology import Topology, init_distributed, init_topology

IN_FLIGHT = 8


def warm_up(parser: AnswerParser) -> None:
    """Let the parser import its libraries before the measurement. The empty answer is refused."""
    with contextlib.suppress(EngineAnswerError):
        asyncio.run(parser.parse(ReceivedAnswer(b"", [], None, {})))


def child_seconds() -> float:
    """CPU seconds of this process's children so far."""
    return sum(sum(c.cpu_times()[:2]) for c in psutil.Process().children(recursive=True))


def generate(size: Size, url: str, positions: list[int], parser: AnswerParser) -> list[Trajectory]:
    """Return the checked responses of the groups at ``positions``."""
    indices: list[int] = []
    for position in positions:
        first = position * size.group
        indices += range(first, first + size.group)
    with AsyncRunner() as runner:
        client = EngineClient(url)
        client.parser = parser
        requests = [size.request(i) for i in indices]
        done = runner.run(generate_many(client, requests, GenerationLimits(IN_FLIGHT)))
        runner.run(client.close())
    return list(done.values())


def score(size: Size, own: list[Trajectory]) -> list[Trajectory]:
    """Return ``own`` with rewards and advantages."""
    with Verifier(RewardTerm(name="exact_integer")) as verifier:
        scores = verifier.score([RewardInput(t.text, "42") for t in own])
    config = size.config()
    most_tokens = config.rollout.max_response_tokens
    return with_rewards(own, scores, size.group, config.algorithm, most_tokens=most_tokens)


def pack_first(
    size: Size, delivery: Delivery, plans: Sequence[MiniBatchPlan], layout: BatchLayout
) -> None:
    """Pack the first mini-batch: an optimiser step holds the packs in addition to the columns."""
    algorithm = size.config().algorithm
    pack_mini_batch(delivery.trajectories, plans[0], layout, algorithm, delivery.forms)


def run_step(size: Size, url: str, topology: Topology) -> dict[str, Any]:
    """Run a step's data through this rank, and return the figures of each phase."""
    meter, received = Meter(), ReceivedBytes()
    groups = range(size.responses // size.group)
    positions = own_positions(groups, topology)
    parser = AnswerParser(smallest=0)
    if positions:
        warm_up(parser)
    child_cpu_s = child_seconds()
    with meter("generate"):
        own = generate(size, url, positions, parser)
    child_cpu_s = child_seconds() - child_cpu_s
    parser.close()
    dist.barrier()
    before = received.total
    with meter("exchange"):
        own = score(size, own)
        generated = sum(t.sampled for t in own)
        outlines, held = announce(own, topology, size.group, groups)
        del own
        layout = BatchLayout(topology.dp_rank, topology.dp_size, pad_multiple=topology.tp_size)
        config = size.config()
        sections = (config.training, config.rollout, config.algorithm)
        plans = plan_mini_batches(outlines, *sections, layout)
        needed = []
        for dp_rank in range(topology.dp_size):
            needed.append(set().union(*(plan.of_rank(dp_rank) for plan in plans)))
        sizes = {"moe_layers": size.layers, "experts_per_token": size.experts_per_token}
        delivery = ColumnExchange(topology, sizes).deliver(outlines, held, needed)
        held.clear()
        dist.barrier()
    responses = list(delivery.trajectories.values())
    with meter("pack"):
        pack_first(size, delivery, plans, layout)
    column_bytes = 0
    for response in responses:
        arrays = (response.token_ids, response.loss_mask, *response.columns.values())
        column_bytes += sum(array.nbytes for array in arrays)
    return {
        **meter.phases,
        "leader": topology.is_leader,
        "child_cpu_s": child_cpu_s,
        "generated": generated,
        "trained": sum(t.sampled for t in responses),
        "received": received.total - before,
        "needed": column_bytes,
    }


def main() -> None:
    """``rank.py SIZE URL FOLDER``: writes ``FOLDER/<rank>.json``."""
    size = Size(**json.loads(sys.argv[1]))
    url = sys.argv[2]
    folder = Path(sys.argv[3])
    init_distributed(size.layout.world_size)
    topology = init_topology(size.layout)
    result = run_step(size, url, topology)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
