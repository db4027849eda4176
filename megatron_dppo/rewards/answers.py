r"""The final answer of a response. This module does not import the rewards' libraries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from megatron_dppo.data.gold_answers import BOX, LONGEST_ANSWER, UNBRACED_BOX, braced
from megatron_dppo.data.thoughts import answer_part
from megatron_dppo.rewards.sentences import denies, is_bound, stated_value, without_lead

_MARKED = re.compile(r"####(?!#)[ \t]*([^\n#]*)")
"""``#### X``, GSM8K's form. Headings of Markdown begin with ``####``, too: "#### Step 2", "#### 1. Find the area"."""
_NUMBER_OR_FORMULA = re.compile(r"[^\w\n\\]{0,8}(?:\d|\\[a-zA-Z(])")
r"""The beginning of a number or formula: a few signs such as ``$``, then a digit, a LaTeX command or ``\(``."""
_HEADING = re.compile(r"\d+[.)]\s|.*(?<![\\a-zA-Z])[a-zA-Z]{2}")
r"""A text that looks like a heading: it begins with the number of a list, or contains a word. A word has two letters or
more, and no ``\`` before them: LaTeX commands are no words."""
_STATED = re.compile(
    r"(?i)\banswer\b\W{0,4}?(?:\s+(?:is|equals)\b\s*:?|\s*[:=])\s*|\u7b54\u6848\s*(?:[\u662f\u4e3a\u70ba]\s*:?|:)\s*"
)
"""The words before a stated answer: ``answer is``, ``Answer:``, and their Chinese forms."""
_ANSWER_BEGINS, _ANSWER_ENDS = "<answer>", "</answer>"
_FORMULA = re.compile(r"\$\$?(.+?)\$\$?|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]")
_DISPLAYED = (("$$", "$$"), (r"\[", r"\]"))
_PLAIN_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2}")
_EMPHASIS = re.compile(
    r"\*\*([^*\n]{1,300})\*\*|__([^_\n]{1,300})__|`([^`\n]{1,300})`|(?<![*\w])\*([^*\s][^*\n]{0,300})\*(?![*\w])"
)
"""Markdown's bold, code and italic text."""
_CLOSED_EMPHASIS = re.compile(r"^\s*(?:\*\*|__|[*_`])(?=\s)")
"""The closing mark of ``**Answer:** 42``, before the answer."""
_SENTENCE_END = re.compile(r"[.!](?:\s|$)")
_REASON = re.compile(
    r"(?i)(?:,?\s+\(?|\s*\()(?:because|since|as|so|not|i\.e\.|that is)\s.*|,\s+(?:which|where|given|giving|meaning)\s.*"
)
"""The rest of a sentence after its answer: a reason, or what the answer is not."""
_ASIDE = re.compile(r"(?i)(?:,\s+not|,?\s+\(?(?:because|since))\s.*")
"""The rest of a sentence after the value of a last line."""
_NOTE = re.compile(
    r"\s+\((?![^()]*\b(?:mod|or|not)\b)(?:[a-zA-Z]{2,}\b[^()\\]*|[^()\\]*=[^()\\]*)\)\W*$"
)
r"""A note in parentheses at the end of an answer: words, or an equation. A function's argument is no note."""
_CLOSING_REMARK = re.compile(
    r"(?i)\n\s*(?:let me know|i hope|hope (?:this|that|it)|feel free|if you (?:have|need|want|would)|would you like)"
    r"[^\n]*$"
)
"""A last line in which a model addresses its user."""
_OPTION = re.compile(
    r"(?i)\b(?:option|choice)\s*(?:is|:)?\s*[*_`$]*(\([A-Ja-j]\)|(?-i:[A-J])\b)(?![-'])"
)
_FURTHER_OPTION = re.compile(r"(?:\b(?:or|and|option|choice)\b|[,/&])\W*[A-J]\b")
_DENIAL = re.compile(
    r"(?i)\b(?:not|isn't|cannot|can't|never|neither|nor|wrong)\b|\u4e0d\u662f|\u4e0d\u4e3a"
)
"""A word that negates an answer, in English or Chinese."""
_LONGEST_LINE = 2000
"""Largest number of characters of a line that are read as words."""
_MAX_SEPARATOR = 30
"""Largest number of characters between two boxes that are one answer."""
_MAX_STATEMENTS = 20
"""Largest number of stated answers that are tried, from the last statement back."""
_BOX_SEPARATOR = re.compile(
    r"(?i)[\s$*.\\()]*"  # markup after the first box
    r"(?:,|;|\b(?:and|or)\b|[\u548c\u6216\u53ca])[\s$*\\()]*"  # also "and" and "or" in Chinese
    r"(?:(?:and|or)\b[\s$*\\()]*)?"  # "and" after a comma
    r"(?:[a-z]\w*\s*=[\s$]*)?"  # "y =" before the second box
)
"""The text between two boxes that are one answer: a comma, a semicolon or "and", perhaps followed by ``y =``."""
_FORMULA_SEPARATOR = re.compile(r"(?i)\s*(?:,|;|\bor\b|\u6216)\s*(?:or\b)?\s*")
"""The text between two formulas of one list."""
_STYLE = re.compile(r"\\(?:text|textbf|textrm|mathbf|mathrm|bm|boldsymbol)\s*\{")
_PARENTHESISED_NUMBER = re.compile(r"\(\s*([+-]?\d+(?:\.\d+)?)\s*\)")
_LEADING_MARKUP = re.compile(r"(?:[\s$*~`#]|\\[,;:!])*")
_TRAILING_MARKUP = " \t\n\r$*~`.,;:\\"

