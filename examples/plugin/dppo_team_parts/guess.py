"""An environment of several turns: the policy guesses a number and learns whether the answer is larger or smaller."""

from __future__ import annotations

from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments import Step, Turn

PENALTY = 0.1


class Guess:
    """One episode. The right number earns 1, each other guess costs ``PENALTY``."""

    async def reset(self, problem: Problem) -> str:
        self.answer = int(problem.answer)
        return ""

    async def step(self, turn: Turn) -> Step:
        try:
            guess = int(turn.text)
        except ValueError:
            return Step("say a number", reward=-PENALTY)
        if guess == self.answer:
            return Step(reward=1.0, done=True)
        direction = "larger" if guess < self.answer else "smaller"
        return Step(direction, reward=-PENALTY)

    async def close(self) -> None:
        """Do nothing: an episode holds no resources."""
