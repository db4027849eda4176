"""The transaction of a weight update with engines that fail at a chosen step: the blamed engines, and bounded waits."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.checkpoint_conversion.gathering import Gathered
from megatron_dppo.engine.errors import (
    UNBOUNDED,
    EngineError,
    EngineLostError,
    EngineMismatchError,
    EngineRequestError,
)
from megatron_dppo.metrics.table import BY_METRIC
from megatron_dppo.system.lease import FencedError
from megatron_dppo.weights import engines, shared_memory, strategies
from megatron_dppo.weights.canary import CanaryReport
from megatron_dppo.weights.engine_weights import EngineWeights
from megatron_dppo.weights.engines import (
    Bucket,
    EngineFaultError,
    Engines,
    TransferTimeoutError,
    local_address,
    on_this_host,
)
from megatron_dppo.weights.links import CalledOffError, in_background
from megatron_dppo.weights.server.shards import adjacent
from megatron_dppo.weights.shards import ShardStrategy
from megatron_dppo.weights.source import Plan
from megatron_dppo.weights.strategies import FolderStrategy
from megatron_dppo.weights.transaction import (
    RankFacts,
    WeightUpdateError,
    WeightUpdater,
    WeightUpdateRefusedError,
    count_bytes,
)
from tests.messages import mentioning
from tests.patience import own_patience
from tests.unit.weight_doubles import (
    BYTES,
    NORM,
    SCORE,
    TENSORS,
    WEIGHTS,
    A,
    B,
    Engine,
    Source,
    opener,
    runner,
    updater,
)


def test_a_whole_transaction() -> None:
    engine = Engine()
    updates = updater(engine, message_bytes=1200)
    report = updates.update(7)
    assert engine.calls[:3] == ["idle", "unverified-7", "begin"]
    assert set(engine.calls[3:-7]) == {"load"}
    assert engine.calls[-7:] == ["end", "flush", "checksums", "resume", "score", "7", "resume"]
    # The embedding and the output layer, of 100 rows, are not cut.
    assert sorted(engine.sent) == [928, 1200, 100 * 8 * 4, 100 * 8 * 4]
    assert sum(engine.sent) == BYTES
    assert torch.equal(engine.held[NORM], WEIGHTS[NORM])
    assert (report.version, report.tensors, report.verified) == (7, len(TENSORS), True)
    assert (report.bytes, report.bytes_moved, report.bytes_bound) == (BYTES, BYTES, BYTES)
    assert report.canary == CanaryReport(0.0, 0.0, 4 * 23)
    assert list(report.seconds) == [
        *("drain", "begin", "gather", "transfer", "hash", "arrive", "end", "verify"),
        *("canary", "commit"),
    ]
    assert updates.committed_version == 7


def test_where_they_share_devices_the_engine_has_weights_before_and_all_after_the_trainer_left() -> (
    None
):
    engine, moments = Engine(), Moments(["kv_cache", "weights"])
    engine.occupation, engine.restore = moments, moments.restore  # type: ignore[assignment]
    updates = updater(engine, leave_devices=moments.leave)
    assert updates.update(7).verified
    # The engine's weights are restored before the trainer frees its memory: they receive the trainer's weights.
    assert moments.seen == ["restore weights", "leave", "restore kv_cache"]
    assert engine.calls[-4:] == ["resume", "score", "7", "resume"]


def test_a_rank_that_fails_before_it_leaves_its_device_aborts_the_update() -> None:
    """The engine's memory stays released: another rank's trainer may still be on its device."""
    engine, moments = Engine(), Moments(["kv_cache"])
    engine.occupation, engine.restore = moments, moments.restore  # type: ignore[assignment]

    def agree(error: str | None) -> str | None:
        other = json.dumps(["RuntimeError: rank 1 can't park", [], 1])
        return other if moments.seen == ["leave"] else error

    updates = updater(engine, agree=agree, leave_devices=moments.leave)
    with pytest.raises(WeightUpdateError, match=r"version 7: .*rank 1 "):
        updates.update(7)
    assert moments.seen == ["leave"]
    assert engine.calls[-2:] == ["pause", "unverified-7"]


class Moments:
    """Records what an engine and a trainer on one device do. ``released``: tags of the engine's released memory."""

    def __init__(self, released: list[str]) -> None:
        self.released, self.seen = frozenset(released), list[str]()

    async def restore(self, tags: Sequence[str]) -> None:
        self.seen.append(f"restore {' '.join(sorted(tags))}")
        self.released -= frozenset(tags)

    def leave(self) -> None:
        self.seen.append("leave")