_INVISIBLE = (0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFEFF)
_HYPHENS_AND_MINUS = (*range(0x2010, 0x2016), 0x2212, 0xFE63)
_FULL_WIDTH = range(0xFF01, 0xFF5F)
_CHECK_MARKS = (0x2611, 0x2705, 0x2713, 0x2714, 0x1F389, 0x1F3AF)
_ASCII_PUNCTUATION = {
    **dict.fromkeys((*_INVISIBLE, *_CHECK_MARKS)),
    **dict.fromkeys(_HYPHENS_AND_MINUS, "-"),
    **{code: chr(code - 0xFEE0) for code in _FULL_WIDTH},
    # Chinese enumeration comma, full stop and comma.
    0x3001: ", ",
    0x3002: ". ",
    0xFF0C: ", ",
    # Typographic apostrophe, and the slash of fractions.
    0x2019: "'",
    0x2044: "/",
    # Python's "\boxed{\frac12}" without an r in front has these two control characters.
    ord("\b"): r"\b",
    ord("\f"): r"\f",
}
"""Code of a character -> the text that replaces it; None removes the character."""
_SPACE = re.compile(r"[^\S\n ]")


def in_ascii_punctuation(text: str) -> str:
    """Convert full-width characters to ASCII and all spaces to plain spaces, and remove invisible characters."""
    return _SPACE.sub(" ", text.translate(_ASCII_PUNCTUATION))


def final_answer(response: str) -> str:
    r"""The final answer of a response, without the markup around it; empty if the response has no answer.

    Only the text after the thoughts is read (``answer_part``). If this text has an ``<answer>``, only the last
    ``<answer>`` is read. The answer is X in the last of these forms: ``\boxed{X}`` (also ``\framebox``, ``\fbox``),
    ``#### X`` (GSM8K's form), ``Answer: X`` (DAPO-Math's form), ``answer is X`` (also in Chinese). In a text without
    these forms, it is the last formula of the last line, or else the whole last line. Boxes in a row,
    ``\boxed{2} and \boxed{3}``, are one answer together. A box that is not closed counts as an empty answer, and a
    negated formula, ``not $5$``, is no answer.
    """
    return without_markup(written_answer(response))


def written_answer(response: str) -> str:
    """The final answer of a response with the markup around it."""
    text = _in_answer_tag(in_ascii_punctuation(answer_part(response)))
    answers = [*_boxed_answers(text), *_marked_answers(text), *_stated_answer(text)]
    if not answers:
        return _last_line_answer(text)
    # The last answer has the largest position.
    _, last_answer = max(answers)
    # A box may hold a sentence: "The answer is 42".
    statements = _stated_answer(last_answer)
    if statements:
        _, stated_answer = statements[0]
        # In "\text{The answer is} 42", the text after "is" begins with the closing brace.
        return stated_answer.lstrip("} ")
    return last_answer


def _in_answer_tag(text: str) -> str:
    """The content of the last ``<answer>``; ``text`` if it has no closed ``<answer>``."""
    end = text.rfind(_ANSWER_ENDS)
    # Without an end tag, the searched range is empty, so ``start`` is -1.
    start = text.rfind(_ANSWER_BEGINS, 0, max(end, 0))
    if start < 0:
        return text
    return text[start + len(_ANSWER_BEGINS) : end]


_PositionedAnswer = tuple[int, str]
"""A position in the text and an answer. The answer with the largest position is the last one."""


