r"""The final answer of a response. Imports none of the rewards' libraries."""

from __future__ import annotations

import re

from megatron_dppo.data.gold_answers import BOX, LONGEST_ANSWER, UNBRACED_BOX, braced

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
# Limits: characters between two boxes of one answer; number of statements of an answer, counted from the end.
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
    """Convert full-width characters to ASCII and every kind of space to one, and remove invisible characters."""
    return _SPACE.sub(" ", text.translate(_ASCII_PUNCTUATION))


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
    """The final answer of a response with the markup around it."""
    spoken = _in_answer_tag(_after_thinking(in_ascii_punctuation(response)))
    answers = [*_boxed_answers(spoken), *_marked_answers(spoken), *_stated_answer(spoken)]
    if not answers:
        return _last_line_answer(spoken)
    answer = max(answers)[1]
    # A box may hold a sentence: "The answer is 42".
    statements = _stated_answer(answer)
    if statements:
        return statements[0][1].lstrip("} ")
    return answer


def _after_thinking(response: str) -> str:
    """The text after ``</think>``; empty if the response begins with ``<think>`` and never closes it."""
    if _THINKING_ENDS in response:
        return response.rpartition(_THINKING_ENDS)[2]
    if response.lstrip().startswith(_THINKING_BEGINS):
        return ""
    return response


def _in_answer_tag(text: str) -> str:
    """The content of the last ``<answer>``; ``text`` if there is none."""
    end = text.rfind(_ANSWER_ENDS)
    start = text.rfind(_ANSWER_BEGINS, 0, max(end, 0))
    if start < 0:
        return text
    return text[start + len(_ANSWER_BEGINS) : end]


_Positioned = tuple[int, str]


def _boxed_answers(text: str) -> list[_Positioned]:
    """End position and content of each box. Boxes in a row count as one, which ends with the last of them."""
    answers: list[_Positioned] = []
    end = 0
    for match in BOX.finditer(text):
        start = match.end()
        content = braced(text, match.end())
        if content is None:
            # The response was cut off inside the box: the box counts as an empty answer.
            answers.append((start, ""))
            continue
        box_end = start + len(content) + 1
        if answers and _is_joint(text, end, match.start()):
            previous_content = answers.pop()[1]
            content = _listed_with(previous_content, content.strip())
        end = box_end
        answers.append((end, content))
    return answers + [(m.start(1), m[1]) for m in UNBRACED_BOX.finditer(text)]


def _is_joint(text: str, start: int, end: int) -> bool:
    return end - start <= _LONGEST_JOINT and _JOINT.fullmatch(text, start, end) is not None


def _listed_with(previous_content: str, content: str) -> str:
    if len(previous_content) > LONGEST_ANSWER or content in previous_content.split(", "):
        return previous_content
    return f"{previous_content}, {content}"


def _marked_answers(text: str) -> list[_Positioned]:
    """The text after each ``####`` in its line. Text that looks like a heading counts only in the last line."""
    end = len(text.rstrip())
    answers = []
    for match in _MARKED.finditer(text):
        is_last_line = match.end() >= end
        if _NUMBER_OR_FORMULA.match(match[1]) and (is_last_line or not _HEADING.match(match[1])):
            answers.append((match.start(1), match[1]))
    return answers


def _stated_answer(text: str) -> list[_Positioned]:
    """The last statement of the form ``answer is X``; empty if there is none, or all are negated."""
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
    """The first formula or sentence of the text after ``Answer:``; empty if it is negated."""
    formula = _FORMULA.search(line)
    if formula is not None:
        if _DENIAL.search(line, 0, formula.start()):
            return ""
        return _content(formula)
    if _DENIAL.match(line):
        return ""
    sentence = _SENTENCE_END.split(line, maxsplit=1)[0]
    return _REASON.sub("", sentence)


def _display_at(text: str, start: int) -> str | None:
    """The content of a displayed formula that begins at ``start``, also over several lines; None if none does."""
    for begin, end in _DISPLAYED:
        if text.startswith(begin, start):
            body, closed, _ = text[start + len(begin) :].partition(end)
            return body.strip() if closed else None
    return None


def _last_line_answer(text: str) -> str:
    """The last formula of the last line, with the formulas of its list; the line if it has no formula."""
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
    while (match := _STYLE.match(text)) and (content := braced(text, match.end())) is not None:
        if match.end() + len(content) + 1 != len(text):
            break
        text = _trimmed(content)
    number = _PARENTHESISED_NUMBER.fullmatch(text)
    return number[1] if number else text


def _trimmed(text: str) -> str:
    prefix = _BEFORE.match(text)
    assert prefix is not None
    return text[prefix.end() :].rstrip(_AFTER)