@pytest.mark.parametrize(("allowed", "calls"), [(0, []), (1, ["pause", "unverified-7"])])
def test_a_fenced_trainer_commits_nothing(allowed: int, calls: list[str]) -> None:
    """Another start takes over before the update, or before its commit. In the second case the engine is paused."""
    engine, checks = Engine(), 0

    def fence() -> None:
        nonlocal checks
        checks += 1
        if checks > allowed:
            raise FencedError("another start of this run took over")

    updates = updater(engine, fence=fence)
    before = len(engine.calls)
    with pytest.raises(FencedError):
        updates.update(7)
    assert engine.calls[before:][-2:] == calls
    assert "7" not in engine.calls
    assert updates.committed_version is None


STEPS = ["idle", "unverified-2", "begin", "load", "end", "flush", "checksums"]


@pytest.mark.parametrize("failing", [*STEPS, "resume", "score", "2"])
def test_any_failure_aborts_and_commits_nothing(failing: str) -> None:
    engine = Engine()
    updates = updater(engine)
    updates.update(1)
    engine.failing, engine.calls = failing, []
    with pytest.raises(WeightUpdateError, match="version 2: EngineRequestError: ") as error:
        updates.update(2)
    assert error.value.engines == (A,)
    assert updates.committed_version is None
    assert "2" not in engine.calls or failing == "2"
    # Since the canary, the engine answers requests: it is paused again, without a version.
    if failing in ("resume", "score", "2"):
        assert engine.calls[-2:] == ["pause", "unverified-2"]
    else:
        assert "pause" not in engine.calls
    engine.failing = None
    assert updates.update(2).verified
    assert updates.committed_version == 2


@pytest.mark.parametrize("bug", [RuntimeError, ValueError, KeyError, TypeError])
@pytest.mark.parametrize("failing", [*STEPS, "resume", "score", "2"])
def test_a_bug_is_no_engines_fault(failing: str, bug: type[Exception]) -> None:
    """The exception is raised unchanged after one call, and nothing is committed."""
    engine = Engine()
    updates = updater(engine)
    updates.update(1)
    engine.failing, engine.error, engine.calls = failing, bug("planted"), []
    with pytest.raises(bug, match="planted") as raised:
        updates.update(2)
    assert raised.type is bug
    assert updates.committed_version is None
    assert engine.calls.count(failing) == 1
    if failing in ("resume", "score", "2"):
        assert engine.calls[-2:] == ["pause", "unverified-2"]


@pytest.mark.parametrize("bug", [RuntimeError, ValueError, TypeError])
def test_a_bug_in_opening_an_engine_is_not_its_fault(bug: type[Exception]) -> None:
    updates = updater()
    updates.open_engine = opener({A: Engine(), B: bug("planted")})
    with pytest.raises(bug, match="planted"):
        updates.attach([A, B])


def test_an_engine_that_decodes_with_other_weights_than_it_scores_with_fails_its_canary() -> None:
    good, stale = Engine(A), Engine(B)
    stale.decode_value = SCORE + 0.01
    with pytest.raises(WeightUpdateError, match=r"CanaryError: .*\(prefill .* decode ") as failure:
        updater(good, stale).update(1)
    assert failure.value.engines == (B,)


