"""Environments that fail on purpose. They have a file of their own, because the processes that run them import it."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments import ChatCall, Step, Turn
from megatron_dppo.system.secret_variables import program_environment


class Counting:
    """An episode of three turns: turn i, from 1, earns i / 10, and the observation after it is i. A turn whose text
    ends with the name of a fault, such as ``crash``, causes this fault."""

    def __init__(self, flag: str = "") -> None:
        self.turns, self.flag = 0, flag

    async def reset(self, problem: Problem) -> str:
        self.problem = problem
        return ""

    async def step(self, turn: Turn) -> Step:
        self.turns += 1
        await self.misbehave(turn.text)
        return Step(f"{self.turns}", reward=self.turns / 10, done=self.turns == 3)

    async def close(self) -> None:
        return

    async def misbehave(self, text: str) -> None:
        if text.endswith("crash"):
            raise ZeroDivisionError("planted")
        if text.endswith("exit"):
            os._exit(3)
        if text.endswith("hang"):
            await asyncio.sleep(3600)
        if text.endswith("block"):
            time.sleep(3600)
        if text.endswith("huge"):
            raise ValueError("x" * 10_000_000)


class Greeting(Counting):
    """Begins with ``greeting``. If ``flag`` is a path, the second turn of the first episode fails and creates that
    file, and later episodes begin with another greeting."""

    def __init__(self, greeting: str, flag: str = "") -> None:
        super().__init__(flag)
        self.greeting = greeting

    async def reset(self, problem: Problem) -> str:
        await super().reset(problem)
        return self.greeting + "!" * (self.flag != "" and Path(self.flag).exists())

    async def misbehave(self, text: str) -> None:
        if self.turns == 2 and self.flag and not Path(self.flag).exists():
            Path(self.flag).touch()
            raise ZeroDivisionError("planted")


class Mapping(Counting):
    """Maps ``gib`` GiB of address space, and touches none of it."""

    def __init__(self, gib: int) -> None:
        super().__init__()
        self.gib = gib

    async def reset(self, problem: Problem) -> str:
        self.map = map_untouched(self.gib)
        return await super().reset(problem)


def map_untouched(gib: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return mmap.mmap(-1, gib << 30, flags=flags, prot=0)


@dataclass(frozen=True)
class FurtherStep(Step):
    further: object = None


@dataclass(frozen=True)
class UncheckedStep(Step):
    def __post_init__(self) -> None:
        return


class Answering(Counting):
    """Evaluates the Python expressions ``first`` for its first observation and ``step`` for the result of a step."""

    makes_prompts = True

    def __init__(self, first: str = "''", step: str = "Step(done=True)") -> None:
        super().__init__()
        self.first, self.answer = first, step

    async def reset(self, problem: Problem) -> Any:
        return eval(self.first, _NAMES)

    async def step(self, turn: Turn) -> Any:
        return eval(self.answer, _NAMES)


SAID = [{"role": "user", "content": "8"}]
_NAMES = {
    "ChatCall": ChatCall,
    "FurtherStep": FurtherStep,
    "SAID": SAID,
    "Step": Step,
    "UncheckedStep": UncheckedStep,
}
"""The names in expressions of Answering."""


class EchoingText(Counting):
    """Ends the episode with the turn's own text as the text to score; the reward tells whether the turn has an answer,
    and is -1 if it is an unfinished thought.
    """

    async def step(self, turn: Turn) -> Step:
        reward = 1.0
        if turn.open_thought == "<think>\n" and not turn.answer:
            reward = -1.0
        return Step(reward=reward, done=True, is_scored=True, scored_text=turn.text)


class Closing(Counting):
    """Takes a while to close, and then creates the file ``flag``."""

    async def close(self) -> None:
        await asyncio.sleep(0.2)
        Path(self.flag).touch()


class Halving(Counting):
    """Its observations end with half of a surrogate pair, which is no valid text."""

    async def step(self, turn: Turn) -> Step:
        step = await super().step(turn)
        return replace(step, observation=f"{step.observation}\ud83d")


class Huge(Counting):
    async def step(self, turn: Turn) -> Step:
        return Step("1" * 10_000_000)


class Long(Counting):
    async def step(self, turn: Turn) -> Step:
        return Step("1 " * 300)


class Faulty(Counting):
    """The second turn of a problem crashes, ends its process, hangs or answers 10 MB, if ``problem_id % 5`` is 0, 1, 2
    or 3; ``TIMES`` says how often for each such problem. Each fault creates a file in ``folder``. Other problems are
    slow."""

    TIMES = (12, 1, 2, 2)

    def __init__(self, folder: str, forever: bool = False) -> None:
        super().__init__()
        self.folder, self.forever = Path(folder), forever

    async def reset(self, problem: Problem) -> str:
        await super().reset(problem)
        return "Begin."

    async def step(self, turn: Turn) -> Step:
        step = await super().step(turn)
        kind = self.problem.problem_id % 5
        if self.turns != 2 or kind == 4 or not self.is_due(kind):
            await asyncio.sleep(0.2 if kind == 4 else 0)
            return step
        await self.misbehave(("crash", "exit", "hang", "")[kind])
        return replace(step, observation="1" * 10_000_000)

    def is_due(self, kind: int) -> bool:
        for number in range(self.TIMES[kind]):
            try:
                (self.folder / f"{self.problem.problem_id}-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return self.forever


class OnceBroken(Counting):
    """Ends its process in the second turn if there is no file ``flag``, and creates the file before it ends."""

    async def misbehave(self, text: str) -> None:
        if self.turns == 2 and not Path(self.flag).exists():
            Path(self.flag).touch()
            os._exit(1)


class Forgetful(OnceBroken):
    """Answers with other observations once the file ``flag`` exists."""

    async def step(self, turn: Turn) -> Step:
        step = await super().step(turn)
        return replace(step, observation="9") if Path(self.flag).exists() else step


class Unchecked(Counting):
    """Its check of options raises an exception that no check should raise."""

    @staticmethod
    def check_options(flag: str = "") -> None:
        raise KeyError("planted")


class Synchronous:
    """No method is asynchronous, as in gymnasium's environments."""

    def reset(self, problem: Problem) -> str:
        return ""

    def step(self, turn: Turn) -> Step:
        return Step(done=True)

    def close(self) -> None:
        return


class Wrapping:
    """Has the methods of another environment, which it looks up when they are called."""

    def __init__(self) -> None:
        self.inner = Counting()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def made_by_a_function(flag: str = "") -> Counting:
    return Counting(flag)


CONSTANT = 5


class Variables:
    """Its first observation lists which variables of ``names`` this process has, and which a program receives."""

    def __init__(self, names: str, key_variable: str = "") -> None:
        self._names = names.split()

    async def reset(self, problem: Problem) -> str:
        set_here = [name for name in self._names if name in os.environ]
        passed = program_environment(os.environ)
        return json.dumps([set_here, [name for name in self._names if name in passed]])

    async def close(self) -> None:
        return
