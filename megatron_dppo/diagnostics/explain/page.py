"""Show an explanation: tables of strings for console and page, the CSV file, and the page.

The page is one HTML file without scripts and external resources; all text in it is escaped.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path

from megatron_dppo.diagnostics.explain.explanation import TOKEN_METRICS, Response, Token
from megatron_dppo.diagnostics.pages import SummaryTable, html_page
from megatron_dppo.metrics.samples import printable
from megatron_dppo.metrics.sums import MetricSums, means
from megatron_dppo.metrics.table import METRICS

FREQUENT = 12
"""Largest number of rows in a table of the most frequent tokens."""
LEFT_ALIGNED = frozenset(
    {"", "token", "metric", "meaning", "blocked where", "verdict", "computed otherwise"}
)
"""Names of the columns with text; the other columns have numbers."""


@dataclass(frozen=True)
class MaskVerdict:
    """The decisions of the two masks about a token, in words; ``css`` is the class of such a token on the page."""

    trains: bool
    ppo_trains: bool
    css: str
    meaning: str

    def holds(self, token: Token) -> bool:
        """Return whether the two masks decided so about ``token``."""
        return (token.trains, token.ppo_trains) == (self.trains, self.ppo_trains)


def verdicts(name: str) -> tuple[MaskVerdict, ...]:
    """Return the four possible verdicts, in words that name the algorithm."""
    return (
        MaskVerdict(True, True, "train", "trains"),
        MaskVerdict(False, False, "both", f"blocked by {name}, and by Clip-Higher too"),
        MaskVerdict(False, True, "own", f"blocked by {name} alone"),
        MaskVerdict(True, False, "ppo", "trains; Clip-Higher would block it"),
    )


def all_tokens(responses: Iterable[Response]) -> list[Token]:
    """Return every token of every response, in order."""
    return [token for response in responses for token in response.tokens]


def summary_tables(name: str, responses: Sequence[Response]) -> list[SummaryTable]:
    """Return all tables: counts, metrics, most often blocked tokens, disagreements with Clip-Higher."""
    tokens = all_tokens(responses)
    _, _, mask_only, ppo_only = verdicts(name)
    return [
        counts(name, tokens),
        metrics(responses),
        frequent(f"Most often blocked by {name}", tokens, lambda t: not t.trains),
        frequent("Disagreement: only Clip-Higher would block", tokens, ppo_only.holds),
        frequent(f"Disagreement: only {name} blocks", tokens, mask_only.holds),
    ]


def counts(name: str, tokens: Sequence[Token]) -> SummaryTable:
    """Return the table of the numbers of tokens, by verdict and sign of the advantage."""
    rows = []
    for verdict in verdicts(name):
        group = [t for t in tokens if verdict.holds(t)]
        positive_count = sum(t.advantage > 0 for t in group)
        share = f"{len(group) / len(tokens):.2%}"
        rows.append(
            (
                verdict.meaning,
                str(positive_count),
                str(len(group) - positive_count),
                str(len(group)),
                share,
            )
        )
    note = "A: advantage of the token; share: of all tokens here."
    return SummaryTable("Tokens", ("", "A > 0", "A < 0", "all", "share"), rows, note)


def metrics(responses: Iterable[Response]) -> SummaryTable:
    """Return the table of the run's metrics, computed over the explained tokens."""
    total = MetricSums()
    for response in responses:
        total = total + response.metrics
    values = means(total.values())
    rows = [(name, f"{values[name]:.6g}", METRICS[name].meaning) for name in TOKEN_METRICS]
    return SummaryTable("The run's metrics, of these tokens", ("metric", "value", "meaning"), rows)


