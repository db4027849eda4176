"""Records of ``metrics.jsonl`` (one flat JSON object for each step): encoding, reading, series."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_dppo.metrics import names
from megatron_dppo.system.errors import RunError

RECORDS_FILE = "metrics.jsonl"

Record = dict[str, float | None]
"""Metric name -> value; ``step`` is always present; None stands for NaN and infinities."""


class RecordsError(RunError, ValueError):
    """A metrics file cannot be read, or a value cannot be written to it."""


def encode_record(step: int, values: Mapping[str, float]) -> str:
    """One JSON line without the line end. NaN and infinities become null. Raises RecordsError."""
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
    """Parse ``lines``, in order; a last line without a line end (left by a crash) is dropped.

    Raises:
        RecordsError: a line is not a JSON object with an integer ``step``; names ``source`` and line.
    """
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise RecordsError(f"{source}, line {number}: not JSON ({error})") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise RecordsError(
                f"{source}, line {number}: expected a JSON object with an integer 'step', "
                f"got {line[:80]!r}"
            )
        records.append(record)
    return records


def read_records(directory: str | Path) -> list[Record]:
    """All records of the run in ``directory``. Raises RecordsError if it has no metrics file."""
    path = Path(directory) / RECORDS_FILE
    if not path.is_file():
        raise RecordsError(f"{directory}: no {RECORDS_FILE} in it, expected the folder of a run")
    return decode_records(read_lines(path), str(path))


def read_lines(path: Path) -> list[str]:
    """The lines of a file that the run itself wrote, with their ends.

    Raises RecordsError where it can't be read, or is not UTF-8.
    """
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            return file.readlines()
    except OSError as error:
        raise RecordsError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecordsError(
            f"{path}: damaged: not UTF-8 at byte {error.start}; move it away to go on without it"
        ) from error


def sha256_until(records: Iterable[Record], step: int) -> str:
    """SHA-256 (hex) of the records up to ``step``, by their values."""
    kept = [record for record in records if step_of(record) <= step]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def step_of(record: Record) -> int:
    """The step of a record from ``decode_records``."""
    return int(record["step"] or 0)


def series(records: Iterable[Record], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of metric ``name``, at the steps where it is present and finite."""
    found = [(step_of(record), record.get(name)) for record in records]
    points = [(step, value) for step, value in found if value is not None]
    return [step for step, _ in points], [value for _, value in points]


def mean_accuracy(record: Mapping[str, float | None]) -> float | None:
    """Held-out accuracy of one step: mean over the evaluation sets; None if none was evaluated."""
    measured = [
        value
        for name, value in record.items()
        if names.accuracy_set(name) is not None and value is not None
    ]
    return sum(measured) / len(measured) if measured else None


def phase_table(records: Iterable[Record]) -> dict[str, list[float]]:
    """Phase -> seconds in each record (0 if it did not run); the phase with the largest sum first."""
    records = list(records)
    found = {name for record in records for name in record if names.phase_of(name) is not None}
    table = {str(names.phase_of(n)): [record.get(n) or 0.0 for record in records] for n in found}
    return dict(sorted(table.items(), key=lambda item: (-sum(item[1]), item[0])))
