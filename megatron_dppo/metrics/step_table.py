"""The table on the console: one row for each step, and an explanation of unusual figures.

Written to a file or a pipe, the rows have no colours, no control codes and no line breaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from megatron_dppo.logging import shared_console
from megatron_dppo.metrics import names
from megatron_dppo.metrics.normal_ranges import BY_METRIC, Dtype, NormalityCheck
from megatron_dppo.metrics.records import mean_accuracy

HEADER_EVERY = 20


@dataclass(frozen=True)
class Column:
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


COLUMNS: tuple[Column, ...] = (
    Column("", "reward", 6, _plain(3), names.REWARD),
    Column("held-", "out", 6, _plain(3), value=mean_accuracy),
    Column("|pi-mu|", "equal w", 8, _small, names.GAP_ON_POLICY),
    Column("|pi-mu|", "step", 8, _small, names.GAP),
    Column("masked", "A>0", 7, _percent, names.MASKED_POSITIVE),
    Column("masked", "A<0", 7, _percent, names.MASKED_NEGATIVE),
    Column("", "entropy", 7, _plain(3), names.ENTROPY),
    Column("", "length", 7, _plain(1), names.RESPONSE_LENGTH),
    Column("trun-", "cated", 7, _percent, names.TRUNCATED),
    Column("grad", "norm", 6, "{:.2g}".format, names.GRAD_NORM),
    Column("", "seconds", 7, _seconds, value=total_seconds),
    Column("", "gen", 6, _seconds, names.phase_seconds("generate")),
    Column("", "train", 6, _seconds, names.phase_seconds("train")),
    Column("", "sync", 6, _seconds, names.phase_seconds("sync")),
    Column("tokens", "/s", 7, _plain(0), names.TOKENS_PER_SECOND),
)


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
