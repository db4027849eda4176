"""Show an explanation: tables of strings for console and page, a CSV file, and an HTML page."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean

from megatron_dppo.diagnostics.explain.explanation import Response, Token, compared_metrics
from megatron_dppo.diagnostics.pages import ResponseText, SummaryTable, TokenSpan, render_page
from megatron_dppo.metrics.sums import MetricSums, means
from megatron_dppo.metrics.table import METRICS

FREQUENT = 12
"""Largest number of rows in a table of the most frequent tokens."""


@dataclass(frozen=True)
class MaskVerdict:
    """The decisions of the algorithm's mask and of PPO's Clip-Higher about a token, in words.

    ``css`` is the page's CSS class for a token with this verdict.
    """

    trains: bool
    ppo_trains: bool
    css: str
    meaning: str

    def holds(self, token: Token) -> bool:
        """Return whether the two masks decided about ``token`` as this verdict says."""
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
        counts_table(name, tokens),
        metrics_table(responses),
        frequent_table(f"Most often blocked by {name}", tokens, lambda t: not t.trains),
        frequent_table("Disagreement: only Clip-Higher would block", tokens, ppo_only.holds),
        frequent_table(f"Disagreement: only {name} blocks", tokens, mask_only.holds),
    ]


def counts_table(name: str, tokens: Sequence[Token]) -> SummaryTable:
    """Return the table of the numbers of tokens, by verdict and sign of the advantage."""
    rows = []
    for verdict in verdicts(name):
        group = [t for t in tokens if verdict.holds(t)]
        positive_count = sum(t.advantage > 0 for t in group)
        negative_count = sum(t.advantage < 0 for t in group)
        share = f"{len(group) / len(tokens):.2%}"
        rows.append(
            (verdict.meaning, str(positive_count), str(negative_count), str(len(group)), share)
        )
    note = "A: advantage of the token; share: of all tokens here."
    return SummaryTable("Tokens", ("", "A > 0", "A < 0", "all", "share"), rows, note)


def metrics_table(responses: Iterable[Response]) -> SummaryTable:
    """Return the table of the run's metrics, computed over the explained tokens."""
    total = MetricSums()
    for response in responses:
        total = total + response.metrics
    values = means(total.values())
    rows = [(name, f"{values[name]:.6g}", METRICS[name].meaning) for name in compared_metrics()]
    return SummaryTable("The run's metrics, of these tokens", ("metric", "value", "meaning"), rows)


