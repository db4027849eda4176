"""The reward functions: every case by hand."""

from __future__ import annotations

import sys

import pytest

from megatron_dppo.rewards import REWARDS, exact_integer, find_reward
from megatron_dppo.rewards.answers import final_answer
from megatron_dppo.rewards.math_verify import math_verify
from tests.messages import mentioning
from tests.patience import run_patiently


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("17", "17", 1),
        (" 17\n", "17", 1),
        ("+17", "17", 1),
        ("017", "17", 1),
        ("17", "017", 1),
        ("-3", "-3", 1),
        ("-0", "0", 1),
        ("3+4=7-2=5", "5", 1),
        ("3 + 4 = 7", "7", 1),
        ("3", "-3", 0),
        ("7 = 3 + 4", "7", 0),
        ("5=", "5", 0),
        ("17.", "17", 0),
        ("17.0", "17", 0),
        ("1 7", "17", 0),
        ("- 3", "-3", 0),
        ("--3", "-3", 0),
        ("the answer is 17", "17", 0),
        ("17 18", "17", 0),
        ("", "17", 0),
        ("-", "0", 0),
        ("١٧", "17", 0),
        ("9" * 100_000, "17", 0),
    ],
)
def test_exact_integer(response, answer, score):
    assert exact_integer(response, answer) == score


def test_exact_integer_wants_an_integer_to_compare_with():
    with pytest.raises(ValueError, match=mentioning("'1.5'", "integer")):
        exact_integer("1", "1.5")


@pytest.mark.parametrize(
    ("response", "final"),
    [
        (r"so \boxed{5}, no: \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\framebox{204} minutes. Check: $180 + 24 = 204$.", "204"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"first \boxed{3}, then cut off \boxed{4", ""),
        ("Thinking.\nAnswer: 34", "34"),
        ("**Answer:** $34$", "34"),
        (r"Answer: \boxed{34}", "34"),
        (r"I get \boxed{3}." + "\nAnswer: 4", "4"),
        ("Answer: 3\nOn reflection,\n\\boxed{4}", "4"),
        ("The final answer is 34. I checked it twice.", "34"),
        (r"so the answer is $\frac{3}{4}$ of the pie", r"\frac{3}{4}"),
        ("2 + 2 is\n4", "4"),
        ("Hence $a = 2$ and $b = 3$.", "b = 3"),
        (r"which gives \(x = 3\).", "x = 3"),
        ("", ""),
    ],
)
def test_final_answer(response, final):
    assert final_answer(response).strip(" *") == final


def test_math_verify_says_when_the_answer_itself_is_no_mathematics():
    with pytest.raises(ValueError, match="cannot parse the answer"):
        math_verify(r"\boxed{1}", r"$$")


def test_the_table():
    own = {"exact_integer", "math_verify", "environment"}
    assert set(REWARDS) == own | {"reward_model", "judge", "verl", "reasoning_gym"}
    assert find_reward("exact_integer").load()("1+1=2", "2") == 1.0
    assert find_reward("exact_integer").runs_inline
    assert not find_reward("math_verify").runs_inline
    with pytest.raises(
        ValueError, match=mentioning("'x'", "exact_integer", "judge", "math_verify")
    ):
        find_reward("x")


def test_the_table_imports_no_library():
    heavy = (
        *("torch", "sympy", "math_verify", "transformers", "aiohttp", "reasoning_gym"),
        *("pydantic", "yaml"),
    )
    code = (
        "import sys; import megatron_dppo.rewards as r; r.REWARDS['exact_integer'].load()('1', '1'); "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    out = run_patiently([sys.executable, "-c", code], check=True)
    assert out.stdout.strip() == "[]"
