"""``megatron-dppo data inspect``: what a run would make of a file of problems, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.config.schema import RewardConfig
from megatron_dppo.data.answers import bad_answers, extracted
from megatron_dppo.data.near_duplicates import near_duplicates
from megatron_dppo.data.problems import DataKeys, ProblemSet, read_problems
from megatron_dppo.data.prompts import Prompt, PromptForm, rendered, text_of, token_counts
from megatron_dppo.data.records import is_columnar
from megatron_dppo.types import Problem

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
