"""Problems with answers, and prompt-response pairs: read from a file, and converted to the tokens of a prompt."""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple, Self

from transformers import PreTrainedTokenizerBase

from megatron_dppo.config.checks import PLACEHOLDER
from megatron_dppo.config.data_files import data_files
from megatron_dppo.config.data_schema import ProblemFile
from megatron_dppo.config.schema import SupervisedConfig, SupervisedDataConfig
from megatron_dppo.data.chat import (
    ChatTemplateError,
    calls_of,
    has_date,
    lacks_generation_prompt,
    render,
    unread_arguments,
)
from megatron_dppo.data.records import (
    DataError,
    FilePart,
    Prompt,
    UnansweredError,
    answer_of,
    metadata_of,
    prompt_of,
    read_all_records,
    refuse_media,
    text_of,
    tools_of,
    turns_of,
    unread_columns,
)
from megatron_dppo.data.tokenizer import has_tokenizer, load_named_tokenizer
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.data.turn_ends import (
    ResponseEnds,
    model_values,
    prompt_end_warnings,
    turn_end_warnings,
)
from megatron_dppo.system.groups import consecutive_groups
from megatron_dppo.system.text import short_json

log = logging.getLogger(__name__)
PIECE = 2**18
"""Largest number of characters in one call of a tokenizer: a call needs 400 bytes of memory or more per character."""
Tools = Sequence[Mapping[str, Any]]
"""Definitions of the functions that one prompt offers as tools."""
Turns = tuple[tuple[int, ...], ...]
"""Token ids of one sequence: of a prompt, of the response with the end-of-sequence token at its end, of what follows it
as the next prompt, of the next response, and so on."""


@dataclass(frozen=True)
class PromptForm:
    """The form of prompts that are made from problems.

    Attributes:
        apply_chat_template: Whether the tokenizer's chat template renders a prompt that is text, as one user message.
            Prompts of chat messages are always rendered.
        system_prompt: A system message before all other messages; None: no such message.
        template: Text of the last message, with ``{prompt}`` in place of the problem; None: the problem alone.
        arguments: Variables for the chat template.
    """

    apply_chat_template: bool = True
    system_prompt: str | None = None
    template: str | None = None
    # The repr leaves out the arguments. Seals have a hash of the repr, and saved seals of runs without arguments must
    # stay valid. The run hashes its arguments separately (loop/inputs.py).
    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)

    def of(self, prompt: Prompt, location: str) -> Prompt:
        """Convert ``prompt`` to this form. Raises DataError if it has a system message in addition to
        ``system_prompt``.
        """
        if self.template is not None:
            prompt = _with_last_text(prompt, self.template.replace(PLACEHOLDER, text_of(prompt)))
        if self.system_prompt is None:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if any(message["role"] == "system" for message in messages):
            raise DataError(
                f"{location}: the prompt has a system message, and data.system_prompt is set, expected only one of them"
            )
        return [{"role": "system", "content": self.system_prompt}, *messages]


@dataclass(frozen=True)
class DataKeys:
    """Keys of a record's prompt, answer and metadata, ``a.b`` for a field of a structure.

    None: the usual keys (``load_problems``).
    """

    prompt: str | None = None
    answer: str | None = None
    metadata: str | None = None
    added_metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values that are added to the metadata of every problem."""

    @classmethod
    def of(cls, file: ProblemFile) -> Self:
        """The keys of a configured file."""
        return cls(file.prompt_key, file.answer_key, file.metadata_key, file.metadata)


class ProblemRecords(NamedTuple):
    """The problems of a data path before tokenisation, by position.

    Attributes:
        prompts: The prompts.
        answers: The answers; a missing answer is an empty text.
        metadata: The metadata.
        unanswered: Position -> the error, for problems whose answer is missing or invalid.
        locations: File and line of each problem, in words.
        sha256: Hash of the file, or of all files.
        parts: The files in their order.
        tools: Definitions of functions of each problem.
        unread: For columns that look like content but are not in the prompts: column -> number of records that have a
            value in the column.
    """

    prompts: list[Prompt]
    answers: list[str]
    metadata: list[Mapping[str, Any]]
    unanswered: dict[int, str]
    locations: list[str]
    sha256: str
    parts: tuple[FilePart, ...]
    tools: list[Tools]
    unread: Mapping[str, int]


@dataclass(frozen=True)
class ProblemSet:
    """The problems of one file, or of several files in their order.

    Attributes:
        problems: Problems with prompts within the length limit.
        dropped: Number of problems that were left out because their prompts are longer.
        sha256: Hash of the file's bytes, or of all files' hashes in their order. A resumed run compares it.
        records: Number of records in the files, including the records that were left out.
        bad_answers: Number of problems left out because no response could match their answer.
        parts: The files in their order; empty for a set without a file.
        unanswered: (problem id, reason) of the problems whose answer is missing, empty or of a wrong type.
    """

    problems: tuple[Problem, ...]
    dropped: int
    sha256: str
    records: int
    bad_answers: int = 0
    parts: tuple[FilePart, ...] = ()
    unanswered: tuple[tuple[int, str], ...] = ()

    def line_of(self, problem_id: int) -> str:
        """The line of the problem in its file, in words; with the file's path if the set has several files."""
        if len(self.parts) < 2:
            unit = self.parts[0].unit if self.parts else "line"
            return f"{unit} {problem_id + 1}"
        ends = list(accumulate(part.records for part in self.parts))
        index = bisect_right(ends, problem_id)
        part = self.parts[index]
        start = ends[index] - part.records
        return f"{part.path}, {part.unit} {problem_id - start + 1}"

    def location(self, path: str, problem_id: int) -> str:
        """The file and the line of the problem, in words, for a set that was read from ``path``."""
        line = self.line_of(problem_id)
        if len(self.parts) > 1:
            return line
        return f"{path}, {line}"

    def __len__(self) -> int:
        return len(self.problems)


def read_problems(path: str | Path, keys_of: DataKeys = DataKeys()) -> ProblemRecords:
    """Read the problems of a file, a folder or a glob, without tokenising them.

    ``load_problems`` describes the accepted records. Raises DataError for a record that is not a problem.
    """
    records, locations, sha256, parts = read_all_records(path)
    prompts: list[Prompt] = []
    answers: list[str] = []
    metadata: list[Mapping[str, Any]] = []
    tools: list[Tools] = []
    unanswered: dict[int, str] = {}
    unread: Counter[str] = Counter()
    for position, (record, location) in enumerate(zip(records, locations, strict=True)):
        prompt = prompt_of(record, location, keys_of.prompt)
        prompts.append(prompt)
        try:
            answers.append(answer_of(record, keys_of.answer))
        except UnansweredError as error:
            answers.append("")
            unanswered[position] = str(error)
        row_metadata = metadata_of(record, location, keys_of.metadata)
        metadata.append({**row_metadata, **keys_of.added_metadata})
        tools.append(tools_of(record, location))
        refuse_media(record, prompt, location)
        unread.update(unread_columns(record, prompt))
    return ProblemRecords(
        prompts, answers, metadata, unanswered, locations, sha256, parts, tools, unread
    )


