"""Ends a rank whose collective does not end, and says which, who asked for it, and which ranks are missing.

torch's own limit is hours, because ranks wait in collectives while others generate or save, and what it
raises names neither the collective nor the rank that does not come.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from megatron_dppo.logging import note_failure
from megatron_dppo.trainer import flight_recorder
from megatron_dppo.trainer.flight_recorder import Pending

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 7200.0
"""Of a collective in which ranks wait while others generate, start or save."""
BACKGROUND = "checkpoint"
"""What a group is for whose collectives wait in threads, while training goes on: each may take LONGEST_WAIT_S."""
HUNG = 1
"""Exit code of a rank that ends itself."""
_POLLS = 10
_LONGEST_POLL_S = 5.0
_STORE_S = 10.0
_BILLION = 10**9

_patience: list[tuple[str, float]] = []


@contextmanager
def patience(what: str, limit_s: float = LONGEST_WAIT_S) -> Iterator[None]:
    """Collectives of this block, of the process's main thread, may take ``limit_s``: others do ``what``."""
    _patience.append((what, limit_s))
    try:
        yield
    finally:
        _patience.pop()


class Watchdog:
    """Looks at the collectives of this process from a thread of its own.

    Args:
        rank: this process's.
        limit_s: the longest that a collective may take, outside of ``patience``.
        open_store: a connection to the ranks' rendezvous, by which those that wait tell each other.
        on_hang: given the report; by default it is written down and the process ended.
        pending: the collectives that have not ended, with their callers where it is asked to.
    """

    def __init__(
        self,
        rank: int,
        limit_s: float,
        open_store: Callable[[], dist.Store],
        on_hang: Callable[[str], None] | None = None,
        pending: Callable[..., list[Pending]] = flight_recorder.pending,
    ) -> None:
        self._rank = rank
        self._limit_s = limit_s
        self._poll_s = min(limit_s / _POLLS, _LONGEST_POLL_S)
        self._open_store = open_store
        self._on_hang = end_process if on_hang is None else on_hang
        self._pending = pending
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._watch, daemon=True, name="collective-watchdog").start()

    def stop(self) -> None:
        """Watch no more."""
        self._stop.set()

    def overdue(self, now_ns: int) -> Pending | None:
        """The oldest collective that takes longer than it may."""
        limit = self._limit[1]

        def allowed(pending: Pending) -> float:
            return LONGEST_WAIT_S if pending.group.endswith(f"({BACKGROUND})") else limit

        late = (
            p for p in self._pending(callers=False) if now_ns - p.since_ns > allowed(p) * _BILLION
        )
        return next(late, None)

    @property
    def _limit(self) -> tuple[str, float]:
        """The longest wait that is allowed now, and why."""
        return max([("", self._limit_s), *_patience], key=lambda each: each[1])

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_s):
            hung = self.overdue(time.time_ns())
            if hung is not None:
                self._on_hang(self._report(hung))
                return

    def _report(self, hung: Pending) -> str:
        what, limit = self._limit
        named = self._pending(callers=True)
        hung = next((p for p in named if p.is_same(hung)), hung)
        heard = self._hear(hung.ranks)
        others = [rank for rank in hung.ranks if rank != self._rank]
        where = [describe(rank, hung, heard) for rank in others] if heard is not None else []
        lines = [
            f"rank {self._rank} has waited for {limit:.0f} s{f' ({what})' if what else ''} in {hung}",
            f"asked for at {hung.caller}",
            *([_NO_RENDEZVOUS] if heard is None else where),
        ]
        return "; ".join(lines)

    def _hear(self, ranks: Sequence[int]) -> Mapping[int, list[Pending]] | None:
        """What the other ranks wait in, of those that wait; None where the rendezvous does not answer."""
        heard: dict[int, list[Pending]] = {}
        answered = threading.Event()

        def exchange() -> None:
            store = self._open_store()
            own = json.dumps([p.to_json() for p in self._pending(callers=True)])
            store.set(_key(self._rank), own)
            time.sleep(2 * self._poll_s)  # those that wait for the same rank see it one poll later
            for rank in ranks:
                if store.check([_key(rank)]):
                    found = json.loads(store.get(_key(rank)))
                    heard[rank] = [Pending.from_json(each) for each in found]
            answered.set()

        threading.Thread(target=exchange, daemon=True).start()
        return heard if answered.wait(2 * self._poll_s + _STORE_S) else None


_NO_RENDEZVOUS = "the ranks' rendezvous, which rank 0 or its launcher hosts, does not answer"


def describe(rank: int, hung: Pending, heard: Mapping[int, Sequence[Pending]]) -> str:
    """Where another rank of the group is, by what it said."""
    if rank not in heard:
        return f"rank {rank} waits in no collective: it is stopped, or busy with something else"
    if any(p.is_same(hung) for p in heard[rank]):
        return f"rank {rank} waits in the same"
    waits = [f"{p}, asked for at {p.caller}" for p in heard[rank][:1]]
    return f"rank {rank} waits in {waits[0]}" if waits else f"rank {rank} has gone on"


def end_process(report: str) -> None:
    """Write the report down and end this process, whose main thread can't be woken."""
    note_failure()
    log.error("a collective hangs: %s", report)
    print(f"error: a collective hangs: {report}", file=sys.stderr, flush=True)
    os._exit(HUNG)


def client_of(host: str, port: int, timeout: timedelta) -> Callable[[], dist.Store]:
    """Opens a connection of its own to the rendezvous: the process's may be waiting in a call."""
    return lambda: dist.PrefixStore(
        "watchdog", dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    )


def _key(rank: int) -> str:
    return f"waits/{rank}"
