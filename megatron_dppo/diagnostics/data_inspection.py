"""Describe a data set in text, with its problems as a run would use them (``megatron-dppo data inspect``)."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.config.data_files import data_files
from megatron_dppo.config.data_schema import RewardConfig
from megatron_dppo.data import problems
from megatron_dppo.data.records import all_text
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.data.turn_ends import ResponseEnds
from megatron_dppo.diagnostics.near_duplicates import near_duplicates
from megatron_dppo.rewards import find_reward
from megatron_dppo.rewards.answer_check import bad_answers

_QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
# Number of bars of a histogram, and number of characters of the longest bar.
_BARS, _WIDTH = 10, 40
_SHOWN_CHARACTERS = 4000
# Number of characters at the beginning of a prompt that are compared with other problems.
_COMPARED_CHARACTERS = 2**16
_SHOWN_FAULTS, _SHOWN_PAIRS = 5, 10


@dataclass(frozen=True)
class Inspection:
    """The options of one inspection of a data set.

    Attributes:
        path: a file of problems, or a folder or glob of several files.
        keys: keys of prompt and answer in the records of the file.
        form: form of the prompts.
        tokenizer: tokenizer of the model; None: lengths are in characters, and prompts are shown without a template.
        embedding_rows: rows of the model's embedding; None if unknown.
        ends: what ends a response of the model.
        reward: reward that checks the answers.
        against: evaluation files that are searched for the same problems.
        similarity: least similarity of near-duplicates.
    """

    path: str
    keys: problems.DataKeys = field(default_factory=problems.DataKeys)
    form: problems.PromptForm = field(default_factory=problems.PromptForm)
    tokenizer: PreTrainedTokenizerBase | None = None
    embedding_rows: int | None = None
    ends: ResponseEnds = field(default_factory=lambda: ResponseEnds({}))
    reward: RewardConfig = field(default_factory=RewardConfig)
    against: Sequence[str] = ()
    similarity: float = 0.6


def inspect(inspection: Inspection) -> Iterator[str]:
    """Yield the lines of the report. Raises DataError if a file is no set of problems."""
    records = problems.read_problems(inspection.path, inspection.keys)
    prompts = records.prompts
    locations = records.locations
    # Conversations are compared as a whole: their last messages may be equal.
    texts = [all_text(prompt) for prompt in prompts]
    repeated = len(prompts) - len(set(map(_compared, prompts)))
    yield f"{inspection.path}: {len(prompts):,} problems, {repeated:,} repeated"
    file_warning = data_files(inspection.path).warning
    if file_warning:
        yield file_warning
    yield from _unread(records)
    yield from _lengths(inspection, records)
    if inspection.tokenizer is not None:
        for warning in problems.template_warnings(
            inspection.tokenizer, inspection.form, inspection.ends, inspection.embedding_rows
        ):
            yield f"warning: {warning}"
        tool_faults = problems.left_out_tools(
            inspection.tokenizer, prompts, inspection.form, locations, records.tools
        )
        if tool_faults is not None:
            yield f"warning: {tool_faults}"
        yield from _special_tokens(inspection.tokenizer, prompts, locations)
        yield from _tokens_beyond(inspection, inspection.tokenizer, records)
    yield from _answers(inspection, records)
    for other in inspection.against:
        yield from _alike(inspection, texts, locations, other)
    yield from _shown(inspection, records)


def _compared(prompt: problems.Prompt) -> str:
    """The text by which repeated prompts are found. Prompts that differ only in white space have equal texts."""
    fields: list[dict[str, Any]] = []
    if not isinstance(prompt, str):
        fields = [{**message, "content": ""} for message in prompt]
    return json.dumps([" ".join(all_text(prompt).split()), fields], sort_keys=True)


def _unread(records: problems.ProblemRecords) -> Iterator[str]:
    """Report columns that look like content but are not in the prompts."""
    if records.unread:
        column_texts = [f"{name!r} ({count:,})" for name, count in sorted(records.unread.items())]
        yield (
            f"columns that look like content and are no part of the prompts (each with its number of records "
            f"with a value): {', '.join(column_texts)}; if the model needs them, write them into the prompt "
            "(docs/data.md)"
        )


def histogram(lengths: Sequence[int]) -> Iterator[str]:
    """Yield a line with a bar for each range of lengths: ten ranges of equal width, from 0 to the largest length."""
    width = math.ceil((max(lengths) + 1) / _BARS)
    counts = np.bincount(np.asarray(lengths) // width, minlength=1)
    digits = len(f"{width * len(counts):,}")
    for i, count in enumerate(counts.tolist()):
        bar = "#" * math.ceil(count * _WIDTH / int(counts.max()))
        low = f"{i * width:,}"
        high = f"{(i + 1) * width - 1:,}"
        yield f"  {low:>{digits}} to {high:>{digits}}  {bar:<{_WIDTH}} {count:,}"


def _lengths(inspection: Inspection, records: problems.ProblemRecords) -> Iterator[str]:
    prompts = records.prompts
    locations = records.locations
    if inspection.tokenizer is None:
        lengths = [len(problems.text_of(prompt)) for prompt in prompts]
        unit = "characters"
    else:
        lengths = problems.token_counts(
            inspection.tokenizer, prompts, inspection.form, locations, records.tools
        )
        unit = "tokens"
    quantiles = np.quantile(lengths, _QUANTILES, method="inverted_cdf").tolist()
    quantile_texts: list[str] = []
    for quantile, length in zip(_QUANTILES, quantiles, strict=True):
        quantile_texts.append(f"{quantile:.0%} {int(length):,}")
    yield f"prompts in {unit}, quantiles: {', '.join(quantile_texts)}"
    yield from histogram(lengths)


def _special_tokens(
    tokenizer: PreTrainedTokenizerBase, prompts: list[problems.Prompt], locations: list[str]
) -> Iterator[str]:
    """Yield a finding for each special token in the text of problems: special tokens begin or end a turn."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    positions_by_token: defaultdict[str, list[int]] = defaultdict(list)
    for position, prompt in enumerate(prompts):
        messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
        # A NUL between messages: a token must not be found across two messages.
        text = "\0".join(str(message["content"]) for message in messages)
        for token in special:
            if token in text:
                positions_by_token[token].append(position)
    for token, positions in sorted(positions_by_token.items()):
        yield (
            f"special token {token} in the text of {len(positions):,} of {len(prompts):,} problems, the first in "
            f"{locations[positions[0]]}: the model reads it as the end or the beginning of a turn"
        )


