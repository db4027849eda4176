"""Collectives of this process that have not ended, as torch's flight recorders keep them: every group's,
Megatron-Core's too, of gloo and of NCCL, each of which has a recorder of its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup, distributed_c10d

DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
"""torch's functions for gloo's recorder and for NCCL's; a build without NCCL lacks the second."""
_LIBRARIES = ("torch", "megatron")


@dataclass(frozen=True)
class Pending:
    """A collective that has begun on this rank and not ended.

    Attributes:
        group: its process group, as torch names it: a number, and what it is for.
        ranks: global ranks of the group.
        name: backend and operation, ``gloo:all_reduce``.
        number: how many of the group's operations have begun here, this one included.
        caller: the line that asked for it, outside of torch and Megatron-Core where there is one.
        since_ns: when, in epoch nanoseconds.
    """

    group: str
    ranks: tuple[int, ...]
    name: str
    number: int
    caller: str
    since_ns: int

    def is_same(self, other: Pending) -> bool:
        """Whether both are one collective, seen by two ranks or at two moments."""
        return (self.group, self.name, self.number) == (other.group, other.name, other.number)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json``."""
        return cls(**{**values, "ranks": tuple(values["ranks"])})

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.name}, number {self.number} of group {self.group} (ranks {ranks})"


def pending(*, callers: bool) -> list[Pending]:
    """Collectives of this process that have not ended, the oldest first.

    ``callers``: name the lines that asked for them. For that torch imports its compiler in the calling
    thread: only where the main thread, which imports it too, waits in one of these collectives.
    """
    groups = list(distributed_c10d._world.pg_group_ranks.items())
    ranks = {
        str(group.group_name): tuple(members)
        for group, members in groups
        if isinstance(group, ProcessGroup)  # torch keeps a number for groups without this rank
    }
    dumps: list[Any] = [getattr(_distributed_c10d, name, None) for name in DUMPS]
    # All entries, the ended ones too: a batch of NCCL is known by the one that closes it.
    traces = [pickle.loads(dump(True, callers, False)) for dump in dumps if dump is not None]
    found = [each for trace in traces for each in read_trace(trace, ranks)]
    return sorted(found, key=lambda each: each.since_ns)


def read_trace(trace: Mapping[str, Any], ranks: Mapping[str, tuple[int, ...]]) -> list[Pending]:
    """Those of a dump of a recorder (version 2) that have not ended.

    The operations of a batch of NCCL (``batch_isend_irecv``) have no state of their own and stay as they
    were recorded for ever (ProcessGroupNCCL::pointToPoint): the entry that closes the batch, of the same
    number, has it.

    ``ranks``: global ranks by group; the recorder knows NCCL's only.
    """
    entries = trace.get("entries", ())
    closed = {_batch(e) for e in entries if e["profiling_name"].endswith("coalesced")}
    found = [
        _pending(entry, ranks)
        for entry in entries
        if not entry["retired"]
        and entry["state"] != "completed"  # seen by the device, not yet by torch's watchdog
        and (entry["profiling_name"].endswith("coalesced") or _batch(entry) not in closed)
    ]
    return sorted(found, key=lambda each: each.since_ns)


def _batch(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for the operations of one batch."""
    return (entry["process_group"], entry["is_p2p"], _number(entry))


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"])


def _pending(entry: Mapping[str, Any], ranks: Mapping[str, tuple[int, ...]]) -> Pending:
    name, use = entry["process_group"]
    return Pending(
        group=f"{name} ({use})" if use and use != "undefined" else name,
        ranks=tuple(ranks.get(name, ())),
        name=entry["profiling_name"],
        number=_number(entry),
        caller=next(_callers(entry.get("frames", ())), "unknown"),
        since_ns=entry["time_created_ns"],
    )


def _callers(frames: Any) -> Iterator[str]:
    """Lines outside of the libraries, the innermost first; then the outermost that there is."""
    for frame in frames:
        path = Path(frame["filename"])
        if not set(_LIBRARIES) & set(path.parts) and path.suffix == ".py":
            yield f"{'/'.join(path.parts[-2:])}:{frame['line']} ({frame['name']})"
    if frames:
        yield f"{frames[-1]['filename']}:{frames[-1]['line']}"
