"""``megatron-dppo data inspect``: what a run would make of a file of problems, as text."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from megatron_dppo.config.schema import RewardConfig
from megatron_dppo.data.problems import DataKeys, ProblemSet, bad_answers, extracted, read_problems
from megatron_dppo.data.prompts import Prompt, PromptForm, rendered, text_of, token_counts
from megatron_dppo.data.records import DataError, is_columnar, parse_lines
from megatron_dppo.rewards.verifier import Score, Verifier
from megatron_dppo.types import Problem

# Problems of a training set that are also in an evaluation set, perhaps worded or set otherwise.
# Texts are compared as sets of three words or numbers in a row, without LaTeX's layout and
# punctuation. The overlap is exact: an index of the evaluation set, which is small, takes the
# place of sketches such as MinHash.

SHINGLE = 3
"""Words in a row."""
_LAYOUT = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|text\w*|math(?:rm|bf|it|cal)|quad|qquad)"
    r"(?![a-zA-Z])|\[asy\].*?\[/asy\]",
    re.DOTALL,
)
_WORD = re.compile(r"[a-z]+|\d+|[^\W\d_]")


class NearDuplicate(NamedTuple):
    """Positions of two alike problems. ``similarity``: shared shingles over all of both (Jaccard)."""

    similarity: float
    training: int
    evaluation: int


def shingles(text: str) -> set[tuple[str, ...]]:
    """The sets that texts are compared by: ``SHINGLE`` words in a row; all of a shorter text."""
    words = _WORD.findall(_LAYOUT.sub(" ", text).lower())
    count = max(1, len(words) - SHINGLE + 1)
    return {tuple(words[i : i + SHINGLE]) for i in range(count)} if words else set()


def near_duplicates(
    training: Sequence[str], evaluation: Sequence[str], at_least: float
) -> list[NearDuplicate]:
    """Every pair that is at least so similar, the most similar first. 17,000 x 30: a second or two."""
    sizes = []
    index: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for position, text in enumerate(evaluation):
        found = shingles(text)
        sizes.append(len(found))
        for shingle in found:
            index[shingle].append(position)
    pairs = []
    for place, text in enumerate(training):
        own = shingles(text)
        shared = Counter(position for shingle in own for position in index.get(shingle, ()))
        for position, count in shared.items():
            similarity = count / (len(own) + sizes[position] - count)
            if similarity >= at_least:
                pairs.append(NearDuplicate(similarity, place, position))
    return sorted(pairs, key=lambda pair: (-pair.similarity, pair.training, pair.evaluation))


_QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
_BARS, _WIDTH = 10, 40
_SHOWN_CHARACTERS = 4000
_COMPARED = 2**16
"""Characters of a prompt that are looked through for near-duplicates: from its beginning."""
_SHOWN_FAULTS, _SHOWN_PAIRS, _SHOWN_PROMPTS = 5, 10, 3


@dataclass(frozen=True)
class Inspection:
    """What is to be looked at, and how.

    Attributes:
        path: file of problems.
        keys: where its records have prompt and answer.
        form: how problems are put to the model.
        tokenizer: None: lengths are characters, and prompts are shown without a chat template.
        reward: that checks the answers.
        against: evaluation files that are looked through for the same problems.
        similarity: from which on two problems count as near-duplicates.
    """

    path: str
    keys: DataKeys = field(default_factory=DataKeys)
    form: PromptForm = field(default_factory=PromptForm)
    tokenizer: PreTrainedTokenizerBase | None = None
    reward: RewardConfig = field(default_factory=RewardConfig)
    against: Sequence[str] = ()
    similarity: float = 0.6


def inspect(asked: Inspection) -> Iterator[str]:
    """The report, line by line. Raises DataError where a file is no set of problems."""
    prompts, answers, unanswered, places, _ = read_problems(asked.path, asked.keys)
    texts = [text_of(prompt) for prompt in prompts]
    repeated = len(texts) - len({" ".join(text.split()) for text in texts})
    yield f"{asked.path}: {len(prompts):,} problems, {repeated:,} repeated"
    yield from _lengths(asked, prompts, places)
    yield from _answers(asked, texts, answers, unanswered)
    for other in asked.against:
        yield from _near_duplicates(asked, texts, places, other)
    yield from _shown(asked, prompts, places)


def histogram(lengths: Sequence[int]) -> Iterator[str]:
    """Bars of text, ten of equal width from 0 to the longest."""
    width = max(1, -(-(max(lengths) + 1) // _BARS))
    counts = np.bincount(np.asarray(lengths) // width, minlength=1)
    digits = len(f"{width * len(counts):,}")
    for i, count in enumerate(counts.tolist()):
        bar = "#" * -(-count * _WIDTH // int(counts.max()))
        low, high = f"{i * width:,}", f"{(i + 1) * width - 1:,}"
        yield f"  {low:>{digits}} to {high:>{digits}}  {bar:<{_WIDTH}} {count:,}"


def _lengths(asked: Inspection, prompts: list[Prompt], places: list[str]) -> Iterator[str]:
    if asked.tokenizer is None:
        lengths, unit = [len(text_of(prompt)) for prompt in prompts], "characters"
    else:
        lengths, unit = token_counts(asked.tokenizer, prompts, asked.form, places), "tokens"
    found = np.quantile(lengths, _QUANTILES, method="inverted_cdf").tolist()
    named = ", ".join(f"{q:.0%} {int(n):,}" for q, n in zip(_QUANTILES, found, strict=True))
    yield f"prompts in {unit}, quantiles: {named}"
    yield from histogram(lengths)


def _answers(
    asked: Inspection, texts: list[str], answers: list[str], unanswered: Mapping[int, str]
) -> Iterator[str]:
    problems = tuple(
        Problem(i, text, answer, ())
        for i, (text, answer) in enumerate(zip(texts, answers, strict=True))
        if i not in unanswered
    )
    unit = "row" if is_columnar(Path(asked.path)) else "line"
    found = ProblemSet(problems, 0, "", len(texts), unit=unit, unanswered=tuple(unanswered.items()))
    final = extracted(found, asked.reward.name)
    bad = bad_answers({asked.path: final}, asked.reward)[asked.path]
    different = len({problem.answer for problem in final.problems})
    yield (
        f"answers: {different:,} different; {len(bad):,} of {len(answers):,} do not verify against "
        f"themselves with {asked.reward.name}"
    )
    for row, why in bad[:_SHOWN_FAULTS]:
        yield f"  {found.place(row)}: {why}"


def _near_duplicates(
    asked: Inspection, texts: list[str], places: list[str], other: str
) -> Iterator[str]:
    prompts, _, _, their_places, _ = read_problems(other)
    theirs = [text_of(prompt)[:_COMPARED] for prompt in prompts]
    pairs = near_duplicates([text[:_COMPARED] for text in texts], theirs, asked.similarity)
    hit = len({pair.evaluation for pair in pairs})
    yield (
        f"near-duplicates (similarity {asked.similarity:g} or more): {hit:,} of the {len(prompts):,} "
        f"problems of {other}, in {len(pairs):,} pairs"
    )
    for pair in pairs[:_SHOWN_PAIRS]:
        start = " ".join(texts[pair.training].split())[:60]
        yield (
            f"  {pair.similarity:.2f}  {places[pair.training]} and {their_places[pair.evaluation]}: "
            f"{start}"
        )


def _shown(asked: Inspection, prompts: list[Prompt], places: list[str]) -> Iterator[str]:
    """The first, the middle and the last prompt, as the model gets them."""
    chosen = sorted({0, len(prompts) // 2, len(prompts) - 1})[:_SHOWN_PROMPTS]
    for i in chosen:
        if asked.tokenizer is None:
            text = text_of(asked.form.of(prompts[i], places[i]))
        else:
            ((text, _),) = rendered(asked.tokenizer, [prompts[i]], asked.form, [places[i]])
        yield f"--- {places[i]}"
        yield _abridged(text)


def _abridged(text: str) -> str:
    """``text``, of a long one the beginning and the end."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    left_out = f"[... {len(text) - 2 * half:,} characters ...]"
    return f"{text[:half]}\n{left_out}\n{text[-half:]}"


