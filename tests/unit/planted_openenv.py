"""Environments of OpenEnv, for its own Python environment: a number is to be guessed."""

from __future__ import annotations

import random
from pathlib import Path

from openenv.core.env_server import Action, Environment, Observation, State


class GuessAction(Action):
    message: str


class Told(Observation):
    message: str


class Described(Observation):
    text: str
    guesses: int


class Guess(Environment):
    """One that is reset with the seed 0 breaks. ``closed``: a file that gets a line where one is closed."""

    def __init__(self, highest: int = 10, closed: str = "/dev/null") -> None:
        super().__init__()
        self.highest, self.closed, self.guesses = highest, Path(closed), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        if seed == 0:
            raise RuntimeError("planted")
        self.number = random.Random(seed).randint(1, self.highest)
        return self.observed(f"Guess, from 1 to {self.highest}.")

    def step(self, action: GuessAction) -> Observation:
        self.guesses += 1
        guess = int(action.message)
        if guess == self.number:
            return self.observed("Right.", done=True, reward=1)
        return self.observed(f"It is {'higher' if guess < self.number else 'lower'}.", reward=-0.25)

    def observed(self, text: str, **fields: object) -> Observation:
        return Told(message=text, **fields)

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)

    def close(self) -> None:
        with self.closed.open("a") as file:
            file.write("closed\n")


class Seedless(Guess):
    """Its reset is that of OpenEnv's own template, and it says what it says in fields of its own."""

    def reset(self) -> Observation:  # type: ignore[override]
        return super().reset(seed=7)

    def observed(self, text: str, **fields: object) -> Observation:
        return Described(text=text, guesses=self.guesses, **fields)
