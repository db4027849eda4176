"""What the console shows of work: bars and spinners on a terminal, plain lines elsewhere; seconds of a step by phase;
and the table with a row for each step, and an explanation of unusual figures.

Written to a file or a pipe, the rows have no colours, no control codes and no line breaks.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

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
from rich.text import Text

from megatron_dppo.logging import shared_console
from megatron_dppo.metrics import table
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import mean_accuracy
from megatron_dppo.metrics.row import Dtype

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
            self.completed = self.completed if completed is None else completed
            self.note = self.note if note is None else note
        self._changed()

    @property
    def elapsed(self) -> float:
        """Seconds since construction."""
        return time.monotonic() - self._started

    def line(self) -> str:
        """The state as text: ``generate: 12/64 (19%), 31 s``."""
        parts = [f"{self.elapsed:.0f} s"]
        if self.total is not None:
            share = f" ({100 * self.completed / self.total:.0f}%)" if self.total else ""
            parts.insert(0, f"{self.completed}/{self.total}{share}")
        if self.note:
            parts.append(self.note)
        return f"{self.description}: {', '.join(parts)}"

    def _changed(self) -> None:
        """Called after every change; a subclass redraws its bar."""


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

    On a terminal: a bar, or without ``total`` a spinner, removed at the end; bars may be nested.
    Elsewhere: plain lines, one every ``interval_s`` seconds and one at the end of a block that took
    longer than that; without ``total`` also one at the start and always one at the end.

    Args:
        description: of the work.
        total: number of items; None: unknown.
        console: where to print; default: the process's shared console. A quiet one prints nothing.
        interval_s: seconds between plain lines.
    """
    console = console or shared_console()
    if console.is_interactive and not console.quiet:
        with Progress(*_columns(total), console=console, transient=True) as bar:
            yield _BarTracker(description, total, bar)
        return
    tracker = Tracker(description, total)
    # Another process prints.
    if console.quiet:
        yield tracker
        return
    if total is None:
        _print(console, f"{description} ...")
    done = threading.Event()
    reporter = threading.Thread(
        target=_report, args=(tracker, console, done, interval_s), daemon=True, name="progress"
    )
    reporter.start()
    try:
        yield tracker
    finally:
        done.set()
        reporter.join()
    if total is None or tracker.elapsed >= interval_s:
        whole = total is None or tracker.completed >= total
        _print(console, f"{tracker.line()} ({'done' if whole else 'ended'})")


def _columns(total: int | None) -> list[ProgressColumn]:
    counting: list[ProgressColumn] = (
        [BarColumn(), MofNCompleteColumn()] if total is not None else []
    )
    return [
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        *counting,
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False, style="dim"),
    ]


def _report(tracker: Tracker, console: Console, done: threading.Event, interval_s: float) -> None:
    """Print the state every ``interval_s`` seconds until ``done``."""
    while not done.wait(interval_s):
        _print(console, tracker.line())


def _print(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False)


OTHER = "other"


class PhaseTimer:
    """Splits wall-clock time into named, disjoint phases: ``with timer("generate"): ...``.

    An inner phase stops the clock of the outer one; time outside all phases counts as ``other``.
    So the phases of a step sum to the time since the end of the step before it. A block that raises
    is counted too. Not thread-safe. ``clock`` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mark = clock()
        self._open: list[str] = []
        self._step: defaultdict[str, float] = defaultdict(float)
        self._total: defaultdict[str, float] = defaultdict(float)

    def _credit(self) -> None:
        """Add the seconds since the last change of phase to the running phase."""
        now = self._clock()
        phase = self._open[-1] if self._open else OTHER
        self._step[phase] += now - self._mark
        self._total[phase] += now - self._mark
        self._mark = now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the block's time as ``phase``."""
        self._credit()
        self._open.append(phase)
        try:
            yield
        finally:
            self._credit()
            self._open.pop()

    def finish_step(self) -> dict[str, float]:
        """Seconds by phase since the last call, as metrics: ``{"time/generate_s": 7.1, ...}``.

        Resets the step's clock. The time of a phase that is still open is split at this call.
        """
        self._credit()
        seconds = {table.phase_seconds(phase): value for phase, value in self._step.items()}
        self._step.clear()
        return seconds

    @property
    def total(self) -> dict[str, float]:
        """Seconds by phase since construction."""
        self._credit()
        return dict(self._total)


HEADER_EVERY = 20
HISTORY = 5
"""Number of earlier steps whose mean a figure is compared with to detect a sudden change."""


@dataclass(frozen=True)
class TableColumn:
    """One column of the table.

    Attributes:
        top, bottom: the two lines of the header.
        width: in characters.
        show: formats the value.
        metric: the metric that is shown, and whose normal range marks the figure.
        value: computes a figure from several metrics; replaces ``metric``.
    """

    top: str
    bottom: str
    width: int
    show: Callable[[float], str]
    metric: str = ""
    value: Callable[[Mapping[str, float]], float | None] | None = None

    def read(self, values: Mapping[str, float]) -> float | None:
        """The value of this column in one step; None if it was not measured."""
        return self.value(values) if self.value else values.get(self.metric)


def total_seconds(values: Mapping[str, float]) -> float | None:
    """Wall-clock seconds of the step: the sum of its phases; None if no phase was timed."""
    phases = [value for name, value in values.items() if names.phase_of(name) is not None]
    return sum(phases) if phases else None


