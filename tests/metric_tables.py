"""The table of metrics as it was before a test added the user's own rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_dppo.metrics import table


@contextmanager
def restored_metrics() -> Iterator[None]:
    """Remove the rows that the block adds to the table of metrics: the table belongs to the whole process."""
    tables: tuple[dict[str, Any], ...] = (table.METRICS, table.BY_METRIC)
    saved = [dict(rows) for rows in tables]
    yield
    for rows, saved_rows in zip(tables, saved, strict=True):
        rows.clear()
        rows.update(saved_rows)
