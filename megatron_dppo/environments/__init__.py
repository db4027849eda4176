"""Environments answer and reward the policy's turns. This module has the interface and two small environments.

To add an environment, write a class (``docs/environments.md``). This package registers its own environments as other
packages do: by entry points. This module imports no environment's libraries.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from megatron_dppo.data.thoughts import DEFAULT_MARKS, Marks
from megatron_dppo.rewards.result import USABLE_NUMBER, is_usable
from megatron_dppo.system import plugins
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.imports import is_async, reason_of

if TYPE_CHECKING:
    from megatron_dppo.data.trajectory import Problem

_MAX_CHARACTERS = 200
"""Largest number of characters of a bad value in an error, and of an expression of the calculator."""


class EnvironmentFaultError(RunError):
    """An environment crashed, hung, or gave an invalid answer. The run continues without this sample.

    ``is_shared``: whether a process with several episodes ended. Then the episode at fault is unknown.
    """

    def __init__(self, message: str, *, is_shared: bool = False) -> None:
        super().__init__(message)
        self.is_shared = is_shared


@dataclass(frozen=True)
class Turn:
    """A turn of the policy.

    Attributes:
        text: text without the token that ended the turn.
        token_ids: the turn's tokens, including the token that ended it.
        is_truncated: whether the turn was cut off at the length limit. A truncated turn is the last one of its episode
            unless ``environment.cut_turns`` is ``answer``.
        prompt_tokens: number of tokens before the turn.
        special_text: the text with its special tokens, without the token that ended the turn; None: equal to ``text``.
        open_thought: the end of the prompt, from the mark of a thought that the prompt leaves open: ``<think>`` and a
            line end. Empty if no thought is open.
        answer: the text after the turn's thoughts; None: equal to ``text``. Empty if the turn ends in a thought.
    """

    text: str
    token_ids: tuple[int, ...]
    is_truncated: bool = False
    prompt_tokens: int = 0
    special_text: str | None = None
    open_thought: str = ""
    answer: str | None = None


@dataclass(frozen=True)
class PolicyFormat:
    """The form in which the policy writes its turns.

    Attributes:
        tool_format: name of the format of tool calls (``engine.tool_calls``); None: calls stay text.
        added_tokens: the added tokens of the tokenizer.
        special_tokens: the special tokens of the tokenizer.
        thought_marks: the marks of thoughts.
    """

    tool_format: str | None = None
    added_tokens: Sequence[str] = ()
    special_tokens: Sequence[str] = ()
    thought_marks: Marks = DEFAULT_MARKS


@dataclass(frozen=True)
class ChatCall:
    """A request for a turn, in the form of a chat API: the messages before the turn.

    Attributes:
        messages: the messages since the last turn of the branch; all messages if the branch is new.
        tools: definitions of tools. All calls of a branch have equal tools.
        max_tokens: largest number of tokens of the requested turn; None: the run's limit.
        calls: tool calls of the turn before the messages, in the form of a message's ``tool_calls``. Some templates
            write the name of a called tool before its answer.
        branch: number of the branch that the call continues. If this number equals the number of branches so far, the
            call begins a new branch, with the messages as prompt. The first call begins branch 0.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    branch: int = 0
    calls: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        lists = {"messages": self.messages, "tools": self.tools, "calls": self.calls}
        for name, entries in lists.items():
            is_list = isinstance(entries, Sequence) and all(isinstance(m, Mapping) for m in entries)
            _require(is_list, name, entries, "a list of objects")
        max_tokens = self.max_tokens
        is_limit = max_tokens is None or (type(max_tokens) is int and max_tokens > 0)
        _require(is_limit, "max_tokens", max_tokens, "1 or more")
        is_number = type(self.branch) is int and self.branch >= 0
        _require(is_number, "branch", self.branch, "the number of a branch")


Observation = str | ChatCall
"""An observation: text or whole messages. Text becomes a message in the role ``environment.role``."""


def observation_of(value: Any) -> Observation:
    """Convert a decoded JSON value to an observation. Raises TypeError for a bad value."""
    if isinstance(value, dict):
        names = [field.name for field in fields(ChatCall)]
        if "messages" not in value or not value.keys() <= set(names):
            raise TypeError(
                f"an observation is an object of {sorted(map(str, value))}, expected text, or an object of messages "
                f"and perhaps others of {names}"
            )
        return ChatCall(**value)
    if not isinstance(value, Observation):
        raise TypeError(f"an observation is a {type(value).__name__}, expected text")
    return value


@dataclass(frozen=True)
class Step:
    """The environment's answer to a turn.

    Attributes:
        observation: text or messages after the turn; unused if the episode is ``done``.
        reward: reward of this turn, a finite number of at most 1e18 in absolute value.
        done: whether the episode has ended.
        is_scored: whether the run's rewards also score the text of the last turn, as they score a response without an
            environment.
        scored_text: text that the run's rewards score in place of the turn's text.
        has_unread_call: whether the turn has the beginning of a tool call that can't be read.
    """

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False
    is_scored: bool = False
    scored_text: str | None = None
    has_unread_call: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "observation", observation_of(self.observation))
        _require(is_usable(self.reward), "reward", self.reward, USABLE_NUMBER)
        for name in ("done", "is_scored", "has_unread_call"):
            flag = getattr(self, name)
            _require(isinstance(flag, bool), name, flag, "true or false")
        text = self.scored_text
        _require(text is None or isinstance(text, str), "scored_text", text, "text or none")


def _require(is_valid: bool, name: str, value: object, expectation: str) -> None:
    if not is_valid:
        raise ValueError(f"{name}: got {str(value)[:_MAX_CHARACTERS]!r}, expected {expectation}")


class Environment(Protocol):
    """One episode. A worker calls the class with ``environment.options`` for each episode.

    A method may take up to ``environment.step_timeout_s``; other episodes run meanwhile. An exception is a fault of the
    environment, never a reward of 0. After a fault, the turns so far are replayed in a new environment of the same
    problem. If the new answers differ, the episode is sampled again.
    """

    async def reset(self, problem: Problem) -> Observation:
        """Begin the episode and return the first observation.

        A text becomes one more user message after the problem's own prompt. An empty text adds no message. A ChatCall
        replaces the prompt, and requires that the class has the attribute ``makes_prompts = True``.
        """

    async def step(self, turn: Turn) -> Step:
        """Answer the policy's turn."""

    async def close(self) -> None:
        """Free the episode's resources, after its end or when it is cancelled."""


class SingleTurn:
    """The run's rewards as an environment: the first turn ends the episode, and the run's rewards score it."""

    async def reset(self, problem: Problem) -> str:
        return ""

    async def step(self, turn: Turn) -> Step:
        return Step(done=True, is_scored=True)

    async def close(self) -> None:
        return


_MAX_DIGITS = 30
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class Calculator:
    """Answers a turn that ends in a call, ``? 3 + 5``, with the result. Any other turn is the answer to the problem.

    Args:
        call: text that begins an expression.
        wrong: answer to an invalid expression.
        call_reward: reward of a turn with a valid expression, in addition to the rewards of the last turn.
    """

    def __init__(self, call: str = "?", wrong: str = "error", call_reward: float = 0.0) -> None:
        self._call = call
        self._wrong = wrong
        self._call_reward = call_reward

    async def reset(self, problem: Problem) -> str:
        return ""

    async def step(self, turn: Turn) -> Step:
        _, call, expression = turn.text.rpartition(self._call)
        if not call:
            return Step(done=True, is_scored=True)
        try:
            return Step(str(calculate(expression)), reward=self._call_reward)
        except ValueError:
            return Step(self._wrong)

    async def close(self) -> None:
        return


def calculate(expression: str) -> int:
    """Compute sums, differences and products of whole numbers, with brackets.

    Raises ValueError for anything else, and for numbers beyond 30 digits.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"{len(expression)} characters, expected at most {_MAX_CHARACTERS}")
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
    if abs(value) >= 10**_MAX_DIGITS:
        raise ValueError(f"a number of more than {_MAX_DIGITS} digits")
    return value


@cache
def find_environment(name: str) -> Callable[..., Environment]:
    """Find an environment's class by its entry point's name, or by ``package.module:Class``.

    Raises ValueError for any other name, and if the class can't be imported.
    """
    form = "package.module:Class"
    environment: Callable[..., Environment] = plugins.import_part(
        "environment", name, plugins.ENVIRONMENTS, (), form
    )
    return environment


def _class_of(name: str | None) -> Callable[..., Environment] | None:
    """Return an environment's class; None without a name, and for a name that is no environment.

    The check of the environment reports such a name. The checks of other sections go on without the class.
    """
    if name is None:
        return None
    try:
        return find_environment(name)
    except ValueError:
        return None


def makes_prompts(name: str | None, options: Mapping[str, Any]) -> bool:
    """Whether episodes may begin with a prompt of the environment in place of the problem's prompt.

    ``makes_prompts`` of a class is a boolean, or a function of the options.
    """
    flag = getattr(_class_of(name), "makes_prompts", False)
    return bool(flag(**options)) if callable(flag) else bool(flag)


def problem_fault(
    name: str | None, options: Mapping[str, Any], metadata: Mapping[str, Any]
) -> str | None:
    """Return the reason why the environment has no episode for a problem with this metadata; None without one.

    A class may have a function ``problem_fault`` of the metadata and the options.
    """
    find_fault = getattr(_class_of(name), "problem_fault", None)
    return None if find_fault is None else find_fault(metadata, **options)


def example_metadata(name: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata of a problem for which the environment has an episode.

    A class whose ``problem_fault`` reads entries has a function ``example_metadata`` of the options.
    """
    find_example = getattr(_class_of(name), "example_metadata", None)
    return {} if find_example is None else dict(find_example(**options))


def reads_tool_calls(name: str | None, options: Mapping[str, Any]) -> bool:
    """Whether the environment reads the policy's calls of tools: its class has a method ``note_policy_format``.

    A class may have a function ``reads_tool_calls`` of the options, which decides instead.
    """
    environment = _class_of(name)
    decide = getattr(environment, "reads_tool_calls", None)
    if decide is not None:
        return bool(decide(**options))
    return hasattr(environment, "note_policy_format")


class NamedEnvironment(NamedTuple):
    """An environment of a run. ``key``: the configuration's key of its options."""

    key: str
    name: str
    options: Mapping[str, Any]


def environments_of(name: str | None, options: Mapping[str, Any]) -> Iterator[NamedEnvironment]:
    """Yield the run's environment, and the environments that it starts. None: no environment.

    A class that starts other environments has a function ``members`` of the options. It returns the settings of each
    (``name`` and perhaps ``options``), by the key below ``environment.options``. Yields no members for options that the
    class does not take.
    """
    if name is None:
        return
    key = "environment.options"
    yield NamedEnvironment(key, name, options)
    list_members = getattr(_class_of(name), "members", None)
    if list_members is None:
        return
    try:
        members = list_members(**options)
    # ``check_environment`` reports options that the class does not take.
    except TypeError:
        return
    for member_key, settings in members.items():
        yield NamedEnvironment(
            f"{key}.{member_key}.options", settings["name"], settings.get("options", {})
        )


def note_settings(
    environment: Environment, sampling: Mapping[str, float], policy_format: PolicyFormat
) -> None:
    """Call the methods ``note_sampling`` and ``note_policy_format`` of an environment that has them, before a reset."""
    settings = {"note_sampling": sampling, "note_policy_format": policy_format}
    for name, value in settings.items():
        # Look in the class: the object's __getattr__ may return something for every name.
        method = getattr(type(environment), name, None)
        if method is not None:
            method(environment, value)


def check_environment(name: str | None, options: Mapping[str, Any]) -> None:
    """Raise ValueError if the environment does not exist, or does not take these options. None: no environment.

    A class may have a method ``check_options``. It receives the options, checks their values and this machine, and
    raises ValueError.
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
        check = getattr(environment, "check_options", None)
        if check is not None:
            check(**options)
        # A class is checked itself; a function returns an environment, so its result is checked.
        checked_object = environment if isinstance(environment, type) else environment(**options)
    except ValueError:
        raise
    # User code may raise any exception.
    except (Exception, SystemExit) as error:
        raise ValueError(f"options: {reason_of(error)}, of {name}") from error
    _require_methods(checked_object, name)


def _require_methods(environment: Any, name: str) -> None:
    """Raise ValueError if a class or an object lacks a method of an environment."""
    for method in ("reset", "step", "close"):
        function = getattr(environment, method, None)
        # A class may define methods dynamically, through __getattr__.
        if function is None and hasattr(environment, "__getattr__"):
            continue
        if not callable(function) or not is_async(function):
            actual = "no such method"
            if function is not None:
                actual = f"a {type(function).__name__}"
            raise ValueError(
                f"got {name}, whose {method} is {actual}, expected a class with async methods reset, step and close"
            )
