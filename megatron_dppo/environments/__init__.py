"""Environments: what answers the policy's turns and says what they earn. The table of them, the one that asks no
further turn, and a calculator. Another is a class and, to ship it, a row; ``docs/environments.md``.

Imports no environment's libraries.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_dppo.rewards import USABLE_NUMBER, is_usable
from megatron_dppo.system import plugins
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.imports import ImportTargetError, import_target, is_async, reason_of

if TYPE_CHECKING:
    from megatron_dppo.data.trajectory import Problem

_LONGEST = 200


class EnvironmentFaultError(RunError):
    """An environment crashed, hung, or answered what it may not. The run goes on without this sample.

    ``is_shared``: the process that ended had other episodes too, so nobody can say whose fault it was.
    """

    def __init__(self, message: str, *, is_shared: bool = False) -> None:
        super().__init__(message)
        self.is_shared = is_shared


@dataclass(frozen=True)
class Turn:
    """What the policy said. ``text``: without the token that ended it; ``token_ids``: with it. ``is_truncated``: it
    was cut off at the length limit, and is the last one unless ``environment.cut_turns`` is ``answer``.
    ``prompt_tokens``: how many stand before it."""

    text: str
    token_ids: tuple[int, ...]
    is_truncated: bool = False
    prompt_tokens: int = 0


@dataclass(frozen=True)
class ChatCall:
    """Messages as a chat API and the chat template have them: those since the branch's last turn; of a new one all.

    ``tools``: their definitions, in each call of a branch the same. ``max_tokens``: of the turn that is asked for;
    None: the run's. ``branch``: the number of the branch that goes on; as many as there are: a new one, whose prompt
    these messages are. The first call begins branch 0.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    branch: int = 0

    def __post_init__(self) -> None:
        for name, parts in (("messages", self.messages), ("tools", self.tools)):
            is_list = isinstance(parts, Sequence) and all(isinstance(m, Mapping) for m in parts)
            _require(is_list, name, parts, "a list of objects")
        most = self.max_tokens
        _require(most is None or (type(most) is int and most > 0), "max_tokens", most, "1 or more")
        is_number = type(self.branch) is int and self.branch >= 0
        _require(is_number, "branch", self.branch, "the number of a branch")


Observation = str | ChatCall
"""Text: a message in the role ``environment.role``."""


def observation_of(value: Any) -> Observation:
    """An observation that was JSON on its way. Raises TypeError for what is none."""
    if isinstance(value, dict):
        return ChatCall(**value)
    if not isinstance(value, Observation):
        raise TypeError(f"an observation is a {type(value).__name__}, expected text")
    return value


@dataclass(frozen=True)
class Step:
    """What the environment answers to a turn.

    ``observation``: what follows it; of no use where the episode is ``done``. ``reward``: of this turn, a finite
    number of at most 1e18 in absolute value. ``is_scored``: of the last turn, whether the run's rewards score its text
    beside, as they do a response without an environment; or, where there is one, ``scored_text`` instead of it.
    """

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False
    is_scored: bool = False
    scored_text: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "observation", observation_of(self.observation))
        _require(is_usable(self.reward), "reward", self.reward, USABLE_NUMBER)
        for name, flag in (("done", self.done), ("is_scored", self.is_scored)):
            _require(isinstance(flag, bool), name, flag, "true or false")
        text = self.scored_text
        _require(text is None or isinstance(text, str), "scored_text", text, "text or none")


def _require(is_right: bool, name: str, value: object, expected: str) -> None:
    if not is_right:
        raise ValueError(f"{name}: got {str(value)[:_LONGEST]!r}, expected {expected}")


