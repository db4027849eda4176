"""Files of records in every format that is read: JSON Lines, JSON, CSV, Parquet, Arrow; and what of a record is a
problem's prompt, answer and metadata.

The first bytes decide, not the name: published files have many. One error names file and line.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from megatron_dppo.config.data_files import data_files
from megatron_dppo.data.gold_answers import holds_answer
from megatron_dppo.system.errors import RunError

Record = dict[str, Any]
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARRO", b"\xff\xff\xff\xff"
"""The first four bytes of each format; ``datasets`` saves streams."""
COLUMNAR = (PARQUET, ARROW_FILE, ARROW_STREAM)
GZIP = b"\x1f\x8b"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Rows that are Python objects at one time: published files have millions.
_BATCH = 4096


class DataError(RunError, ValueError):
    """A data set cannot be used; the message names the file, the line (from 1) and the fault."""


class FilePart(NamedTuple):
    """One of the files that a set of records is from.

    ``records``: their number. ``unit``: what one is called in messages, ``line`` or ``row``.
    """

    path: str
    records: int
    unit: str


class RecordSet(NamedTuple):
    """The records of a data path.

    ``locations``: the place of each in words. ``sha256``: of the file's bytes, or of all files' hashes. ``parts``: the
    files in their order.
    """

    records: list[Record]
    locations: list[str]
    sha256: str
    parts: tuple[FilePart, ...]


def read_records(path: Path) -> tuple[list[Record], list[str], str]:
    """The objects of a file, the place of each in words, and the SHA-256 of the file's bytes."""
    if is_columnar(path):
        records = list(_rows(path))
        if not records:
            raise DataError(f"{path}: the file is empty, expected at least one row")
        locations = [f"{path}, row {number}" for number in range(1, len(records) + 1)]
        with open(path, "rb") as file:
            return records, locations, hashlib.file_digest(file, "sha256").hexdigest()
    content = _content(path)
    digest = hashlib.sha256(content).hexdigest()
    records, locations = _parse_text_file(path, _decompressed(path, content))
    return records, locations, digest


def read_all_records(path: str | Path) -> RecordSet:
    """The objects of a file, or of all files of a folder or a glob, file after file.

    Raises DataError where there is no file, or one can't be read.
    """
    expanded = data_files(path)
    if not expanded.files:
        raise DataError(f"{path}: expected {expanded.fault}")
    records: list[Record] = []
    locations: list[str] = []
    hashes, parts = [], []
    for file in expanded.files:
        new_records, new_locations, digest = read_records(file)
        records += new_records
        locations += new_locations
        hashes.append(digest)
        parts.append(FilePart(str(file), len(new_records), unit_of(file)))
    return RecordSet(records, locations, joined_sha256(hashes), tuple(parts))


def joined_sha256(hashes: Sequence[str]) -> str:
    """One hash for files in this order, from their own; a single file keeps its own."""
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256(json.dumps(list(hashes)).encode()).hexdigest()


def columns_of(path: Path) -> list[str]:
    """The names of a file's columns; of the first object where it is JSON."""
    if not is_columnar(path):
        return sorted(_objects(path)[0])
    with _faults_named(path):
        return list(_opened(path, None)[0])


def stream_records(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    """The objects of a file one after the other, with ``columns`` at least.

    Takes a JSON document too: a list of objects, or a single one, as MATH was first published.
    """
    return _rows(path, columns) if is_columnar(path) else iter(_objects(path))


def is_columnar(path: Path) -> bool:
    """Whether the file is Parquet or Arrow. Raises DataError where it can't be read."""
    try:
        with open(path, "rb") as file:
            return file.read(4) in COLUMNAR
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def unit_of(path: Path) -> str:
    """What a record of the file is called in messages, ``line`` or ``row``."""
    return "row" if is_columnar(path) or _delimiter(path) is not None else "line"


# --- JSON and CSV, perhaps compressed by gzip


def _delimiter(path: Path) -> str | None:
    """What separates the columns of a CSV file; None for other files. ``.csv.gz`` is one too."""
    name = path.name.lower().removesuffix(".gz")
    return _DELIMITERS.get(Path(name).suffix)


def _decompressed(path: Path, content: bytes) -> bytes:
    if not content.startswith(GZIP):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: no readable gzip file: {error}") from error


def _parse_text_file(path: Path, content: bytes) -> tuple[list[Record], list[str]]:
    """The objects of a JSONL or CSV file and the place of each in words."""
    delimiter = _delimiter(path)
    if delimiter is None:
        return _parse_lines(path, content)
    return _parse_table(path, content, delimiter)


def _parse_table(path: Path, content: bytes, delimiter: str) -> tuple[list[Record], list[str]]:
    """The rows of a CSV file, whose first line names the columns. Values are text; empty ones are none."""
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
    locations = [f"{path}, row {number}" for number in range(1, len(rows) + 1)]
    for row, where in zip(rows, locations, strict=True):
        # DictReader keeps what is beyond the named columns under None.
        if None in row or None in row.values():
            count = len(reader.fieldnames or ())
            raise DataError(f"{where}: expected {count} columns, as the first line names")
    records = [{key: value or None for key, value in row.items()} for row in rows]
    return records, locations


def _parse_lines(path: Path, content: bytes) -> tuple[list[Record], list[str]]:
    """The objects of a JSONL file and the place of each in words."""
    lines = content.removeprefix(b"\xef\xbb\xbf").rstrip().split(b"\n")
    if lines == [b""]:
        raise DataError(f"{path}: the file is empty, expected one JSON object a line")
    locations = [f"{path}, line {number}" for number in range(1, len(lines) + 1)]
    records = [_parse_text(line, where) for line, where in zip(lines, locations, strict=True)]
    for record, where in zip(records, locations, strict=True):
        if not isinstance(record, dict):
            raise DataError(f"{where}: {type(record).__name__}, expected a JSON object")
    return records, locations


def _parse_text(text: bytes, where: str) -> Any:
    """A JSON value. Raises DataError beginning with ``where``, also for what can't be written back."""
    try:
        value = json.loads(text)
        # An escape may be half of a surrogate pair, which json takes and no file can hold.
        if b"\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}: {error.reason}") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: holds half of a surrogate pair, which is no text") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply") from error
    # Python reads no integer of more than 4300 digits.
    except ValueError as error:
        raise DataError(f"{where}: {error}; write a long number as text") from error
    return value


def _objects(path: Path) -> list[Record]:
    content = _decompressed(path, _content(path))
    try:
        return _parse_text_file(path, content)[0]
    except DataError:
        if path.suffix != ".json":
            raise
        document = _parse_text(content, str(path))
    records = document if isinstance(document, list) else [document]
    if not records or not all(isinstance(record, dict) for record in records):
        raise DataError(f"{path}: expected an object, or a list of objects")
    return records


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


# --- Parquet and Arrow


def _rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Record]:
    """The rows as plain Python values, of ``columns`` alone where they are given."""
    with _faults_named(path):
        for batch in _opened(path, columns)[1]:
            for start in range(0, batch.num_rows, _BATCH):
                rows = batch.slice(start, _BATCH)
                yield from (rows if columns is None else rows.select(list(columns))).to_pylist()


def _opened(path: Path, columns: Sequence[str] | None) -> tuple[list[str], Iterator[Any]]:
    """The names of the columns, and the record batches."""
    import pyarrow
    import pyarrow.parquet

    with open(path, "rb") as file:
        kind = file.read(4)
    if kind == PARQUET:
        parquet = pyarrow.parquet.ParquetFile(path)
        chosen = None if columns is None else list(columns)
        return parquet.schema_arrow.names, parquet.iter_batches(_BATCH, columns=chosen)
    source = pyarrow.memory_map(str(path))
    if kind == ARROW_STREAM:
        stream = pyarrow.ipc.open_stream(source)
        return stream.schema.names, iter(stream)
    whole = pyarrow.ipc.open_file(source)
    return whole.schema.names, map(whole.get_batch, range(whole.num_record_batches))


@contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet is read by pyarrow, which is not installed: pip install pyarrow"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    # pyarrow's own errors derive from these.
    except (ValueError, KeyError, NotImplementedError) as error:
        raise DataError(f"{path}: no readable Parquet or Arrow file: {error}") from error


# --- what of a record is a problem's prompt, its answer and its metadata

Prompt = str | list[dict[str, Any]]
"""Text, or chat messages with the content as text."""
Keys = tuple[tuple[str, ...], ...]
"""Names of the same thing, in any case: the first row of which a record has one with a value is used. Values of two
names of a row must be the same."""
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
"""The first that is an object, or its JSON as text."""
EVERY_COLUMN = "*"
"""As the key of metadata: all columns of a record."""
_CONVERSATIONS = ("messages", "conversations", "prompt")
TOOLS_KEY = "tools"
"""Definitions of functions, which the chat template writes into the prompt."""
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
_MEDIA_MARK = re.compile(r"<\|?(?:image|video|audio)", re.IGNORECASE)
UNREAD_KEYS = (
    *MEDIA_KEYS,
    *(
        "system",
        "system_prompt",
        "context",
        "contexts",
        "passage",
        "passages",
        "document",
        "documents",
    ),
    *("article", "choices", "options", "input", "history"),
    *("functions", "tool_definitions", "available_tools", "tool_schemas"),
)
"""Columns that are content by their names, and never a part of a prompt beside the columns above."""
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""ShareGPT's names of roles; other roles stay."""


class UnansweredError(ValueError):
    """A record has no usable answer; the message says why."""


def prompt_of(record: Mapping[str, Any], where: str, key: str | None = None) -> Prompt:
    """The prompt under ``key``, ``a.b`` for a field of a structure; None: under one of ``PROMPT_KEYS``.

    Chat messages have a role and content, or ShareGPT's ``from`` and ``value``; content is text, or parts of text, and
    may lack where there are ``tool_calls``. What the assistant says at the end is an answer, and left out. Text under
    ``input`` belongs to an ``instruction``. Raises DataError where there is no prompt, or two.
    """
    if key is not None:
        if (value := value_at(record, key)) is None:
            raise DataError(f"{where}: no {key!r}, found {keys(record)}")
        return _prompt(value, key, where)
    values = _values(record, PROMPT_KEYS)
    if not values:
        expected = ", ".join(name for names in PROMPT_KEYS for name in names)
        raise DataError(f"{where}: no prompt; expected one of {expected}, found {keys(record)}")
    prompts = {name: _prompt(value, name, where) for name, value in values.items()}
    if len({text_of(prompt) for prompt in prompts.values()}) > 1:
        raise DataError(f"{where}: {_ambiguity(values, 'prompt_key')}")
    key, prompt = next(iter(prompts.items()))
    if key.lower() == "instruction" and isinstance(prompt, str):
        further = next(iter(_values(record, (("input",),)).values()), "")
        return f"{prompt}\n\n{further}" if isinstance(further, str) and further.strip() else prompt
    return prompt


def answer_of(record: Mapping[str, Any], key: str | None = None) -> str:
    """The answer under ``key``; None: under one of ``ANSWER_KEYS``, a ``solution`` where it has its answer after
    ``####`` or in a box, or is a single word. Text, a number, or a list with one of them.

    Raises UnansweredError where there is no answer, or two.
    """
    if key is not None:
        if _steps(key)[0] not in record and key not in record:
            raise UnansweredError(f"no {key!r}, found {keys(record)}")
        return _answer(value_at(record, key), key)
    values = _values(record, ANSWER_KEYS)
    answers = {name: _answer(value, name) for name, value in values.items()}
    if len(set(answers.values())) > 1:
        raise UnansweredError(_ambiguity(values, "answer_key"))
    for name, answer in answers.items():
        if name.lower() != "solution" or holds_answer(answer) or len(answer.split()) == 1:
            return answer
    expected = ", ".join(repr(name) for names in ANSWER_KEYS[:-1] for name in names)
    raise UnansweredError(
        f"no answer; expected {expected}, or a 'solution' with #### or \\boxed, found {keys(record)}"
        f"{_last_message_hint(record)}"
    )


def _last_message_hint(record: Mapping[str, Any]) -> str:
    """How to name the answer that a conversation ends with; empty where none does."""
    for name, value in record.items():
        if name.lower() not in _CONVERSATIONS or not isinstance(value, list) or not value:
            continue
        message = _message(value[-1])
        if message is not None and message["role"] == "assistant":
            field = "content" if "content" in value[-1] else "value"
            key = f"{name}[-1].{field}"
            return f". Where the last message is the answer, set the file's answer_key: {key}"
    return ""


def metadata_of(record: Mapping[str, Any], where: str, key: str | None = None) -> Mapping[str, Any]:
    """The object under ``key``, or all columns where that is ``*``; None: under one of ``METADATA_KEYS``, and empty
    where none is an object.

    Raises DataError where there is none under ``key``, or it holds what JSON can't.
    """
    if key == EVERY_COLUMN:
        return {name: _as_json(value, f"{where}: {name!r}") for name, value in record.items()}
    for name in METADATA_KEYS if key is None else (key,):
        value = value_at(record, name)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                continue
        if isinstance(value, Mapping):
            return {part: _as_json(inner, f"{where}: {name!r}") for part, inner in value.items()}
    if key is not None:
        raise DataError(f"{where}: {key!r} is {shorten(value_at(record, key))}, expected an object")
    return {}


def _as_json(value: Any, where: str) -> Any:
    """A value of a columnar file as JSON has it, for that is how it goes to processes: dates, times and decimals as
    text. Raises DataError for what no text stands for, and what is nested too deeply."""
    try:
        if isinstance(value, Mapping):
            return {key: _as_json(inner, where) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [_as_json(inner, where) for inner in value]
    except RecursionError as error:
        raise DataError(f"{where} is nested too deeply") from error
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise DataError(f"{where} holds {type(value).__name__}, expected what JSON can hold, or dates")


def tools_of(record: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    """The definitions of functions under ``tools``: a list of objects, or its JSON as text; empty where there are none.

    Raises DataError where it is something else.
    """
    value = record.get(TOOLS_KEY)
    if _is_blank(value):
        return ()
    tools = _parsed(value)
    # Some files have each definition as JSON text of its own.
    tools = [_parsed(tool) for tool in tools] if isinstance(tools, list) else [tools]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(
            f"{where}: {TOOLS_KEY!r} is {shorten(value)}, expected a list of objects that define functions, or its "
            "JSON as text; give a column that is for other ends another name"
        )
    return tuple(_as_json(_without_none(tool), f"{where}: {TOOLS_KEY!r}") for tool in tools)


def refuse_media(record: Mapping[str, Any], prompt: Prompt, where: str) -> None:
    """Raise DataError where a record has images, videos or sound, which the model would not get.

    A text under ``image`` alone may be a name of something else, so it counts where the prompt has a mark such as
    ``<image>``.
    """
    for name, value in record.items():
        if name.lower() not in MEDIA_KEYS or _is_empty(value):
            continue
        if isinstance(value, str) and _MEDIA_MARK.search(_all_text(prompt)) is None:
            continue
        raise DataError(
            f"{where}: the column {name!r} has a value ({type(value).__name__}), expected an empty one: models are "
            "trained on text alone, so the prompt would have only a word such as <image>. Leave out such problems, or "
            f"the column {name!r} where the text is enough"
        )


def unread_columns(record: Mapping[str, Any], prompt: Prompt) -> list[str]:
    """The columns of ``UNREAD_KEYS`` that have a value which is no part of the prompt."""
    text = _all_text(prompt)
    found = []
    for name, value in record.items():
        if name.lower() not in UNREAD_KEYS or _is_empty(value):
            continue
        if not isinstance(value, str) or value.strip() not in text:
            found.append(name)
    return found


def _all_text(prompt: Prompt) -> str:
    """The text of every message."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)


def _is_empty(value: object) -> bool:
    """Whether a column has nothing: also a list or an object of nothing, as columnar files have them."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_empty, value))
    return value is None or value == b"" or (isinstance(value, str) and not value.strip())


def _parsed(value: Any) -> Any:
    """The value of JSON text; another value, and text that is no JSON, stays what it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _without_none(value: Any) -> Any:
    """A copy without the keys that columnar files add to every object of a column."""
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_none(inner) for inner in value]
    return value


def text_of(prompt: Prompt) -> str:
    """The text itself, or the last message's."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _values(record: Mapping[str, Any], rows: Keys) -> dict[str, Any]:
    """What a record has under the names of the first row with a value, by key; where no name has one, what is there
    instead under the first."""
    blank: dict[str, Any] = {}
    for names in rows:
        # A structure's fields are asked for as they are written.
        spelled = [k for n in names for k in ([n] if "." in n else record) if k.lower() == n]
        present = {
            k: value_at(record, k) for k in spelled if k in record or _is_structure(record, k)
        }
        if values := {k: value for k, value in present.items() if not _is_blank(value)}:
            return values
        blank = blank or dict(list(present.items())[:1])
    return blank


def _is_structure(record: Mapping[str, Any], path: str) -> bool:
    return isinstance(record.get(path.partition(".")[0]), Mapping)


def _is_blank(value: object) -> bool:
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def _ambiguity(values: Mapping[str, Any], config_key: str) -> str:
    shown = " and ".join(f"{key!r} is {shorten(value)}" for key, value in values.items())
    return f"{shown}; which of them is meant? Set the file's {config_key} (docs/data.md)"


def _prompt(value: object, key: str, where: str) -> Prompt:
    if isinstance(value, str) and value.strip():
        return value
    messages = [_message(message) for message in value] if isinstance(value, list) else []
    if None not in messages:
        plain = [message for message in messages if message is not None]
        while plain and plain[-1]["role"] == "assistant":
            plain.pop()
        if plain:
            return [_as_json(message, f"{where}: {key!r}") for message in plain]
    raise DataError(
        f"{where}: {key!r} is {shorten(value)}, expected text or a list of chat messages with a role and a content, "
        "not the assistant's alone"
    )


def _message(message: Any) -> dict[str, Any] | None:
    """A message as chat templates take it; None where it is none."""
    if not isinstance(message, Mapping):
        return None
    # Columnar files have every key in every message.
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.pop("role", None) or fields.pop("from", None)
    content = fields.pop("content" if "content" in fields else "value", None)
    if isinstance(content, list):
        content = _text_of_parts(content)
    if not content and fields.get("tool_calls"):
        content = ""
    elif not isinstance(content, str) or not content:
        return None
    if not isinstance(role, str) or not role:
        return None
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = [_tool_call(call) for call in fields["tool_calls"]]
    return {"role": ROLES.get(role, role), "content": content, **fields}


def _tool_call(call: Any) -> Any:
    """A call with its arguments as an object, where they are one or its JSON as text."""
    if not isinstance(call, Mapping):
        return call
    plain = {key: _without_none(value) for key, value in call.items() if value is not None}
    if isinstance(plain.get("function"), Mapping):
        return {**plain, "function": _tool_call(plain["function"])}
    arguments = _parsed(plain.get("arguments"))
    return {**plain, "arguments": arguments} if isinstance(arguments, Mapping) else plain


def _text_of_parts(parts: list[Any]) -> str | None:
    """The texts of ``{"type": "text", "text": ...}`` in a row; None where there is anything else."""
    texts = []
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            return None
        texts.append(part["text"])
    return "".join(texts)


def _answer(value: object, key: str) -> str:
    answer = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(answer, Decimal) and answer.is_finite():
        answer = _decimal_text(answer)
    elif _is_number(answer):
        answer = str(int(answer) if answer == int(answer) else answer)
    if not isinstance(answer, str) or not answer.strip():
        raise UnansweredError(f"{key!r} is {shorten(value)}, expected text or a number")
    return answer


def _decimal_text(value: Decimal) -> str:
    """A decimal without an exponent and without zeros at its end: ``5.00`` is 5."""
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


# --- values, and how messages show them


def value_at(record: Mapping[str, Any], path: str) -> Any:
    """The value under ``a``, under ``a.b`` in a structure, or under ``a[-1]`` in a list; None where it is not there."""
    if path in record:
        return record[path]
    value: Any = record
    for step in _steps(path):
        if isinstance(step, int):
            is_there = isinstance(value, list) and -len(value) <= step < len(value)
            value = value[step] if is_there else None
        else:
            value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _steps(path: str) -> list[str | int]:
    """``a[-1].b`` as a, -1, b."""
    steps: list[str | int] = []
    for part in path.split("."):
        name, *places = re.split(r"\[(-?\d+)\]", part)
        steps += [name, *map(int, places[::2])]
    return steps


def keys(record: Mapping[str, Any]) -> str:
    names = sorted(record)
    return str([_cut(name) for name in names[:12]]) + (" and more" if len(names) > 12 else "")


def shorten(value: object) -> str:
    """A JSON value in at most 60 characters."""
    try:
        return _cut(json.dumps(value, ensure_ascii=False, default=str))
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
