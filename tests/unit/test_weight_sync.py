"""The transaction over a transport that fails where it is told to; canary; bounded waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.rollout.errors import EngineLostError, EngineRequestError
from megatron_dppo.weight_sync.base import (
    Bucket,
    ChecksumMismatch,
    ChecksumMismatchError,
    VerifiedTensors,
    WeightUpdateError,
    WeightUpdateRefusedError,
    compare_checksums,
)
from megatron_dppo.weight_sync.broadcast import (
    TransferTimeoutError,
    in_background,
    local_address,
    wait_all,
)
from megatron_dppo.weight_sync.canary import CanaryError, compare_canary
from megatron_dppo.weight_sync.distributed import DistributedTransport
from megatron_dppo.weight_sync.update import WeightUpdater

BUCKETS: list[Bucket] = [[("a", torch.ones(2))], [("b", torch.ones(3)), ("c", torch.ones(1))]]


class Source:
    def __init__(self, *, fail_after: int | None = None, holds_weights: bool = True) -> None:
        self.holds_weights = holds_weights
        self.asked: list[int] = []
        self.yielded = 0
        self.fail_after = fail_after

    def hf_buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        self.asked.append(bucket_bytes)
        for i, bucket in enumerate(BUCKETS):
            if self.fail_after == i:
                raise RuntimeError("gather failed")
            self.yielded += 1
            yield bucket if self.holds_weights else []


class Transport:
    def __init__(self, failing: str | None = None) -> None:
        self.failing = failing
        self.busy = False
        self.calls: list[str] = []

    def _step(self, name: str) -> None:
        self.calls.append(name)
        if name == self.failing:
            raise RuntimeError(f"{name} failed")

    def prepare(self) -> bool:
        self._step("prepare")
        return not self.busy

    def begin(self, version: int) -> None:
        self._step("begin")

    def send(self, bucket: Bucket) -> int:
        self._step("send")
        return sum(t.nbytes for _, t in bucket)

    def expect(self, bucket: Bucket) -> None:
        self._step("expect")

    def finish(self) -> None:
        self._step("finish")

    def verify(self) -> VerifiedTensors:
        self._step("verify")
        return VerifiedTensors(3)

    def commit(self, version: int) -> None:
        self._step(f"commit {version}")

    def abort(self) -> None:
        self.calls.append("abort")

    def close(self) -> None:
        self.calls.append("close")


def alone(error: str | None) -> str | None:
    return error


def updater(
    transport: Transport | None, source: Source | None = None, **config: int
) -> WeightUpdater:
    return WeightUpdater(source or Source(), transport, WeightSyncConfig(**config), alone)


def test_a_whole_transaction() -> None:
    transport, source = Transport(), Source()
    updates = updater(transport, source, bucket_mib=3)
    report = updates.update(7)
    sends = ["send", "expect"] * 2
    assert transport.calls == ["prepare", "begin", *sends, "finish", "verify", "commit 7"]
    assert source.asked == [3 * 1024 * 1024]
    assert (report.version, report.bytes, report.tensors, report.verified) == (7, 24, 3, True)
    phases = ["drain", "begin", "gather", "transfer", "hash", "finish", "verify", "commit"]
    assert list(report.seconds) == phases
    assert updates.committed_version == 7


@pytest.mark.parametrize(
    "failing", ["prepare", "begin", "send", "expect", "finish", "verify", "commit 2"]
)
def test_any_failure_aborts_and_commits_nothing(failing: str) -> None:
    transport, source = Transport(), Source()
    updates = updater(transport, source)
    updates.update(1)
    transport.failing, transport.calls, source.yielded = failing, [], 0
    with pytest.raises(WeightUpdateError, match=f"version 2: RuntimeError: {failing} failed"):
        updates.update(2)
    assert updates.committed_version is None
    assert transport.calls[-2:] == [failing, "abort"]
    assert "commit 2" not in transport.calls[:-2]
    # The other ranks are in the gather's collective: rank 0 goes through it to the end.
    assert source.yielded == (0 if failing in ("prepare", "begin") else 2)
    transport.failing = None
    assert updates.update(2).verified
    assert updates.committed_version == 2


def test_a_busy_engine_keeps_its_version() -> None:
    transport = Transport()
    updates = updater(transport)
    updates.update(1)
    transport.busy, transport.calls = True, []
    with pytest.raises(WeightUpdateRefusedError, match="version 2: requests kept the engine busy"):
        updates.update(2)
    assert transport.calls == ["prepare"]
    assert updates.committed_version == 1


def test_the_sources_own_error_aborts_and_passes() -> None:
    transport = Transport()
    updates = updater(transport, Source(fail_after=1))
    with pytest.raises(RuntimeError, match=r"^gather failed$"):
        updates.update(1)
    assert transport.calls[-1] == "abort"
    assert updates.committed_version is None


def test_other_ranks_share_the_failure() -> None:
    answers = iter([None, None, None, "EngineLostError: gone"])
    source = Source(holds_weights=False)
    updates = WeightUpdater(source, None, WeightSyncConfig(), lambda error: next(answers))
    with pytest.raises(WeightUpdateError, match="version 5: EngineLostError: gone"):
        updates.update(5)
    assert updates.committed_version is None
    assert source.yielded == 2


def test_another_rank_learns_that_the_engine_was_busy() -> None:
    answers = iter([None, "requests kept the engine busy"])
    updates = WeightUpdater(Source(), None, WeightSyncConfig(), lambda error: next(answers))
    updates.committed_version = 4
    with pytest.raises(WeightUpdateRefusedError):
        updates.update(5)
    assert updates.committed_version == 4


def test_weights_without_an_engine_are_no_update() -> None:
    updates = updater(None)
    with pytest.raises(ValueError, match="holds the weights but no transport"):
        updates.update(1)
    assert updates.committed_version is None


def test_verify_every_second_update_but_always_the_first_of_an_engine() -> None:
    transport = Transport()
    updates = updater(transport, verify_every=2)
    assert [updates.update(v).verified for v in range(5)] == [True, False, True, False, True]
    assert transport.calls.count("verify") == 3
    assert transport.calls.count("expect") == 6
    second = Transport()
    updates.attach(second)
    assert transport.calls[-1] == "abort"
    assert updates.committed_version is None
    assert updates.update(4).verified
    assert second.calls[-1] == "commit 4"
    updates.close()
    assert second.calls[-1] == "close"


def test_compare_checksums_names_tensor_and_rank() -> None:
    expected = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert compare_checksums(expected, expected) == []
    got = [{"a": "1", "b": "2"}, {"a": "9", "c": "5"}]
    mismatches = compare_checksums(expected, got)
    assert mismatches == [
        ChecksumMismatch("a", 1, "3", "9"),
        ChecksumMismatch("b", 1, "4", None),
        ChecksumMismatch("c", 1, None, "5"),
    ]
    assert "a on engine rank 1: expected 3, got 9" in str(ChecksumMismatchError(mismatches))
    assert "and 2 more" in str(ChecksumMismatchError([*mismatches, *mismatches[:2], *got_seven()]))
    with pytest.raises(ValueError, match="1 engine ranks, expected 2"):
        compare_checksums(expected, got[:1])


def got_seven() -> list[ChecksumMismatch]:
    return [ChecksumMismatch("d", 0, "1", "2"), ChecksumMismatch("e", 0, "1", "2")]


def test_canary_reports_and_names_the_worst_token() -> None:
    report = compare_canary([[-1.0, -2.0], [-3.0]], [[-1.0, -2.5], [-3.25]], 0.5)
    assert (report.max_abs_diff, report.mean_abs_diff, report.tokens) == (0.5, 0.25, 3)
    with pytest.raises(CanaryError, match=r"token 1 of prompt 0 differs by 0.5 .*1 of 3 tokens"):
        compare_canary([[-1.0, -2.0], [-3.0]], [[-1.0, -2.5], [-3.25]], 0.49)
    with pytest.raises(CanaryError, match=r"token 0 of prompt 1 differs by nan"):
        compare_canary([[-1.0], [-3.0]], [[-9.0], [float("nan")]], 0.5)
    with pytest.raises(ValueError, match="token counts"):
        compare_canary([[-1.0]], [[-1.0, -2.0]], 0.5)
    with pytest.raises(ValueError, match="empty"):
        compare_canary([[]], [[]], 0.5)


def test_waits_end_with_the_first_failure_or_in_time() -> None:
    never = threading.Event()
    stuck = in_background(lambda: (never.wait(30), None)[1])

    def fail() -> None:
        raise OSError("connection reset")

    start = time.monotonic()
    with pytest.raises(OSError, match="connection reset"):
        wait_all([stuck, in_background(fail)], 20, "a test")
    with pytest.raises(TransferTimeoutError, match="a test took longer than 0 s"):
        wait_all([stuck], 0.2, "a test")
    assert time.monotonic() - start < 10
    never.set()
    wait_all([stuck], 10, "a test")


class LeavingEngine:
    """As much of a receiver as ``close`` needs; ``error`` is what leaving the group raises."""

    url, device, ranks = "http://127.0.0.1:1", "cpu", 1

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.left: list[str] = []

    def expected(self) -> None:
        return None

    def close_group(self, name: str) -> None:
        self.left.append(name)
        if self.error is not None:
            raise self.error


class Group:
    name = "weights-1"
    aborted = 0

    def abort(self) -> None:
        self.aborted += 1


@pytest.mark.parametrize(
    "error", [None, EngineLostError("refused"), EngineRequestError(400, "?"), OSError("reset")]
)
def test_closing_never_fails_on_the_engine(error: Exception | None) -> None:
    engine, group = LeavingEngine(error), Group()
    transport = DistributedTransport(engine, timeout_s=1)
    transport._group = group
    transport.close()
    transport.close()  # there is nothing left to leave
    assert (engine.left, group.aborted) == (["weights-1"], 1)


def test_local_address_of_a_local_engine_is_loopback() -> None:
    assert local_address("http://127.0.0.1:30000") == "127.0.0.1"
