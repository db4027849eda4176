"""``run.sha256_list``: the inputs of a run whose bytes must be known ones, as ``sha256sum`` lists them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_dppo.metrics.progress import progress

_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_THREADS = 8


class InputError(ValueError):
    """Inputs are not those that the list names, or the list can't be read. One line for each."""


def check_input_hashes(path: str | Path) -> None:
    """Compare every file of the list at ``path`` with its hash; names are relative to the list's folder.

    Raises InputError with every file that is missing or has other bytes.
    """
    path = Path(path)
    expected = dict(_listed(path))
    with (
        ThreadPoolExecutor(_THREADS, "sha256") as pool,
        progress("check inputs", len(expected)) as bar,
    ):
        problems = []
        for problem in pool.map(_problem, expected.keys(), expected.values()):
            problems += [problem] if problem else []
            bar.advance(1)
    if problems:
        raise InputError("\n".join(problems))


def _listed(path: Path) -> Iterator[tuple[Path, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise InputError(f"{path}, line {number}: expected a line of sha256sum, <hash>  <file>")
        yield path.parent / match[2], match[1].lower()
    if not lines:
        raise InputError(f"{path}: expected lines of sha256sum, <hash>  <file>")


def _problem(file: Path, expected: str) -> str:
    try:
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        return f"{file}: {error.strerror}"
    if found == expected:
        return ""
    return f"{file}: its SHA-256 is {found[:12]}..., expected {expected[:12]}..."
