"""Render the HTML pages of the diagnostics from ``templates/``, and their tables on a console.

The classes hold the content of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from megatron_dppo.metrics.samples import printable


@dataclass(frozen=True)
class SummaryTable:
    """A table of strings; the first column names the row.

    ``note`` explains the columns. For a table without rows, only ``shown_title`` is shown.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    @property
    def shown_title(self) -> str:
        """The title, followed by ``(none)`` if there are no rows."""
        if self.rows:
            return self.title
        return f"{self.title}: (none)"

    def show(self, console: Console) -> None:
        """Print the table."""
        if not self.rows:
            console.print(self.shown_title)
            return
        columns: list[Column] = []
        for name in self.columns:
            columns.append(Column(name, justify="left" if name in LEFT_ALIGNED else "right"))
        note = self.note or None
        table = Table(
            *columns, title=self.title, title_justify="left", caption=note, caption_justify="left"
        )
        for row in self.rows:
            table.add_row(*map(Text, row))
        console.print(table)


@dataclass(frozen=True)
class TokenSpan:
    """A token on a page: its CSS class, its text, and its tooltip.

    ``shade`` is from 0 to 1. A larger value makes the token darker.
    """

    css: str
    text: str
    hover: str
    shade: float | None = None


@dataclass(frozen=True)
class ResponseText:
    """A prompt and its response on a page.

    ``about`` names the response. ``outcome`` describes its reward and its end in words; the page shows it beside the
    advantage.
    """

    about: str
    prompt: str
    tokens: Sequence[TokenSpan]
    advantage: float | None = None
    outcome: str = ""


def visible(text: str) -> str:
    """Return ``text`` with a mark at each line end, and with unprintable characters as escapes."""
    return printable(text).replace("\n", "\u23ce\n")


TEMPLATES = Path(__file__).with_name("templates")
LEFT_ALIGNED = frozenset(
    {
        *("", "token", "metric", "meaning", "blocked where", "verdict", "computed otherwise"),
        *("fixed", "cause", "implementation", "update"),
    }
)
"""Names of the columns with text; the other columns have numbers."""


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"printable": printable, "visible": visible}
    environment.globals["left_aligned"] = LEFT_ALIGNED
    return environment


def render_page(template: str, **values: Any) -> str:
    """Return the page of a template with the escaped ``values``. The page is one file and needs no other resource."""
    return _environment().get_template(template).render(**values)
