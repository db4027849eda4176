"""``metrics.jsonl``: one flat JSON object a step, and the atomic replacement of small files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_dppo.metrics import names

RECORDS_FILE = "metrics.jsonl"

Record = dict[str, float | None]
"""Metric name -> value; ``step`` is always there; None stands for what was not finite."""


class RecordsError(ValueError):
    """A metrics file that can't be read, or a value that can't be written to one."""


def write_text_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``; a crash leaves the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def encode_record(step: int, values: Mapping[str, float]) -> str:
    """One line without its end. NaN and infinities become null: JSON has no word for them."""
    record: Record = {"step": step}
    for name, value in values.items():
        if not isinstance(value, int | float):
            raise RecordsError(
                f"metric {name!r} of step {step} is a {type(value).__name__}, "
                f"expected a Python number"
            )
        finite = math.isfinite(value)
        if name == "step" and value != step:
            raise RecordsError(
                f"metric 'step' is {value}, expected the step that is written: {step}"
            )
        record[name] = (value if type(value) is int else float(value)) if finite else None
    return json.dumps(record, allow_nan=False)


def decode_records(lines: Iterable[str], source: str) -> list[Record]:
    """The records of ``lines``, in order, without a last line that a crash cut short.

    Raises RecordsError, naming ``source`` and the line, where a line is no object with an integer
    ``step``.
    """
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordsError(f"{source}, line {number}: not JSON ({error})") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise RecordsError(
                f"{source}, line {number}: expected a JSON object with an integer 'step', "
                f"got {line[:80]!r}"
            )
        records.append(record)
    return records


def read_records(directory: str | Path) -> list[Record]:
    """Every record of the run in ``directory``. Raises RecordsError where it has no metrics."""
    path = Path(directory) / RECORDS_FILE
    if not path.is_file():
        raise RecordsError(f"{directory}: no {RECORDS_FILE} in it, expected the folder of a run")
    with open(path, encoding="utf-8", newline="\n") as file:
        return decode_records(file, str(path))


def step_of(record: Record) -> int:
    """The step of a record that ``decode_records`` has let through."""
    return int(record["step"] or 0)


def series(records: Iterable[Record], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of metric ``name`` at the steps that have a finite one."""
    found = [(step_of(record), record.get(name)) for record in records]
    points = [(step, value) for step, value in found if value is not None]
    return [step for step, _ in points], [value for _, value in points]


def mean_accuracy(record: Mapping[str, float | None]) -> float | None:
    """Held-out accuracy of one step: the mean over its evaluation sets, None where none ran."""
    measured = [
        value
        for name, value in record.items()
        if names.accuracy_set(name) is not None and value is not None
    ]
    return sum(measured) / len(measured) if measured else None


def phase_table(records: Iterable[Record]) -> dict[str, list[float]]:
    """Phase -> its seconds in each record (0 where it did not run), the longest phase first."""
    records = list(records)
    found = {name for record in records for name in record if names.phase_of(name) is not None}
    table = {str(names.phase_of(n)): [record.get(n) or 0.0 for record in records] for n in found}
    return dict(sorted(table.items(), key=lambda item: (-sum(item[1]), item[0])))
