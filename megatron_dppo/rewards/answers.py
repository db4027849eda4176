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

# In Markdown the mark begins a heading, which has words: "#### Step 2", "#### 1. Find the area".
_MARKED = re.compile(r"####(?!#)[ \t]*([^\n#]*)")
_NUMBER_OR_FORMULA = re.compile(r"[^\w\n\\]{0,8}(?:\d|\\[a-zA-Z(])")
_HEADING = re.compile(r"\d+[.)]\s|.*(?<![\\a-zA-Z])[a-zA-Z]{2}")
_STATED = re.compile(
    r"(?i)\banswer\b\W{0,4}?(?:\s+is\b\s*:?|:)\s*|\u7b54\u6848\s*(?:[\u662f\u4e3a\u70ba]\s*:?|:)\s*"
)
_ANSWER_BEGINS, _ANSWER_ENDS = "<answer>", "</answer>"
_THINKING_BEGINS, _THINKING_ENDS = "<think>", "</think>"
_FORMULA = re.compile(r"\$\$?(.+?)\$\$?|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]")
_DISPLAYED = (("$$", "$$"), (r"\[", r"\]"))
_SENTENCE_END = re.compile(r"[.!](?:\s|$)")
_REASON = re.compile(r"(?i),?\s+(?:because|since|as|so|not)\s.*")
_DENIAL = re.compile(
    r"(?i)\b(?:not|isn't|cannot|can't|never|neither|nor|wrong)\b|\u4e0d\u662f|\u4e0d\u4e3a"
)
# Characters between two boxes that are looked at, and statements of an answer, the last ones.
_LONGEST_JOINT, _STATEMENTS = 30, 20
_JOINT = re.compile(
    r"(?i)[\s$*.\\()]*(?:,|;|\b(?:and|or)\b|[\u548c\u6216\u53ca])[\s$*\\()]*(?:(?:and|or)\b[\s$*\\()]*)?"
    r"(?:[a-z]\w*\s*=[\s$]*)?"
)
_LISTED = re.compile(r"(?i)\s*(?:,|;|\bor\b|\u6216)\s*(?:or\b)?\s*")
_STYLE = re.compile(r"\\(?:text|textbf|textrm|mathbf|mathrm|bm|boldsymbol)\s*\{")
_PARENTHESISED_NUMBER = re.compile(r"\(\s*([+-]?\d+(?:\.\d+)?)\s*\)")
_BEFORE = re.compile(r"(?:[\s$*~`#]|\\[,;:!])*")
_AFTER = " \t\n\r$*~`.,;:\\"

_INVISIBLE = (0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFEFF)
_ASCII_PUNCTUATION = {
    **dict.fromkeys(_INVISIBLE),
    **dict.fromkeys((*range(0x2010, 0x2016), 0x2212, 0xFE63), "-"),
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    0x3001: ", ",
    0x3002: ". ",
    0xFF0C: ", ",
    0x2019: "'",
    0x2044: "/",
    # Python's "\boxed{\frac12}" without an r in front has these two control characters.
    ord("\b"): r"\b",
    ord("\f"): r"\f",
}
_SPACE = re.compile(r"[^\S\n ]")


def in_ascii_punctuation(text: str) -> str:
    """``text`` with full-width characters as ASCII, spaces of every width as one, and nothing invisible."""
    return _SPACE.sub(" ", text.translate(_ASCII_PUNCTUATION))


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

    The last of ``\boxed{X}`` (``\framebox``, ``\fbox``), ``#### X`` (GSM8K's form), ``Answer: X`` (DAPO-Math's form),
    ``answer is X`` (in Chinese too); in a response without these, the last formula of the last line, or that line.
    Boxes in a row, ``\boxed{2} and \boxed{3}``, are one answer together. Only what follows ``</think>`` is read, and
    of that the last ``<answer>`` where there is one. A box that is open at the end is no answer, and neither is
    ``not $5$``.
    """
    return without_markup(written_answer(response))


def written_answer(response: str) -> str:
    """As ``final_answer``, with the markup."""
    spoken = _in_answer_tag(_after_thinking(in_ascii_punctuation(response)))
    answers = [*_boxed_answers(spoken), *_marked_answers(spoken), *_stated_answer(spoken)]
    if not answers:
        return _last_line_answer(spoken)
    answer = max(answers)[1]
    # A box may hold a sentence: "The answer is 42".
    inner = _stated_answer(answer)
    return inner[0][1].lstrip("} ") if inner else answer


def _after_thinking(response: str) -> str:
    """What a response says after its thoughts; nothing where these don't end."""
    if _THINKING_ENDS in response:
        return response.rpartition(_THINKING_ENDS)[2]
    return "" if response.lstrip().startswith(_THINKING_BEGINS) else response