def _boxed_answers(text: str) -> list[_PositionedAnswer]:
    """A position and the content of each box. Boxes in a row count as one box, at the end of the last box."""
    answers: list[_PositionedAnswer] = []
    previous_end = 0
    for match in BOX.finditer(text):
        start = match.end()
        content = braced(text, start)
        if content is None:
            # The response was cut off inside the box: the box counts as an empty answer.
            answers.append((start, ""))
            continue
        end = start + len(content) + 1
        if answers and _is_separator(text, previous_end, match.start()):
            _, previous_content = answers.pop()
            content = _extended_list(previous_content, content.strip())
        answers.append((end, content))
        previous_end = end
    return answers + [(m.start(1), m[1]) for m in UNBRACED_BOX.finditer(text)]


def _is_separator(text: str, start: int, end: int) -> bool:
    """Whether the text from ``start`` to ``end`` separates two boxes that are one answer."""
    if end - start > _MAX_SEPARATOR:
        return False
    return _BOX_SEPARATOR.fullmatch(text, start, end) is not None


def _extended_list(previous_content: str, content: str) -> str:
    """Add ``content`` to the previous boxes' content, unless the content is there already, or the list is too long."""
    if len(previous_content) > LONGEST_ANSWER or content in previous_content.split(", "):
        return previous_content
    return f"{previous_content}, {content}"


def _marked_answers(text: str) -> list[_PositionedAnswer]:
    """The text after each ``####`` in its line. Text that looks like a heading counts only in the last line."""
    end = len(text.rstrip())
    answers = []
    for match in _MARKED.finditer(text):
        is_last_line = match.end() >= end
        if _NUMBER_OR_FORMULA.match(match[1]) and (is_last_line or not _HEADING.match(match[1])):
            answers.append((match.start(1), match[1]))
    return answers


def _stated_answer(text: str) -> list[_PositionedAnswer]:
    """Position and X of the last statement ``answer is X`` that is not negated, as the only entry of a list.

    The list is empty if there is no such statement.
    """
    matches = list(_STATED.finditer(text))
    for match in reversed(matches[-_MAX_STATEMENTS:]):
        answer = _display_at(text, match.end())
        if answer is None:
            line = text[match.end() :].partition("\n")[0]
            answer = _first_answer_of(line)
        if answer:
            return [(match.end(), answer)]
    return []


def _first_answer_of(line: str) -> str:
    """The answer in ``line``; empty if the answer is negated. ``line`` is the rest of a line after ``Answer:``.

    The answer is the first formula. Without a formula, it is the first sentence up to a reason (``because ...``), or
    the value that this sentence states.
    """
    line = _CLOSED_EMPHASIS.sub("", _with_single_spaces(line[:_LONGEST_LINE]))
    formulas = _formulas(line)
    if formulas:
        if _DENIAL.search(line, 0, formulas[0].start()):
            return ""
        return _content(formulas[0])
    if _DENIAL.match(line):
        return ""
    sentence = _SENTENCE_END.split(line, maxsplit=1)[0]
    answer = without_lead(without_note(_REASON.sub("", sentence)))
    return _emphasised_value(answer) or stated_value(answer) or answer


def _display_at(text: str, start: int) -> str | None:
    """The content of the displayed formula, of one or more lines, at ``start``. None if no formula begins there."""
    for begin, end in _DISPLAYED:
        if text.startswith(begin, start):
            content, closing_mark, _ = text[start + len(begin) :].partition(end)
            return content.strip() if closing_mark else None
    return None


def _last_line_answer(text: str) -> str:
    """The last formula of the last line, with the other formulas of its list.

    A line without a formula is read by its emphasised text, or by the value that its last sentence states. If neither
    is clear, the whole line is the answer.
    """
    text = _CLOSING_REMARK.sub("", text.strip()).rstrip()
    # A displayed formula of several lines at the end counts as the last line.
    for begin, end in _DISPLAYED:
        body = text.rstrip(".")
        if not body.endswith(end):
            continue
        start = body.rfind(begin, 0, -len(end))
        if start >= 0 and "\n" in body[start:]:
            return body[start + len(begin) : -len(end)].strip()
    line = text.rpartition("\n")[2]
    formulas = _formulas(line)
    if formulas:
        return _listed(line, formulas)
    line = _with_single_spaces(line[-_LONGEST_LINE:])
    value = _emphasised_value(line)
    if value is not None:
        return value
    line = _ASIDE.sub("", line)
    sentence = _last_sentence(line)
    if denies(sentence) and any(character.isdigit() for character in sentence):
        return ""
    option = _OPTION.search(sentence)
    if option is not None and not denies(sentence):
        has_further = _FURTHER_OPTION.search(sentence, option.end()) is not None
        return "" if has_further else option[1]
    return stated_value(sentence) or without_lead(without_note(line))


