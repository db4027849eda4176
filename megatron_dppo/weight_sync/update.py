"""The transaction: every tensor has provably arrived under a new version, or all ranks raise."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.weight_sync.base import (
    Agree,
    Bucket,
    UpdateReport,
    WeightSource,
    WeightTransport,
    WeightUpdateError,
    WeightUpdateRefusedError,
)

_MIB = 1 << 20
_BUSY = "requests kept the engine busy beyond weight_sync.timeout_s"


class WeightUpdater:
    """Pushes the trainer's weights; every method is collective over all trainer ranks.

    ``transport``: on global rank 0 the way to the engine, None on the others. ``agree``: see
    base.py. ``committed_version``: what the engine runs, on every rank; None before the first
    update and while it is quarantined.
    """

    def __init__(
        self,
        source: WeightSource,
        transport: WeightTransport | None,
        config: WeightSyncConfig,
        agree: Agree,
    ) -> None:
        self._source = source
        self._transport = transport
        self._config = config
        self._agree = agree
        self._unverified = 0
        self.committed_version: int | None = None

    def attach(self, transport: WeightTransport | None) -> None:
        """Turn to another engine or incarnation, whose weights are unknown until ``update``."""
        if self._transport is not None:
            self._transport.abort()
        self._transport = transport
        self.committed_version = None

    def update(self, version: int) -> UpdateReport:
        """Send all weights and commit them as ``version``, verified where ``verify_every`` says so.

        The first update of an engine, and the first after a failure, is always verified. Waits for
        running requests. Raises on every rank: WeightUpdateRefusedError where requests kept
        running, WeightUpdateError where the update failed. What the source itself raises passes
        through, after an abort.
        """
        verify = self.committed_version is None or self._unverified + 1 >= self._config.verify_every
        previous, self.committed_version = self.committed_version, None
        steps = _Steps(self._transport)
        try:
            idle = steps.run("drain", lambda t: t.prepare())
            self._share(steps, version)
            if self._agree(_BUSY if idle is False else None) is not None:
                self.committed_version = previous
                raise WeightUpdateRefusedError(f"weight update to version {version}: {_BUSY}")
            steps.run("begin", lambda t: t.begin(version))
            self._share(steps, version)
            sent = self._stream(steps, verify)
            steps.run("finish", lambda t: t.finish())
            checked = steps.run("verify", lambda t: t.verify()) if verify else None
            steps.run("commit", lambda t: t.commit(version))
            self._share(steps, version)
        except WeightUpdateRefusedError:
            raise
        except BaseException:
            if self._transport is not None:
                self._transport.abort()
            raise
        self.committed_version = version
        self._unverified = 0 if verify else self._unverified + 1
        tensors = 0 if checked is None else checked.tensors
        return UpdateReport(version, sent, dict(steps.seconds), verify, tensors)

    def close(self) -> None:
        """Leave the engine in peace; it keeps its weights."""
        if self._transport is not None:
            self._transport.close()

    def _stream(self, steps: _Steps, verify: bool) -> int:
        """Bytes of all buckets.

        After a failure the rest is gathered all the same: the other ranks are in that collective.
        """
        sent = 0
        buckets = self._source.hf_buckets(self._config.bucket_mib * _MIB)
        while True:
            with steps.timed("gather"):
                bucket: Bucket | None = next(buckets, None)
            if bucket is None:
                return sent
            if bucket and self._transport is None:
                raise ValueError("weight update: this rank holds the weights but no transport")
            if bucket:
                sent += steps.run("transfer", partial(_send, bucket)) or 0
            if bucket and verify:
                steps.run("hash", partial(_expect, bucket))

    def _share(self, steps: _Steps, version: int) -> None:
        error = steps.error
        first = self._agree(None if error is None else f"{type(error).__name__}: {error}")
        if first is not None:
            raise WeightUpdateError(f"weight update to version {version}: {first}") from error


def _send(bucket: Bucket, transport: WeightTransport) -> int:
    return transport.send(bucket)


def _expect(bucket: Bucket, transport: WeightTransport) -> None:
    transport.expect(bucket)


class _Steps:
    """Rank 0's calls, timed, until the first that fails; nothing is called on the others."""

    def __init__(self, transport: WeightTransport | None) -> None:
        self._transport = transport
        self.error: Exception | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, phase: str, call: Callable[[WeightTransport], Any]) -> Any:
        if self._transport is None or self.error is not None:
            return None
        with self.timed(phase):
            try:
                return call(self._transport)
            except (OSError, RuntimeError, ValueError) as error:
                self.error = error
                return None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start