def test_one_bad_engine_spoils_the_update_of_all_and_is_named() -> None:
    good, bad = Engine(A), Engine(B)
    updates = updater(good, bad)
    bad.score_value = SCORE + 0.5
    with pytest.raises(WeightUpdateError, match=r"CanaryError: .* 0.5") as failure:
        updates.update(1)
    assert failure.value.engines == (B,)
    assert failure.value.attempts == 2
    for engine in (good, bad):
        assert "1" not in engine.calls
        assert engine.calls[-2:] == ["pause", "unverified-1"]
    updates.attach([A])
    assert updates.update(1).tensors == len(TENSORS)
    assert good.calls[-2:] == ["1", "resume"]
    assert bad.calls[-2:] == ["pause", "unverified-1"]


def test_a_wrong_checksum_names_engine_and_tensor() -> None:
    good, bad = Engine(A), Engine(B)
    bad.altered = {NORM: "9"}
    updates = updater(good, bad)
    with pytest.raises(WeightUpdateError, match=rf"{NORM} .* 0: .* 9") as failure:
        updates.update(1)
    assert failure.value.engines == (B,)


def test_a_busy_engine_keeps_its_version_and_holds_up_no_other() -> None:
    engine, busy = Engine(A), Engine(B)
    updates = updater(engine, busy)
    updates.update(1)
    busy.idle, busy.calls, engine.calls = False, [], []
    with pytest.raises(WeightUpdateRefusedError, match="version 2: ") as refusal:
        updates.update(2)
    assert refusal.value.engines == (B,)
    assert engine.calls == busy.calls == ["idle", "resume"]
    assert updates.committed_version == 1


def test_the_sources_own_error_aborts_and_passes() -> None:
    engine = Engine()
    updates = updater(engine, source=Source(fails=True))
    with pytest.raises(RuntimeError, match=r"^gather failed$"):
        updates.update(1)
    assert "end" not in engine.calls
    assert updates.committed_version is None


class SourceOfOneRank(Source):
    """The source of one rank. ``others``: what the other ranks report, each the fields of ``RankFacts`` in order."""

    def __init__(self, *others: list[Any], rank: int = 0) -> None:
        super().__init__(rank=rank)
        self.others = list(others)

    def all_gather(self, value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) != len(RankFacts._fields):
            return [value]
        return [value, *self.others] if self.rank == 0 else [*self.others, value]


def test_the_report_adds_up_what_all_ranks_sent() -> None:
    source = SourceOfOneRank([100, 7, 0, None, [], 0, 0], [50, 3, 0, None, [], 0, 0])
    report = updater(Engine(), source=source).update(1)
    assert report.bytes == BYTES + 100 + 50
    assert report.bytes_moved == report.bytes + 7 + 3
    assert report.bytes_bound == BYTES


def test_the_held_part_of_the_adapters_is_that_of_all_ranks() -> None:
    source = SourceOfOneRank(
        [0, 0, 0, None, [], 0, 0, [1.0, 3.0]], [0, 0, 0, None, [], 0, 0, [0.5, 3.0]]
    )
    report = updater(Engine(), source=source).update(1)
    assert report.held_update == 0.25
    metric = "weights/held_update"
    assert report.metrics()[metric] == 0.25
    assert BY_METRIC[metric].low == 0.5
    # Without merged adapters nothing is recorded.
    assert metric not in updater(Engine()).update(1).metrics()


def test_a_rank_without_engines_reports_rank_0s_figures() -> None:
    source = SourceOfOneRank([24, 10, 0, None, [], 24, 31], rank=1)
    updates = updater(Engine(), source=source)
    report = updates.update(4)
    assert (report.bytes, report.bytes_moved, report.bytes_bound) == (24, 10 + 24, 31)
    assert (report.tensors, updates.committed_version) == (0, 4)


@pytest.mark.parametrize(
    ("words", "ending"),
    [({}, "left"), ({"at_once": False}, "left"), ({"at_once": True}, "aborted")],
)
def test_closing_leaves_the_groups_of_the_engines_or_aborts_its_own(
    words: dict[str, bool], ending: str
) -> None:
    """A group that is neither left nor aborted makes the process abort at its exit."""
    updates, calls = updater(engine := Engine()), list[str]()
    assert updates._strategy is not None
    updates._strategy.close = lambda: calls.append("left")  # type: ignore[method-assign]
    updates._strategy.abort = lambda: calls.append("aborted")  # type: ignore[method-assign]
    updates.close(**words)
    assert calls == [ending]
    assert engine.closed


