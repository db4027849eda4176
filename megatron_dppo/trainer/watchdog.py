"""End a rank that hangs in a collective, with a report of the collective, its caller and the missing ranks.

torch's own time limit is set to hours, because ranks wait in collectives while others generate or save. torch's error
message does not name the collective and the missing rank. The watchdog reads torch's two flight recorders, for gloo and
for NCCL. They record the collectives of every group, including Megatron-Core's groups.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup, distributed_c10d

from megatron_dppo.logging import note_failure

DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
"""torch's functions that dump the recorders of gloo and NCCL; a build without NCCL lacks the second."""
_LIBRARIES = ("torch", "megatron")


@dataclass(frozen=True)
class Pending:
    """A collective that has begun on this rank and not ended.

    Attributes:
        group: torch's name of the process group: a number, and the group's purpose.
        ranks: global ranks of the group.
        name: backend and operation, ``gloo:all_reduce``.
        number: number of the group's operations that have begun on this rank, including this operation.
        caller: the line that called the collective, outside of torch and Megatron-Core if there is one.
        since_ns: start time, in epoch nanoseconds.
    """

    group: str
    ranks: tuple[int, ...]
    name: str
    number: int
    caller: str
    since_ns: int

    def is_same(self, other: Pending) -> bool:
        """Return whether both describe the same collective, on two ranks or at two times."""
        return (self.group, self.name, self.number) == (other.group, other.name, other.number)

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.name}, number {self.number} of group {self.group} (ranks {ranks})"


PENDING_LIST = TypeAdapter(list[Pending])
"""Converts collectives to JSON and back, to send them to other ranks."""


def pending_collectives(*, callers: bool) -> list[Pending]:
    """Return this process's collectives that have not ended, the oldest first.

    Collectives of destroyed groups are left out: the recorders keep them until the backend's own limit.

    ``callers``: whether to find the calling lines. With True, torch imports its compiler in this thread, and the main
    thread must not import the compiler meanwhile. So pass True only if the main thread waits in one of these
    collectives.
    """
    ranks_by_group = known_groups()
    collectives: list[Pending] = []
    for name in DUMPS:
        dump: Any = getattr(_distributed_c10d, name, None)
        if dump is not None:
            # The arguments: include collectives, include call stacks, leave out ended entries. Ended entries are
            # needed: only the entry that closes a batch of NCCL shows that the batch has ended.
            trace = pickle.loads(dump(True, callers, False))
            collectives += read_trace(_of_groups(trace, ranks_by_group), ranks_by_group)
    return sorted(collectives, key=attrgetter("since_ns"))


def known_groups() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each process group that has this rank and was not destroyed, by the group's name."""
    ranks_by_group: dict[str, tuple[int, ...]] = {}
    # Copy the items first: the main thread may create a group meanwhile.
    for group, members in list(distributed_c10d._world.pg_group_ranks.items()):
        # torch has a number in place of a group without this rank.
        if isinstance(group, ProcessGroup):
            ranks_by_group[str(group.group_name)] = tuple(members)
    return ranks_by_group


def _of_groups(trace: Mapping[str, Any], groups: Container[str]) -> dict[str, Any]:
    """Return the dump ``trace`` with only the entries of ``groups``, names of process groups."""
    entries = [e for e in trace.get("entries", ()) if e["process_group"][0] in groups]
    return {**trace, "entries": entries}


def read_trace(trace: Mapping[str, Any], ranks: Mapping[str, tuple[int, ...]]) -> list[Pending]:
    """Return the collectives in a dump of a recorder (version 2) that have not ended.

    The recorder does not update the entries of single operations in a batch of NCCL (``batch_isend_irecv``,
    ProcessGroupNCCL::pointToPoint). The entry that closes the batch has the same number, and its state
    counts for all operations of the batch.

    ``ranks``: global ranks by group; the recorder knows the ranks of NCCL's groups only.
    """
    entries = trace.get("entries", ())
    closed_batches: set[tuple[Any, ...]] = set()
    for entry in entries:
        if _closes_batch(entry):
            closed_batches.add(_batch_key(entry))
    collectives: list[Pending] = []
    for entry in entries:
        # torch's own watchdog retires an entry some time after the device has completed it.
        has_ended = entry["retired"] or entry["state"] == "completed"
        is_closed_by_other = not _closes_batch(entry) and _batch_key(entry) in closed_batches
        if not has_ended and not is_closed_by_other:
            collectives.append(_pending(entry, ranks))
    return sorted(collectives, key=attrgetter("since_ns"))