def _percent(value: float) -> str:
    """Percent with two decimals below 10%, one from 10% on: 0.02%, 12.5%."""
    return f"{100 * value:.2f}%" if abs(value) < 0.1 else f"{100 * value:.1f}%"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _plain(decimals: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{decimals}f}"


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


COLUMNS: tuple[TableColumn, ...] = (
    TableColumn("", "reward", 6, _plain(3), names.REWARD),
    TableColumn("held-", "out", 6, _plain(3), value=mean_accuracy),
    TableColumn("|pi-mu|", "equal w", 8, _small, names.GAP_ON_POLICY),
    TableColumn("|pi-mu|", "step", 8, _small, names.GAP),
    TableColumn("masked", "A>0", 7, _percent, names.MASKED_POSITIVE),
    TableColumn("masked", "A<0", 7, _percent, names.MASKED_NEGATIVE),
    TableColumn("", "entropy", 7, _plain(3), names.ENTROPY),
    TableColumn("", "length", 7, _plain(1), names.RESPONSE_LENGTH),
    TableColumn("trun-", "cated", 7, _percent, names.TRUNCATED),
    TableColumn("grad", "norm", 6, "{:.2g}".format, names.GRAD_NORM),
    TableColumn("", "seconds", 7, _seconds, value=total_seconds),
    TableColumn("", "gen", 6, _seconds, names.phase_seconds("generate")),
    TableColumn("", "train", 6, _seconds, names.phase_seconds("train")),
    TableColumn("", "sync", 6, _seconds, names.phase_seconds("sync")),
    TableColumn("tokens", "/s", 7, _plain(0), names.TOKENS_PER_SECOND),
)


class NormalityCheck:
    """Compares each step's metrics with their normal ranges and with the steps before."""

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype
        self._history: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))

    def step(self, values: Mapping[str, float]) -> dict[str, str]:
        """Compare one step; returns metric -> finding, for the unusual metrics only."""
        unusual: dict[str, str] = {}
        for name, normal in table.BY_METRIC.items():
            value = values.get(name)
            if value is None:
                continue
            finding = self._judge(table.METRICS[name], normal, value)
            if finding:
                unusual[name] = f"{normal.label} {table.METRICS[name].show(value)}: {finding}"
            if math.isfinite(value):
                self._history[name].append(value)
        return unusual

    def _judge(self, metric: table.Metric, normal: table.NormalRange, value: float) -> str:
        """The finding about ``value``; empty if it is normal."""
        if not math.isfinite(value):
            return "not a finite number"
        if not normal.low <= value <= normal.upper(self.dtype):
            # A bound that is the same in every data type says nothing of it.
            of_dtype = "" if normal.high_bf16 is None else f" in {self.dtype}"
            return f"expected {metric.range_text(self.dtype)}{of_dtype}"
        history = self._history[metric.name]
        if len(history) == HISTORY:
            usual = fmean(history)
            # Without a bound on its drop a metric may also fall below zero.
            low = normal.most_drop * usual if normal.most_drop else -math.inf
            if usual > 0 and not low <= value <= normal.most_rise * usual:
                return f"its mean over the {HISTORY} steps before was {metric.show(usual)}"
        return ""


class StepTable:
    """Prints one row for each step; marks unusual figures with ``!`` and explains each once.

    The header is repeated every ``HEADER_EVERY`` rows.

    Args:
        dtype: of the policy; selects the normal ranges.
        total_steps: of the whole run.
        console: where to print; default: the process's shared console.
    """

    def __init__(self, dtype: Dtype, total_steps: int, *, console: Console | None = None) -> None:
        self._check = NormalityCheck(dtype)
        self._total = total_steps
        self._console = console or shared_console()
        self._explained: set[str] = set()
        self._lines = 0
        self._step_width = 2 * len(str(total_steps)) + 1

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Print the row of ``step``; ``values``: metric name -> value, as in the metrics file."""
        unusual = self._check.step(values)
        if self._lines % HEADER_EVERY == 0:
            self._print(self._header())
        self._lines += 1
        self._print(self._row(step, values, unusual))
        for metric in [name for name in unusual if name not in self._explained]:
            self._explained.add(metric)
            self._print(
                Text(f"  ! {unusual[metric]}. {table.BY_METRIC[metric].why}", style="yellow")
            )

    def note(self, lines: Sequence[str]) -> None:
        """Print ``lines`` below the last row."""
        for line in lines:
            self._print(Text(f"  {line}", style="dim"))

    def _header(self) -> Text:
        top = ["".rjust(self._step_width), *(c.top.rjust(c.width) for c in COLUMNS)]
        bottom = ["step".rjust(self._step_width), *(c.bottom.rjust(c.width) for c in COLUMNS)]
        return Text("\n".join(" ".join(row).rstrip() for row in (top, bottom)), style="bold")

    def _row(self, step: int, values: Mapping[str, float], unusual: Mapping[str, str]) -> Text:
        line = Text(f"{step}/{self._total}".rjust(self._step_width) + " ")
        for column in COLUMNS:
            value = column.read(values)
            shown = "" if value is None else column.show(value) if math.isfinite(value) else "nan"
            marked = column.metric in unusual
            cell = shown.rjust(column.width) + ("!" if marked else " ")
            line.append(cell, style="yellow" if marked else "")
        line.rstrip()
        return line

    def _print(self, text: Text) -> None:
        """Print without line breaks; outside a terminal rich would break at 80 columns."""
        self._console.print(text, soft_wrap=True)