def _tokens_beyond(
    inspection: Inspection, tokenizer: PreTrainedTokenizerBase, records: problems.ProblemRecords
) -> Iterator[str]:
    """Report prompts with tokens that have no row in the model's embedding."""
    rows = inspection.embedding_rows
    if rows is None or not problems.has_tokens_beyond(tokenizer, rows):
        return
    faulty_prompts = []
    prompts = records.prompts
    for prompt, location, tools in zip(prompts, records.locations, records.tools, strict=True):
        tokens = problems.distinct_tokens(tokenizer, prompt, inspection.form, location, tools)
        unknown_tokens = [token for token in tokens if token >= rows]
        if unknown_tokens:
            faulty_prompts.append((location, min(unknown_tokens)))
    if faulty_prompts:
        location, token = faulty_prompts[0]
        yield (
            f"tokens beyond the {rows:,} rows of the model's embedding: in {len(faulty_prompts):,} of {len(prompts):,} "
            f"prompts, the first in {location}: {token} ({tokenizer.convert_ids_to_tokens(token)!r}). A run refuses to "
            "start"
        )


def _answers(inspection: Inspection, records: problems.ProblemRecords) -> Iterator[str]:
    texts = [problems.text_of(prompt) for prompt in records.prompts]
    answers = records.answers
    unanswered = records.unanswered
    problem_fields = zip(texts, answers, records.metadata, strict=True)
    all_problems: list[Problem] = []
    for position, (text, answer, metadata) in enumerate(problem_fields):
        # The check of answers reads no prompt ids, so they are left empty.
        all_problems.append(Problem(position, text, answer, (), (), metadata))
    problem_set = problems.ProblemSet(
        tuple(all_problems),
        dropped=0,
        sha256="",
        records=len(texts),
        parts=records.parts,
        unanswered=tuple(unanswered.items()),
    )
    bad = bad_answers({inspection.path: problem_set}, inspection.reward)[inspection.path]
    final_answer = find_reward(inspection.reward.name).final
    different_answers: set[str] = set()
    for position, answer in enumerate(answers):
        if position not in unanswered:
            different_answers.add(final_answer(answer))
    yield (
        f"answers: {len(different_answers):,} different; {len(bad):,} of {len(answers):,} do not verify against "
        f"themselves with {inspection.reward.name}"
    )
    for row, reason in bad[:_SHOWN_FAULTS]:
        yield f"  {problem_set.line_of(row)}: {reason}"


