"""Environments of OpenEnv in which the policy guesses a number. They run in a Python environment of their own."""

from __future__ import annotations

import random
from pathlib import Path

from openenv.core.env_server import Action, Environment, Observation, State


class GuessAction(Action):
    message: str


class TextObservation(Observation):
    message: str


class CountedObservation(Observation):
    text: str
    guesses: int


class Guess(Environment):
    """A reset with the seed 0 fails. Each environment that is closed appends a line to the file ``closed``."""

    def __init__(self, highest: int = 10, closed: str = "/dev/null") -> None:
        super().__init__()
        self.highest, self.closed, self.guesses = highest, Path(closed), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        if seed == 0:
            raise RuntimeError("planted")
        self.number = random.Random(seed).randint(1, self.highest)
        return self.observe(f"Guess, from 1 to {self.highest}.")

    def step(self, action: GuessAction) -> Observation:
        self.guesses += 1
        guess = int(action.message)
        if guess == self.number:
            return self.observe("Right.", done=True, reward=1)
        return self.observe(f"It is {'higher' if guess < self.number else 'lower'}.", reward=-0.25)

    def observe(self, text: str, **fields: object) -> Observation:
        return TextObservation(message=text, **fields)

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)

    def close(self) -> None:
        with self.closed.open("a") as file:
            file.write("closed\n")


class Seedless(Guess):
    """Its reset takes no seed, as in OpenEnv's own template, and its observations have fields of other names."""

    def reset(self) -> Observation:  # type: ignore[override]
        return super().reset(seed=7)

    def observe(self, text: str, **fields: object) -> Observation:
        return CountedObservation(text=text, guesses=self.guesses, **fields)
