"""``masked_tokens.jsonl``: the tokens that the mask blocked most often in each step, as text.

A line is ``{"step": n, "tokens": [{"id", "raised", "lowered", "text"}, ...]}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_dppo.metrics.file_names import MASKED_TOKENS_FILE
from megatron_dppo.metrics.masked_tokens import MaskedToken, NamedMaskedToken, with_text
from megatron_dppo.metrics.records import RecordsError, read_lines
from megatron_dppo.system.files import write_atomically


class MaskedTokensFile:
    """Appends one line for each step.

    Args:
        directory: of the run.
        resume_step: as for ``MetricsWriter``; lines of this and later steps are dropped.
        text_of: token id -> text.
    """

    def __init__(
        self, directory: str | Path, resume_step: int, text_of: Callable[[int], str]
    ) -> None:
        self._path = Path(directory) / MASKED_TOKENS_FILE
        self._text_of = text_of
        if self._path.exists():
            kept = [line for line in _complete_lines(self._path) if line["step"] < resume_step]
            write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, step: int, tokens: Sequence[MaskedToken]) -> list[NamedMaskedToken]:
        """Append the line of ``step``; returns the tokens with their text. Raises OSError."""
        named = with_text(tokens, self._text_of)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "tokens": named}, ensure_ascii=False) + "\n")
        return named


def _complete_lines(path: Path) -> list[dict]:
    """The parsed lines, without a last line that a killed process left incomplete."""
    lines = read_lines(path)
    found = []
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise RecordsError(f"{path}, line {number}: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise RecordsError(f"{path}, line {number}: expected an object with an integer 'step'")
        found.append(record)
    return found
