"""The frame of the HTML pages: one file, no scripts, no external resources, fit for a phone."""

from __future__ import annotations

from html import escape

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1em auto; max-width: 72em; padding: 0 1em;
  color: #1b1b1b; background: #fff; overflow-wrap: anywhere }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
.table { overflow-x: auto }
table { border-collapse: collapse; margin: .5em 0 1.5em; overflow-wrap: normal }
"""


def html_page(title: str, style: str, body: str) -> str:
    """A page with ``body``, which is HTML already, under a heading. ``style``: CSS beside the frame's."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style></head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )
