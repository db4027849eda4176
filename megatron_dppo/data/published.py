"""Published sets of problems: where they are, the columns of their files, the rows that are used, their preparation.

A file's columns decide how it is read, not its name. A set may have several schemas, and ``schema_of`` returns the
first schema whose columns the file has. To add a set, add a row to ``SETS``.

``megatron-dppo data prepare`` writes published problems as JSON Lines, with one problem a line: ``problem`` without the
publisher's instructions, ``answer`` (the text after ``####`` or in the box), ``source``. The recipe sets the form of
the prompt (``data.prompt_template``), so that the prompts of training and evaluation have equal forms. Sets of prompts
for reward models and judges have no answers; a prompt of several turns is chat messages under ``messages``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dppo.config.data_files import DESCRIPTIONS
from megatron_dppo.data.gold_answers import gold_answer, holds_answer
from megatron_dppo.data.records import DataError, columns_of, stream_records, value_at
from megatron_dppo.metrics.progress import progress
from megatron_dppo.system.files import folder_fault, write_atomically
from megatron_dppo.system.text import short_json, single_line


@dataclass(frozen=True)
class Schema:
    """The columns of problem and answer in a published file; ``a.b`` for a field of a structure.

    Attributes:
        prompt: Column of the problem, as text or chat messages.
        answer: Column of the final answer; None for a set of prompts without answers.
        where: The hub's repositories that have these columns, for errors.
        worked: Whether ``answer`` is a worked solution, with its answer after ``####`` or in a box.
    """

    prompt: str
    answer: str | None
    where: str
    worked: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The top-level columns of problem and answer."""
        names = [self.prompt] if self.answer is None else [self.prompt, self.answer]
        return tuple(name.partition(".")[0] for name in names)

    @property
    def description(self) -> str:
        """The columns in words, for errors."""
        columns = self.prompt if self.answer is None else f"{self.prompt} and {self.answer}"
        return f"{columns} ({self.where})"


_VERL = Schema(
    "prompt", "reward_model.ground_truth", "BytedTsinghua-SIA/DAPO-Math-17k, Jiawei415/DPAO_filter"
)
_CONTEST = (
    Schema("problem", "answer", "HuggingFaceH4/aime_2024, yentinglin/aime_2025, math-ai/aime25"),
    Schema("question", "answer", "opencompass/AIME2025, math-ai/amc23, zwhe99/amc23"),
    Schema("Problem", "Answer", "Maxwell-Jia/AIME_2024"),
    Schema("Question", "Answer", "di-zhang-fdu/AIME_1983_2024"),
    Schema("problem", "solution", "math-ai/aime24", worked=True),
    _VERL,
    Schema("prompt", "label", "zhuzilin/aime-2024"),
    Schema("prompt", "answer", "verl and other frameworks' own files"),
)
_DAPO = (
    _VERL,
    Schema("prompt", "ground_truth", "hamishivi/DAPO-Math-17k-Processed_filtered"),
    Schema("prompt", "label", "zhuzilin/dapo-math-17k"),
    Schema("prompt", "solution", "open-r1/DAPO-Math-17k-Processed"),
    Schema("messages", "ground_truth", "mnoukhov/dapo_math_14k_en_openinstruct"),
    Schema("prompt", "answer", "other frameworks' own files"),
    Schema("problem", "answer", "Perflow-Shuai/DAPO-Math-17k"),
)
_MATH = (
    Schema("problem", "answer", "HuggingFaceH4/MATH-500, nlile/hendrycks-MATH-benchmark"),
    Schema("problem", "solution", "EleutherAI/hendrycks_math", worked=True),
    Schema("question", "answer", "other frameworks' own files"),
    _VERL,
)
_PROBLEM_ANSWER = (Schema("problem", "answer", "sail-sg/Precision-RL, axon-rl/MATH-12k"), _VERL)
_GSM8K = (Schema("question", "answer", "openai/gsm8k", worked=True), _VERL)


@dataclass(frozen=True)
class PublishedSet:
    """A published set, a row of ``SETS``.

    Attributes:
        title: Description of the set.
        schemas: The schemas of its published files, in order of preference.
        hub: Name on the Hugging Face hub.
        file: The file in the hub's repository, for a download by hand.
        configs: The configurations to read: names in the hub's repository, and folders in a copy of the repository. If
            the repository has none of these, or the tuple is empty, all configurations are read.
        split: The split to read if the repository has several. None: all splits.
        year: Year of a competition. Rows of other years are left out.
        english: Whether to leave out problems with Chinese, Japanese or Korean characters.
        integer_answers: Whether every answer is an integer from 0 to 999.
        transcripts: Whether a prompt is the transcript of a conversation (``messages_of``).
        elsewhere: A further place of the file, in words.
    """

    title: str
    schemas: tuple[Schema, ...]
    hub: str
    file: str
    configs: tuple[str, ...] = ()
    split: str | None = None
    year: int | None = None
    english: bool = False
    integer_answers: bool = False
    transcripts: bool = False
    elsewhere: str = ""


_SUBJECTS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra"),
    *("number_theory", "prealgebra", "precalculus"),
)
SETS: dict[str, PublishedSet] = {
    "dapo-math-17k": PublishedSet(
        "competition problems with integer answers, English and Chinese",
        _DAPO,
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "data/dapo-math-17k.parquet",
        configs=("all",),
    ),
    "dapo-math-13k": PublishedSet(
        "the filter of DAPO-Math-17k that the DPPO paper trains on",
        _DAPO,
        "Jiawei415/DPAO_filter",
        "the files of its folder train",
        split="train",
    ),
    "dapo-math-english": PublishedSet(
        "the English problems of DAPO-Math-17k",
        _DAPO,
        "open-r1/DAPO-Math-17k-Processed",
        "en/train-00000-of-00001.parquet",
        configs=("en",),
        english=True,
    ),
    "math": PublishedSet(
        "Hendrycks' MATH, the 7,500 problems for training",
        _MATH,
        "EleutherAI/hendrycks_math",
        "algebra/train-00000-of-00001.parquet and those of six further subjects",
        configs=_SUBJECTS,
        split="train",
    ),
    "math-12k": PublishedSet(
        "MATH without the problems of math500, 12,000 for training",
        _PROBLEM_ANSWER,
        "axon-rl/MATH-12k",
        "the train split's file",
        split="train",
    ),
    "math-solvable-1460": PublishedSet(
        "the 1,460 problems of MATH that DeepSeek-R1-Distill-Qwen-1.5B can solve",
        _PROBLEM_ANSWER,
        "sail/Sanity-Test-R1D-1.5B",
        "the train split's file",
        split="train",
        elsewhere="oat/data/train/math_1k5/train/data-00000-of-00001.arrow of https://github.com/sail-sg/Precision-RL",
    ),
    "math500": PublishedSet(
        "500 of MATH's problems for testing",
        _MATH,
        "HuggingFaceH4/MATH-500",
        "test.jsonl",
        split="test",
    ),
    "gsm8k": PublishedSet(
        "grade school word problems",
        _GSM8K,
        "openai/gsm8k",
        "main/train-00000-of-00001.parquet",
        configs=("main",),
        split="train",
    ),
    "aime24": PublishedSet(
        "AIME I and II of 2024",
        _CONTEST,
        "HuggingFaceH4/aime_2024",
        "data/train-00000-of-00001.parquet",
        year=2024,
        integer_answers=True,
    ),
    "aime25": PublishedSet(
        "AIME I and II of 2025",
        _CONTEST,
        "yentinglin/aime_2025",
        "data/train-00000-of-00001.parquet",
        year=2025,
        integer_answers=True,
    ),
    "amc23": PublishedSet(
        "AMC 12 of 2023, problems with numbers as answers",
        _CONTEST,
        "math-ai/amc23",
        "test-00000-of-00001.parquet",
        year=2023,
    ),
    "hh-rlhf": PublishedSet(
        "prompts of Anthropic's HH-RLHF, conversations without their last answer",
        (Schema("chosen", None, "Anthropic/hh-rlhf"),),
        "Anthropic/hh-rlhf",
        "helpful-base/train.jsonl.gz and those of three further folders",
        configs=("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled"),
        split="train",
        transcripts=True,
    ),
    "alpaca-eval": PublishedSet(
        "the 805 instructions of AlpacaEval",
        (Schema("instruction", None, "tatsu-lab/alpaca_eval"),),
        "tatsu-lab/alpaca_eval",
        "alpaca_eval.json",
    ),
}
"""Name for ``prepare`` -> the set."""

_YEAR_COLUMNS = ("year", "Year", "url", "ID")
"""Columns that have the year of a competition, or text with it."""
_YEAR_IN_TEXT = re.compile(r"(?<!\d)((?:19|20)\d\d)(?!\d)")


def schema_of(published: PublishedSet, columns: Sequence[str], where: object) -> Schema:
    """The first of the set's schemas whose columns are in ``columns``. Raises DataError if no schema fits."""
    for schema in published.schemas:
        if set(schema.columns) <= set(columns):
            return schema
    expected = "; ".join(schema.description for schema in published.schemas)
    raise DataError(f"{where}: has the columns {sorted(columns)}, expected one of: {expected}")


def columns_read(schema: Schema, columns: Sequence[str]) -> list[str]:
    """The columns to read: the columns of ``schema``, and among ``columns`` the columns that may have a year."""
    return sorted({*schema.columns, *(name for name in _YEAR_COLUMNS if name in columns)})


def year_of(record: Mapping[str, Any]) -> int | None:
    """The year of a competition's problem, from its year, address or id; None if it is unknown."""
    for column in _YEAR_COLUMNS:
        year = _YEAR_IN_TEXT.search(str(record.get(column) or ""))
        if year:
            return int(year[1])
    return None


_INSTRUCTIONS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\ASolve the following math problem step by step\. The last line of your response should be "
        r"of the form .{1,60}? is the answer to the problem\.\s+",
        r"\s+Remember to put your answer on its own line (?:after|as) \"Answer:[^\"]*\"\.\s*\Z",
        r"\s+Let's think step by step and output the final answer (?:within|after) "
        r"(?:\\boxed\{\}|\"####\")\.\s*\Z",
        r"\s+Please reason step by step, and put your final answer within \\boxed\{\}\.\s*\Z",
    )
)
"""Instructions about the form of the answer that publishers write around a problem."""
_WHOLE = re.compile(r"([+-]?\d+)\.0+")
"""A whole number with decimals, ``27.0``."""
_NUMBER = re.compile(r"[+-]?[\d.,/]+")
_CONTEST_INTEGER = re.compile(r"\$?\s*(\d{1,3})\s*(?:\^\{?\\circ\}?|°)?\s*\$?")
_EAST_ASIAN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uff01-\uff5e\u3001\u3002]")


class RowError(ValueError):
    """A record has no usable problem or answer."""


def prompt_text(value: object) -> str:
    """The text of a problem, or of the single message of the user. Raises RowError."""
    text = value
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        questions = [message.get("content") for message in value if message.get("role") == "user"]
        other_roles = {message.get("role") for message in value} - {"user", "system"}
        if len(questions) == 1 and not other_roles:
            text = questions[0]
    if isinstance(text, str) and text.strip():
        return text
    raise RowError(f"its problem is {short_json(text)}, expected text or one message of a user")


_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(rf"\n\n({'|'.join(_SPEAKERS)}):")


def messages_of(transcript: str) -> list[dict[str, str]]:
    """The messages of a transcript with turns such as ``\\n\\nHuman: Hello``, without the last answer.

    Raises RowError if the turns do not alternate, from a human's to an assistant's, or if one is empty.
    """
    start, *parts = _TURN.split(transcript)
    messages: list[dict[str, str]] = []
    for speaker, text in zip(parts[::2], parts[1::2], strict=True):
        messages.append({"role": _SPEAKERS[speaker], "content": text.strip()})
    roles = [message["role"] for message in messages]
    expected_roles = ["user", "assistant"] * (len(messages) // 2)
    prompt = messages[:-1]
    is_filled = all(message["content"] for message in prompt)
    if start.strip() or not messages or roles != expected_roles or not is_filled:
        raise RowError(
            f"its conversation is {short_json(transcript)}, expected turns of Human and Assistant in turn, with text"
        )
    return prompt


def bare_problem(text: str) -> str:
    """``text`` without the instructions that publishers are known to put around problems."""
    for instruction in _INSTRUCTIONS:
        text = instruction.sub("", text)
    return text.strip()


def answer_text(value: object) -> str:
    """Convert an answer to text: from text, from a number, or from a list with one text or number. Raises RowError."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise RowError(f"its answer is {short_json(value)}, expected text or a number")


def final_answer(text: str, schema: Schema, published: PublishedSet) -> str:
    """The final answer in the result of ``answer_text``: ``27.0`` becomes 27.

    Raises RowError if a worked solution has no answer, or if the answer of a set with integer answers is no integer.
    """
    if schema.worked and not holds_answer(text) and not _NUMBER.fullmatch(text):
        raise RowError("its solution has neither #### nor a box")
    answer = gold_answer(text)
    whole_number = _WHOLE.fullmatch(answer)
    if whole_number:
        answer = whole_number[1]
    if not answer:
        raise RowError("its answer is empty")
    if published.integer_answers:
        integer = _CONTEST_INTEGER.fullmatch(answer)
        if not integer:
            raise RowError(f"its answer is {short_json(answer)}, expected an integer from 0 to 999")
        answer = str(int(integer[1]))
    return answer


_FORMATS = (".parquet", ".jsonl", ".json", ".arrow")
_SPLIT = re.compile(r"(?:^|[/_.-])(train|test|validation|valid|dev)(?=[/_.-]|$)", re.IGNORECASE)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class PublishedFile:
    """The records of one file, or of one split on the hub. ``name`` is the path, or the name on the hub."""

    name: str
    schema: Schema
    records: Iterator[dict[str, Any]]


def files_of(published: PublishedSet, source: str, split: str | None) -> list[PublishedFile]:
    """The files of the set in ``source``.

    Args:
        published: The set.
        source: Path of a file or a folder, or a name on the hub.
        split: The split to read instead of the set's own.

    Raises:
        DataError: There is no file, or no file has a known schema.
    """
    path = Path(source)
    wanted_split = split or published.split
    if path.exists():
        files = [path] if path.is_file() else _files_in(path, published, wanted_split)
        return [_published_file(published, file) for file in files]
    if _HUB_NAME.fullmatch(source):
        return _from_hub(published, source, wanted_split)
    raise DataError(f"{source}: no such file or folder. {_how_to_get(published)}")


def _published_file(published: PublishedSet, file: Path) -> PublishedFile:
    columns = columns_of(file)
    schema = schema_of(published, columns, file)
    return PublishedFile(str(file), schema, stream_records(file, columns_read(schema, columns)))


def _files_in(folder: Path, published: PublishedSet, split: str | None) -> list[Path]:
    """The data files of the folder.

    If some paths have a folder named after a configuration of the set, only the files with such a path count. If
    ``split`` is given, files whose path names another split do not count.
    """
    paths = []
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        suffix = Path(path.name.removesuffix(".gz")).suffix
        is_data = suffix in _FORMATS and path.name not in DESCRIPTIONS and path.is_file()
        if is_data and not is_hidden:
            paths.append(path)
    config_paths = [p for p in paths if set(p.relative_to(folder).parts) & set(published.configs)]
    paths = config_paths or paths
    if split is not None and any(_split_of(path, folder) for path in paths):
        paths = [path for path in paths if _split_of(path, folder) in (None, split)]
    if not paths:
        split_text = f" of the split {split}" if split else ""
        raise DataError(
            f"{folder}: no {', '.join(_FORMATS)} file{split_text} in it. {_how_to_get(published)}"
        )
    return paths


def _split_of(path: Path, folder: Path) -> str | None:
    """The split that the path within ``folder`` names; None if it names none."""
    names = _SPLIT.findall(str(path.relative_to(folder)))
    return names[0].lower() if names else None


def _how_to_get(published: PublishedSet) -> str:
    place = f"{published.file} of https://huggingface.co/datasets/{published.hub}"
    if published.elsewhere:
        place += f", or {published.elsewhere}"
    return f"Wanted is {place}: download it where there is a network, and give its path or its folder's"


def _from_hub(published: PublishedSet, name: str, split: str | None) -> list[PublishedFile]:
    """Read a repository of the hub with the library ``datasets``. The library caches its downloads."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name}: no such file or folder, and the hub is read through datasets, which is not "
            f"installed (pip install datasets). {_how_to_get(published)}"
        ) from error
    files = []
    try:
        hub_configs = datasets.get_dataset_config_names(name)
        set_configs = [config for config in published.configs if config in hub_configs]
        for config in set_configs or hub_configs:
            loaded = datasets.load_dataset(name, config)
            for key, rows in loaded.items():
                if split in (None, key) or len(loaded) == 1:
                    where = f"{name} ({config}, {key})"
                    schema = schema_of(published, rows.column_names, where)
                    columns = columns_read(schema, rows.column_names)
                    files.append(PublishedFile(where, schema, iter(rows.select_columns(columns))))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = single_line(error)
        raise DataError(
            f"{name}: can't be read from the hub: {type(error).__name__}: {reason}. {_how_to_get(published)}"
        ) from error
    if not files:
        raise DataError(f"{name}: has no split {split}. {_how_to_get(published)}")
    return files


DUPLICATES, OTHER_YEARS, NOT_ENGLISH = "duplicates", "of other years", "not in English"
CONFLICTING, UNUSABLE = "with another answer elsewhere", "without a usable answer or problem"
_SHOWN = 3
"""Largest number of unusable rows that the report describes."""
_ADVANCE = 10_000
"""Number of rows between two updates of the progress bar."""


@dataclass
class Preparation:
    """The problems of a published set, collected row by row without duplicates.

    Attributes:
        published: The set.
        answers: Problem -> answer, in the published order; None without answers. A problem of a set of transcripts is
            the JSON text of its messages.
        rows: Number of rows read.
        left_out: Reason -> number of rows that were left out for it.
        faults: Descriptions of the first unusable rows.
        instructed: Problems that had a publisher's instructions; the instructions were removed.
    """

    published: PublishedSet
    answers: dict[str, str | None] = field(default_factory=dict)
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    instructed: set[str] = field(default_factory=set)
    _seen_rows: set[tuple[str, str | None]] = field(default_factory=set)
    """Problem and answer of each row, as published."""
    _problem_of: dict[str, str] = field(default_factory=dict)
    """Key -> the problem in ``answers``. The key is the problem's text with single spaces."""
    _conflicting_keys: set[str] = field(default_factory=set)

    def add(self, record: Mapping[str, Any], schema: Schema, where: str) -> None:
        """Add the row's problem, or count the reason why it is left out."""
        self.rows += 1
        try:
            reason = self._try_to_add(record, schema)
        except RowError as error:
            reason = UNUSABLE
            if len(self.faults) < _SHOWN:
                self.faults.append(f"{where}: {error}")
        if reason is not None:
            self.left_out[reason] += 1

    def finish(self) -> None:
        """Remove problems with several different answers: at most one answer of a problem is right."""
        for key in self._conflicting_keys:
            del self.answers[self._problem_of[key]]
            self.left_out[CONFLICTING] += 1
        self.instructed &= self.answers.keys()

    def lines(self, source: str) -> str:
        """The problems as JSON Lines. ``source``: name of the set."""
        records: list[dict[str, Any]] = []
        for problem, answer in self.answers.items():
            record: dict[str, Any] = {"problem": problem}
            if self.published.transcripts:
                record = {"messages": json.loads(problem)}
            if answer is not None:
                record["answer"] = answer
            records.append({**record, "source": source})
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)

    def report(self) -> Iterator[str]:
        """Yield lines about the rows read, kept and left out."""
        yield f"{self.rows:,} rows read, {len(self.answers):,} problems kept"
        for reason, count in self.left_out.most_common():
            yield f"  {count:,} left out: {reason}"
        yield from (f"    {fault}" for fault in self.faults)
        if self.instructed:
            count = len(self.instructed)
            yield f"  {count:,} without the publisher's instructions (data.prompt_template sets yours)"

    def _try_to_add(self, record: Mapping[str, Any], schema: Schema) -> str | None:
        """Add the row's problem and return None, or return the reason why the row is left out.

        Raises RowError for an unusable row.
        """
        published = self.published
        text = prompt_text(value_at(record, schema.prompt))
        published_answer = None
        if schema.answer is not None:
            published_answer = answer_text(value_at(record, schema.answer))
        # First compare rows as they were published, because this is fast: DAPO-Math-17k has each row a hundred times.
        if (text, published_answer) in self._seen_rows:
            return DUPLICATES
        self._seen_rows.add((text, published_answer))
        if published.year is not None and year_of(record) not in (None, published.year):
            return OTHER_YEARS
        if published.transcripts:
            text = json.dumps(messages_of(text), ensure_ascii=False)
        problem = bare_problem(text)
        if published.english and _EAST_ASIAN.search(problem):
            return NOT_ENGLISH
        answer = None
        if published_answer is not None:
            answer = final_answer(published_answer, schema, published)
        key = " ".join(problem.split())
        if key in self._problem_of:
            if self.answers[self._problem_of[key]] == answer:
                return DUPLICATES
            self._conflicting_keys.add(key)
            return CONFLICTING
        self._problem_of[key] = problem
        self.answers[problem] = answer
        if problem != text.strip():
            self.instructed.add(problem)
        return None


def prepare(name: str, source: str, out: Path, split: str | None = None) -> Preparation:
    """Read the published set ``name`` from ``source``, and write the file ``out`` atomically.

    Raises DataError if ``source`` has no files, or no usable problem.
    """
    published = SETS[name]
    reason = folder_fault(out.parent)
    if reason:
        raise DataError(f"{out}: {reason}")
    preparation = collect(published, files_of(published, source, split))
    if not preparation.answers:
        raise DataError(f"{source}: no usable problem\n" + "\n".join(preparation.report()))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, preparation.lines(name))
    return preparation


def collect(published: PublishedSet, files: Iterable[PublishedFile]) -> Preparation:
    """Collect the problems of all files, without duplicates."""
    preparation = Preparation(published)
    with progress("read rows", None) as bar:
        for file in files:
            for number, record in enumerate(file.records, start=1):
                preparation.add(record, file.schema, f"{file.name}, row {number}")
                if preparation.rows % _ADVANCE == 0:
                    bar.advance(_ADVANCE)
    preparation.finish()
    return preparation