class Environment(Protocol):
    """One episode. A class of ``ENVIRONMENTS`` is called with ``environment.options``.

    Methods may take long, as they are awaited beside other episodes', up to ``environment.step_timeout_s`` each; what
    they raise is a fault of the environment, never a reward of 0. After a fault elsewhere the same turns may be given
    to a new environment of the same problem: one that answers them otherwise has its episode drawn anew.
    """

    async def reset(self, problem: Problem) -> Observation:
        """Begin. The first observation: after the problem's own prompt, as one more message of the user; empty where
        that prompt says all. A ChatCall takes the prompt's place, where the class says ``makes_prompts``."""

    async def step(self, turn: Turn) -> Step: ...

    async def close(self) -> None:
        """The episode is over, or given up."""


class SingleTurn:
    """The run's rewards as an environment: the first turn is the last one, and earns what they give it."""

    async def reset(self, problem: Problem) -> str:
        return ""

    async def step(self, turn: Turn) -> Step:
        return Step(done=True, is_scored=True)

    async def close(self) -> None:
        return


_MOST_DIGITS = 30
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class Calculator:
    """A turn that ends in a call, ``? 3 + 5``, is answered with the number; any other turn is the answer to the
    problem, and ends the episode.

    ``call``: the text that begins an expression; ``wrong``: what is said of one that can't be worked out.
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


ENVIRONMENTS: dict[str, str] = {
    "single-turn": "megatron_dppo.environments:SingleTurn",
    "calculator": "megatron_dppo.environments:Calculator",
    "over-http": "megatron_dppo.environments.over_http:OverHttp",
    "agent": "megatron_dppo.environments.agents:Agent",
    "python": "megatron_dppo.environments.python_sandbox:Python",
}
"""``package.module:Class`` by name."""


def find_environment(name: str) -> Callable[..., Environment]:
    """Find an environment's class by its name in ``ENVIRONMENTS``, its entry point's name, or ``package.module:Class``.

    Raises ValueError for any other name, and where it can't be imported.
    """
    target = name if ":" in name else ENVIRONMENTS.get(name)
    if target is None:
        registered = plugins.targets(plugins.ENVIRONMENTS)
        if name not in registered:
            names = ", ".join(sorted({*ENVIRONMENTS, *registered}))
            raise ValueError(
                f"unknown environment {name!r}; there are {names}, or package.module:Class"
            )
        target = registered[name]
    try:
        return import_target(target)
    except ImportTargetError as error:
        raise ValueError(f"the environment {name!r} can't be imported: {error}") from error


def makes_prompts(name: str | None) -> bool:
    """Whether episodes begin with the environment's prompt in place of the problem's."""
    return name is not None and getattr(find_environment(name), "makes_prompts", False)


def check_environment(name: str | None, options: Mapping[str, Any]) -> None:
    """Raise ValueError where there is no such environment, or it does not take these options.

    A class may know more of them than their names, and what it needs of this machine: ``check_options``, called with
    them, raises ValueError.
    """
    if name is None:
        return
    environment = find_environment(name)
    try:
        inspect.signature(environment).bind(**options)
    # Python can't inspect every class that is written in C.
    except (TypeError, ValueError) as error:
        raise ValueError(f"options: {error}, of {name}") from error
    try:
        if (check := getattr(environment, "check_options", None)) is not None:
            check(**options)
        # A function's methods are those of what it makes.
        made = environment if isinstance(environment, type) else environment(**options)
    except ValueError:
        raise
    # It may be a user's, and raise anything.
    except (Exception, SystemExit) as error:
        raise ValueError(f"options: {reason_of(error)}, of {name}") from error
    _require_methods(made, name)


def _require_methods(environment: Any, name: str) -> None:
    """Raise ValueError where a class or an object has not the methods of an environment."""
    for method in ("reset", "step", "close"):
        function = getattr(environment, method, None)
        # A class may look up methods that it does not define itself when they are called.
        if function is None and hasattr(environment, "__getattr__"):
            continue
        if not callable(function) or not is_async(function):
            found = "no such method" if function is None else f"a {type(function).__name__}"
            raise ValueError(
                f"got {name}, whose {method} is {found}, expected a class with async methods reset, step and close"
            )