def load_problems(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    form: PromptForm,
    keys_of: DataKeys = DataKeys(),
    embedding_rows: int | None = None,
) -> ProblemSet:
    """Read and tokenise problems. Each record has a prompt, and may have an answer.

    ``records.PROMPT_KEYS``, ``ANSWER_KEYS`` and ``METADATA_KEYS`` are the keys of prompt, answer and metadata.
    ``problem_id`` counts all problems from 0, file after file, including dropped problems: in a single file it is the
    line's number minus 1. In JSON Lines a byte-order mark and blank lines at the end are ignored.

    Args:
        path: Path of the file, the folder or the glob; see config/data_files.py.
        tokenizer: Tokenizer for the prompts.
        max_prompt_tokens: Problems with longer prompts are dropped.
        form: The form of the prompts.
        keys_of: Keys of prompt and answer, instead of the usual keys.
        embedding_rows: Rows of the model's embedding; None: do not check tokens against it.

    Raises:
        DataError: A record is not a problem, no problem is within the limit, or a prompt has a token beyond the
            embedding.
    """
    _warn_of_unread_files(path)
    records = read_problems(path, keys_of)
    prompts = records.prompts
    answers = records.answers
    metadata = records.metadata
    unanswered = records.unanswered
    locations = records.locations
    # Records may lack an answer, because not every reward needs one. But if the configuration names the key of answers,
    # some record must have an answer.
    if keys_of.answer is not None and len(unanswered) == len(prompts):
        raise DataError(f"{locations[0]}: {unanswered[0]}; no record of the file has an answer")
    positions = short_enough(tokenizer, prompts, max_prompt_tokens)
    short_prompts = [prompts[i] for i in positions]
    short_locations = [locations[i] for i in positions]
    short_tools = [records.tools[i] for i in positions]
    prompt_ids = tokenise(tokenizer, short_prompts, form, short_locations, short_tools)
    _refuse_tokens_beyond(embedding_rows, tokenizer, prompt_ids, short_locations)
    warning = left_out_tools(tokenizer, short_prompts, form, short_locations, short_tools)
    if warning is not None:
        log.warning("%s", warning)
    for warning in prompt_end_warnings(tokenizer, prompt_ids):
        log.warning("%s: %s", path, warning)
    problems: list[Problem] = []
    for i, ids in zip(positions, prompt_ids, strict=True):
        if len(ids) > max_prompt_tokens:
            continue
        prompt = prompts[i]
        prompt_tools = tuple(records.tools[i])
        whole_prompt = form.of(prompt, locations[i])
        messages = _problem_messages(prompt, whole_prompt)
        problems.append(
            Problem(i, text_of(prompt), answers[i], ids, messages, metadata[i], prompt_tools)
        )
    if not problems:
        raise DataError(
            f"{path}: all {len(prompts)} prompts are longer than max_prompt_tokens={max_prompt_tokens}"
        )
    dropped = len(prompts) - len(problems)
    kept_ids = {problem.problem_id for problem in problems}
    kept_unanswered: list[tuple[int, str]] = []
    for position, reason in unanswered.items():
        if position in kept_ids:
            kept_unanswered.append((position, reason))
    return ProblemSet(
        tuple(problems),
        dropped,
        records.sha256,
        len(prompts),
        parts=records.parts,
        unanswered=tuple(kept_unanswered),
    )


@dataclass(frozen=True)
class TurnSets:
    """Sequences for supervised learning. ``held_out``: sequences of each held-out set, by the set's name."""

    train: Sequence[Turns]
    held_out: Mapping[str, Sequence[Turns]]

    @classmethod
    def load(cls, config: SupervisedConfig) -> Self:
        """Load the policy's tokenizer, and the sequences of a run's files. Raises DataError as ``load_turns``."""
        data = config.data
        form = PromptForm(data.apply_chat_template, arguments=data.chat_template_arguments)
        tokenizer, _, rows = load_policy_tokenizer(config.model.hf_checkpoint, form)
        return cls.of_files(data, tokenizer, form, rows)

    @classmethod
    def of_files(
        cls,
        data: SupervisedDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        form: PromptForm,
        embedding_rows: int | None = None,
    ) -> Self:
        """Load the sequences of the files of ``data``. Raises DataError as ``load_turns``."""
        read_turns = partial(
            load_turns,
            tokenizer=tokenizer,
            form=form,
            embedding_rows=embedding_rows,
            only_last=data.turns == "last",
        )
        held_out = {name: read_turns(path) for name, path in data.evaluation.items()}
        return cls(read_turns(data.train), held_out)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        sequences = chain(self.train, *self.held_out.values())
        return max(sum(map(len, turns)) for turns in sequences)


