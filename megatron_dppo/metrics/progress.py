"""Progress on the console: bars and spinners on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from megatron_dppo.logging import shared_console

PLAIN_INTERVAL_S = 10.0
"""Seconds between two plain lines."""


class Tracker:
    """Counter of finished items with an optional note. Thread-safe."""

    def __init__(self, description: str, total: int | None) -> None:
        self.description = description
        self.total = total
        self.completed = 0
        self.note = ""
        self._lock = threading.Lock()
        self._started = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Add ``count`` finished items."""
        with self._lock:
            self.completed += count
        self._changed()

    def update(self, *, completed: int | None = None, note: str | None = None) -> None:
        """Set the number of finished items, or the note after the bar (``"loading weights"``)."""
        with self._lock:
            if completed is not None:
                self.completed = completed
            if note is not None:
                self.note = note
        self._changed()

    @property
    def elapsed(self) -> float:
        """Seconds since construction."""
        return time.monotonic() - self._started

    def line(self) -> str:
        """Return the state as text: ``generate: 12/64 (19%), 31 s``."""
        parts = [f"{self.elapsed:.0f} s"]
        if self.total is not None:
            share = ""
            if self.total:
                share = f" ({100 * self.completed / self.total:.0f}%)"
            parts.insert(0, f"{self.completed}/{self.total}{share}")
        if self.note:
            parts.append(self.note)
        return f"{self.description}: {', '.join(parts)}"

    def _changed(self) -> None:
        """Called after every change. A subclass redraws its bar here."""


class _BarTracker(Tracker):
    """A Tracker that updates a task of a rich progress display."""

    def __init__(self, description: str, total: int | None, bar: Progress) -> None:
        super().__init__(description, total)
        self._bar = bar
        self._task = bar.add_task(description, total=total, note="")

    def _changed(self) -> None:
        self._bar.update(self._task, completed=self.completed, note=self.note)


@contextmanager
def progress(
    description: str,
    total: int | None = None,
    *,
    console: Console | None = None,
    interval_s: float = PLAIN_INTERVAL_S,
) -> Iterator[Tracker]:
    """Show the progress of the block; yields the Tracker to advance.

    On a terminal, a bar (without ``total`` a spinner) is shown, and removed at the end; bars may be nested. Elsewhere
    a plain line is printed every ``interval_s`` seconds, and at the end of a block that took at least ``interval_s``.
    Without ``total``, a line is also printed at the start and at the end of every block.

    Args:
        description: text of the work.
        total: number of items; None: unknown.
        console: console to print on; default: the process's shared console. A quiet console prints nothing.
        interval_s: seconds between plain lines.
    """
    console = console or shared_console()
    if console.is_interactive and not console.quiet:
        with Progress(*_columns(total), console=console, transient=True) as bar:
            yield _BarTracker(description, total, bar)
        return
    tracker = Tracker(description, total)
    # A process has a quiet console if another process prints the progress.
    if console.quiet:
        yield tracker
        return
    if total is None:
        _print(console, f"{description} ...")
    finished = threading.Event()
    reporter = threading.Thread(
        target=_report, args=(tracker, console, finished, interval_s), daemon=True, name="progress"
    )
    reporter.start()
    try:
        yield tracker
    finally:
        finished.set()
        reporter.join()
    if total is None or tracker.elapsed >= interval_s:
        outcome = "done"
        if total is not None and tracker.completed < total:
            outcome = "ended"
        _print(console, f"{tracker.line()} ({outcome})")


def _columns(total: int | None) -> list[ProgressColumn]:
    count_columns: list[ProgressColumn] = []
    if total is not None:
        count_columns = [BarColumn(), MofNCompleteColumn()]
    return [
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        *count_columns,
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False, style="dim"),
    ]


def _report(
    tracker: Tracker, console: Console, finished: threading.Event, interval_s: float
) -> None:
    """Print the state every ``interval_s`` seconds until ``finished``."""
    while not finished.wait(interval_s):
        _print(console, tracker.line())


def _print(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False)
