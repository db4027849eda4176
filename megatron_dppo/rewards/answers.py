r"""Final answers: of a worked gold solution, ``#### 72`` of GSM8K and ``\boxed{72}`` of MATH, and of a response; what a
check of gold answers found, and the file by which the check of a start tells the ranks.

Imports none of the rewards' libraries.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_dppo.system.files import write_atomically

# Characters. Anything longer is a derivation, and costly to parse.
LONGEST_ANSWER = 500

_BOX = re.compile(r"\\(?:boxed|framebox|fbox)\s*\{")
_UNBRACED_BOX = re.compile(r"\\(?:boxed|framebox|fbox)\s+([^${}]+?)\s*(?:\$|$)")
_MARK = "####"
_GROUPED_NUMBER = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")

_STATED = re.compile(r"(?i)\banswer\b\W{0,4}?(?:\s+is\b\s*:?|:)\s*([^\n]+)")
_FORMULA = re.compile(r"\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_SENTENCE_END = re.compile(r"\.(?:\s|$)")
_STYLE = re.compile(r"\\(?:text|textbf|textrm|mathbf|mathrm|bm|boldsymbol)\s*\{")
_PARENTHESISED_NUMBER = re.compile(r"\(\s*([+-]?\d+(?:\.\d+)?)\s*\)")
_BEFORE = " \t\n\r$*~"
_AFTER = _BEFORE + ".,;:"


def gold_answer(text: str) -> str:
    r"""What follows the last ``####``, else the content of the last closed ``\boxed``, else ``text``.

    After ``####`` a number's groups of three digits are joined: ``1,080`` becomes ``1080``. A box
    without braces, ``\boxed 4$`` as in some of MATH's solutions, ends with its formula.
    """
    if _MARK in text:
        answer = text.rpartition(_MARK)[2].strip()
        return answer.replace(",", "") if _GROUPED_NUMBER.fullmatch(answer) else answer
    contents = [content for _, content in boxes(text)] or _UNBRACED_BOX.findall(text)
    return contents[-1].strip() if contents else text


def holds_answer(text: str) -> bool:
    """Whether ``gold_answer`` finds an answer in ``text`` that is not all of it."""
    return _MARK in text or any(boxes(text)) or bool(_UNBRACED_BOX.search(text))


def boxes(text: str) -> Iterator[tuple[int, str]]:
    """Position and content of every box that is closed."""
    for match in _BOX.finditer(text):
        content = braced(text, match.end())
        if content is not None:
            yield match.end(), content


def braced(text: str, start: int) -> str | None:
    """What stands between the brace before ``start`` and the one that closes it; None where none does."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(
        text, start, start + LONGEST_ANSWER + 100
    ):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()]
    return None


def final_answer(response: str) -> str:
    r"""The final answer of a response, without the markup around it; empty if there is none.

    The last of ``\boxed{X}`` (``\framebox``, ``\fbox``), ``Answer: X`` (DAPO-Math's form) and ``answer
    is X``; in a response without these, the last formula of the last line, or that line.
    """
    return without_markup(_written_answer(response))


def _written_answer(response: str) -> str:
    stated = [(m.start(1), _first_answer_of(m[1])) for m in _STATED.finditer(response)]
    answers = [*boxes(response), *stated]
    if answers:
        return max(answers)[1]
    last_line = response.strip().rpartition("\n")[2]
    formulas = _formulas(last_line)
    return formulas[-1] if formulas else last_line


def _first_answer_of(line: str) -> str:
    """The answer in the text after ``Answer:``: its first formula, else its first sentence."""
    formulas = _formulas(line)
    return formulas[0] if formulas else _SENTENCE_END.split(line, maxsplit=1)[0]


def _formulas(line: str) -> list[str]:
    return [next(group for group in m.groups() if group) for m in _FORMULA.finditer(line)]


def without_markup(text: str) -> str:
    """``text`` without fonts, dollar signs and punctuation around the whole of it."""
    text = text.lstrip(_BEFORE).rstrip(_AFTER)
    while (match := _STYLE.match(text)) and (inner := braced(text, match.end())) is not None:
        if match.end() + len(inner) + 1 != len(text):
            break
        text = inner.lstrip(_BEFORE).rstrip(_AFTER)
    number = _PARENTHESISED_NUMBER.fullmatch(text)
    return number[1] if number else text


BadAnswers = dict[str, list[list[Any]]]
"""File -> [problem id, what is wrong with its answer] of each; plain JSON."""
VARIABLE = "MEGATRON_DPPO_CHECKED_ANSWERS"
"""The file's path, in the environment of the processes of a run."""


@contextmanager
def checked_answers_file() -> Iterator[str]:
    """The path of a file that only this user can read, for the processes started within; removed after."""
    with tempfile.TemporaryDirectory(prefix="megatron_dppo-") as folder:
        path = os.environ[VARIABLE] = str(Path(folder) / "answers.json")
        try:
            yield path
        finally:
            del os.environ[VARIABLE]


def hand_over(path: Path, scored: Mapping[str, str], bad: BadAnswers) -> None:
    """Write ``bad`` for another process. ``scored``: what it was found of."""
    write_atomically(path, json.dumps({"scored": dict(scored), "bad": bad}))


def handed_over(scored: Mapping[str, str]) -> BadAnswers | None:
    """What the check of this start wrote of the same; None where it wrote nothing, or of something else."""
    try:
        content = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
    # A launcher started this rank, or on another machine.
    except (KeyError, OSError, ValueError):
        return None
    return content["bad"] if content["scored"] == dict(scored) else None