def load_turns(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    form: PromptForm,
    embedding_rows: int | None = None,
    only_last: bool = False,
) -> list[Turns]:
    """Read and tokenise prompts and responses for supervised learning, as ``records.turns_of`` finds them.

    Each prompt is rendered as for a response that is sampled. The turns of a conversation are one sequence as long as
    the next prompt begins with the ids of the turns before it; where it does not, because a template drops the thoughts
    of earlier turns, for example, a new sequence begins with the whole prompt. ``only_last``: learn only the last
    response of a conversation. Raises DataError for a record without prompt or response, and for a token beyond the
    ``embedding_rows``.
    """
    _warn_of_unread_files(path)
    records, record_locations, *_ = read_all_records(path)
    prompts: list[Prompt] = []
    responses: list[str] = []
    tools: list[Tools] = []
    locations: list[str] = []
    begins_record: list[bool] = []
    for record, location in zip(records, record_locations, strict=True):
        turns = turns_of(record, location)
        for prompt, response in turns[-1:] if only_last else turns:
            begins_record.append(not locations or locations[-1] != location)
            prompts.append(prompt)
            responses.append(response)
            tools.append(tools_of(record, location))
            locations.append(location)
        refuse_media(record, turns[-1][0], location)
    if tokenizer.eos_token_id is None:
        raise DataError(f"{path}: the tokenizer has no end-of-sequence token to end responses with")
    prompt_ids = tokenise(tokenizer, prompts, form, locations, tools)
    response_ids = tokenizer(responses, add_special_tokens=False)["input_ids"]
    for ids in (prompt_ids, response_ids):
        _refuse_tokens_beyond(embedding_rows, tokenizer, ids, locations)
    for warning in prompt_end_warnings(tokenizer, prompt_ids):
        log.warning("%s: %s", path, warning)
    sequences: list[Turns] = []
    for prompt_tokens, response_tokens, is_first in zip(
        prompt_ids, response_ids, begins_record, strict=True
    ):
        # A response's own text may have the end token already.
        has_end = response_tokens[-1:] == [tokenizer.eos_token_id]
        end_tokens = () if has_end else (tokenizer.eos_token_id,)
        turn = (*response_tokens, *end_tokens)
        turns_before = () if is_first else tuple(chain(*sequences[-1]))
        if turns_before and prompt_tokens[: len(turns_before)] == turns_before:
            sequences[-1] = (*sequences[-1], prompt_tokens[len(turns_before) :], turn)
        else:
            sequences.append((prompt_tokens, turn))
    return sequences


def _warn_of_unread_files(path: str | Path) -> None:
    if warning := data_files(path).warning:
        log.warning("%s", warning)


def load_policy_tokenizer(
    folder: str | Path,
    form: PromptForm,
    stop_token_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
) -> tuple[PreTrainedTokenizerBase, ResponseEnds, int | None]:
    """Load the tokenizer of the policy in ``folder``, and log what is seldom intended about it.

    ``stop_token_ids``, ``stop``: what ends a response beside the model's own tokens. Returns the tokenizer, what ends
    a response, and the rows of the model's embedding.
    """
    tokenizer = load_tokenizer(folder)
    ends = ResponseEnds.of(folder, tokenizer, stop_token_ids, stop)
    rows = embedding_rows(folder)
    for warning in template_warnings(tokenizer, form, ends, rows):
        log.warning("%s: %s", folder, warning)
    return tokenizer, ends, rows


def embedding_rows(folder: str | Path) -> int | None:
    """Return the number of embedding rows of the model in ``folder``; None if its config.json does not have the number.

    A server crashes at a token without a row in the embedding, so prompts with tokens beyond the rows are refused.
    """
    rows = model_values(folder).get("vocab_size")
    return rows if isinstance(rows, int) else None


