"""The table on the console: one row for each step, and an explanation of unusual figures.

Written to a file or a pipe, the rows have no colours, no control codes and no line breaks.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console
from rich.text import Text

from megatron_dppo.logging import shared_console
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import mean_accuracy
from megatron_dppo.metrics.table import BY_METRIC, METRICS, Dtype, Metric, NormalRange

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
        for name, normal in BY_METRIC.items():
            value = values.get(name)
            if value is None:
                continue
            finding = self._judge(METRICS[name], normal, value)
            if finding:
                unusual[name] = f"{normal.label} {METRICS[name].show(value)}: {finding}"
            if math.isfinite(value):
                self._history[name].append(value)
        return unusual

    def _judge(self, metric: Metric, normal: NormalRange, value: float) -> str:
        """The finding about ``value``; empty if it is normal."""
        if not math.isfinite(value):
            return "not a finite number"
        if not normal.low <= value <= normal.upper(self.dtype):
            return f"expected {metric.range_text(self.dtype)} in {self.dtype}"
        history = self._history[metric.name]
        if len(history) == HISTORY:
            usual = fmean(history)
            if usual > 0 and not normal.most_drop * usual <= value <= normal.most_rise * usual:
                return f"its mean over the {HISTORY} steps before was {metric.show(usual)}"
        return ""


class StepTable:
    """Prints one row for each step; marks unusual figures with ``!`` and explains each once.

    The header is repeated every ``HEADER_EVERY`` rows.

    Args:
        dtype: of the policy; selects the normal ranges.
        total_steps: of the whole run.
        explain: print the explanations; figures are marked either way.
        console: where to print; default: the process's shared console.
    """

    def __init__(
        self,
        dtype: Dtype,
        total_steps: int,
        *,
        explain: bool = True,
        console: Console | None = None,
    ) -> None:
        self._check = NormalityCheck(dtype)
        self._total = total_steps
        self._explain = explain
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
        if self._explain:
            for metric in [name for name in unusual if name not in self._explained]:
                self._explained.add(metric)
                self._print(Text(f"  ! {unusual[metric]}. {BY_METRIC[metric].why}", style="yellow"))

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
