"""The console table with a row for each step, and explanations of unusual values."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from rich.console import Console
from rich.text import Text

from megatron_dppo.logging import shared_console
from megatron_dppo.metrics import table as metric_table
from megatron_dppo.metrics.records import mean_accuracy
from megatron_dppo.metrics.row import Dtype

HEADER_EVERY = 20
"""Number of rows after which the header is repeated."""
HISTORY = 5
"""Number of earlier steps. A value is compared with its mean over these steps, to detect a sudden change."""


@dataclass(frozen=True)
class TableColumn:
    """One column of the table.

    Attributes:
        top, bottom: the two lines of the header.
        width: width in characters.
        show: formats the value.
        metric: name of the metric in the column; a value outside its normal range is marked.
        value: computes the column's value from several metrics; None: the column shows ``metric``.
    """

    top: str
    bottom: str
    width: int
    show: Callable[[float], str]
    metric: str = ""
    value: Callable[[Mapping[str, float]], float | None] | None = None

    def read(self, values: Mapping[str, float]) -> float | None:
        """Return the value of this column in one step; None if it was not measured."""
        if self.value:
            return self.value(values)
        return values.get(self.metric)


def total_seconds(values: Mapping[str, float]) -> float | None:
    """Return the wall-clock seconds of the step, the sum of its phases; None if no phase was timed."""
    phase_seconds: list[float] = []
    for name, value in values.items():
        if metric_table.phase_of(name) is not None:
            phase_seconds.append(value)
    return sum(phase_seconds) if phase_seconds else None


def _percent(value: float) -> str:
    """Format a share in percent with two decimals below 10%, one from 10% on: 0.02%, 12.5%."""
    if abs(value) < 0.1:
        return f"{100 * value:.2f}%"
    return f"{100 * value:.1f}%"


def _seconds(value: float) -> str:
    if value < 1000:
        return f"{value:.1f}"
    return f"{value:.0f}"


def _plain(decimals: int) -> Callable[[float], str]:
    def format_value(value: float) -> str:
        return f"{value:.{decimals}f}"

    return format_value


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


COLUMNS: tuple[TableColumn, ...] = (
    TableColumn("", "reward", 6, _plain(3), metric_table.REWARD),
    TableColumn("held-", "out", 6, _plain(3), value=mean_accuracy),
    TableColumn("|pi-mu|", "equal w", 8, _small, metric_table.GAP_ON_POLICY),
    TableColumn("|pi-mu|", "step", 8, _small, metric_table.GAP),
    TableColumn("masked", "A>0", 7, _percent, metric_table.MASKED_POSITIVE),
    TableColumn("masked", "A<0", 7, _percent, metric_table.MASKED_NEGATIVE),
    TableColumn("", "entropy", 7, _plain(3), metric_table.ENTROPY),
    TableColumn("", "length", 7, _plain(1), metric_table.RESPONSE_LENGTH),
    TableColumn("trun-", "cated", 7, _percent, metric_table.TRUNCATED),
    TableColumn("grad", "norm", 6, "{:.2g}".format, metric_table.GRAD_NORM),
    TableColumn("", "seconds", 7, _seconds, value=total_seconds),
    TableColumn("", "gen", 6, _seconds, metric_table.phase_seconds("generate")),
    TableColumn("", "train", 6, _seconds, metric_table.phase_seconds("train")),
    TableColumn("", "sync", 6, _seconds, metric_table.phase_seconds("sync")),
    TableColumn("tokens", "/s", 7, _plain(0), metric_table.TOKENS_PER_SECOND),
)


class NormalityCheck:
    """Compares each step's metrics with their normal ranges and with the steps before."""

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype
        self._history: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=HISTORY))

    def compare(self, values: Mapping[str, float]) -> dict[str, str]:
        """Compare the metrics of one step. Returns metric -> finding, for the unusual metrics only."""
        unusual: dict[str, str] = {}
        for name, normal in metric_table.BY_METRIC.items():
            value = values.get(name)
            if value is None:
                continue
            finding = self._judge(metric_table.METRICS[name], normal, value)
            if finding:
                unusual[name] = (
                    f"{normal.label} {metric_table.METRICS[name].show(value)}: {finding}"
                )
            if math.isfinite(value):
                self._history[name].append(value)
        return unusual

    def _judge(
        self, metric: metric_table.Metric, normal: metric_table.NormalRange, value: float
    ) -> str:
        """Return the finding about ``value``; empty if it is normal."""
        if not math.isfinite(value):
            return "not a finite number"
        if not normal.low <= value <= normal.upper(self.dtype):
            # Name the dtype only if the bound depends on it.
            dtype_text = ""
            if normal.high_bf16 is not None or normal.high_fp8 is not None:
                dtype_text = f" in {self.dtype}"
            return f"expected {metric.range_text(self.dtype)}{dtype_text}"
        history = self._history[metric.name]
        if len(history) < HISTORY:
            if value <= normal.high_first:
                return ""
            return f"expected at most {metric.show(normal.high_first)} in the first {HISTORY} steps"
        return self._judge_by_history(metric, normal, value, history)

    def _judge_by_history(
        self,
        metric: metric_table.Metric,
        normal: metric_table.NormalRange,
        value: float,
        history: deque[float],
    ) -> str:
        """Return the finding about ``value`` and its mean over the steps before; empty if it is normal."""
        recent_mean = fmean(history)
        # A ratio to a mean of zero or below says nothing.
        if recent_mean <= 0:
            return ""
        low = -math.inf
        if normal.most_drop > 0:
            low = normal.most_drop * recent_mean
        if not low <= value <= normal.most_rise * recent_mean:
            return f"its mean over the {HISTORY} steps before was {metric.show(recent_mean)}"
        return ""


