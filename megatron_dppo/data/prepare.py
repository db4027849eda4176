"""``megatron-dppo data prepare``: published problems as the JSON Lines that a run reads.

One line a problem: ``problem`` without the publisher's instructions, ``answer`` as what follows
``####`` or stands in the box, ``source``. How the problem is put to the model is the recipe's to say
(``data.prompt_template``), so that training and evaluation say it alike.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dppo.data.json_lines import DataError, value_at
from megatron_dppo.data.locating import Part, parts_of
from megatron_dppo.data.published import SETS, PublishedSet, Schema, year_of
from megatron_dppo.data.published_rows import (
    RowError,
    answer_text,
    bare_problem,
    final_answer,
    is_english,
    prompt_text,
)
from megatron_dppo.metrics.progress import progress
from megatron_dppo.system.files import write_atomically

DUPLICATES, OTHER_YEARS, NOT_ENGLISH = "duplicates", "of other years", "not in English"
CONFLICTING, UNUSABLE = "with another answer elsewhere", "without a usable answer or problem"
_SHOWN = 3
_ADVANCE = 10_000


@dataclass
class Prepared:
    """The problems of a published set.

    Attributes:
        answers: problem -> answer, in the published order.
        rows: rows read.
        instructed: problems whose publisher's instructions were taken away.
        left_out: reason -> rows.
        faults: the first rows that can't be used, in words.
    """

    answers: dict[str, str] = field(default_factory=dict)
    rows: int = 0
    instructed: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def lines(self, source: str) -> str:
        """The file's text."""
        records = (
            {"problem": problem, "answer": answer, "source": source}
            for problem, answer in self.answers.items()
        )
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)

    def report(self) -> Iterator[str]:
        """What was read, kept and left out, a line each."""
        yield f"{self.rows:,} rows read, {len(self.answers):,} problems kept"
        for reason, count in self.left_out.most_common():
            yield f"  {count:,} left out: {reason}"
        yield from (f"    {fault}" for fault in self.faults)
        if self.instructed:
            yield f"  {self.instructed:,} without the publisher's instructions (data.prompt_template sets yours)"


def prepare(name: str, source: str, out: Path, split: str | None = None) -> Prepared:
    """Read the published set ``name`` from ``source`` and write ``out``, whole or not at all.

    Raises DataError where nothing is found, or nothing of it can be used.
    """
    published = SETS[name]
    if not out.parent.is_dir():
        raise DataError(f"{out}: {out.parent} is no folder")
    prepared = collect(published, parts_of(published, source, split))
    if not prepared.answers:
        raise DataError(f"{source}: no problem is left of it\n" + "\n".join(prepared.report()))
    write_atomically(out, prepared.lines(name))
    return prepared


def collect(published: PublishedSet, parts: Iterable[Part]) -> Prepared:
    """The problems of all parts, each once.

    A problem that comes with different answers is left out: all but one of them are wrong.
    """
    collector = _Collector(published)
    with progress("read rows", None) as bar:
        for part in parts:
            for row, record in enumerate(part.records):
                collector.add(record, part.schema, f"{part.name}, row {row + 1}")
                if collector.prepared.rows % _ADVANCE == 0:
                    bar.advance(_ADVANCE)
    return collector.finish()


class _Collector:
    """Takes rows one by one; compares them as they are published before it looks closer, because one
    set has each row a hundred times."""

    def __init__(self, published: PublishedSet) -> None:
        self._published = published
        self._seen: set[tuple[str, str]] = set()
        self._problems: dict[str, str] = {}
        self._conflicting: set[str] = set()
        self._instructed: set[str] = set()
        self.prepared = Prepared()

    def add(self, record: Mapping[str, Any], schema: Schema, where: str) -> None:
        """Keep the row's problem, or count why not."""
        self.prepared.rows += 1
        try:
            reason = self._reason_against(record, schema)
        except RowError as error:
            reason = UNUSABLE
            if len(self.prepared.faults) < _SHOWN:
                self.prepared.faults.append(f"{where}: {error}")
        if reason is not None:
            self.prepared.left_out[reason] += 1

    def finish(self) -> Prepared:
        """All that was kept, without the problems whose answers differ."""
        for key in self._conflicting:
            del self.prepared.answers[self._problems[key]]
            self.prepared.left_out[CONFLICTING] += 1
        self.prepared.instructed = len(self._instructed & self.prepared.answers.keys())
        return self.prepared

    def _reason_against(self, record: Mapping[str, Any], schema: Schema) -> str | None:
        published, prepared = self._published, self.prepared
        text = prompt_text(value_at(record, schema.prompt))
        given = answer_text(value_at(record, schema.answer))
        if (text, given) in self._seen:
            return DUPLICATES
        self._seen.add((text, given))
        if published.year is not None and year_of(record) not in (None, published.year):
            return OTHER_YEARS
        problem = bare_problem(text)
        if published.english and not is_english(problem):
            return NOT_ENGLISH
        answer = final_answer(given, schema, published)
        key = " ".join(problem.split())
        if key in self._problems:
            if prepared.answers[self._problems[key]] == answer:
                return DUPLICATES
            self._conflicting.add(key)
            return CONFLICTING
        self._problems[key] = problem
        prepared.answers[problem] = answer
        if problem != text.strip():
            self._instructed.add(problem)
        return None