def frequent(
    title: str, tokens: Sequence[Token], is_chosen: Callable[[Token], bool]
) -> SummaryTable:
    """Return the table of the token ids that occur most often among the tokens for which ``is_chosen`` is true.

    The means in a row are over these occurrences.
    """
    by_id: dict[int, list[Token]] = defaultdict(list)
    occurrences: dict[int, int] = defaultdict(int)
    for token in tokens:
        occurrences[token.token_id] += 1
        if is_chosen(token):
            by_id[token.token_id].append(token)
    groups = sorted(by_id.items(), key=lambda item: (-len(item[1]), item[0]))
    rows: list[tuple[str, ...]] = []
    for token_id, group in groups[:FREQUENT]:
        positive_count = sum(t.advantage > 0 for t in group)
        negative_count = sum(t.advantage < 0 for t in group)
        values = zip(*((t.mu, t.pi, t.binary_tv) for t in group), strict=True)
        means_of_group = [f"{sum(column) / len(group):.4f}" for column in values]
        rows.append(
            (
                repr(group[0].text),
                str(token_id),
                str(len(group)),
                str(occurrences[token_id]),
                f"{positive_count} / {negative_count}",
                *means_of_group,
            )
        )
    columns = ("token", "id", "times", "of", "A > 0 / A < 0", "mean mu", "mean pi", "mean TV")
    table_title = f"{title}: {sum(map(len, by_id.values()))} tokens, {len(by_id)} different"
    note = (
        "times: how often it is among these tokens; of: how often it occurs at all; A > 0 / A < 0: times by the sign "
        "of the advantage; mean mu, pi: its mean probability by engine and trainer; mean TV: of |pi - mu|."
    )
    return SummaryTable(table_title, columns, rows, note)


NOTABLE_COLUMNS = (
    "token", "response", "at", "A", "mu", "pi", "r", "TV", "KL", "Top-K TV", "Top-K KL",
    "exact TV", "exact KL", "blocked where", "verdict",
)  # fmt: skip


def notable(name: str, tokens: Sequence[Token], count: int) -> SummaryTable:
    """Return the table of ``count`` tokens: first those that a mask blocks, and by descending Binary TV."""
    ordered_tokens = sorted(tokens, key=lambda t: (t.trains and t.ppo_trains, -t.binary_tv))
    rows = [
        (
            repr(t.text), str(t.response), str(t.position), f"{t.advantage:+.3g}",
            *map(number, (t.mu, t.pi, t.ratio, t.binary_tv, t.binary_kl, t.topk_tv, t.topk_kl,
                          t.exact_tv, t.exact_kl)),
            t.threshold, verdict_of(name, t).meaning,
        )
        for t in ordered_tokens[:count]
    ]  # fmt: skip
    title = f"{len(rows)} of {len(tokens)} tokens: the blocked ones first, by Binary TV"
    note = (
        "response: its number in the batch; at: the token's place in it; A: advantage; mu, pi: probability by engine "
        "and trainer; r: pi / mu; TV, KL: divergence of the two, over the token and all others (Binary), the engine's "
        "likeliest ids (Top-K) or all ids (exact), - where it is not known; blocked where: the rule's bound."
    )
    return SummaryTable(title, NOTABLE_COLUMNS, rows, note)


def verdict_of(name: str, token: Token) -> MaskVerdict:
    """Return the verdict about ``token``."""
    return next(v for v in verdicts(name) if v.holds(token))


def number(value: float | None) -> str:
    """Format a number with four significant digits, and None as a dash."""
    return "-" if value is None else f"{value:.4g}"


