"""Updates in shared memory on several hosts: each trainer rank has a host of its own, with the engine of this host.

The ranks are processes on one machine that take each other for other hosts. The engines hold real tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.layout import Layout
from megatron_dppo.weights import engines as engines_module
from megatron_dppo.weights import shared_memory
from megatron_dppo.weights.checksums import ExpectedChecksums
from megatron_dppo.weights.engines import Engines
from megatron_dppo.weights.phases import Phases
from megatron_dppo.weights.shared_memory import TensorStrategy
from tests.distributed.test_shards import trainer_values
from tests.ranks import run_ranks
from tests.unit.weight_doubles import SHAPE, TABLE, WEIGHTS, Engine, runner

pytestmark = pytest.mark.distributed

BUCKET = 2_000
"""Bytes: an update has several rounds."""
TP2: dict[str, Any] = {"tensor": 2, "expert_tensor": 2}


class RankSource:
    """One rank's part of the weights of the doubles, times ``factor``."""

    dtype_name = "float32"
    shape = SHAPE

    def __init__(self, layout: Layout, factor: float = 1.0) -> None:
        self.rank = dist.get_rank()
        self.layout = layout
        self.factor = factor

    @property
    def whole(self) -> dict[str, Tensor]:
        return {name: tensor * self.factor for name, tensor in WEIGHTS.items()}

    def values(self) -> Mapping[ParameterKey, Tensor]:
        return trainer_values(SHAPE, self.layout, self.rank, self.whole)

    def all_max(self, values: Tensor) -> Tensor:
        return values

    def all_gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value)
        return gathered


def updates(
    layout: dict[str, int],
    hosts: int,
    *,
    failing_rank: int = -1,
    changes_only: bool = False,
    strangers: bool = False,
) -> list[dict[str, Any]]:
    """Make two updates of ``hosts`` engines, and report each.

    Args:
        layout: the trainer's layout.
        hosts: number of hosts, each with one engine. The first ranks have a host each, and the others have none.
        failing_rank: the rank whose engine refuses its first messages.
        changes_only: ``weight_sync.changes_only``.
        strangers: whether no rank runs on the last host.
    """
    dist.init_process_group("gloo")
    source = RankSource(Layout(**layout))
    urls = [f"http://127.0.0.{number + 2}:1" for number in range(hosts)]
    has_host = source.rank < hosts - strangers
    own = urls[source.rank] if has_host else ""
    doubles = {url: Engine(url) for url in urls}
    if source.rank == failing_rank:
        doubles[own].failing = "load"
    config = WeightSyncConfig(strategy="tensor", timeout_s=30, changes_only=changes_only)
    config = config.model_copy(update={"bucket_mib": BUCKET / 2**20})
    strategy: Any = TensorStrategy(source, config)  # type: ignore[arg-type]
    reports = []
    with (
        patch.object(engines_module, "on_this_host", own.__eq__),
        patch.object(shared_memory, "on_this_host", own.__eq__),
    ):
        strategy.attach(Engines(list(doubles.values()), runner()))
        try:
            strategy.plan(source)
        except EngineMismatchError as error:
            return [{"error": str(error)}]
        for factor in (1.0, 2.0):
            source.factor = factor
            reports.append(update(source, strategy, doubles.get(own)))
            if source.rank == failing_rank:
                doubles[own].failing = None
        strategy.close()
    return reports


def update(source: RankSource, strategy: Any, own_engine: Engine | None) -> dict[str, Any]:
    phases = Phases()
    points = source.all_gather(strategy.meeting_point())
    phases.run("begin", strategy.begin, points)
    streamed = strategy.stream(source, phases, verify=True, sends_changes=False)
    phases.run("arrive", strategy.arrive)
    errors = source.all_gather(None if phases.error is None else type(phases.error).__name__)
    partials = source.all_gather(streamed.partials)
    report: dict[str, Any] = {"errors": errors, "between_nodes": streamed.between_nodes}
    if any(errors):
        strategy.abort()
        return report
    expected = ExpectedChecksums(TABLE, own_dtype())
    expected.add(list(source.whole.items()))
    (checksums,) = expected.digests([expected.partial()])
    if own_engine is not None:
        (held,) = runner().run(own_engine.checksums())
        report["is_held"] = held == checksums
    report["is_expected"] = list(strategy.digests(partials).values()) == [[checksums]]
    report["requests"] = 0 if own_engine is None else own_engine.calls.count("load")
    return report


def own_dtype() -> Any:
    return next(iter(WEIGHTS.values())).dtype


@pytest.mark.parametrize(
    ("layout", "hosts"),
    [(TP2, 2), ({"data": 3}, 3), ({"data": 3}, 2)],
    ids=["each host has half of the matrices", "three hosts", "a trainer's host without engines"],
)
def test_every_engine_has_all_weights(layout: dict[str, int], hosts: int) -> None:
    ranks = run_ranks(
        "tests.distributed.test_relays:updates", Layout(**layout).world_size, layout, hosts
    )
    for number in range(2):
        reports = [rank[number] for rank in ranks]
        assert all(report["is_expected"] for report in reports)
        assert [report["is_held"] for report in reports[:hosts]] == [True] * hosts
        assert min(report["requests"] for report in reports[:hosts]) > 1
        # Every host receives what its own trainer rank does not send.
        whole = sum(tensor.nbytes for tensor in WEIGHTS.values())
        between = sum(report["between_nodes"] for report in reports)
        assert (hosts - 1) * whole <= between < hosts * whole


def test_a_failure_on_one_host_ends_the_update_on_all_and_the_next_update_succeeds() -> None:
    ranks = run_ranks("tests.distributed.test_relays:updates", 2, TP2, 2, failing_rank=1)
    for first, second in ranks:
        assert first["errors"][1] == "EngineFaultError"
        assert second["errors"] == [None, None]
        assert second["is_held"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"strangers": True},
            r"no trainer rank runs on the host of the engine at http://127.0.0.3:1",
        ),
        ({"changes_only": True}, r"weight_sync.changes_only: got true"),
    ],
    ids=["a host without trainer ranks", "changes only"],
)
def test_what_relays_cannot_reach_is_refused_on_every_rank(
    options: dict[str, bool], text: str
) -> None:
    for (report,) in run_ranks("tests.distributed.test_relays:updates", 2, TP2, 2, **options):
        assert text in report["error"]
