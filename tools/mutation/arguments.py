"""Wrong arguments: two similar arguments are swapped, or a keyword is left out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise

SWAPPED, DROPPED = "SwapArguments", "DropKeyword"
SYMMETRIC = ("dot", "equal", "gcd", "logaddexp", "max", "maximum", "min", "minimum")
"""Functions whose arguments may be in any order."""
_REFERENCES = (ast.Name, ast.Attribute, ast.Subscript)


def wrong_arguments(statement: str) -> Iterator[tuple[str, str]]:
    """Yield each mistake in the arguments of the calls of ``statement``: its kind, and the statement with the mistake.

    The types of arguments are not known. So two neighbouring arguments are swapped if each is a name, attribute or
    item, or if both are expressions of one kind. The number of lines stays, so that the code after the statement does
    not move.
    """
    tree = ast.parse(statement)
    # The syntax tree has no columns of the nodes inside f-strings, so leave them out.
    ids_in_texts: set[int] = set()
    for text in ast.walk(tree):
        if isinstance(text, ast.JoinedStr):
            ids_in_texts |= {id(node) for node in ast.walk(text)}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and id(call) not in ids_in_texts:
            for kind, changed in _mistakes(call):
                yield kind, _replaced(statement, call, changed)


def _mistakes(call: ast.Call) -> Iterator[tuple[str, ast.Call]]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    for i, (a, b) in enumerate(pairwise(call.args)):
        if _alike(a, b) and name not in SYMMETRIC:
            changed = deepcopy(call)
            changed.args[i], changed.args[i + 1] = b, a
            yield SWAPPED, changed
    for i, (one, other) in enumerate(pairwise(call.keywords)):
        if one.arg and other.arg and _alike(one.value, other.value):
            changed = deepcopy(call)
            changed.keywords[i].value = other.value
            changed.keywords[i + 1].value = one.value
            yield SWAPPED, changed
    for i, keyword in enumerate(call.keywords):
        if keyword.arg:
            changed = deepcopy(call)
            del changed.keywords[i]
            yield DROPPED, changed


def _alike(a: ast.expr, b: ast.expr) -> bool:
    if isinstance(a, _REFERENCES) and isinstance(b, _REFERENCES):
        return True
    if isinstance(a, ast.Constant) and isinstance(b, ast.Constant):
        return type(a.value) is type(b.value)
    return type(a) is type(b) and not isinstance(a, ast.Starred)


def _replaced(text: str, call: ast.Call, changed: ast.Call) -> str:
    # ast counts columns in bytes.
    lines = text.encode().splitlines(keepends=True)
    assert call.end_lineno is not None
    assert call.end_col_offset is not None
    first, last = call.lineno - 1, call.end_lineno - 1
    before = b"".join(lines[:first]) + lines[first][: call.col_offset]
    after = lines[last][call.end_col_offset :] + b"".join(lines[last + 1 :])
    written = ast.unparse(changed)
    # Keep the number of lines: put line breaks in front of the closing bracket.
    padded = written[:-1] + "\n" * (last - first) + written[-1]
    return before.decode() + padded + after.decode()
