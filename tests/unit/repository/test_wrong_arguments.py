"""The calls with wrong arguments that ``make mutants`` plants, against a list by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from mutation.arguments import DROPPED, SWAPPED, wrong_arguments


def each(kind: str, *statements: str) -> list[tuple[str, str]]:
    return [(kind, statement) for statement in statements]


@pytest.mark.parametrize(
    ("statement", "swapped", "dropped"),
    [
        ("f(mu, pi.log, a[0], 1)", ("f(pi.log, mu, a[0], 1)", "f(mu, a[0], pi.log, 1)"), ()),
        ("f(1, 2, 'a', 'b')", ("f(2, 1, 'a', 'b')", "f(1, 2, 'b', 'a')"), ()),
        ("f(-a, -b, a + b)", ("f(-b, -a, a + b)",), ()),
        ("f(*a, *b)", (), ()),
        ("f(low=a, high=b)", ("f(low=b, high=a)",), ("f(high=b)", "f(low=a)")),
        ("f(a, low=1, high=b)", (), ("f(a, high=b)", "f(a, low=1)")),
        ("f(low=a, **more)", (), ("f(**more)",)),
        ("f(**one, **other)", (), ()),
        ("x.maximum(a, b) + max(a, b)", (), ()),
        ("x = f(g(a, b), c)", ("x = f(g(b, a), c)",), ()),
        ("x = f'{g(a, b)}' + g(c, d)", ("x = f'{g(a, b)}' + g(d, c)",), ()),
        ("é = f(a, b)  # é", ("é = f(b, a)  # é",), ()),
    ],
)
def test_neighbours_that_look_alike_are_swapped_and_each_keyword_is_left_out(
    statement: str, swapped: tuple[str, ...], dropped: tuple[str, ...]
):
    mistakes = list(wrong_arguments(statement))
    assert sorted(mistakes) == sorted(each(SWAPPED, *swapped) + each(DROPPED, *dropped))


def test_a_call_of_several_lines_keeps_their_number():
    mistakes = list(wrong_arguments("x = f(\n    one,\n    two,\n)\ny = 1\n"))
    assert mistakes == [(SWAPPED, "x = f(two, one\n\n\n)\ny = 1\n")]