def _closes_batch(entry: Mapping[str, Any]) -> bool:
    """Return whether ``entry`` closes a batch of NCCL."""
    return entry["profiling_name"].endswith("coalesced")


def _batch_key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for the operations of one batch."""
    return (entry["process_group"], entry["is_p2p"], _number(entry))


def _number(entry: Mapping[str, Any]) -> int:
    """Return the number of the operation in its group. Sends and receives are counted apart from collectives."""
    key = "p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"
    return int(entry[key])


def _pending(entry: Mapping[str, Any], ranks: Mapping[str, tuple[int, ...]]) -> Pending:
    name, purpose = entry["process_group"]
    group = name
    if purpose and purpose != "undefined":
        group = f"{name} ({purpose})"
    return Pending(
        group=group,
        ranks=tuple(ranks.get(name, ())),
        name=entry["profiling_name"],
        number=_number(entry),
        caller=next(_callers(entry.get("frames", ())), "unknown"),
        since_ns=entry["time_created_ns"],
    )


def _callers(frames: Any) -> Iterator[str]:
    """Yield the Python frames outside of the libraries, the innermost first, and then the outermost frame of all."""
    for frame in frames:
        path = Path(frame["filename"])
        is_in_library = not set(_LIBRARIES).isdisjoint(path.parts)
        if not is_in_library and path.suffix == ".py":
            yield f"{'/'.join(path.parts[-2:])}:{frame['line']} ({frame['name']})"
    if frames:
        yield f"{frames[-1]['filename']}:{frames[-1]['line']}"


log = logging.getLogger(__name__)

LONGEST_WAIT_S = 7200.0
"""Time limit of a collective whose ranks may wait while other ranks generate, start or save."""
BACKGROUND = "checkpoint"
"""The purpose of a group whose collectives wait in threads while training continues: each may take LONGEST_WAIT_S."""
HUNG = 1
"""Exit code of a rank that ends itself."""
_POLLS = 10
"""Number of polls within the limit of a collective, unless polls would then be more than _LONGEST_POLL_S apart."""
_LONGEST_POLL_S = 5.0
_STORE_S = 10.0
"""Time limit for an answer from the rendezvous."""
_NANOSECONDS = 10**9

_patience: list[tuple[str, float]] = []
"""Reason and limit of each ``patience`` block that the main thread is in."""


@contextmanager
def patience(reason: str, limit_s: float = LONGEST_WAIT_S) -> Iterator[None]:
    """Allow collectives in this block of the main thread to take ``limit_s``.

    ``reason``: the work of other ranks meanwhile, for the report.
    """
    _patience.append((reason, limit_s))
    try:
        yield
    finally:
        _patience.pop()


class Watchdog:
    """Watches the collectives of this process from a separate thread.

    Args:
        rank: global rank of this process.
        limit_s: longest time of a collective outside of ``patience``.
        open_store: opens a connection to the ranks' rendezvous, where each waiting rank publishes its collectives.
        on_hang: called with the report; by default the report is logged and the process ends.
        read_pending: returns the collectives that have not ended; see ``pending_collectives``.
    """

    def __init__(
        self,
        rank: int,
        limit_s: float,
        open_store: Callable[[], dist.Store],
        on_hang: Callable[[str], None] | None = None,
        read_pending: Callable[..., list[Pending]] = pending_collectives,
    ) -> None:
        self._rank = rank
        self._limit_s = limit_s
        self._poll_s = min(limit_s / _POLLS, _LONGEST_POLL_S)
        self._open_store = open_store
        self._on_hang = end_process if on_hang is None else on_hang
        self._read_pending = read_pending
        self._stop = threading.Event()

    def start(self) -> None:
        """Start the watching thread."""
        threading.Thread(target=self._watch, daemon=True, name="collective-watchdog").start()

    def stop(self) -> None:
        """End the watching thread."""
        self._stop.set()

    def overdue(self, now_ns: int) -> Pending | None:
        """Return the oldest collective that takes longer than its limit; None if all are within their limits."""
        for collective in self._read_pending(callers=False):
            _, allowed_s = self._limit_of(collective)
            if now_ns - collective.since_ns > allowed_s * _NANOSECONDS:
                return collective
        return None

    def _limit_of(self, collective: Pending) -> tuple[str, float]:
        """Return the reason and the seconds of the longest wait that ``collective`` may take now."""
        if collective.group.endswith(f"({BACKGROUND})"):
            return "", LONGEST_WAIT_S
        return max([("", self._limit_s), *_patience], key=itemgetter(1))

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_s):
            hung = self.overdue(time.time_ns())
            if hung is not None:
                self._on_hang(self._report(hung))
                return

    def _report(self, hung: Pending) -> str:
        """Return what this rank waits in, who called it, and what each other rank of the group waits in."""
        reason, limit_s = self._limit_of(hung)
        # Find callers only now: the main thread waits, so it cannot be inside an import.
        waits_with_callers = self._read_pending(callers=True)
        hung = next((wait for wait in waits_with_callers if wait.is_same(hung)), hung)
        waits_by_rank = self._exchange_waits(hung.ranks)
        reason_text = f" ({reason})" if reason else ""
        lines = [
            f"rank {self._rank} has waited for {limit_s:.0f} s{reason_text} in {hung}",
            f"asked for at {hung.caller}",
        ]
        if waits_by_rank is None:
            lines.append(_NO_RENDEZVOUS)
        else:
            other_ranks = [rank for rank in hung.ranks if rank != self._rank]
            lines += [describe_wait(rank, hung, waits_by_rank) for rank in other_ranks]
        return "; ".join(lines)

    def _exchange_waits(self, ranks: Sequence[int]) -> Mapping[int, list[Pending]] | None:
        """Publish what this rank waits in, and return the collectives of each waiting rank among ``ranks``.

        The result is None if the rendezvous does not answer.
        """
        waits_by_rank: dict[int, list[Pending]] = {}
        answered = threading.Event()

        def exchange() -> None:
            store = self._open_store()
            waits = PENDING_LIST.dump_json(self._read_pending(callers=True))
            store.set(_key(self._rank), waits.decode())
            # Let the other waiting ranks publish their collectives: they notice the hang up to one poll later.
            time.sleep(2 * self._poll_s)
            for rank in ranks:
                if store.check([_key(rank)]):
                    waits_by_rank[rank] = PENDING_LIST.validate_json(store.get(_key(rank)))
            answered.set()

        # Use a thread: it is abandoned if the rendezvous does not answer.
        threading.Thread(target=exchange, daemon=True).start()
        if answered.wait(2 * self._poll_s + _STORE_S):
            return waits_by_rank
        return None


_NO_RENDEZVOUS = "the ranks' rendezvous, which rank 0 or its launcher hosts, does not answer"


def describe_wait(rank: int, hung: Pending, waits_by_rank: Mapping[int, Sequence[Pending]]) -> str:
    """Describe what another ``rank`` of the group waits in.

    A rank that waits in no collective publishes nothing. A rank publishes an empty list if its collective ended just
    before it published.
    """
    if rank not in waits_by_rank:
        return f"rank {rank} waits in no collective: it is stopped, or busy with something else"
    waits = waits_by_rank[rank]
    if any(wait.is_same(hung) for wait in waits):
        return f"rank {rank} waits in the same"
    if waits:
        return f"rank {rank} waits in {waits[0]}, asked for at {waits[0].caller}"
    return f"rank {rank} has gone on"


def end_process(report: str) -> None:
    """Log the report and end this process: the main thread waits in a collective and can't be interrupted."""
    note_failure()
    log.error("a collective hangs: %s", report)
    print(f"error: a collective hangs: {report}", file=sys.stderr, flush=True)
    # Do not call sys.exit: it would wait for threads and for the clean-up of the process groups.
    os._exit(HUNG)


def client_of(host: str, port: int, timeout: timedelta) -> Callable[[], dist.Store]:
    """Return a function that opens a new connection to the rendezvous.

    The process's existing connection may be blocked in a call.
    """

    def connect() -> dist.Store:
        store = dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        return dist.PrefixStore("watchdog", store)

    return connect


def _key(rank: int) -> str:
    return f"waits/{rank}"
