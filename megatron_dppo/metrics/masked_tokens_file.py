"""``masked_tokens.jsonl``: for every step, the tokens that the mask blocked most often, as text.

A line is ``{"step": n, "tokens": [{"id", "raised", "lowered", "text"}, ...]}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_dppo.metrics.masked_tokens import MaskedToken, NamedMaskedToken, with_text
from megatron_dppo.metrics.records import RecordsError, write_text_atomically

FILE = "masked_tokens.jsonl"


class MaskedTokensFile:
    """Appends a line a step. ``resume_step``: as for ``MetricsWriter``; ``text_of``: of a token id."""

    def __init__(
        self, directory: str | Path, resume_step: int, text_of: Callable[[int], str]
    ) -> None:
        self._path = Path(directory) / FILE
        self._text_of = text_of
        if self._path.exists():
            kept = [line for line in _complete_lines(self._path) if line["step"] < resume_step]
            write_text_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, step: int, tokens: Sequence[MaskedToken]) -> list[NamedMaskedToken]:
        """Add a step's line; its tokens with their text. Raises OSError where it can't be written."""
        named = with_text(tokens, self._text_of)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "tokens": named}, ensure_ascii=False) + "\n")
        return named


def _complete_lines(path: Path) -> list[dict]:
    """The lines, but for a last one that a kill cut short."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise RecordsError(f"{path}, line {number}: {error}") from error
    return found
