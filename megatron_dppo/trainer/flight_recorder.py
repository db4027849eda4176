"""Collectives of this process that have not ended, as torch's flight recorder keeps them: every group's,
Megatron-Core's too, of gloo and of NCCL.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup, distributed_c10d

BUFFER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
_ENTRIES = "256"
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


def switch_on() -> None:
    """Have torch record collectives; before the first process group. A size that is set stays."""
    os.environ.setdefault(BUFFER_VARIABLE, _ENTRIES)


def pending(*, callers: bool) -> list[Pending]:
    """Collectives of this process that have not ended, the oldest first.

    ``callers``: name the lines that asked for them. For that torch imports its compiler in the calling
    thread: only where the main thread, which imports it too, waits in one of these collectives.
    """
    dump: Any = vars(_distributed_c10d)["_dump_fr_trace"]
    trace = pickle.loads(dump(True, callers, True))
    groups = list(distributed_c10d._world.pg_group_ranks.items())
    return read_trace(
        trace,
        {
            group.group_name: tuple(ranks)
            for group, ranks in groups
            if isinstance(group, ProcessGroup)  # torch keeps a number for groups without this rank
        },
    )


def read_trace(trace: Mapping[str, Any], ranks: Mapping[str, tuple[int, ...]]) -> list[Pending]:
    """Those of a dump of the recorder (version 2) that are not retired.

    ``ranks``: global ranks by group; the recorder knows NCCL's only.
    """
    found = [_pending(entry, ranks) for entry in trace.get("entries", ()) if not entry["retired"]]
    return sorted(found, key=lambda each: each.since_ns)


def _pending(entry: Mapping[str, Any], ranks: Mapping[str, tuple[int, ...]]) -> Pending:
    name, use = entry["process_group"]
    return Pending(
        group=f"{name} ({use})" if use and use != "undefined" else name,
        ranks=tuple(ranks.get(name, ())),
        name=entry["profiling_name"],
        number=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
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
