"""A calculator as an environment: a turn that ends in a call, ``? 3 + 5``, is answered with the number; any other turn
is the answer to the problem, and ends the episode.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments import Step, Turn

_LONGEST = 200
_MOST_DIGITS = 30
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class Calculator:
    """``call``: the text that begins an expression; ``wrong``: what is said of one that can't be worked out.
    ``call_reward``: what a call that can be earns, beside what the run's rewards give the last turn."""

    def __init__(self, call: str = "?", wrong: str = "error", call_reward: float = 0.0) -> None:
        self._call, self._wrong, self._reward = call, wrong, call_reward

    async def reset(self, problem: Problem) -> str:
        return ""

    async def step(self, turn: Turn) -> Step:
        _, call, expression = turn.text.rpartition(self._call)
        if not call:
            return Step(done=True, is_scored=True)
        try:
            return Step(str(calculate(expression)), reward=self._reward)
        except ValueError:
            return Step(self._wrong)

    async def close(self) -> None:
        return


def calculate(expression: str) -> int:
    """Sums, differences and products of whole numbers, with brackets. Raises ValueError for anything else, and for
    numbers beyond 30 digits."""
    if len(expression) > _LONGEST:
        raise ValueError(f"{len(expression)} characters, expected at most {_LONGEST}")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no expression") from error
    return _value(tree)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError(f"{type(node).__name__} is no sum, difference or product")
    if abs(value) >= 10**_MOST_DIGITS:
        raise ValueError(f"a number of more than {_MOST_DIGITS} digits")
    return value