def _with_single_spaces(line: str) -> str:
    return " ".join(line.split())


def _listed(line: str, formulas: Sequence[re.Match[str]]) -> str:
    """The last formula of ``line``, with the other formulas of its list."""
    listed_formulas: list[str] = []
    previous_end = 0
    for formula in formulas:
        start = formula.start()
        # A negated formula is left out. It does not end the list.
        if not _DENIAL.search(line, previous_end, start) and not is_bound(
            line, start, formula.end()
        ):
            if not _FORMULA_SEPARATOR.fullmatch(line, previous_end, start):
                # This formula begins a new list.
                listed_formulas = []
            listed_formulas.append(_content(formula))
        previous_end = formula.end()
    return ", ".join(listed_formulas)


def _emphasised_value(line: str) -> str | None:
    """The value that bold, code or italic text in ``line`` states; empty if it is denied. None without such a value.

    The last sentence with emphasised values counts. If it states one value, its other words count too. Otherwise its
    emphasised values must be one list.
    """
    values = [match for match in _EMPHASIS.finditer(line) if _is_value(match, line)]
    if not values:
        return None
    ends = [match.end() for match in _SENTENCE_END.finditer(line)]
    start = max((end for end in ends if end <= values[-1].start()), default=0)
    end = min((end for end in ends if end >= values[-1].end()), default=len(line))
    plain_sentence = _ASIDE.sub("", _EMPHASIS.sub(_content, line[start:end]))
    value = stated_value(plain_sentence)
    if value is not None:
        return value
    is_denied = denies(plain_sentence) or _DENIAL.search(line, values[-1].end())
    values = [match for match in values if match.start() >= start]
    is_list = True
    for value_before, value_after in pairwise(values):
        if not _FORMULA_SEPARATOR.fullmatch(line, value_before.end(), value_after.start()):
            is_list = False
    if is_denied or not is_list:
        return ""
    contents = [_content(match) for match in values]
    return ", ".join(stated_value(content) or without_lead(content) for content in contents)


def _is_value(match: re.Match[str], line: str) -> bool:
    """Whether emphasised text is a value: it has a digit, or it ends the line. A title ends with a colon."""
    content = _content(match)
    if content.rstrip().endswith(":") or line[match.end() :].startswith(":"):
        return False
    ends_line = not line[match.end() :].strip(" .!")
    return ends_line or any(character.isdigit() for character in content)


def _last_sentence(line: str) -> str:
    sentences = [sentence for sentence in _SENTENCE_END.split(line) if sentence.strip(" *_`")]
    return sentences[-1] if sentences else line


def without_note(answer: str) -> str:
    """``answer`` without a note in parentheses after it: ``4 (that is 2+2)`` becomes 4."""
    note = _NOTE.search(answer)
    if note is None or not answer[: note.start()].strip():
        return answer
    return answer[: note.start()]


def _formulas(line: str) -> list[re.Match[str]]:
    """The formulas of ``line``. Dollar signs of prices are not the marks of a formula."""
    formulas: list[re.Match[str]] = []
    position = 0
    while match := _FORMULA.search(line, position):
        position = match.end()
        if _is_price(match, line):
            position = match.start() + 1
        else:
            formulas.append(match)
    return formulas


def _is_price(match: re.Match[str], line: str) -> bool:
    """Whether the text between two dollar signs is not a formula: "$18 and $20", "$18 per day, so $"."""
    content = match[1]
    if content is None:
        return False
    is_followed_by_digit = line[match.end() : match.end() + 1].isdigit()
    return is_followed_by_digit or (
        content[-1].isspace() and bool(_PLAIN_WORD.search(content)) and not content[0].isspace()
    )


def _content(match: re.Match[str]) -> str:
    """The text inside delimiters: ``_FORMULA`` and ``_EMPHASIS`` have a group for each pair of delimiters."""
    return next(group for group in match.groups() if group)


def without_markup(text: str) -> str:
    """``text`` without fonts, dollar signs and punctuation around the whole text; ``(5)`` becomes 5."""
    text = _trimmed(text)
    while match := _STYLE.match(text):
        content = braced(text, match.end())
        # The command must span the whole text.
        if content is None or match.end() + len(content) + 1 != len(text):
            break
        text = _trimmed(content)
    number = _PARENTHESISED_NUMBER.fullmatch(text)
    return number[1] if number else text


def _trimmed(text: str) -> str:
    prefix = _LEADING_MARKUP.match(text)
    assert prefix is not None
    return text[prefix.end() :].rstrip(_TRAILING_MARKUP)