# ``megatron-dppo data check-rewards``: a reward against a data set's own solutions.
# The worked solution of a line must score 1 against the line's answer, and 0 against a wrong
# answer (the answer plus one if it is an integer, else another line's answer). The failed lines
# and the counts are printed.

CHUNK = 64
"""Number of checks between two updates of the progress bar."""


def read_solutions(path: Path) -> list[tuple[int, str, str]]:
    """(line number, solution, answer) of every line with both. Raises DataError naming the line, OSError."""
    records, places = parse_lines(path, path.read_bytes())
    rows = []
    for number, (record, where) in enumerate(zip(records, places, strict=True), start=1):
        if "answer" not in record:
            raise DataError(f"{where}: no 'answer'")
        if isinstance(record.get("solution"), str):
            rows.append((number, record["solution"], str(record["answer"])))
    if not rows:
        raise DataError(f"{path}: no line has a 'solution'")
    return rows


def wrong_answer(answer: str, others: list[str]) -> str | None:
    """An answer that is certainly wrong; None if no other line has a different one."""
    if answer.lstrip("+-").isdecimal():
        return str(int(answer) + 1)
    return next((other for other in others if other != answer), None)


def check_rewards(path: Path, reward: str, timeout_s: float, workers: int) -> int:
    """Check every line, at most ``timeout_s`` seconds each; the exit code: 1 where a check failed, else 0.

    Raises DataError naming the line where ``path`` can't be used, VerifierError where the reward's worker fails.
    """
    rows = read_solutions(path)
    verifier = Verifier(reward, timeout_s, workers)
    answers = [answer for _, _, answer in rows]
    checks = [(number, solution, answer, 1.0) for number, solution, answer in rows]
    for number, solution, answer in rows:
        wrong = wrong_answer(answer, answers)
        if wrong is not None:
            checks.append((number, solution, wrong, 0.0))
    scores: list[Score] = []
    with verifier:
        for start in track(range(0, len(checks), CHUNK), description="checking"):
            chunk = checks[start : start + CHUNK]
            scores += verifier.score([(solution, answer) for _, solution, answer, _ in chunk])
    return report(checks, scores)


def report(checks: list[tuple[int, str, str, float]], scores: list[Score]) -> int:
    """Print each failed check and the counts of both kinds; returns 1 if a check failed, else 0."""
    failed = 0
    for (number, _, answer, expected), score in zip(checks, scores, strict=True):
        if score.value != expected or score.timed_out or score.crashed:
            failed += 1
            print(f"line {number}: scored {score} against {answer!r}, expected {expected:g}")
    for expected, kind in ((1.0, "the given answer"), (0.0, "a wrong answer")):
        of_kind = [s for c, s in zip(checks, scores, strict=True) if c[3] == expected]
        right = sum(s.value == expected for s in of_kind)
        print(f"{right} of {len(of_kind)} solutions score {expected:g} against {kind}")
    return int(failed > 0)
