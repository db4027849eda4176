"""Registry of reward functions by name. Imports no reward's libraries."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

RewardFunction = Callable[[str, str], float]
"""``(response, answer) -> score``. Deterministic; the score lies in [0, 1]."""


@dataclass(frozen=True)
class Reward:
    """A reward function that is imported on first use.

    Attributes:
        target: ``package.module:function``.
        runs_inline: the verifier calls the function in its own process, without a time limit. Only
            for string functions whose time is linear in the response's length.
    """

    target: str
    runs_inline: bool = False

    def load(self) -> RewardFunction:
        """Import the function. Raises ValueError where there is no such module or function."""
        module, _, function = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"the reward {self.target!r} can't be imported: {error}") from error

    def __call__(self, response: str, answer: str) -> float:
        return self.load()(response, answer)


REWARDS: dict[str, Reward] = {
    "exact_integer": Reward("megatron_dppo.rewards.exact_integer:exact_integer", runs_inline=True),
    "math_verify": Reward("megatron_dppo.rewards.math_verify:math_verify"),
}


def find_reward(name: str) -> Reward:
    """The reward with this name in ``REWARDS``, or a user's ``package.module:function``.

    Raises ValueError for any other name; the message lists the names.
    """
    if ":" in name:
        return Reward(name)
    if name not in REWARDS:
        raise ValueError(
            f"unknown reward {name!r}; there are {', '.join(sorted(REWARDS))}, "
            "or package.module:function"
        )
    return REWARDS[name]