@pytest.mark.parametrize(
    ("strategy", "rank", "connects"),
    [("tensor", 0, True), ("tensor", 1, True), ("disk", 0, True), ("disk", 1, False)],
)
def test_rank_0_and_who_sends_connect_to_the_engines(
    strategy: str, rank: int, connects: bool
) -> None:
    updates = updater(Engine(), source=Source(rank=rank), strategy=strategy)
    assert (updates._engines is not None) == connects


def test_a_failed_transfer_is_broken_off_before_the_next_message_is_sent() -> None:
    engine = Engine()
    updates = updater(engine, message_bytes=1200)
    engine.failing = "load"
    strategy = updates._strategy
    assert strategy is not None
    calls: list[int] = []
    strategy.abort = lambda: calls.append(len(engine.calls))  # type: ignore[method-assign]
    with pytest.raises(WeightUpdateError):
        updates.update(1)
    # A rank waits for its message before it sends the next one.
    assert engine.calls[calls[0] - 1] == "load"
    assert engine.calls.count("load") == 1


@pytest.mark.parametrize("hangs", [True, False])
def test_buffers_are_dropped_if_an_engine_may_still_read_them(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (engines, shared_memory):
        monkeypatch.setattr(module, "GRACE_S", 0.2)
    engine = Engine()
    updates = updater(engine, timeout_s=0.3)
    released = asyncio.Event()

    async def hang(by_rank: Any) -> None:
        await released.wait()

    if hangs:
        engine.receive_shared = hang  # type: ignore[method-assign]
    else:
        engine.failing = "load"
    with pytest.raises(WeightUpdateError, match="took longer" if hangs else "refused"):
        updates.update(1)
    runner().run(_set(released))
    strategy = updates._strategy
    assert isinstance(strategy, ShardStrategy)
    assert len(strategy.shards._buffers._buffers) == (0 if hangs else 1)


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_all_whole_tensors_are_gathered_after_a_failure_too(tmp_path: Path) -> None:
    """The other ranks are in the gather's collectives."""
    updates = updater(Engine(), strategy="disk", message_bytes=1200, directory=str(tmp_path))
    strategy = updates._strategy
    assert isinstance(strategy, FolderStrategy)
    gather, yielded = updates.source.gather, []

    def count(plan: Plan) -> Iterator[Gathered]:
        for bucket in gather(plan):
            yielded.append(bucket)
            yield bucket

    def fail(bucket: Bucket) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    updates.source.gather = count  # type: ignore[method-assign]
    strategy.write = fail  # type: ignore[method-assign]
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WeightUpdateError, match=os.strerror(errno.ENOSPC)):
        updates.update(1)
    assert len(yielded) == len(strategy.buckets) > 1
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_full_disk_fails_an_update_and_the_next_one_may_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = updater(Engine(), strategy="disk", directory=str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
        with pytest.raises(WeightUpdateError, match="0 bytes free"):
            updates.update(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("own", ["refused", None])
def test_a_failure_that_is_not_the_first_is_logged(
    own: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks fail. All ranks raise the error of the first one, and the other rank logs its own error."""
    first = json.dumps(["EngineLostError: gone", [B], 2])
    updates = updater(agree=lambda error: first if own else error)
    updates.open_engine = opener({A: EngineRequestError(400, "refused")})
    with pytest.raises(WeightUpdateError, match="gone" if own else "refused"):
        updates.attach([A])
    assert ("on trainer rank 0: " in caplog.text) == (own is not None)
    if own is not None:
        assert own in caplog.text


def test_other_ranks_share_the_failure() -> None:
    shared_error = json.dumps(["EngineLostError: gone", [A], 2])
    answers = iter([None, None, None, None, None, None, shared_error])
    updates = updater(Engine(), source=Source(rank=1), agree=lambda error: next(answers))
    with pytest.raises(WeightUpdateError, match="version 5: EngineLostError: ") as failure:
        updates.update(5)
    assert failure.value.engines == (A,)
    assert failure.value.attempts == 2
    assert updates.committed_version is None


def test_an_update_needs_an_engine() -> None:
    updates = updater()
    with pytest.raises(ValueError, match="engine"):
        updates.update(1)


def test_an_engine_that_does_not_answer_cannot_be_attached() -> None:
    updates = updater(Engine(A))
    updates.update(1)

    good = Engine(A)
    updates.open_engine = opener({A: good, B: EngineLostError("connection refused")})
    with pytest.raises(WeightUpdateError, match=mentioning("refused")) as failure:
        updates.attach([A, B])
    assert failure.value.engines == (B,)
    assert updates.committed_version is None
    assert good.closed


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (EngineMismatchError("another model"), 1),
        (EngineRequestError(401, "no key"), 1),
        (EngineRequestError(400, "shape mismatch"), 2),
        (EngineLostError("connection refused"), UNBOUNDED),
    ],
)
def test_how_often_a_failure_is_worth_another_attempt(error: EngineError, attempts: int) -> None:
    updates = updater()
    updates.open_engine = opener({A: error})
    with pytest.raises(WeightUpdateError, match=str(error)) as failure:
        updates.attach([A])
    assert failure.value.engines == (A,)
    assert failure.value.attempts == attempts


def test_checks_every_second_update_but_always_the_first_of_an_engine() -> None:
    engine = Engine()
    updates = updater(engine, verify_every=2, canary_every=3)
    reports = [updates.update(v) for v in range(7)]
    assert [r.verified for r in reports] == [True, False, True, False, True, False, True]
    assert [r.canary is not None for r in reports] == [True, False, False, True, False, False, True]
    assert (engine.calls.count("checksums"), engine.calls.count("score")) == (4, 3)
    compared = [r.tensors for r in reports]
    assert compared == [len(TENSORS) if r.verified else 0 for r in reports]
    updates.attach([A])
    assert updates.committed_version is None
    after_attach = updates.update(7)
    assert after_attach.verified
    assert after_attach.canary is not None
    without_canary = updater(Engine(), canary_every=0).update(1)
    assert (without_canary.canary, "canary" in without_canary.seconds) == (None, False)
    recorded = [
        r.metrics().get("weights/canary_max_abs_diff") for r in (after_attach, without_canary)
    ]
    assert recorded == [0.0, None]


def test_strategies_that_share_a_host_refuse_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (strategies, shared_memory):
        monkeypatch.setattr(module, "on_this_host", lambda url: False)
    with pytest.raises(WeightUpdateError, match=f"tensor: .*{A}"):
        updater(Engine())
    with pytest.raises(WeightUpdateError, match=r"expected weight_sync\.directory"):
        updater(Engine(), strategy="disk")


# --- who is to blame


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "GRACE_S", 0.5)


def find_blamed(fleet: list[Engine], step: Any, timeout_s: float = 20.0) -> EngineFaultError:
    """Return the fault of a step in which engines wait for each other. Aborting the step sets ``step.broken``."""
    together = Engines(fleet, runner())
    patience = own_patience(18)
    with pytest.raises(EngineFaultError) as failure:
        together.arrive(together.start(step), timeout_s, "a test", step.broken.set)
    assert not patience.is_exhausted()
    return failure.value


class Together:
    """A step in which engines wait for each other until it is aborted. Engines in ``fault`` die, hang or refuse."""

    def __init__(self, fault: dict[str, str]) -> None:
        self.fault = fault
        self.broken = threading.Event()

    async def __call__(self, engine: EngineWeights) -> None:
        assert isinstance(engine, Engine)
        fault = self.fault.get(engine.url)
        if fault == "killed":
            engine.alive = False
            raise EngineLostError("connection reset")
        if fault == "hung":
            engine.alive = False
            await asyncio.sleep(30)
        if fault == "refuses":
            raise EngineRequestError(400, "no such group")
        while not self.broken.is_set():
            await asyncio.sleep(0.01)
        raise EngineRequestError(400, "broadcast failed")


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("fault", ["killed", "refuses"])
def test_the_engine_that_failed_is_blamed_not_those_it_held_up(fault: str) -> None:
    error = find_blamed([Engine(A), Engine(B)], Together({B: fault}))
    # After a refusal, the other engine refuses, too. Nothing shows whether an engine or the trainer is at fault.
    assert error.engines == ((B,) if fault == "killed" else ())
    assert "connection reset" in str(error) or "no such group" in str(error)


@pytest.mark.usefixtures("short_grace")
def test_the_engine_that_hangs_is_blamed_in_time() -> None:
    error = find_blamed([Engine(A), Engine(B)], Together({B: "hung"}), timeout_s=0.3)
    assert error.engines == (B,)
    assert isinstance(error.faults[B], TransferTimeoutError)


@pytest.mark.usefixtures("short_grace")
def test_no_engine_is_blamed_if_a_trainer_rank_has_given_up() -> None:
    fleet = Engines([Engine(A), Engine(B)], runner())
    step = Together({})
    patience = own_patience(18)
    with pytest.raises(CalledOffError):
        fleet.arrive(fleet.start(step), 60.0, "a test", step.broken.set, lambda: True)
    assert not patience.is_exhausted()
    step.broken.set()


@pytest.mark.usefixtures("short_grace")
def test_a_lone_engine_that_refuses_is_blamed() -> None:
    assert find_blamed([Engine(A)], Together({A: "refuses"})).engines == (A,)


def test_quarantine_reaches_whoever_answers_and_never_raises() -> None:
    good, dead, odd = Engine(A), Engine(B), Engine("http://127.0.0.1:3")
    dead.alive, odd.failing = False, "pause"
    Engines([good, dead, odd], runner()).quarantine("unverified-3")
    assert (good.calls, dead.calls, odd.calls) == (["pause", "unverified-3"], [], ["pause"])


# --- parts


def test_adjacent_tensors_are_one_view() -> None:
    flat = torch.arange(10, dtype=torch.float32)
    data = adjacent([flat[2:5].view(torch.uint8), flat[5:9].view(torch.uint8)])
    assert data is not None
    assert data.data_ptr() == flat[2:].data_ptr()
    assert data.view(torch.float32).tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert adjacent([flat[2:5].view(torch.uint8), flat[6:9].view(torch.uint8)]) is None


def test_background_calls_hand_over_their_errors() -> None:
    def fail() -> None:
        raise OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    assert in_background(lambda: 3).result(10) == 3
    with pytest.raises(OSError, match=os.strerror(errno.ECONNRESET)):
        in_background(fail).result(10)


def test_engines_of_two_hosts_meet_where_both_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {A: "127.0.0.1", B: "10.0.0.7", "http://far:1": "10.0.0.7"}
    monkeypatch.setattr(engines, "local_address", addresses.__getitem__)
    assert engines.meeting_address([A]) == "127.0.0.1"
    assert engines.meeting_address([A, B]) == "10.0.0.7"
    assert engines.meeting_address([B, "http://far:1", A]) == "10.0.0.7"


def test_a_loopback_server_beside_one_elsewhere_is_refused() -> None:
    engines.require_routable([A, B])
    engines.require_routable(["http://10.0.0.7:1", "http://10.0.0.8:1"])
    with pytest.raises(EngineMismatchError, match=r"10\.0\.0\.8:1 can't reach it; .* engine\.host"):
        engines.require_routable([A, "http://10.0.0.8:1"])


def test_bytes_between_nodes_are_counted_for_each_host_of_engines() -> None:
    # Two ranks send 100 and 60 bytes. Rank 1 runs on the engines' host "b".
    facts = [
        RankFacts(100, 7, 200, None, ["a", "b"], 160, 190),
        RankFacts(60, 5, 60, None, ["a"], 160, 0),
        RankFacts(0, 0, 0, None, [], 0, 0),
    ]
    assert count_bytes(facts) == {
        "bytes": 160,
        "bytes_moved": 12 + 160,
        "bytes_bound": 190,
        "bytes_between_nodes": 200 + 60,
        "bytes_between_nodes_bound": 160,
        "bytes_into_node_bound": 160,
    }


def test_a_report_counts_the_engines_pause_within_the_update() -> None:
    report = updater(Engine()).update(1)
    assert 0 < report.stall_s <= report.update_s
    recorded = report.metrics()
    assert recorded["weights/bytes_between_nodes"] == 0
    assert recorded["weights/gb_per_s"] == report.bytes / report.stall_s / 1e9


def test_local_address_of_a_local_engine_is_loopback() -> None:
    assert local_address("http://127.0.0.1:30000") == "127.0.0.1"
    assert on_this_host("http://127.0.0.1:30000")


def test_only_hosts_that_every_sender_is_foreign_to_bound_the_bytes_between_nodes() -> None:
    first = RankFacts(10, 0, 10, None, ["b"], 10, 0)
    silent = RankFacts(0, 5, 0, None, ["c", "d"], 0, 0)
    second = RankFacts(5, 0, 0, None, [], 0, 0)
    for bound in ("bytes_between_nodes_bound", "bytes_into_node_bound"):
        assert count_bytes([first, silent])[bound] == 10
        assert count_bytes([first, second])[bound] == 0


def run_on_hosts(updates: WeightUpdater, *hosts: str | None) -> None:
    """Pretend that engine ranks run on other hosts."""
    strategy = updates._strategy
    assert isinstance(strategy, ShardStrategy)
    strategy._hosts = list(hosts)


def test_a_sender_tells_of_engines_on_other_hosts() -> None:
    updates = updater(Engine(A), Engine(B))
    run_on_hosts(updates, "b", "c")
    report = updates.update(1)
    # Both engines hold the same bytes: the second one gets them from the first one.
    assert report.bytes == BYTES
    assert report.bytes_moved == report.bytes_between_nodes == 2 * BYTES
    assert report.bytes_between_nodes_bound == BYTES * 2
    assert report.bytes_into_node_bound == BYTES  # into each of the two hosts, at the same time


@pytest.mark.parametrize(("host", "seconds"), [("b", BYTES / 6e9), (None, 0.0)])
def test_the_fewest_seconds_are_bytes_into_a_node_over_the_stated_rate(
    host: str | None, seconds: float
) -> None:
    rated, silent = updater(Engine(), network_gb_per_s=6), updater(Engine())
    for updates in (rated, silent):
        run_on_hosts(updates, host)
    stated = rated.update(1).metrics()
    assert stated["weights/bound_s"] == pytest.approx(seconds, rel=1e-12)
    unstated = silent.update(1).metrics()
    assert "weights/bound_s" not in unstated
    assert unstated["weights/bytes_over_bound"] == stated["weights/bytes_over_bound"] == 1.0
    assert unstated["weights/bytes_into_node_bound"] == (BYTES if host else 0)


def test_an_updates_seconds_are_those_between_its_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock begins at 1000 and advances by a second at each reading."""
    updates, ticks = updater(Engine()), itertools.count(1000.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    report = updates.update(1)
    assert 2 <= report.stall_s < report.update_s < 500
    # Each phase lasts a few readings. Its value is a difference of whole seconds, and no absolute time.
    assert all(1 <= seconds < 50 and seconds.is_integer() for seconds in report.seconds.values())
    half = replace(report, bytes=10**9, stall_s=0.5).metrics()
    assert half["weights/gb_per_s"] == 2
    for bound, over in ((0, 6), (1, 6), (2, 3)):
        few = replace(report, bytes_moved=6, bytes_bound=bound).metrics()
        assert few["weights/bytes_over_bound"] == over
    assert replace(report, bytes=3, stall_s=0.0).metrics()["weights/gb_per_s"] == pytest.approx(3)


def test_the_busiest_ranks_are_recorded_if_each_rank_has_its_own_bytes() -> None:
    report = updater(Engine()).update(1)
    names = ("weights/bytes_busiest_sender_over_mean", "weights/bytes_busiest_receiver_over_mean")
    assert not set(names) & set(replace(report, busiest_over_mean=None).metrics())
    in_shards = replace(report, busiest_over_mean=(1.5, 2.0)).metrics()
    assert [in_shards[name] for name in names] == [1.5, 2.0]