class StepTable:
    """Prints one row for each step, marks unusual values with ``!``, and explains each metric's first unusual value.

    The header is repeated every ``HEADER_EVERY`` rows. In a file or a pipe, the rows have no colours, no control codes
    and no line breaks.

    Args:
        dtype: dtype of the weights of trainer and servers; selects the normal ranges.
        total_steps: steps of the whole run.
        console: console to print on; default: the process's shared console.
    """

    def __init__(self, dtype: Dtype, total_steps: int, *, console: Console | None = None) -> None:
        self._check = NormalityCheck(dtype)
        self._total_steps = total_steps
        self._console = console or shared_console()
        self._explained_metrics: set[str] = set()
        self._rows = 0
        # The longest text is total/total.
        self._step_width = 2 * len(str(total_steps)) + 1

    def print_step(self, step: int, values: Mapping[str, float]) -> None:
        """Print the row of ``step``; ``values``: metric name -> value, as in the metrics file."""
        unusual = self._check.compare(values)
        if self._rows % HEADER_EVERY == 0:
            self._print(self._header())
        self._rows += 1
        self._print(self._row(step, values, unusual))
        for metric, text in unusual.items():
            if metric in self._explained_metrics:
                continue
            self._explained_metrics.add(metric)
            self._print(Text(f"  ! {text}. {metric_table.BY_METRIC[metric].why}", style="yellow"))

    def note(self, lines: Sequence[str]) -> None:
        """Print ``lines`` below the last row."""
        for line in lines:
            self._print(Text(f"  {line}", style="dim"))

    def _header(self) -> Text:
        top = ["".rjust(self._step_width)]
        bottom = ["step".rjust(self._step_width)]
        for column in COLUMNS:
            top.append(column.top.rjust(column.width))
            bottom.append(column.bottom.rjust(column.width))
        top_line = " ".join(top).rstrip()
        bottom_line = " ".join(bottom).rstrip()
        return Text(f"{top_line}\n{bottom_line}", style="bold")

    def _row(self, step: int, values: Mapping[str, float], unusual: Mapping[str, str]) -> Text:
        line = Text(f"{step}/{self._total_steps}".rjust(self._step_width) + " ")
        for column in COLUMNS:
            value = column.read(values)
            if value is None:
                text = ""
            elif math.isfinite(value):
                text = column.show(value)
            else:
                text = "nan"
            mark = " "
            style = ""
            if column.metric in unusual:
                mark = "!"
                style = "yellow"
            line.append(text.rjust(column.width) + mark, style=style)
        line.rstrip()
        return line

    def _print(self, text: Text) -> None:
        """Print without line breaks; outside a terminal rich would break at 80 columns."""
        self._console.print(text, soft_wrap=True)
