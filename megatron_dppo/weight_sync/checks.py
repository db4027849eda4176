"""What is compared before a commit: a checksum of every tensor, and the canary's log-probabilities."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from megatron_dppo.weight_sync.canary import CanaryError, CanaryReport, Tolerance, compare_canary
from megatron_dppo.weight_sync.engines import Engines, Expected, H
from megatron_dppo.weight_sync.interfaces import (
    Bucket,
    ChecksumMismatchError,
    EngineFaultError,
    compare_checksums,
)


class ExpectedByLayout:
    """Checksums of the buckets that this rank sends, once for each kind of engine."""

    def __init__(self, engines: Engines[Any]) -> None:
        self._by_layout: dict[Hashable, Expected] = {}
        for engine in engines.receivers:
            if engine.layout not in self._by_layout:
                self._by_layout[engine.layout] = engine.expected()

    def add(self, bucket: Bucket) -> None:
        """Hash a bucket as the engines fuse and cut it."""
        for expected in self._by_layout.values():
            expected.add(bucket)

    def partials(self) -> list[Any]:
        """What was added, by kind of engine; JSON."""
        return [expected.partial() for expected in self._by_layout.values()]


def compare_tensors(engines: Engines[H], partials: Sequence[Sequence[Any]]) -> int:
    """Compare every engine tensor with all senders' ``partials``; returns how many there are.

    Raises EngineFaultError of ChecksumMismatchError, and what an incomplete stream raises.
    """
    layouts = list(dict.fromkeys(engine.layout for engine in engines.receivers))
    digests = {}
    for engine in engines.receivers:
        if engine.layout not in digests:
            mine = [sender[layouts.index(engine.layout)] for sender in partials]
            digests[engine.layout] = engine.expected().digests(mine)
    got = engines.each(lambda engine: engine.checksums())
    faults = {}
    for engine in engines.receivers:
        mismatches = compare_checksums(digests[engine.layout], got[engine.url])
        if mismatches:
            faults[engine.url] = ChecksumMismatchError(mismatches)
    if faults:
        raise EngineFaultError(faults)
    return sum(len(rank) for ranks in got.values() for rank in ranks)


def compare_scores(
    engines: Engines[H],
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[float]],
    tolerance: Tolerance,
) -> CanaryReport:
    """Let the engines go on, for as long as it takes to score ``prompts``, and compare.

    Returns the worst engine's report. Raises EngineFaultError of CanaryError.
    """
    engines.each(lambda engine: engine.resume())
    scores = engines.each(lambda engine: engine.score(prompts))
    reports, faults = [], {}
    for url, theirs in scores.items():
        try:
            reports.append(compare_canary(ours, theirs, tolerance))
        except CanaryError as error:
            faults[url] = error
    if faults:
        raise EngineFaultError(faults)
    return max(reports, key=lambda report: report.max_abs_diff)
