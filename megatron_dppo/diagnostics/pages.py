"""The HTML pages of the diagnostics, made from ``templates/``, and the tables and responses on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_dppo.metrics.samples import printable


@dataclass(frozen=True)
class SummaryTable:
    """A table of strings; the first column names the row.

    ``note``: meaning of the columns. Only ``shown_title`` is shown of a table without rows.
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


@dataclass(frozen=True)
class TokenSpan:
    """A token on a page: its class in the style, its text, and its tooltip.

    ``shade`` is from 0 to 1: a larger one makes the token darker.
    """

    css: str
    text: str
    hover: str
    shade: float | None = None


@dataclass(frozen=True)
class ResponseText:
    """A prompt and its response on a page. ``about`` names it; ``outcome`` is shown with its advantage."""

    about: str
    prompt: str
    tokens: Sequence[TokenSpan]
    advantage: float | None = None
    outcome: str = ""


def visible(text: str) -> str:
    """Return ``text`` with line ends marked, and unprintable characters as escapes."""
    return printable(text).replace("\n", "\u23ce\n")


TEMPLATES = Path(__file__).with_name("templates")
LEFT_ALIGNED = frozenset(
    {"", "token", "metric", "meaning", "blocked where", "verdict", "computed otherwise"}
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
    """Return the page of a template, all ``values`` escaped: one file, no external resources, fit for a phone."""
    return _environment().get_template(template).render(**values)
