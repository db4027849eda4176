"""docs/faq.md quotes only lines that the code can write."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLACEHOLDER = re.compile(r"%(?:\.\d+)?[sdfr]|%%")
SHORTEST = 9
"""Characters of fixed text that a pattern must have to prove anything."""


def quoted_lines() -> list[str]:
    """Return the quoted lines of this project, which precede the section on the libraries."""
    own = (ROOT / "docs" / "faq.md").read_text().split("## From the libraries")[0]
    return [line[4:] for line in own.splitlines() if line.startswith("    ")]


def patterns() -> list[re.Pattern[str]]:
    """Return a regular expression for every line of text in the package. Placeholders match anything."""
    found = []
    for path in (ROOT / "megatron_dppo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for line in template_of(node).split("\n"):
                parts = PLACEHOLDER.split(line)
                if sum(len(part.strip()) for part in parts) >= SHORTEST:
                    found.append(re.compile(".*?".join(f"({re.escape(part)})" for part in parts)))
    return found


def template_of(node: ast.AST) -> str:
    """Return a string's text with ``%s`` for each inserted value; empty if the node is no string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(template_of(v) if isinstance(v, ast.Constant) else "%s" for v in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


PATTERNS = patterns()


def fixed_share(text: str) -> float:
    """Return the share of the characters of ``text`` that match the fixed text of a pattern."""
    is_fixed = [False] * len(text)
    for pattern in PATTERNS:
        for match in pattern.finditer(text):
            for group in range(1, 1 + pattern.groups):
                start, end = match.span(group)
                is_fixed[start:end] = [True] * (end - start)
    return sum(is_fixed) / len(text)


@pytest.mark.parametrize("line", quoted_lines())
def test_the_code_can_write_the_line(line):
    text = re.sub(r"^(\[\w+\]|!|error:) ", "", line)
    assert fixed_share(text) > 0.4


def test_a_line_that_nobody_writes_is_noticed():
    assert fixed_share("a zebra sings in key 17") == 0
    # The code writes only a part of this line.
    assert fixed_share("409: another call of this session waits, expected one at a time") < 0.4
