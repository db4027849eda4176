"""What is wrong with a node, and how nodes that differ from the others are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

EVERYWHERE = "*"
"""Host of a finding that no single node is to blame for: leaving one out would not help."""


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is not as it must be.

    Attributes:
        host: the node's name, or ``EVERYWHERE``.
        what: what was looked at.
        got: what was found there.
        expected: what a run needs.
    """

    host: str
    what: str
    got: str
    expected: str

    def __str__(self) -> str:
        where = "all nodes" if self.host == EVERYWHERE else self.host
        return f"{where}: {self.what}: got {self.got}, expected {self.expected}"


def too_little(what: str, found: Mapping[str, int], needed: int, unit: str) -> Iterator[Finding]:
    """One finding for each host that has less than ``needed``; ``unit``: ``GiB`` divides by 2**30."""
    for host, value in found.items():
        if value < needed:
            yield Finding(host, what, amount(value, unit), f"at least {amount(needed, unit)}")


def amount(value: int, unit: str) -> str:
    """A number with its unit; bytes as GiB or MiB, whichever reads better."""
    if unit != "GiB":
        return f"{value} {unit}"
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def odd_ones(what: str, found: Mapping[str, Any]) -> Iterator[Finding]:
    """One finding for each host whose value is not what most hosts have.

    Where two values are equally frequent, the one of the host that comes first is expected.
    """
    if not found:
        return
    values = {host: str(value) for host, value in sorted(found.items())}
    usual, count = Counter(values.values()).most_common(1)[0]
    for host, value in values.items():
        if value != usual:
            yield Finding(host, what, value, f"{usual}, as on {count} of {len(values)} nodes")


def culprits(broken: set[frozenset[str]]) -> Iterator[tuple[str, int]]:
    """Nodes that take part in all broken pairs, most involved first, with the pairs each explains.

    Of two nodes with as many the later name is blamed: the first node of a job runs its supervisor.
    """
    left = set(broken)
    while left:
        counts = Counter(host for pair in left for host in pair)
        host = max(counts, key=lambda name: (counts[name], name))
        yield host, counts[host]
        left = {pair for pair in left if host not in pair}
