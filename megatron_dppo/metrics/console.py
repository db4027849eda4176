"""One readable line a step on the terminal, with a word on whatever looks unusual.

Piped into a file the same lines come without colours, control codes or folding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from megatron_dppo.logging import shared_console
from megatron_dppo.metrics import names
from megatron_dppo.metrics.expectations import BY_METRIC, Dtype, NormalityCheck
from megatron_dppo.metrics.records import mean_accuracy

HEADER_EVERY = 20


@dataclass(frozen=True)
class Column:
    """One figure of the line: two header words, its width, and how its metric is shown.

    ``metric`` also names the expectation that marks the figure; ``value`` computes figures made of
    several metrics.
    """

    top: str
    bottom: str
    width: int
    show: Callable[[float], str]
    metric: str = ""
    value: Callable[[Mapping[str, float]], float | None] | None = None

    def read(self, values: Mapping[str, float]) -> float | None:
        """The figure of this step, None where it was not measured."""
        return self.value(values) if self.value else values.get(self.metric)


def total_seconds(values: Mapping[str, float]) -> float | None:
    """Wall-clock seconds of the step: the sum of its phases."""
    phases = [value for name, value in values.items() if names.phase_of(name) is not None]
    return sum(phases) if phases else None


def _percent(value: float) -> str:
    """Two decimals below 10%, one above: 0.02%, 12.5%."""
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


class StepConsole:
    """Prints a line for each step and explains what is unusual, once for each figure.

    A header comes every twenty lines. ``dtype``: the policy's, which sets the expected ranges.
    ``total_steps``: of the whole run. ``explain``: print the explanations; figures outside their
    range are marked with ``!`` either way.
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
        """Print ``step`` with its metrics as they are written to the metrics file."""
        odd = self._check.step(values)
        if self._lines % HEADER_EVERY == 0:
            self._print(self._header())
        self._lines += 1
        self._print(self._line(step, values, odd))
        if self._explain:
            for metric in [name for name in odd if name not in self._explained]:
                self._explained.add(metric)
                self._print(Text(f"  ! {odd[metric]}. {BY_METRIC[metric].why}", style="yellow"))

    def _header(self) -> Text:
        top = ["".rjust(self._step_width), *(c.top.rjust(c.width) for c in COLUMNS)]
        bottom = ["step".rjust(self._step_width), *(c.bottom.rjust(c.width) for c in COLUMNS)]
        return Text("\n".join(" ".join(row).rstrip() for row in (top, bottom)), style="bold")

    def _line(self, step: int, values: Mapping[str, float], odd: Mapping[str, str]) -> Text:
        line = Text(f"{step}/{self._total}".rjust(self._step_width) + " ")
        for column in COLUMNS:
            value = column.read(values)
            shown = "" if value is None else column.show(value) if math.isfinite(value) else "nan"
            unusual = column.metric in odd
            cell = shown.rjust(column.width) + ("!" if unusual else " ")
            line.append(cell, style="yellow" if unusual else "")
        line.rstrip()
        return line

    def _print(self, text: Text) -> None:
        """Print without folding; outside a terminal rich would fold at 80 columns."""
        self._console.print(text, soft_wrap=True)
