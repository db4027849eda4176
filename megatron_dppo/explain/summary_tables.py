"""Summary of all explained tokens: tables of strings for console and page, and the CSV file."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megatron_dppo.explain.explanation import Response, Token
from megatron_dppo.metrics.definitions import DEFINITIONS, means
from megatron_dppo.metrics.sums import MetricSums

FREQUENT = 12
"""Largest number of rows in a table of the most frequent tokens."""
LEFT_ALIGNED = frozenset({"", "token", "metric", "meaning", "blocked where", "verdict"})
"""Columns of text; the others hold numbers."""
METRICS = (
    "policy/tokens",
    "policy/abs_prob_gap",
    "policy/prob_gap_min",
    "policy/prob_gap_max",
    "policy/ratio_max",
    "policy/bad_update",
    "mask/masked",
    "mask/masked_positive",
    "mask/masked_negative",
    "mask/cap_hit",
    "mask/rollout_prob_of_masked",
    "mask/entropy_of_masked",
    "mask/ppo_only",
    "mask/dppo_only",
)


@dataclass(frozen=True)
class Verdict:
    """Decision of the two masks about a token; ``css``: its class on the page."""

    trains: bool
    ppo_trains: bool
    css: str
    words: str

    def holds(self, token: Token) -> bool:
        """Whether this is the token's verdict."""
        return (token.trains, token.ppo_trains) == (self.trains, self.ppo_trains)


def verdicts(name: str) -> tuple[Verdict, ...]:
    """The four possible verdicts, in words that name the algorithm."""
    return (
        Verdict(True, True, "train", "trains"),
        Verdict(False, False, "both", f"blocked by {name}, and by Clip-Higher too"),
        Verdict(False, True, "own", f"blocked by {name} alone"),
        Verdict(True, False, "ppo", "trains; Clip-Higher would block it"),
    )


@dataclass(frozen=True)
class Sheet:
    """A table of strings; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def all_tokens(responses: Iterable[Response]) -> list[Token]:
    """Every token of every response, in order."""
    return [token for response in responses for token in response.tokens]


def sheets(name: str, responses: Sequence[Response]) -> list[Sheet]:
    """All tables: counts, metrics, most often blocked tokens, disagreements with Clip-Higher."""
    tokens = all_tokens(responses)
    _, _, own, ppo = verdicts(name)
    return [
        counts(name, tokens),
        metrics(responses),
        frequent(f"Most often blocked by {name}", tokens, lambda t: not t.trains),
        frequent("Disagreement: only Clip-Higher would block", tokens, ppo.holds),
        frequent(f"Disagreement: only {name} blocks", tokens, own.holds),
    ]


def counts(name: str, tokens: Sequence[Token]) -> Sheet:
    """Number of tokens by verdict and sign of the advantage."""
    rows = []
    for verdict in verdicts(name):
        own = [t for t in tokens if verdict.holds(t)]
        up = sum(t.advantage > 0 for t in own)
        share = f"{len(own) / len(tokens):.2%}"
        rows.append((verdict.words, str(up), str(len(own) - up), str(len(own)), share))
    return Sheet("Tokens", ("", "A > 0", "A < 0", "all", "share"), rows)


def metrics(responses: Iterable[Response]) -> Sheet:
    """The run's metrics, computed over the explained tokens."""
    total = MetricSums()
    for response in responses:
        total = total + response.metrics
    values = means(total.values())
    rows = [(name, f"{values[name]:.6g}", DEFINITIONS[name].meaning) for name in METRICS]
    return Sheet("The run's metrics, of these tokens", ("metric", "value", "meaning"), rows)


def frequent(title: str, tokens: Sequence[Token], chosen: Callable[[Token], bool]) -> Sheet:
    """The token ids with the most occurrences for which ``chosen`` is true, with means over these."""
    found: dict[int, list[Token]] = defaultdict(list)
    occurrences: dict[int, int] = defaultdict(int)
    for token in tokens:
        occurrences[token.token_id] += 1
        if chosen(token):
            found[token.token_id].append(token)
    ranked = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = [
        (
            quoted(own[0].text),
            str(token_id),
            str(len(own)),
            str(occurrences[token_id]),
            f"{sum(t.advantage > 0 for t in own)} / {sum(t.advantage < 0 for t in own)}",
            *(f"{sum(values) / len(own):.4f}" for values in _averaged(own)),
        )
        for token_id, own in ranked[:FREQUENT]
    ]
    columns = ("token", "id", "times", "of", "A > 0 / A < 0", "mean mu", "mean pi", "mean TV")
    shown = f"{title}: {sum(map(len, found.values()))} tokens, {len(found)} different"
    return Sheet(shown, columns, rows)


def _averaged(own: Sequence[Token]) -> tuple[list[float], list[float], list[float]]:
    return [t.mu for t in own], [t.pi for t in own], [t.binary_tv for t in own]


NOTABLE_COLUMNS = (
    "token", "response", "at", "A", "mu", "pi", "r", "TV", "KL", "Top-K TV", "Top-K KL",
    "exact TV", "exact KL", "blocked where", "verdict",
)  # fmt: skip


def notable(name: str, tokens: Sequence[Token], count: int) -> Sheet:
    """``count`` tokens: blocked ones (by either mask) first, then by descending Binary TV."""
    ranked = sorted(tokens, key=lambda t: (t.trains and t.ppo_trains, -t.binary_tv))
    rows = [
        (
            quoted(t.text), str(t.response), str(t.position), f"{t.advantage:+.3g}",
            *map(number, (t.mu, t.pi, t.ratio, t.binary_tv, t.binary_kl, t.topk_tv, t.topk_kl,
                          t.exact_tv, t.exact_kl)),
            t.threshold, verdict_of(name, t).words,
        )
        for t in ranked[:count]
    ]  # fmt: skip
    shown = f"{len(rows)} of {len(tokens)} tokens: the blocked ones first, by Binary TV"
    return Sheet(shown, NOTABLE_COLUMNS, rows)


def verdict_of(name: str, token: Token) -> Verdict:
    """The verdict of ``verdicts(name)`` for this token."""
    return next(v for v in verdicts(name) if v.holds(token))


def number(value: float | None) -> str:
    """Four significant digits; a dash for None."""
    return "-" if value is None else f"{value:.4g}"


def quoted(text: str) -> str:
    """``text`` as a Python literal: spaces are visible, control characters escaped."""
    return repr(text)


def write_csv(path: Path, responses: Sequence[Response]) -> None:
    """Write one line for each token: problem, sample, then the fields of ``Token``.

    Text is a Python literal; unknown numbers are empty.
    """
    columns = ["problem_id", "sample_index", *(f.name for f in fields(Token))]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for response in responses:
            of = {
                "problem_id": response.trajectory.problem_id,
                "sample_index": response.trajectory.sample_index,
            }
            for token in response.tokens:
                writer.writerow({**of, **asdict(token), "text": quoted(token.text)})