def has_tokens_beyond(tokenizer: PreTrainedTokenizerBase, rows: int | None) -> bool:
    """Whether the tokenizer has tokens beyond an embedding with ``rows`` rows. Prompts need not use these tokens."""
    return rows is not None and max(tokenizer.get_vocab().values(), default=0) >= rows


def first_token_beyond(token_ids: Sequence[int], rows: int) -> int | None:
    """The first token of a prompt that is beyond an embedding with ``rows`` rows; None if all tokens have a row."""
    return next((token for token in token_ids if token >= rows), None)


def _refuse_tokens_beyond(
    rows: int | None,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[Sequence[int]],
    locations: Sequence[str],
) -> None:
    """Raise DataError if prompts have tokens beyond an embedding with ``rows`` rows; None: do not check.

    The message has the first of these prompts and their number.
    """
    if rows is None or not has_tokens_beyond(tokenizer, rows):
        return
    unknown_tokens: list[tuple[str, int]] = []
    for ids, location in zip(prompt_ids, locations, strict=True):
        token = first_token_beyond(ids, rows)
        if token is not None:
            unknown_tokens.append((location, token))
    if unknown_tokens:
        location, token = unknown_tokens[0]
        name = tokenizer.convert_ids_to_tokens(token)
        raise DataError(
            f"{location}: the text has the token {token} ({name!r}), expected ids below the {rows} rows of the model's "
            f"embedding (vocab_size of its config.json); {len(unknown_tokens)} of {len(prompt_ids)} texts have such "
            "tokens. Give the model's own tokenizer, or a model with more rows"
        )


def _messages(prompt: Prompt) -> tuple[Mapping[str, Any], ...]:
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    return tuple(prompt)


