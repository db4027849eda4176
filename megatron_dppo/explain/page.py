"""The explanation as one HTML file: no scripts, no external resources, all text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megatron_dppo.explain.explanation import Response, Token
from megatron_dppo.explain.summary_tables import (
    LEFT_ALIGNED,
    Sheet,
    number,
    quoted,
    verdict_of,
    verdicts,
)
from megatron_dppo.metrics.html import html_page

STYLE = """
caption { text-align: left; font-weight: 600; padding: .3em 0 }
th, td { padding: .15em .7em; text-align: right; border-bottom: 1px solid #ddd }
th.words, td.words { text-align: left }
.response { border-top: 1px solid #ddd; padding: .6em 0 }
.about { color: #555; font-size: .85em } .up { color: #00691f } .down { color: #a3000f }
.prompt, .tokens { font-family: ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere }
.prompt { color: #777 }
.tokens span, .legend span { unicode-bidi: isolate; border-radius: 3px; padding: 0 1px;
  margin-right: 1px; border: 1px solid transparent }
.legend span { display: inline-block; margin: 0 1em .3em 0; padding: .1em .4em }
.train { background: rgba(90, 90, 90, var(--tv, 0)) }
.both { background: #c9a6f5; border-color: #6a2bc2 !important }
.own { background: #ffb3a8; border-color: #c22b14 !important }
.ppo { background: #a9d4ff; border-color: #1466b8 !important }
.tokens span:hover { outline: 2px solid #000 }
"""


def render(
    title: str,
    facts: Sequence[str],
    tables: Sequence[Sheet],
    name: str,
    responses: Sequence[Response],
) -> str:
    """The HTML page. ``facts``: lines above the tables; ``name``: of the algorithm."""
    blocks = [
        *(f"<div>{escape(fact)}</div>" for fact in facts),
        "<h2>Summary</h2>",
        *map(_table, tables),
        "<h2>Responses</h2>",
        _legend(name),
        *(_response(name, r) for r in responses),
    ]
    return html_page(title, STYLE, "\n".join(blocks))


def _table(sheet: Sheet) -> str:
    if not sheet.rows:
        return f"<table><caption>{escape(sheet.title)}</caption></table>"
    kinds = [' class="words"' if name in LEFT_ALIGNED else "" for name in sheet.columns]

    def line(tag: str, cells: Sequence[str]) -> str:
        made = (f"<{tag}{kind}>{escape(c)}</{tag}>" for kind, c in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    lines = "\n".join([line("th", sheet.columns), *(line("td", row) for row in sheet.rows)])
    caption = f"<caption>{escape(sheet.title)}</caption>"
    return f'<div class="table"><table>{caption}\n{lines}</table></div>'


def _legend(name: str) -> str:
    keys = "".join(f'<span class="{v.css}">{escape(v.words)}</span>' for v in verdicts(name))
    return (
        f'<p class="legend">{keys}</p><p class="about">A token that trains is the darker the larger '
        "its Binary TV. Neither a clip nor a divergence mask blocks a token whose update brings pi "
        "back towards mu, however far apart they are. Point at a token for its numbers.</p>"
    )


def _response(name: str, response: Response) -> str:
    r, first = response.trajectory, response.tokens[0]
    sign = "up" if first.advantage > 0 else "down"
    about = f"response {response.index}: problem {r.problem_id}, sample {r.sample_index}, "
    reward = f"reward {r.reward:g}, {r.finish_reason}"
    spans = "".join(_span(name, token) for token in response.tokens)
    return (
        f'<div class="response"><div class="about">{about}'
        f'<b class="{sign}">A = {first.advantage:+.3g}</b>, {reward}</div>'
        f'<div class="prompt">{escape(visible(response.prompt))}</div>'
        f'<div class="tokens">{spans}</div></div>'
    )


def _span(name: str, token: Token) -> str:
    verdict = verdict_of(name, token)
    shade = f' style="--tv:{token.binary_tv:.2f}"' if verdict.css == "train" else ""
    hover = escape(numbers(name, token)).replace("\n", "&#10;")
    return (
        f'<span class="{verdict.css}"{shade} title="{hover}">{escape(visible(token.text))}</span>'
    )


def numbers(name: str, token: Token) -> str:
    """The text of a token's tooltip."""
    pairs = [
        f"{quoted(token.text)}, id {token.token_id}, token {token.position}",
        verdict_of(name, token).words,
        f"A {token.advantage:+.4g}; blocked where {token.threshold or 'never'}",
        f"mu {number(token.mu)}, pi {number(token.pi)}, r {number(token.ratio)}, "
        f"weight {number(token.weight)}",
        f"Binary: TV {number(token.binary_tv)}, KL {number(token.binary_kl)}",
    ]
    if token.topk_tv is not None:
        pairs.append(f"Top-K: TV {number(token.topk_tv)}, KL {number(token.topk_kl)}")
    if token.exact_tv is not None:
        pairs.append(f"exact: TV {number(token.exact_tv)}, KL {number(token.exact_kl)}")
    if token.recomputed is not None:
        pairs.append(f"pi' (trainer at the rollout's weights) {number(token.recomputed)}")
    return "\n".join([*pairs, f"entropy {number(token.entropy)} nats"])


def visible(text: str) -> str:
    """``text`` with line ends marked and unprintable characters as escapes."""
    return "".join(
        "\u23ce\n" if c == "\n" else c if c.isprintable() else repr(c)[1:-1] for c in text
    )
