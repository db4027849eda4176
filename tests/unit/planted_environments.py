"""Environments that fail on purpose; apart, because the processes that run them import this file."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments import ChatCall, Step, Turn
from megatron_dppo.system.secret_variables import program_environment


class Counting:
    """Two observations, then the end; turn i earns i + 1 tenths. What the last digit of a turn asks for goes wrong."""

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
    """Says ``greeting`` first; once it fails, in its second turn, and greets otherwise, where ``flag`` says where it
    keeps that in mind."""

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
    """Maps ``gib`` of address space, and touches none of it."""

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
    """Begins with, and answers, whatever these say in Python."""

    makes_prompts = True

    def __init__(self, first: str = "''", step: str = "Step(done=True)") -> None:
        super().__init__()
        self.first, self.answer = first, step

    async def reset(self, problem: Problem) -> str | ChatCall:
        return eval(self.first)

    async def step(self, turn: Turn) -> object:
        return eval(self.answer)


SAID = [{"role": "user", "content": "8"}]


class Closing(Counting):
    """Takes a while to close, and touches ``flag`` then."""

    async def close(self) -> None:
        await asyncio.sleep(0.2)
        Path(self.flag).touch()


class Halving(Counting):
    async def step(self, turn: Turn) -> Step:
        step = await super().step(turn)
        return replace(step, observation=step.observation + "\ud83d")


class Huge(Counting):
    async def step(self, turn: Turn) -> Step:
        return Step("1" * 10_000_000)


class Long(Counting):
    async def step(self, turn: Turn) -> Step:
        return Step("1 " * 300)


class Faulty(Counting):
    """A fifth of the problems has environments that crash in their second turn, others end their process, hang, or
    answer 10 MB, as often as ``TIMES`` says of each such problem; a file in ``folder`` for each fault. The rest is
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
    """Fails in its second turn while there is no file ``flag``, which it makes then."""

    async def misbehave(self, text: str) -> None:
        if self.turns == 2 and not Path(self.flag).exists():
            Path(self.flag).touch()
            os._exit(1)


class Forgetful(OnceBroken):
    """Answers otherwise after that."""

    async def step(self, turn: Turn) -> Step:
        step = await super().step(turn)
        return replace(step, observation="9") if Path(self.flag).exists() else step


class Unchecked(Counting):
    """Its check of options fails with what no check should raise."""

    @staticmethod
    def check_options(flag: str = "") -> None:
        raise KeyError("planted")


class Synchronous:
    """As gymnasium's environments: no method is asynchronous."""

    def reset(self, problem: Problem) -> str:
        return ""

    def step(self, turn: Turn) -> Step:
        return Step(done=True)

    def close(self) -> None:
        return


class Wrapping:
    """Finds the methods of another environment when they are called."""

    def __init__(self) -> None:
        self.inner = Counting()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def made_by_a_function(flag: str = "") -> Counting:
    return Counting(flag)


CONSTANT = 5


class Variables:
    """Says which of the variables that its options name are set here, and which it passes to a program."""

    def __init__(self, names: str, key_variable: str = "") -> None:
        self._names = names.split()

    async def reset(self, problem: Problem) -> str:
        here = [name for name in self._names if name in os.environ]
        passed = program_environment(os.environ)
        return json.dumps([here, [name for name in self._names if name in passed]])

    async def close(self) -> None:
        return