def write_csv(path: Path, responses: Sequence[Response]) -> None:
    """Write one line for each token: problem, sample, then the fields of ``Token``.

    The text of a token is a Python literal; an unknown number is empty.
    """
    columns = ["problem_id", "sample_index", *(f.name for f in fields(Token))]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for response in responses:
            response_fields = {
                "problem_id": response.trajectory.problem_id,
                "sample_index": response.trajectory.sample_index,
            }
            for token in response.tokens:
                writer.writerow({**response_fields, **asdict(token), "text": repr(token.text)})


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
.explained { background: rgba(20, 102, 184, var(--tv, 0)) }
.left { background: rgba(194, 43, 20, var(--tv, 0)) }
.tokens span:hover { outline: 2px solid #000 }
"""


def render(
    title: str,
    facts: Sequence[str],
    tables: Sequence[SummaryTable],
    name: str,
    responses: Sequence[Response],
) -> str:
    """Return the HTML page. ``facts`` are lines above the tables; ``name`` is the name of the algorithm."""
    blocks = [
        *(f"<div>{escape(fact)}</div>" for fact in facts),
        "<h2>Summary</h2>",
        *map(_table, tables),
        "<h2>Responses</h2>",
        _legend(name),
        *(_response(name, r) for r in responses),
    ]
    return html_page(title, STYLE, "\n".join(blocks))


def tables_page(
    title: str, facts: Sequence[str], tables: Sequence[SummaryTable], below: Sequence[str] = ()
) -> str:
    """Return an HTML page of tables, with the blocks of HTML ``below`` after them."""
    blocks = [*(f"<div>{escape(fact)}</div>" for fact in facts), *map(_table, tables), *below]
    return html_page(title, STYLE, "\n".join(blocks))


def _table(sheet: SummaryTable) -> str:
    """Return the HTML of a table."""
    if not sheet.rows:
        return f"<table><caption>{escape(sheet.shown_title)}</caption></table>"
    classes = [' class="words"' if name in LEFT_ALIGNED else "" for name in sheet.columns]

    def line(tag: str, cells: Sequence[str]) -> str:
        cells_html = (
            f"<{tag}{css}>{escape(c)}</{tag}>" for css, c in zip(classes, cells, strict=True)
        )
        return f"<tr>{''.join(cells_html)}</tr>"

    lines = "\n".join([line("th", sheet.columns), *(line("td", row) for row in sheet.rows)])
    caption = f"<caption>{escape(sheet.title)}</caption>"
    note = f'<p class="about">{escape(sheet.note)}</p>' if sheet.note else ""
    return f'<div class="table"><table>{caption}\n{lines}</table></div>{note}'


def _legend(name: str) -> str:
    """Return the HTML that explains the colours of the tokens."""
    keys = "".join(f'<span class="{v.css}">{escape(v.meaning)}</span>' for v in verdicts(name))
    return (
        f'<p class="legend">{keys}</p><p class="about">A token that trains is the darker the larger '
        "its Binary TV. Neither a clip nor a divergence mask blocks a token whose update brings pi "
        "back towards mu, however far apart they are. Point at a token for its numbers.</p>"
    )


def _response(name: str, response: Response) -> str:
    """Return the HTML of a response and its prompt."""
    t, first_token = response.trajectory, response.tokens[0]
    sign = "up" if first_token.advantage > 0 else "down"
    about = f"response {response.index}: problem {t.problem_id}, sample {t.sample_index}, "
    reward = f"reward {t.reward:g}, {t.finish_reason}"
    spans = (_span(name, token) for token in response.tokens)
    advantage = f'<b class="{sign}">A = {first_token.advantage:+.3g}</b>'
    return response_block(f"{about}{advantage}, {reward}", response.prompt, spans)


def response_block(about: str, prompt: str, spans: Iterable[str]) -> str:
    """Return the HTML of a prompt and its response: ``about`` is HTML, ``spans`` are results of ``token_span``."""
    return (
        f'<div class="response"><div class="about">{about}</div>'
        f'<div class="prompt">{escape(visible(prompt))}</div>'
        f'<div class="tokens">{"".join(spans)}</div></div>'
    )


def _span(name: str, token: Token) -> str:
    """Return the HTML of an explained token."""
    verdict = verdict_of(name, token)
    shade = token.binary_tv if verdict.css == "train" else None
    return token_span(verdict.css, token.text, numbers(name, token), shade)


def token_span(css: str, text: str, hover: str, shade: float | None = None) -> str:
    """Return the HTML of a token of the class ``css``, with the lines ``hover`` as its tooltip.

    ``shade`` is from 0 to 1: a larger one makes the token darker.
    """
    style = "" if shade is None else f' style="--tv:{shade:.2f}"'
    title = escape(hover).replace("\n", "&#10;")
    return f'<span class="{css}"{style} title="{title}">{escape(visible(text))}</span>'


def numbers(name: str, token: Token) -> str:
    """Return the text of a token's tooltip."""
    lines = [
        f"{token.text!r}, id {token.token_id}, token {token.position}",
        verdict_of(name, token).meaning,
        f"A {token.advantage:+.4g}; blocked where {token.threshold or 'never'}",
        f"mu {number(token.mu)}, pi {number(token.pi)}, r {number(token.ratio)}, weight {number(token.weight)}",
        f"Binary: TV {number(token.binary_tv)}, KL {number(token.binary_kl)}",
    ]
    if token.topk_tv is not None:
        lines.append(f"Top-K: TV {number(token.topk_tv)}, KL {number(token.topk_kl)}")
    if token.exact_tv is not None:
        lines.append(f"exact: TV {number(token.exact_tv)}, KL {number(token.exact_kl)}")
    if token.recomputed is not None:
        lines.append(f"pi' (trainer at the rollout's weights) {number(token.recomputed)}")
    return "\n".join([*lines, f"entropy {number(token.entropy)} nats"])


def visible(text: str) -> str:
    """Return ``text`` with line ends marked, and unprintable characters as escapes."""
    return printable(text).replace("\n", "\u23ce\n")