def _in_answer_tag(text: str) -> str:
    """What the last ``<answer>`` holds; all of ``text`` where there is none."""
    end = text.rfind(_ANSWER_ENDS)
    start = text.rfind(_ANSWER_BEGINS, 0, max(end, 0))
    return text if start < 0 else text[start + len(_ANSWER_BEGINS) : end]


_Positioned = tuple[int, str]


def _boxed_answers(text: str) -> list[_Positioned]:
    """Where each box ends, and its content; those in a row are one, and end with the last of them."""
    answers: list[_Positioned] = []
    end = 0
    for match in _BOX.finditer(text):
        start, content = match.end(), braced(text, match.end())
        if content is None:
            # Cut off: the answer that it was to hold is not there.
            answers.append((start, ""))
            continue
        box_end = start + len(content) + 1
        if answers and _is_joint(text, end, match.start()):
            previous = answers.pop()[1]
            content = _listed_with(previous, content.strip())
        end = box_end
        answers.append((end, content))
    return answers + [(m.start(1), m[1]) for m in _UNBRACED_BOX.finditer(text)]


def _is_joint(text: str, start: int, end: int) -> bool:
    return end - start <= _LONGEST_JOINT and _JOINT.fullmatch(text, start, end) is not None


def _listed_with(previous: str, content: str) -> str:
    if len(previous) > LONGEST_ANSWER or content in previous.split(", "):
        return previous
    return f"{previous}, {content}"


def _marked_answers(text: str) -> list[_Positioned]:
    """What follows ``####`` in its line; with words behind a number only in the last line."""
    last = len(text.rstrip())
    return [
        (match.start(1), match[1])
        for match in _MARKED.finditer(text)
        if _NUMBER_OR_FORMULA.match(match[1])
        and (match.end() >= last or not _HEADING.match(match[1]))
    ]


def _stated_answer(text: str) -> list[_Positioned]:
    """What is last said to be the answer, in words; empty where nothing is, and where all that is said is denied."""
    matches = list(_STATED.finditer(text))
    for match in reversed(matches[-_STATEMENTS:]):
        statement = _display_at(text, match.end())
        if statement is None:
            end = text.find("\n", match.end())
            line = text[match.end() : len(text) if end < 0 else end]
            statement = _first_answer_of(line)
        if statement:
            return [(match.end(), statement)]
    return []


def _first_answer_of(line: str) -> str:
    """The answer in the text after ``Answer:``: its first formula or sentence; empty where it is denied."""
    formula = _FORMULA.search(line)
    if formula is not None:
        return "" if _DENIAL.search(line, 0, formula.start()) else _content(formula)
    if _DENIAL.match(line):
        return ""
    sentence = _SENTENCE_END.split(line, maxsplit=1)[0]
    return _REASON.sub("", sentence)


def _display_at(text: str, start: int) -> str | None:
    """The content of a displayed formula that begins at ``start``, over several lines; None where none does."""
    for begin, end in _DISPLAYED:
        if text.startswith(begin, start):
            body, closed, _ = text[start + len(begin) :].partition(end)
            return body.strip() if closed else None
    return None


def _last_line_answer(text: str) -> str:
    """The last formula of the last line, with those that it lists; else the line."""
    text = text.strip()
    for begin, end in _DISPLAYED:
        body = text.rstrip(".")
        start = body.rfind(begin, 0, -len(end)) if body.endswith(end) else -1
        if start >= 0 and "\n" in body[start:]:
            return body[start + len(begin) : -len(end)].strip()
    line = text.rpartition("\n")[2]
    formulas = list(_FORMULA.finditer(line))
    if not formulas:
        return line
    listed: list[str] = []
    previous_end = 0
    for formula in formulas:
        start = formula.start()
        if not _DENIAL.search(line, previous_end, start):
            is_further = bool(listed) and _LISTED.fullmatch(line, previous_end, start)
            listed = [*listed, _content(formula)] if is_further else [_content(formula)]
        previous_end = formula.end()
    return ", ".join(listed)


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group)


def without_markup(text: str) -> str:
    """``text`` without fonts, dollar signs and punctuation around the whole of it."""
    text = _trimmed(text)
    while (match := _STYLE.match(text)) and (inner := braced(text, match.end())) is not None:
        if match.end() + len(inner) + 1 != len(text):
            break
        text = _trimmed(inner)
    number = _PARENTHESISED_NUMBER.fullmatch(text)
    return number[1] if number else text


def _trimmed(text: str) -> str:
    before = _BEFORE.match(text)
    assert before is not None
    return text[before.end() :].rstrip(_AFTER)


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
