"""docs/faq.md quotes lines that the code can really write."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACEHOLDER = re.compile(r"%(?:\.\d+)?[sdfr]|%%")
SHORTEST = 9
"""Characters of fixed text that a pattern must have to prove anything."""


def quoted_lines() -> list[str]:
    """The quoted lines of ours: those before the section on the libraries."""
    own = (ROOT / "docs" / "faq.md").read_text().split("## From the libraries")[0]
    return [line[4:] for line in own.splitlines() if line.startswith("    ")]


def patterns() -> list[re.Pattern[str]]:
    """A regular expression for every line of text in the package, with anything for what is filled in."""
    found = []
    for path in (ROOT / "megatron_dppo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for line in template_of(node).split("\n"):
                parts = PLACEHOLDER.split(line)
                if sum(len(part.strip()) for part in parts) >= SHORTEST:
                    found.append(re.compile(".*?".join(map(re.escape, parts))))
    return found


def template_of(node: ast.AST) -> str:
    """A string's text with ``%s`` for what is filled in; empty where the node is no string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(template_of(v) if isinstance(v, ast.Constant) else "%s" for v in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


PATTERNS = patterns()


@pytest.mark.parametrize("line", quoted_lines())
def test_the_code_can_write_the_line(line):
    text = re.sub(r"^(\[\w+\]|!|error:) ", "", line)
    assert any(pattern.search(text) for pattern in PATTERNS)


def test_a_line_that_nobody_writes_is_noticed():
    assert not any(p.search("a zebra sings in key 17") for p in PATTERNS)
