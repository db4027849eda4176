"""Verifiable rewards: the table of them, and the one that needs no library. A further one is a file and a row.

Imports no reward's libraries.
"""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

_LONGEST_REFUSAL = 200
# Characters of a response's end that are read for a reason: the patterns take quadratic time.
_LONGEST_READ = 4000
_LONGEST_SHOWN = 80
RewardFunction = Callable[[str, str], float]
"""``(response, answer) -> score``. Deterministic; the score lies in [0, 1]."""


@dataclass(frozen=True)
class Reward:
    """A reward function that is imported on first use.

    Attributes:
        target: ``package.module:function``.
        runs_inline: the verifier calls the function in its own process, without a time limit. Only
            for string functions whose time is linear in the response's length.
        gold_target: as ``target``, of a function that scores an answer 1 where responses can match
            it, whatever the response. None: ``target`` itself; an answer need not match itself.
        answer_target: as ``target``, of a function from a response to the part of it that is compared
            with the answer, for people to read; imports no library. None: it can't be told.
    """

    target: str
    runs_inline: bool = False
    gold_target: str | None = None
    answer_target: str | None = None

    @property
    def reads_solutions(self) -> bool:
        """Whether gold answers may be worked solutions; one's own reward gets them as they stand."""
        return self.gold_target is not None

    def load(self) -> RewardFunction:
        """Import the function. Raises ValueError where there is no such module or function."""
        return _imported(self.target)

    def reason(self, response: str, answer: str, score: float) -> str:
        """Why ``response`` has this score, as far as it can be told without the reward's libraries."""
        if self.answer_target is None:
            return f"by {self.target}"
        given = _imported(self.answer_target)(response[-_LONGEST_READ:])
        given = given if len(given) <= _LONGEST_SHOWN else f"{given[:_LONGEST_SHOWN]}..."
        if score > 0:
            return f"{given!r} is right"
        if given == answer:
            return f"{given!r} is right, but the check ended without a score"
        return f"{given!r}, expected {answer!r}" if given else f"no answer, expected {answer!r}"


def _imported(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the reward {target!r} can't be imported: {error}") from error


_EXACT = "megatron_dppo.rewards:exact_integer"
_MATH = "megatron_dppo.rewards.math_verify"
REWARDS: dict[str, Reward] = {
    "exact_integer": Reward(
        _EXACT,
        runs_inline=True,
        gold_target=_EXACT,
        answer_target="megatron_dppo.rewards:stated_result",
    ),
    "math_verify": Reward(
        f"{_MATH}:math_verify",
        gold_target=f"{_MATH}:check_gold",
        answer_target="megatron_dppo.rewards.answers:final_answer",
    ),
}


def score_or_refusal(function: RewardFunction, response: str, answer: str) -> float | str:
    """The score, or in words why there is none: a ValueError of ``function``, or no number in [0, 1]."""
    try:
        value: Any = function(response, answer)
    except ValueError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        why = str(error)[:_LONGEST_REFUSAL]
        if Path(frame.filename).parent == Path(__file__).parent:
            return why
        return f"{why} ({Path(frame.filename).name}, line {frame.lineno})"
    if not isinstance(value, Real):
        return f"it returned a {type(value).__name__}, expected a number in [0, 1]"
    # typeshed's Real can't be compared.
    score: Any = value
    if not 0 <= score <= 1:
        return f"it returned {_shown(value)}, expected a number in [0, 1]"
    return float(value)


def _shown(value: Any) -> str:
    try:
        return str(value)[:_LONGEST_REFUSAL]
    # Python writes out no integer of more than some thousand digits.
    except ValueError:
        return "a number of thousands of digits"


def find_reward(name: str) -> Reward:
    """The reward with this name in ``REWARDS``, or a user's ``package.module:function``.

    Raises ValueError for any other name; the message lists the names.
    """
    if ":" in name:
        return Reward(name)
    if name not in REWARDS:
        raise ValueError(
            f"unknown reward {name!r}; there are {', '.join(sorted(REWARDS))}, or package.module:function"
        )
    return REWARDS[name]


# --- exact match of one integer: the demo's arithmetic problems

INTEGER = re.compile(r"[+-]?[0-9]+")


def exact_integer(response: str, answer: str) -> float:
    """Score 1 if the text after the response's last ``=`` is the integer ``answer``, else 0.

    Without ``=`` the whole response is compared. White space around the integer, a plus sign and leading zeros are
    ignored; any other character scores 0. Raises ValueError if ``answer`` is not an integer.
    """
    expected = answer.strip()
    if not INTEGER.fullmatch(expected):
        raise ValueError(f"the answer is {answer!r}, expected an integer")
    given = stated_result(response)
    return float(bool(INTEGER.fullmatch(given)) and _normalise(given) == _normalise(expected))


def stated_result(response: str) -> str:
    """The text after the response's last ``=``; without one, all of it."""
    return response.rpartition("=")[2].strip()


def _normalise(integer: str) -> str:
    """``integer`` without plus sign and leading zeros."""
    # As text: int() takes quadratic time.
    digits = integer.lstrip("+-").lstrip("0")
    return ("-" if integer.startswith("-") and digits else "") + digits
