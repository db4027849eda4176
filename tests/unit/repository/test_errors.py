"""The tree of errors, as system/errors.py draws it, against the classes of the package."""

import ast
import builtins
import re
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from megatron_dppo.system import errors

PACKAGE = Path(__file__).resolve().parents[3] / "megatron_dppo"
TREE, OUTSIDE = errors.__doc__.split("The errors below are outside")


def is_exception(name):
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException)


@cache
def exceptions_of_the_package():
    """Return the names of the bases of each public exception class, by the name of the class."""
    bases = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, []).append([ast.unparse(base) for base in node.bases])
    found, before = set(), None
    # A subclass may be read before its base, so repeat until nothing is added.
    while found != before:
        before = set(found)
        found |= {
            name
            for name, base_lists in bases.items()
            for base in chain.from_iterable(base_lists)
            if is_exception(base) or base in found
        }
    public = sorted(name for name in found if not name.startswith("_"))
    assert [name for name in public if len(bases[name]) > 1] == []
    return {name: bases[name][0] for name in public}


def drawn_parents():
    """Return the parent of each class in the drawing; None for the root."""
    parents, class_at_depth = {}, {}
    for line in re.findall(r"^ {4,}[A-Z]\w+.*$", TREE, re.MULTILINE):
        depth = len(line) - len(line.lstrip())
        name = line.split()[0]
        parents[name] = class_at_depth.get(depth - 2)
        class_at_depth[depth] = name
    return parents


def drawn_outside():
    return set(re.findall(r"^ {4}([A-Z]\w+) ", OUTSIDE, re.MULTILINE))


def test_every_public_exception_is_in_the_drawing_once():
    inside, outside = set(drawn_parents()), drawn_outside()
    assert inside | outside == set(exceptions_of_the_package())
    assert not inside & outside


@pytest.mark.parametrize(("name", "parent"), drawn_parents().items())
def test_a_class_stands_under_the_base_that_it_has(name, parent):
    bases = exceptions_of_the_package()[name]
    assert [base for base in bases if not is_exception(base)] == ([parent] if parent else [])


@pytest.mark.parametrize("name", sorted(drawn_outside()))
def test_what_ends_no_run_has_another_base(name):
    assert all(is_exception(base) for base in exceptions_of_the_package()[name])
