"""Pages and tables that the diagnostics share: a table of strings, and the frame of an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class SummaryTable:
    """A table of strings; the first column names the row. ``note``: what the columns mean. Without rows it is shown as
    its ``shown_title`` alone."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    @property
    def shown_title(self) -> str:
        """The title, and that nothing follows where there is no row."""
        return self.title if self.rows else f"{self.title}: (none)"


POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_PAGE_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1em auto; max-width: 72em; padding: 0 1em;
  color: #1b1b1b; background: #fff; overflow-wrap: anywhere }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
.table { overflow-x: auto }
table { border-collapse: collapse; margin: .5em 0 1.5em; overflow-wrap: normal }
"""


def html_page(title: str, style: str, body: str) -> str:
    """A page with ``body``, which is HTML already, under a heading: one file, no scripts, no external resources, fit
    for a phone. ``style``: CSS beside the frame's.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{_PAGE_STYLE}{style}</style></head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )
