"""Published sets of problems: where each is, which columns its files have, what of it is taken.

A file's columns decide how it is read, not its name: ``schema_of`` takes the first schema of a set
whose columns are all there. A further set is a row of ``SETS``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.data.json_lines import DataError


@dataclass(frozen=True)
class Schema:
    """Two columns of a published file, each perhaps a field of a structure (``a.b``).

    ``prompt``: the problem, as text or chat messages. ``answer``: the final answer. ``where``: what
    was published so. ``worked``: ``answer`` is a worked solution, with its answer after ``####`` or
    in a box.
    """

    prompt: str
    answer: str
    where: str
    worked: bool = False

    @property
    def columns(self) -> tuple[str, str]:
        """The top-level columns of both."""
        return self.prompt.partition(".")[0], self.answer.partition(".")[0]


_VERL = Schema("prompt", "reward_model.ground_truth", "BytedTsinghua-SIA/DAPO-Math-17k")
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
_GSM8K = (Schema("question", "answer", "openai/gsm8k", worked=True), _VERL)


@dataclass(frozen=True)
class PublishedSet:
    """One name of ``prepare``.

    Attributes:
        title: what it is.
        schemas: that its files have been published with, in order of preference.
        hub: its name on the Hugging Face hub.
        file: of the hub's repository, for who downloads it by hand.
        configs: of the hub's repository, and folders of a copy of it, that are read where they are
            there; none: all.
        split: that is read where files name several; none: all.
        year: of a competition; rows of other years are left out.
        english: leave problems with Chinese, Japanese or Korean characters out.
        integer_answers: whether every answer is an integer from 0 to 999.
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
}
"""Name of ``prepare`` -> what it means."""

_YEAR_COLUMNS = ("year", "Year", "url", "ID")
_YEAR_IN_TEXT = re.compile(r"(?<!\d)((?:19|20)\d\d)(?!\d)")


def schema_of(published: PublishedSet, columns: Sequence[str], where: object) -> Schema:
    """The first schema of the set whose columns a file has. Raises DataError where none fits."""
    for schema in published.schemas:
        if set(schema.columns) <= set(columns):
            return schema
    known = "; ".join(f"{s.prompt} and {s.answer} ({s.where})" for s in published.schemas)
    raise DataError(f"{where}: has the columns {sorted(columns)}, expected one of: {known}")


def columns_read(schema: Schema, columns: Sequence[str]) -> list[str]:
    """What of a file's ``columns`` is looked at."""
    return sorted({*schema.columns, *(name for name in _YEAR_COLUMNS if name in columns)})


def year_of(record: Mapping[str, Any]) -> int | None:
    """The year of a competition's problem: from its year, address or id; None where none says it."""
    for column in _YEAR_COLUMNS:
        found = _YEAR_IN_TEXT.search(str(record.get(column) or ""))
        if found:
            return int(found[1])
    return None