def _alike(
    inspection: Inspection, texts: list[str], locations: list[str], other: str
) -> Iterator[str]:
    """Yield lines about the near-duplicates: pairs of a problem in the inspected set and one in the file ``other``."""
    other_problems = problems.read_problems(other)
    other_locations = other_problems.locations
    other_starts = [all_text(prompt)[:_COMPARED_CHARACTERS] for prompt in other_problems.prompts]
    starts = [text[:_COMPARED_CHARACTERS] for text in texts]
    pairs = near_duplicates(starts, other_starts, inspection.similarity)
    found_count = len({pair.evaluation for pair in pairs})
    yield (
        f"near-duplicates (similarity {inspection.similarity:g} or more): {found_count:,} of the "
        f"{len(other_starts):,} problems of {other}, in {len(pairs):,} pairs"
    )
    for pair in pairs[:_SHOWN_PAIRS]:
        start = " ".join(texts[pair.training].split())[:60]
        yield (
            f"  {pair.similarity:.2f}  {locations[pair.training]} and {other_locations[pair.evaluation]}: {start}"
        )


def _shown(inspection: Inspection, records: problems.ProblemRecords) -> Iterator[str]:
    """Yield the first, the middle and the last prompt in the model's form; the middle of a long prompt is left out.

    With a tokenizer, the text is decoded from the prompt's ids. A text that its ids do not keep is shown too.
    """
    prompts = records.prompts
    locations = records.locations
    tokenizer = inspection.tokenizer
    for i in sorted({0, len(prompts) // 2, len(prompts) - 1}):
        location = locations[i]
        yield f"--- {location}"
        if tokenizer is None:
            text = problems.text_of(inspection.form.of(prompts[i], location))
            yield _joined(_ends_of(text), text)
            continue
        ((text, by_template),) = problems.rendered(
            tokenizer, [prompts[i]], inspection.form, [location], [records.tools[i]]
        )
        ends = _ends_of(text)
        decoded_ends: list[str] = []
        is_cut = len(ends) > 1
        for end in ends:
            # The tokenizer adds special tokens only to a whole text that no template wrote.
            pieces = problems.encode_in_pieces(tokenizer, end, by_template or is_cut)
            text_of_ids = tokenizer.decode([token for ids in pieces for token in ids])
            decoded_ends.append(str(text_of_ids))
        yield _joined(decoded_ends, text)
        if decoded_ends != ends:
            yield f"--- {location}: its ids, decoded above, do not keep the text"
            yield _joined(ends, text)


def _ends_of(text: str) -> list[str]:
    """Return the beginning and the end of a long text, or the whole text."""
    if len(text) <= _SHOWN_CHARACTERS:
        return [text]
    half = _SHOWN_CHARACTERS // 2
    return [text[:half], text[-half:]]


def _joined(ends: Sequence[str], text: str) -> str:
    """Join the shown ``ends`` of ``text``, with the number of characters that are left out between them."""
    return f"\n[... {len(text) - _SHOWN_CHARACTERS:,} characters ...]\n".join(ends)
