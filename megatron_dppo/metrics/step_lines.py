"""Files of a run with JSON lines that belong to steps: ``masked_tokens.jsonl``, ``samples.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.metrics.records import RecordsError, read_lines
from megatron_dppo.system.files import write_atomically


class StepLines:
    """Appends lines, objects with an integer ``step``, to ``path``.

    ``resume_step``: as for ``MetricsWriter``; lines of this and later steps are dropped.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self._path = path
        if path.exists():
            kept = [line for line in read_step_lines(path) if line["step"] < resume_step]
            write_atomically(path, "".join(map(_encoded, kept)))

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append ``lines``. Raises OSError."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write("".join(map(_encoded, lines)))


def read_step_lines(path: Path) -> list[dict[str, Any]]:
    """The parsed lines, without a last line that a killed process left incomplete. Raises RecordsError."""
    lines = read_lines(path)
    records = []
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise RecordsError(f"{path}, line {number}: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise RecordsError(f"{path}, line {number}: expected an object with an integer 'step'")
        records.append(record)
    return records


def _encoded(line: Mapping[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=False) + "\n"
