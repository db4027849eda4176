"""Data rows from files in JSON Lines, JSON, CSV, Parquet and Arrow; and a row's prompt, answer and metadata.

The first bytes of a file decide whether it is Parquet, Arrow or compressed, because published files have many names.
Other files are CSV if their name says so, else JSON Lines or one JSON document. An error names file and line.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from megatron_dppo.config.data_files import data_files
from megatron_dppo.data.compression import CompressionError, decompressed, without_compressed_ending
from megatron_dppo.data.gold_answers import holds_answer
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.text import cut, short_json

Record = dict[str, Any]
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARRO", b"\xff\xff\xff\xff"
"""The first four bytes of each format. The library ``datasets`` saves Arrow streams."""
COLUMNAR = (PARQUET, ARROW_FILE, ARROW_STREAM)
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_BATCH = 4096
"""Number of rows that exist as Python objects at one time: published files have millions of rows."""


class DataError(RunError, ValueError):
    """A data set cannot be used. The message has the file, the line (from 1) and the error."""


class FilePart(NamedTuple):
    """One of the files of a data path.

    ``records`` is the number of its records. ``unit`` is the word for a record in messages: ``line``, ``row`` of a
    table, or ``record`` if records are no consecutive lines.
    """

    path: str
    records: int
    unit: str


class RecordSet(NamedTuple):
    """The records of a data path.

    Attributes:
        records: The records.
        locations: File and line of each record, in words.
        sha256: Hash of the file's bytes, or of all files' hashes.
        parts: The files in their order.
    """

    records: list[Record]
    locations: list[str]
    sha256: str
    parts: tuple[FilePart, ...]


class FileRecords(NamedTuple):
    """The records of a file, the location of each in words, ``FilePart.unit``, and the SHA-256 of the file's bytes."""

    records: list[Record]
    locations: list[str]
    unit: str
    sha256: str


_Parsed = tuple[list[Record], list[str], str]
"""The fields of ``FileRecords`` that parsing a file yields."""


def read_records(path: Path) -> FileRecords:
    """Read a file. Raises DataError if it has no records, or cannot be read."""
    if is_columnar(path):
        records = list(_rows(path))
        if not records:
            raise DataError(f"{path}: the file is empty, expected at least one row")
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecords(records, _numbered(path, "row", len(records)), "row", digest)
    content = _content(path)
    return FileRecords(*_parse_text_file(path, content), hashlib.sha256(content).hexdigest())


def _numbered(path: Path, unit: str, count: int) -> list[str]:
    return [f"{path}, {unit} {number}" for number in range(1, count + 1)]


def read_all_records(path: str | Path) -> RecordSet:
    """Read the records of a file, or of all files of a folder or a glob, file after file.

    Raises DataError if there is no file, or one cannot be read.
    """
    expanded = data_files(path)
    if not expanded.files:
        raise DataError(f"{path}: expected {expanded.fault}")
    records: list[Record] = []
    locations: list[str] = []
    hashes: list[str] = []
    parts: list[FilePart] = []
    for file in expanded.files:
        read = read_records(file)
        records += read.records
        locations += read.locations
        hashes.append(read.sha256)
        parts.append(FilePart(str(file), len(read.records), read.unit))
    return RecordSet(records, locations, joined_sha256(hashes), tuple(parts))


def joined_sha256(hashes: Sequence[str]) -> str:
    """Combine the hashes of files, in this order. A single hash is returned unchanged."""
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256(json.dumps(list(hashes)).encode()).hexdigest()


def columns_of(path: Path) -> list[str]:
    """The names of a file's columns; for JSON, the keys of the first object."""
    if not is_columnar(path):
        return sorted(_objects(path)[0])
    with _faults_named(path):
        return list(_open(path, None)[0])


def stream_records(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    """Yield the records of a file one by one. A record has at least the values of ``columns``.

    The file may also be a JSON document: a list of objects, or one object. MATH was first published as one object a
    file.
    """
    if is_columnar(path):
        return _rows(path, columns)
    return iter(_objects(path))


def is_columnar(path: Path) -> bool:
    """Whether the file is Parquet or Arrow. Raises DataError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(4) in COLUMNAR
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _delimiter(path: Path) -> str | None:
    """The column separator of a CSV or TSV file, also of a ``.csv.gz``; None for other files."""
    name = without_compressed_ending(path.name.lower())
    return _DELIMITERS.get(Path(name).suffix)


def _decompressed(path: Path, content: bytes) -> bytes:
    try:
        return decompressed(content)
    except CompressionError as error:
        raise DataError(f"{path}: {error}") from error


def _parse_text_file(path: Path, content: bytes) -> _Parsed:
    """Parse a file of JSON Lines, a JSON document or a CSV file, perhaps compressed."""
    content = _decompressed(path, content)
    delimiter = _delimiter(path)
    if delimiter is not None:
        return _parse_table(path, content, delimiter)
    content = content.removeprefix(b"\xef\xbb\xbf").strip()
    # One object may be the whole file: a record of several lines, or an object with a list of records.
    if content.startswith(b"[") or (content.startswith(b"{") and _is_json(content)):
        return _parse_document(path, content)
    return _parse_lines(path, content)


def _parse_document(path: Path, content: bytes) -> _Parsed:
    """Parse a JSON document: a list of objects, an object with one such list, or one object, which is a record."""
    is_line = content.startswith(b"{") and b"\n" not in content
    document = _parse_text(content, f"{path}, line 1" if is_line else str(path))
    unit = "record"
    if isinstance(document, dict) and not _is_wrapped_list(document):
        document = [document]
        unit = "line" if is_line else unit
    elif isinstance(document, dict):
        (document,) = document.values()
    for number, record in enumerate(document, 1):
        if not isinstance(record, dict):
            raise DataError(
                f"{path}, record {number}: {type(record).__name__}, expected a list of JSON objects"
            )
    if not document:
        raise DataError(f"{path}: the list is empty, expected at least one JSON object")
    return document, _numbered(path, unit, len(document)), unit


def _is_wrapped_list(document: Mapping[str, Any]) -> bool:
    """Whether the only value of an object is a list of records: ``{"data": [...]}``. A list of messages is none."""
    if len(document) != 1:
        return False
    (value,) = document.values()
    has_objects = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    return has_objects and bool(value) and not any(map(_role_of, value))


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_table(path: Path, content: bytes, delimiter: str) -> _Parsed:
    """Parse a CSV file, whose first line has the column names. Values are text; an empty value becomes None."""
    try:
        text = content.decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows = list(reader)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}: {error.reason}") from error
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not CSV: {error}") from error
    if not rows:
        raise DataError(f"{path}: the file is empty, expected a line of column names and rows")
    records: list[Record] = []
    locations: list[str] = []
    for number, row in enumerate(rows, 1):
        location = f"{path}, row {number}"
        # DictReader stores surplus values under the key None, and None as the value of a missing column.
        if None in row or None in row.values():
            count = len(reader.fieldnames or ())
            raise DataError(f"{location}: expected {count} columns, as the first line names")
        records.append({key: value or None for key, value in row.items()})
        locations.append(location)
    return records, locations, "row"


def _parse_lines(path: Path, content: bytes) -> _Parsed:
    """Parse JSON Lines. Blank lines are left out."""
    records: list[Record] = []
    locations: list[str] = []
    number = 0
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        location = f"{path}, line {number}"
        record = _parse_text(line, location)
        if not isinstance(record, dict):
            raise DataError(f"{location}: {type(record).__name__}, expected a JSON object")
        records.append(record)
        locations.append(location)
    if not records:
        raise DataError(f"{path}: the file is empty, expected one JSON object a line")
    # The number of a record is the number of its line, unless there are blank lines.
    unit = "line" if len(records) == number else "record"
    return records, locations, unit


def _parse_text(text: bytes, location: str) -> Any:
    """Parse a JSON value. Raises DataError beginning with ``location``: for invalid JSON, and for a string in the value
    that no file can store.
    """
    try:
        value = json.loads(text)
        # json accepts the escape of half a surrogate pair, but such text cannot be written to a file. Encoding it here
        # raises UnicodeEncodeError.
        if b"\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise DataError(f"{location}: not UTF-8 at byte {error.start}: {error.reason}") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{location}: holds half of a surrogate pair, which is no text") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{location}: not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise DataError(f"{location}: nested too deeply") from error
    # Python raises ValueError for an integer of more than 4300 digits.
    except ValueError as error:
        raise DataError(f"{location}: {error}; write a long number as text") from error
    return value


def _objects(path: Path) -> list[Record]:
    """Read the records of a CSV, JSONL or JSON file."""
    records, *_ = _parse_text_file(path, _content(path))
    return records


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Record]:
    """Yield the rows of a columnar file as plain Python values, with only ``columns``; None: with all."""
    with _faults_named(path):
        for batch in _open(path, columns)[1]:
            for start in range(0, batch.num_rows, _BATCH):
                rows = batch.slice(start, _BATCH)
                if columns is not None:
                    rows = rows.select(list(columns))
                yield from rows.to_pylist()


def _open(path: Path, columns: Sequence[str] | None) -> tuple[list[str], Iterator[Any]]:
    """Open a columnar file, and return the names of its columns and its record batches.

    Parquet batches have only ``columns`` (None: all), Arrow batches have all columns.
    """
    import pyarrow
    import pyarrow.parquet

    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == PARQUET:
        parquet = pyarrow.parquet.ParquetFile(path)
        selected_columns = None
        if columns is not None:
            selected_columns = list(columns)
        return parquet.schema_arrow.names, parquet.iter_batches(_BATCH, columns=selected_columns)
    source = pyarrow.memory_map(str(path))
    if magic == ARROW_STREAM:
        stream = pyarrow.ipc.open_stream(source)
        return stream.schema.names, iter(stream)
    arrow = pyarrow.ipc.open_file(source)
    return arrow.schema.names, map(arrow.get_batch, range(arrow.num_record_batches))


@contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    """Raise DataError, with the path, for an error of pyarrow in the block."""
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet is read by pyarrow, which is not installed: pip install pyarrow"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    # pyarrow's own errors are subclasses of these three.
    except (ValueError, KeyError, NotImplementedError) as error:
        raise DataError(f"{path}: no readable Parquet or Arrow file: {error}") from error


Prompt = str | list[dict[str, Any]]
"""Text, or chat messages with the content as text."""
Keys = tuple[tuple[str, ...], ...]
"""Rows of column names; upper and lower case are equal. All names of a row have the same meaning. A record's value
comes from the first row with a column that is not blank in the record. If several columns of this row are not blank,
their values must be equal."""
PROMPT_KEYS: Keys = (
    ("prompt",),
    ("problem", "question", "query", "instruction"),
    ("messages", "conversations"),
    ("input",),
)
ANSWER_KEYS: Keys = (
    ("answer",),
    ("reward_model.ground_truth", "reward_spec.ground_truth"),
    ("ground_truth", "final_answer", "expected_answer", "correct_answer", "target", "label"),
    ("solution",),
)
METADATA_KEYS = ("metadata", "extra_info", "info")
"""The first of these columns that has an object, or an object as JSON text, is the metadata."""
EVERY_COLUMN = "*"
"""A key of metadata that stands for all columns of a record."""
_CONVERSATIONS = ("messages", "conversations", "prompt")
TOOLS_KEY = "tools"
"""Column of definitions of functions. The chat template writes them into the prompt."""
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
_MEDIA_MARK = re.compile(r"<\|?(?:image|video|audio)", re.IGNORECASE)
UNREAD_KEYS = (
    *MEDIA_KEYS,
    *("system", "system_prompt", "context", "contexts"),
    *("passage", "passages", "document", "documents"),
    *("article", "choices", "options", "input", "history"),
    *("functions", "tool_definitions", "available_tools", "tool_schemas"),
)
"""Columns with names that suggest content. They are not added to a prompt, with one exception: ``input`` is appended to
a prompt from ``instruction``."""
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""ShareGPT's names of roles -> the usual names. Other names are kept."""


class UnansweredError(ValueError):
    """A record has no usable answer. The message has the reason."""


def prompt_of(record: Mapping[str, Any], location: str, key: str | None = None) -> Prompt:
    """Read the prompt under ``key`` (``a.b`` for a field of a structure); None: under one of ``PROMPT_KEYS``.

    Chat messages have a role and content, or ShareGPT's ``from`` and ``value``. Content is text, or parts of text, and
    may be missing if there are ``tool_calls``. Messages of the assistant at the end are an answer, and are left out.
    Text under ``input`` is appended to a prompt from ``instruction``. Raises DataError if there is no prompt, or if
    several columns have different prompts.
    """
    if key is not None:
        value = value_at(record, key)
        if value is None:
            raise DataError(f"{location}: no {key!r}, found {keys(record)}")
        return _prompt(value, key, location)
    values = _values(record, PROMPT_KEYS)
    if not values:
        raise DataError(
            f"{location}: no prompt; expected one of {', '.join(chain(*PROMPT_KEYS))}, found {keys(record)}"
        )
    prompts: dict[str, Prompt] = {}
    for name, value in values.items():
        prompts[name] = _prompt(value, name, location)
    if len(set(map(all_text, prompts.values()))) > 1:
        raise DataError(f"{location}: {_ambiguity(values, 'prompt_key')}")
    first_name, prompt = next(iter(prompts.items()))
    if first_name.lower() == "instruction" and isinstance(prompt, str):
        input_rows: Keys = (("input",),)
        input_text = next(iter(_values(record, input_rows).values()), None)
        if isinstance(input_text, str) and input_text.strip():
            return f"{prompt}\n\n{input_text}"
    return prompt


CONVERSATION_KEYS: Keys = (("messages", "conversations"),)
"""Columns of a conversation whose assistant messages are learned."""


_NOT_IN_CONTENT = {"tool_calls", "reasoning_content", "reasoning", "thinking"}
"""Keys of an assistant message for what the model writes beside ``content``, in an order that a template decides."""


def turns_of(record: Mapping[str, Any], location: str) -> list[tuple[Prompt, str]]:
    """Read what a record teaches: pairs of a prompt and the response to it.

    With text under ``response`` it is one pair, and the prompt is as in ``prompt_of``. Without, the record has a
    conversation, and each of its assistant messages is the response to the messages before it. Raises DataError if the
    record has neither, and for an assistant message that is no text or follows another one.
    """
    conversation = next(iter(_values(record, CONVERSATION_KEYS).items()), None)
    if "response" in record or conversation is None:
        return [(prompt_of(record, location), _response(record, location))]
    key, value = conversation
    entries = _conversation(value) or []
    turns: list[tuple[Prompt, str]] = []
    for number, entry in enumerate(entries, 1):
        # A message of the assistant at the beginning answers nothing, so it is only read.
        if number == 1 or _role_of(entry) != "assistant":
            continue
        place = f"{location}: message {number} of {key!r}"
        if _role_of(entries[number - 2]) == "assistant":
            raise DataError(
                f"{place} follows a message of the assistant, expected one message a turn"
            )
        message = _message(entry)
        if message is None or not message["content"].strip() or message.keys() & _NOT_IN_CONTENT:
            raise DataError(
                f"{place} is {short_json(entry)}, expected content as the model writes it, with thoughts and calls of "
                "tools in it as text"
            )
        turns.append((_prompt(entries[: number - 1], key, location), message["content"]))
    if not turns:
        raise DataError(
            f"{location}: {key!r} has no message of the assistant after another one, expected one, or 'response'"
        )
    return turns


def _response(record: Mapping[str, Any], location: str) -> str:
    if "response" not in record:
        raise DataError(
            f"{location}: no response; expected 'response', or 'messages' with answers of the assistant, found "
            f"{keys(record)}"
        )
    response = record["response"]
    if not isinstance(response, str) or not response.strip():
        raise DataError(f"{location}: 'response' is {short_json(response)}, expected text")
    return response


def answer_of(record: Mapping[str, Any], key: str | None = None) -> str:
    """Read the answer under ``key``; None: under one of ``ANSWER_KEYS``.

    The answer is text, a number, or a list with one text or number. A ``solution`` counts only if it has its answer
    after ``####`` or in a box, or is a single word. Raises UnansweredError if there is no answer, or if several columns
    have different answers.
    """
    if key is not None:
        # ``key`` is the whole name of a column, perhaps with dots, or a path that begins with the name of a column.
        if key not in record and _steps(key)[0] not in record:
            raise UnansweredError(f"no {key!r}, found {keys(record)}")
        return _answer(value_at(record, key), key)
    values = _values(record, ANSWER_KEYS)
    answers = {name: _answer(value, name) for name, value in values.items()}
    if len(set(answers.values())) > 1:
        raise UnansweredError(_ambiguity(values, "answer_key"))
    for name, answer in answers.items():
        if name.lower() != "solution" or holds_answer(answer) or len(answer.split()) == 1:
            return answer
    expected = ", ".join(map(repr, chain(*ANSWER_KEYS[:-1])))
    raise UnansweredError(
        f"no answer; expected {expected}, or a 'solution' with #### or \\boxed, found {keys(record)}"
        f"{_last_message_hint(record)}"
    )


def _last_message_hint(record: Mapping[str, Any]) -> str:
    """A hint to set the key of the answer, if a conversation ends with a message of the assistant; else empty."""
    for name, value in record.items():
        conversation = _conversation(value)
        if name.lower() not in _CONVERSATIONS or conversation is None:
            continue
        message = _message(conversation[-1])
        if message is not None and message["role"] == "assistant":
            field = "content" if "content" in conversation[-1] else "value"
            key = f"{name}[-1].{field}"
            return f". Where the last message is the answer, set the file's answer_key: {key}"
    return ""


def metadata_of(
    record: Mapping[str, Any], location: str, key: str | None = None
) -> Mapping[str, Any]:
    """Read the object under ``key``. If ``key`` is None, read the first object under ``METADATA_KEYS``; without such an
    object, return an empty mapping.

    The key ``*`` stands for all columns. Raises DataError if there is no object under ``key``, or if the object has
    values that JSON cannot represent.
    """
    if key == EVERY_COLUMN:
        return {name: _as_json(value, f"{location}: {name!r}") for name, value in record.items()}
    names = METADATA_KEYS if key is None else (key,)
    for name in names:
        value = value_at(record, name)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = _parsed(value)
        if isinstance(value, Mapping):
            return _as_json(value, f"{location}: {name!r}")
    if key is not None:
        raise DataError(
            f"{location}: {key!r} is {short_json(value_at(record, key))}, expected an object"
        )
    return {}


def _as_json(value: Any, location: str) -> Any:
    """Convert a value of a columnar file to JSON types, because processes exchange JSON.

    Dates, times and decimals become text. Raises DataError for other types, and for values that are nested too deeply.
    """
    try:
        if isinstance(value, Mapping):
            return {key: _as_json(item, location) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [_as_json(item, location) for item in value]
    except RecursionError as error:
        raise DataError(f"{location} is nested too deeply") from error
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise DataError(
        f"{location} holds {type(value).__name__}, expected what JSON can hold, or dates"
    )


def tools_of(record: Mapping[str, Any], location: str) -> tuple[dict[str, Any], ...]:
    """Read the definitions of functions under ``tools``: a list of objects, or the JSON text of a list of objects.

    Returns an empty tuple for a record without tools. Raises DataError for another value.
    """
    value = record.get(TOOLS_KEY)
    if _is_blank(value):
        return ()
    parsed = _parsed(value)
    tools = [parsed]
    if isinstance(parsed, list):
        # Some files have a separate JSON text for each definition.
        tools = [_parsed(tool) for tool in parsed]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(
            f"{location}: {TOOLS_KEY!r} is {short_json(value)}, expected a list of objects that define functions, or "
            "its JSON as text; rename a column of another meaning"
        )
    return tuple(_as_json(_without_none(tool), f"{location}: {TOOLS_KEY!r}") for tool in tools)


def refuse_media(record: Mapping[str, Any], prompt: Prompt, location: str) -> None:
    """Raise DataError if a record has images, videos or sound: the model would not receive them.

    Text under ``image`` may have another meaning, so it counts only if the prompt has a mark, for instance ``<image>``.
    """
    for name, value in record.items():
        if name.lower() not in MEDIA_KEYS or _is_empty(value):
            continue
        if isinstance(value, str) and _MEDIA_MARK.search(all_text(prompt)) is None:
            continue
        raise DataError(
            f"{location}: the column {name!r} has a value ({type(value).__name__}), expected an empty column: models "
            "are trained on text alone, so the prompt would have only a word such as <image>. Leave out this problem, "
            f"or the column {name!r} if the text is enough"
        )


def unread_columns(record: Mapping[str, Any], prompt: Prompt) -> list[str]:
    """The columns of ``UNREAD_KEYS`` that have a value which is not in the prompt."""
    text = all_text(prompt)
    names = []
    for name, value in record.items():
        if name.lower() not in UNREAD_KEYS or _is_empty(value):
            continue
        if not isinstance(value, str) or value.strip() not in text:
            names.append(name)
    return names


def all_text(prompt: Prompt) -> str:
    """The text of all messages, a message a paragraph."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)


def _is_empty(value: object) -> bool:
    """Whether a value is empty. A list or object of empty values is empty too: columnar files have such values."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_empty, value))
    return value is None or value == b"" or (isinstance(value, str) and not value.strip())


def _parsed(value: Any) -> Any:
    """Parse JSON text. Other values, and text that is not JSON, are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _without_none(value: Any) -> Any:
    """A copy without the keys whose value is None: columnar files add these keys to every object of a column."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value


def text_of(prompt: Prompt) -> str:
    """The prompt's text, or the text of its last message."""
    if isinstance(prompt, str):
        return prompt
    return str(prompt[-1]["content"])


def _values(record: Mapping[str, Any], rows: Keys) -> dict[str, Any]:
    """The record's values under the names of one of ``rows`` (``Keys``), by the record's own keys.

    The first row with a value that is not blank is used. If all values are blank, the result has the first blank value,
    so that an error can show it. If the record has none of the names, the result is empty.
    """
    blank_value: dict[str, Any] = {}
    for names in rows:
        row_values: dict[str, Any] = {}
        for name in names:
            # Names of a structure's fields must match exactly; column names may differ in case.
            record_keys = [name]
            if "." not in name:
                record_keys = [key for key in record if key.lower() == name]
            for key in record_keys:
                # If a structure lacks the field, ``value_at`` returns None, which is a blank value.
                if key in record or _is_structure(record, key):
                    row_values[key] = value_at(record, key)
        values = {key: value for key, value in row_values.items() if not _is_blank(value)}
        if values:
            return values
        if not blank_value:
            blank_value = dict(list(row_values.items())[:1])
    return blank_value


def _is_structure(record: Mapping[str, Any], path: str) -> bool:
    """Whether the column of ``path`` has an object. ``path``: ``a`` for a column, ``a.b`` for a structure's field."""
    return isinstance(_structure(record.get(path.partition(".")[0])), Mapping)


def _structure(value: Any) -> Any:
    """The object or list that a text has as JSON; other values unchanged."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        conversation = _conversation(value)
        return _parsed(value) if conversation is None else conversation
    return value


def _is_blank(value: object) -> bool:
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def _ambiguity(values: Mapping[str, Any], config_key: str) -> str:
    values_text = " and ".join(f"{key!r} is {short_json(value)}" for key, value in values.items())
    return f"{values_text}; which of them is meant? Set the file's {config_key} (docs/data.md)"


def _prompt(value: object, key: str, location: str) -> Prompt:
    """Convert the value under ``key`` to a prompt. Raises DataError if the value is not a prompt."""
    entries = _conversation(value)
    if entries is None:
        if isinstance(value, str) and _is_broken_conversation(value):
            raise DataError(
                f"{location}: {key!r} is {short_json(value)}, which begins like chat messages, expected a list of "
                "messages in JSON, each with a role and a content"
            )
        if isinstance(value, str) and value.strip():
            return value
        raise DataError(f"{location}: {key!r} is {short_json(value)}, expected {_PROMPT_FORM}")
    messages: list[dict[str, Any]] = []
    for number, entry in enumerate(entries, 1):
        message = _message(entry)
        role = _role_of(entry)
        if role in _OPTIONAL_ROLES and _has_no_content(entry):
            continue
        if message is not None:
            messages.append(message)
        elif role == "assistant" and all(_role_of(e) == "assistant" for e in entries[number:]):
            # Messages of the assistant at the end are left out in any case.
            continue
        else:
            raise DataError(
                f"{location}: {key!r} has {short_json(entry)} as message {number}, {_message_fault(entry, role)}"
            )
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{location}: {key!r} is {short_json(value)}, expected {_PROMPT_FORM}")
    return [_as_json(message, f"{location}: {key!r}") for message in messages]


_PROMPT_FORM = "text or a list of chat messages with a role and a content, at least one of them not the assistant's"
_MESSAGES_BEGIN = re.compile(
    r"\s*(?:array\()?\[\s*\{\s*['\"](?:role|from|content|value)['\"]\s*:\s*['\"]"
)
"""The beginning of text that is a list of messages in some notation."""
_OPTIONAL_ROLES = ("system", "developer")
"""A message of these roles without content is left out: many exports have an empty system message."""


def _conversation(value: object) -> list[Any] | None:
    """The messages of a list, or of text that is a list of messages in JSON or Python's notation; None for others."""
    if isinstance(value, list):
        has_messages = any(isinstance(entry, Mapping) for entry in value)
        return value if has_messages else None
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return None
    parsed = _parsed_literal(value)
    messages = [parsed] if isinstance(parsed, Mapping) else parsed
    if isinstance(messages, list) and messages and all(map(_role_of, messages)):
        return messages
    return None


def _is_broken_conversation(text: str) -> bool:
    """Whether text that is no list of messages begins like one: it is cut off, or one of its messages is none."""
    if not _MESSAGES_BEGIN.match(text):
        return False
    parsed = _parsed_literal(text)
    return not isinstance(parsed, list) or any(map(_role_of, parsed))


def _parsed_literal(text: str) -> Any:
    """The value of JSON, or of a Python literal: CSV files of pandas have messages in this notation. None for other
    text."""
    value = _parsed(text)
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _role_of(message: Any) -> str | None:
    """The role of a message that has keys for a role and for content or calls; None for other values."""
    if not isinstance(message, Mapping):
        return None
    role = message.get("role") or message.get("from")
    has_content_key = any(key in message for key in ("content", "value", "tool_calls"))
    if not isinstance(role, str) or not role or not has_content_key:
        return None
    return ROLES.get(role, role)


def _has_no_content(message: Mapping[str, Any]) -> bool:
    return all(_is_blank(message.get(key)) for key in ("content", "value", "tool_calls"))


def _message_fault(message: Any, role: str | None) -> str:
    if role is None:
        return "expected a message with a role and a content"
    if _has_no_content(message):
        return f"of the role {role!r} without content, expected text"
    return "expected content as text, or as a list of text parts"


def _message(message: Any) -> dict[str, Any] | None:
    """Convert a message to the form that chat templates take. None for an invalid message."""
    if not isinstance(message, Mapping):
        return None
    # Columnar files have every key in every message, with the value None.
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.pop("role", None) or fields.pop("from", None)
    if not isinstance(role, str) or not role:
        return None
    content_key = "content" if "content" in fields else "value"
    content = fields.pop(content_key, None)
    if isinstance(content, list):
        content = _text_of_parts(content)
    if not content and fields.get("tool_calls"):
        content = ""
    elif not isinstance(content, str) or not content:
        return None
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = [_tool_call(call) for call in fields["tool_calls"]]
    return {"role": ROLES.get(role, role), "content": content, **fields}


def _tool_call(call: Any) -> Any:
    """Convert a tool call: arguments that are the JSON text of an object become the object."""
    if not isinstance(call, Mapping):
        return call
    fields = _without_none(call)
    if isinstance(fields.get("function"), Mapping):
        return {**fields, "function": _tool_call(fields["function"])}
    arguments = _parsed(fields.get("arguments"))
    if isinstance(arguments, Mapping):
        return {**fields, "arguments": arguments}
    return fields


def _text_of_parts(parts: list[Any]) -> str | None:
    """Join the texts of ``{"type": "text", "text": ...}``. None if there is another kind of part."""
    texts = []
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            return None
        texts.append(part["text"])
    return "".join(texts)


def _answer(value: object, key: str) -> str:
    """Convert the value under ``key`` to the text of an answer: 5.0 becomes "5". Raises UnansweredError."""
    answer = value
    if isinstance(value, list) and len(value) == 1:
        answer = value[0]
    if isinstance(answer, Decimal) and answer.is_finite():
        answer = _decimal_text(answer)
    elif _is_number(answer):
        is_whole = answer == int(answer)
        answer = str(int(answer)) if is_whole else str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise UnansweredError(f"{key!r} is {short_json(value)}, expected text or a number")
    return answer


def _decimal_text(value: Decimal) -> str:
    """Write a decimal without an exponent and without trailing zeros: ``5.00`` becomes 5."""
    text = format(value, "f")
    if "." in text:
        return text.rstrip("0").rstrip(".")
    return text


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def value_at(record: Mapping[str, Any], path: str) -> Any:
    """The value under ``a``, under ``a.b`` in a structure, or under ``a[-1]`` in a list; None if there is no value."""
    if path in record:
        return record[path]
    value: Any = record
    for step in _steps(path):
        value = _structure(value)
        if isinstance(step, int):
            has_step = isinstance(value, list) and -len(value) <= step < len(value)
        else:
            has_step = isinstance(value, Mapping) and step in value
        if not has_step:
            return None
        value = value[step]
    return value


def _steps(path: str) -> list[str | int]:
    """Split a path: ``a[-1].b`` becomes a, -1, b."""
    steps: list[str | int] = []
    for part in path.split("."):
        # The split returns the name, then each index followed by the text after it.
        name, *indices_and_texts = re.split(r"\[(-?\d+)\]", part)
        indices = indices_and_texts[::2]
        steps += [name, *map(int, indices)]
    return steps


def keys(record: Mapping[str, Any]) -> str:
    """The names of a record's columns, at most 12, for errors."""
    names = sorted(record)
    return str([cut(name) for name in names[:12]]) + (" and more" if len(names) > 12 else "")