def _problem_messages(prompt: Prompt, whole_prompt: Prompt) -> tuple[Mapping[str, Any], ...]:
    """``Problem.messages``: the messages of ``whole_prompt``; empty if ``whole_prompt`` is text equal to ``prompt``.

    ``whole_prompt`` is the result of ``PromptForm.of`` for ``prompt``.
    """
    if isinstance(whole_prompt, str) and whole_prompt == prompt:
        return ()
    return _messages(whole_prompt)


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in ``folder`` (local files only), with the rules of its tokenizer.json.

    Raises DataError if the tokenizer is missing or damaged, or as ``with_file_rules``.
    """
    if not has_tokenizer(folder):
        raise DataError(f"{folder}: no tokenizer here, expected a tokenizer_config.json")
    return load_named_tokenizer(folder, local_files_only=True)


def short_enough(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], max_prompt_tokens: int
) -> list[int]:
    """Positions of the prompts that may be short enough, by their number of characters.

    A prompt is surely too long if it has more characters than ``max_prompt_tokens`` times the longest token. Such a
    prompt is not tokenised, because tokenising megabytes takes gigabytes of memory.
    """
    longest_token = max(map(len, tokenizer.get_vocab()), default=1)
    max_characters = longest_token * max_prompt_tokens
    return [i for i, prompt in enumerate(prompts) if len(text_of(prompt)) <= max_characters]


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    form: PromptForm,
    locations: Sequence[str],
    tools: Sequence[Tools] = (),
) -> list[tuple[str, bool]]:
    """Render every prompt in ``form``: its text, and whether the chat template wrote it.

    ``tools`` has the tool definitions of each prompt; empty: no prompt has any. Raises DataError if a chat template
    leaves out the content of a message.
    """
    tools = tools or [()] * len(prompts)
    texts: list[tuple[str, bool]] = []
    for record_prompt, location, prompt_tools in zip(prompts, locations, tools, strict=True):
        prompt = form.of(record_prompt, location)
        if isinstance(prompt, str) and not form.apply_chat_template:
            texts.append((prompt, False))
            continue
        if tokenizer.chat_template is None:
            raise DataError(
                f"{location}: the prompt needs a chat template and the tokenizer "
                "has none; set data.apply_chat_template to false for plain-text prompts"
            )
        text = _render(tokenizer, prompt, form, location, prompt_tools)
        texts.append((text, True))
    return texts


def tokenise(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    form: PromptForm,
    locations: Sequence[str],
    tools: Sequence[Tools] = (),
) -> list[tuple[int, ...]]:
    """Tokenise every prompt in ``form``.

    The chat template writes special tokens, for instance the token at the beginning. For plain text the tokenizer adds
    them.
    """
    texts = rendered(tokenizer, prompts, form, locations, tools)
    prompt_ids: list[tuple[int, ...]] = [()] * len(prompts)
    # Encode plain texts and renderings in separate calls: a call adds special tokens to all of its texts or to none.
    for is_rendering in (False, True):
        positions: list[int] = []
        selected_texts: list[str] = []
        for position, (text, by_template) in enumerate(texts):
            if by_template == is_rendering:
                positions.append(position)
                selected_texts.append(text)
        if not positions:
            continue
        encoded = _encode(tokenizer, selected_texts, adds_special=not is_rendering)
        for i, ids in zip(positions, encoded, strict=True):
            prompt_ids[i] = tuple(ids)
    if () in prompt_ids:
        raise DataError(f"{locations[prompt_ids.index(())]}: the prompt has no tokens")
    return prompt_ids


def token_counts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    form: PromptForm,
    locations: Sequence[str],
    tools: Sequence[Tools] = (),
) -> list[int]:
    """Count the tokens of every prompt in ``form``.

    A prompt longer than ``PIECE`` is tokenised in pieces, and each cut may add a token.
    """
    counts = []
    for text, by_template in rendered(tokenizer, prompts, form, locations, tools):
        pieces = encode_in_pieces(tokenizer, text, by_template)
        counts.append(sum(map(len, pieces)))
    return counts


def distinct_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    form: PromptForm,
    location: str,
    tools: Tools = (),
) -> set[int]:
    """The set of token ids of a prompt in ``form``."""
    ((text, by_template),) = rendered(tokenizer, [prompt], form, [location], [tools])
    return set().union(*encode_in_pieces(tokenizer, text, by_template))


def encode_in_pieces(
    tokenizer: PreTrainedTokenizerBase, text: str, by_template: bool
) -> Iterator[list[int]]:
    """Yield the ids of a rendered prompt, piece by piece. ``by_template``: whether the chat template wrote it."""
    # Tokenising a prompt of megabytes in one call would take gigabytes.
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    # Special tokens belong to the whole prompt, not to each piece.
    is_whole = len(pieces) == 1
    return _encode(tokenizer, pieces, adds_special=is_whole and not by_template)


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, adds_special: bool
) -> Iterator[list[int]]:
    """Yield the ids of each text. A call of the tokenizer has at most ``PIECE`` characters, or one text."""
    for group in consecutive_groups(texts, len, PIECE):
        yield from tokenizer(group, add_special_tokens=adds_special)["input_ids"]


def _with_last_text(prompt: Prompt, text: str) -> Prompt:
    """Replace the prompt, or the content of its last message, by ``text``."""
    if isinstance(prompt, str):
        return text
    return [*prompt[:-1], {**prompt[-1], "content": text}]


def _render(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    form: PromptForm,
    location: str,
    tools: Tools,
) -> str:
    messages = _messages(prompt)
    try:
        text = render(tokenizer, messages, tools=tools, arguments=form.arguments)
    except ChatTemplateError as error:
        raise DataError(f"{location}: the chat template fails on it: {error}") from error
    missing_message = next(_missing_messages(text, messages), None)
    if missing_message is not None:
        raise DataError(
            f"{location}: the chat template leaves out, or alters, {missing_message}; expected it in the prompt. Leave "
            "it out of the data, or give the checkpoint a chat template that writes it"
        )
    return text


def _missing_messages(text: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Describe the messages whose text is missing in a rendering."""
    for number, message in enumerate(messages, start=1):
        role = str(message["role"])
        content = str(message["content"])
        if role == "assistant":
            # Templates remove the thoughts from earlier turns.
            content = content.rpartition("</think>")[2]
        if not _is_in(text, content):
            yield f"message {number}, of the role {role!r}: {short_json(content)}"


