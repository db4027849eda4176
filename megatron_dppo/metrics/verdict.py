"""The verdict about a run of the demo or of a rehearsal: a table of measurements with their targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class VerdictRow:
    """A measurement, its target, and whether the target is met.

    Attributes:
        label: name of the measurement.
        measured: measured value with its unit, as text.
        expected: target as text; empty without a target.
        holds: whether the target is met; None without a target.
    """

    label: str
    measured: str
    expected: str = ""
    holds: bool | None = None


def verdict_table(title: str, rows: Iterable[VerdictRow]) -> Table:
    """Return the table of ``rows`` for the console."""
    table = Table("", "measured", "expected", "holds", title=title)
    for row in rows:
        answers = {None: "", True: "yes", False: "NO"}
        table.add_row(row.label, row.measured, row.expected, answers[row.holds])
    return table