def frequent_table(
    title: str, tokens: Sequence[Token], is_chosen: Callable[[Token], bool]
) -> SummaryTable:
    """Return the table of the most frequent token ids among the tokens that ``is_chosen`` accepts.

    The means in a row are over the accepted tokens with the row's id.
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
        mean_mu = fmean(t.mu for t in group)
        mean_pi = fmean(t.pi for t in group)
        mean_tv = fmean(t.binary_tv for t in group)
        rows.append(
            (
                repr(group[0].text),
                str(token_id),
                str(len(group)),
                str(occurrences[token_id]),
                f"{positive_count} / {negative_count}",
                f"{mean_mu:.4f}",
                f"{mean_pi:.4f}",
                f"{mean_tv:.4f}",
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
    "token",
    "response",
    "at",
    "A",
    "mu",
    "pi",
    "r",
    "TV",
    "KL",
    "Top-K TV",
    "Top-K KL",
    "exact TV",
    "exact KL",
    "blocked where",
    "verdict",
)


def notable_table(name: str, tokens: Sequence[Token], count: int) -> SummaryTable:
    """Return a table of ``count`` rows, in this order: blocked tokens, then the other tokens.

    A token is blocked if the algorithm's mask or Clip-Higher blocks it. Each of the two kinds is sorted by descending
    Binary TV. Tokens of several responses whose other cells are equal are one row.
    """
    responses_of_cells: dict[tuple[str, ...], list[int]] = {}
    for t in sorted(tokens, key=_blocked_first):
        divergences = (t.binary_tv, t.binary_kl, t.topk_tv, t.topk_kl, t.exact_tv, t.exact_kl)
        numbers = map(formatted, (t.mu, t.pi, t.ratio, *divergences))
        cells = (repr(t.text), str(t.position), f"{t.advantage:+.3g}", *numbers)
        cells = (*cells, t.threshold, verdict_of(name, t).meaning)
        if cells not in responses_of_cells and len(responses_of_cells) == count:
            break
        responses_of_cells.setdefault(cells, []).append(t.response)
    rows: list[tuple[str, ...]] = []
    for (text, *cells_after), responses in responses_of_cells.items():
        others = "" if len(responses) == 1 else f" (+{len(responses) - 1})"
        rows.append((text, f"{responses[0]}{others}", *cells_after))
    shown = sum(map(len, responses_of_cells.values()))
    title = f"{shown} of {len(tokens)} tokens: the blocked ones first, by Binary TV"
    note = (
        "response: its number in the batch, (+n): n equal rows of other responses; "
        "at: the token's place in it; A: advantage; mu, pi: probability by engine "
        "and trainer; r: pi / mu; TV, KL: divergence between mu and pi, Binary (the token against all other ids); "
        "Top-K: over the engine's likeliest ids; exact: over all ids; -: not known; blocked where: the rule's bound."
    )
    return SummaryTable(title, NOTABLE_COLUMNS, rows, note)


def _blocked_first(token: Token) -> tuple[bool, float]:
    """Return the sorting key of ``notable_table``."""
    no_mask_blocks = token.trains and token.ppo_trains
    return no_mask_blocks, -token.binary_tv


def verdict_of(name: str, token: Token) -> MaskVerdict:
    """Return the verdict about ``token``."""
    return next(v for v in verdicts(name) if v.holds(token))


def formatted(value: float | None) -> str:
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


def render(
    title: str,
    facts: Sequence[str],
    tables: Sequence[SummaryTable],
    name: str,
    responses: Sequence[Response],
) -> str:
    """Return the HTML page. ``facts`` are lines above the tables; ``name`` is the name of the algorithm."""
    return render_page(
        "explanation.html",
        title=title,
        facts=facts,
        tables=tables,
        verdicts=verdicts(name),
        responses=[_response(name, response) for response in responses],
    )


def tables_page(title: str, facts: Sequence[str], tables: Sequence[SummaryTable]) -> str:
    """Return an HTML page of tables."""
    return render_page("tables.html", title=title, facts=facts, tables=tables)


def _response(name: str, response: Response) -> ResponseText:
    t = response.trajectory
    return ResponseText(
        about=f"response {response.index}: problem {t.problem_id}, sample {t.sample_index}",
        prompt=response.prompt,
        tokens=[_span(name, token) for token in response.tokens],
        advantage=response.tokens[0].advantage,
        outcome=f"reward {t.reward:g}, {t.finish_reason}",
    )


def _span(name: str, token: Token) -> TokenSpan:
    verdict = verdict_of(name, token)
    shade = token.binary_tv if verdict.css == "train" else None
    return TokenSpan(verdict.css, token.text, tooltip(name, token), shade)


def tooltip(name: str, token: Token) -> str:
    """Return the text of a token's tooltip: its id and position, the verdict, and its numbers."""
    lines = [
        f"{token.text!r}, id {token.token_id}, token {token.position}",
        verdict_of(name, token).meaning,
        f"A {token.advantage:+.4g}; blocked where {token.threshold or 'never'}",
        f"mu {formatted(token.mu)}, pi {formatted(token.pi)}, r {formatted(token.ratio)}, "
        f"weight {formatted(token.weight)}",
        f"Binary: TV {formatted(token.binary_tv)}, KL {formatted(token.binary_kl)}",
    ]
    if token.topk_tv is not None:
        lines.append(f"Top-K: TV {formatted(token.topk_tv)}, KL {formatted(token.topk_kl)}")
    if token.exact_tv is not None:
        lines.append(f"exact: TV {formatted(token.exact_tv)}, KL {formatted(token.exact_kl)}")
    if token.recomputed is not None:
        lines.append(f"pi' (trainer at the rollout's weights) {formatted(token.recomputed)}")
    return "\n".join([*lines, f"entropy {formatted(token.entropy)} nats"])