def _is_in(text: str, content: str) -> bool:
    """Whether ``text`` contains the content, unchanged or as a JSON string, ignoring white space around it."""
    content = content.strip()
    if content in text:
        return True
    for ascii_only in (False, True):
        quoted = json.dumps(content, ensure_ascii=ascii_only)
        if quoted[1:-1] in text:
            return True
    return False


def left_out_tools(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    form: PromptForm,
    locations: Sequence[str],
    tools: Sequence[Tools],
) -> str | None:
    """Return a warning if prompts lack the name of a tool that their record defines or calls; else None."""
    missing_tools: list[tuple[str, str]] = []
    """Location and name of the first missing tool, for each prompt that lacks one."""
    for prompt, location, prompt_tools in zip(prompts, locations, tools, strict=True):
        names = _tool_names(prompt, prompt_tools)
        if not names:
            continue
        ((text, _),) = rendered(tokenizer, [prompt], form, [location], [prompt_tools])
        missing_names = [name for name in names if not _is_in(text, name)]
        if missing_names:
            missing_tools.append((location, missing_names[0]))
    if not missing_tools:
        return None
    location, name = missing_tools[0]
    return (
        f"{len(missing_tools):,} of {len(prompts):,} prompts lack a tool that their record defines or calls, the first "
        f"in {location}: {short_json(name)}; only a chat template that supports tools writes them into a prompt"
    )


def _tool_names(prompt: Prompt, tools: Tools) -> list[str]:
    """The names of the functions that are defined in ``tools`` or called in a message."""
    functions = [tool.get("function", tool) for tool in tools]
    for message in _messages(prompt):
        functions += calls_of(message)
    names: list[str] = []
    for function in functions:
        name = None
        if isinstance(function, Mapping):
            name = function.get("name")
        if isinstance(name, str):
            names.append(name)
    return names


def template_warnings(
    tokenizer: PreTrainedTokenizerBase,
    form: PromptForm,
    ends: ResponseEnds,
    embedding_rows: int | None = None,
) -> Iterator[str]:
    """Yield warnings about effects of the chat template that are seldom intended.

    Args:
        tokenizer: The tokenizer with the template.
        form: The form of the prompts.
        ends: What ends a response.
        embedding_rows: Rows of the model's embedding; None if unknown.
    """
    for name, similar in unread_arguments(tokenizer, form.arguments).items():
        hint = f" (similar names in it: {', '.join(similar)})" if similar else ""
        yield (
            f"data.chat_template_arguments.{name}: the chat template does not mention it{hint}, so it has no effect; "
            "expected a variable that the template reads"
        )
    if not ends.tokens and not ends.texts:
        yield (
            "no token and no text ends a response, so that every response is cut off at the length limit; expected an "
            "eos_token_id in config.json or generation_config.json, or rollout.stop_token_ids"
        )
    if tokenizer.chat_template is None or not form.apply_chat_template:
        return
    if has_date(tokenizer, form.arguments):
        yield (
            "the chat template writes the current date into prompts, so prompts change from day to day, during the run "
            "and between training and use. If the template has a variable for the date (Llama's is date_string), set "
            "it in data.chat_template_arguments; otherwise write a fixed date into the template"
        )
    if lacks_generation_prompt(tokenizer, form.arguments):
        yield (
            "the chat template writes no generation prompt: prompts end before the text that begins the assistant's "
            "turn, so the model must write this text itself; expected a template that reads add_generation_prompt"
        )
    yield from turn_end_warnings(tokenizer, ends, form.arguments, embedding_rows)
