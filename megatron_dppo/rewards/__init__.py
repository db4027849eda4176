"""Rewards: their inputs, the table of rewards, and the reward that needs no library.

To add a reward, write a file and a row of ``REWARDS``. This module imports no reward's libraries.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from megatron_dppo.data.gold_answers import gold_answer
from megatron_dppo.data.thoughts import TurnText

# Reward functions of users import RewardResult from here.
from megatron_dppo.rewards.result import RewardResult as RewardResult
from megatron_dppo.system import plugins
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.imports import ImportTargetError, import_target, is_async, reason_of
from megatron_dppo.system.text import cut

if TYPE_CHECKING:
    from megatron_dppo.config.data_schema import RewardTerm, TextForm
    from megatron_dppo.data.trajectory import Problem

_MAX_SEARCHED = 4000
"""To explain a score, only this many characters at the end of a response are searched for the answer. The patterns of
the search take quadratic time, so the number is small."""
_MAX_SHOWN = 80
"""Largest number of characters of an answer in a reason."""


class RewardUnavailableError(RunError):
    """A reward could not be computed, and the response is not the cause: a service is down or answers nonsense.

    A reward raises this error, or any OSError (for instance a broken connection or TimeoutError). The reward is then
    called again. After the last attempt, another response is generated in place of the response without a reward. If
    this does not help either, the run ends with this error.
    """


@dataclass(frozen=True)
class RewardInput:
    """The input of a reward: a response and its problem.

    Attributes:
        response: Text of the response, in the form that ``RewardTerm.reads`` names.
        answer: The problem's answer; empty if the problem has none.
        prompt: The problem's own text; for chat messages the text of the last message.
        messages: The whole prompt as chat messages, with system prompt and template.
        metadata: The problem's metadata, any JSON object.
        open_thought: The end of the prompt, from the mark of a thought that the prompt leaves open: ``<think>`` and a
            line end. Empty if no thought is open, or if ``response`` is only the answer.
    """

    response: str
    answer: str = ""
    prompt: str = ""
    messages: Sequence[Mapping[str, str]] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    open_thought: str = ""

    @classmethod
    def of(cls, problem: Problem, response: str, open_thought: str = "") -> Self:
        """The input for a response to ``problem``."""
        messages = problem.messages or ({"role": "user", "content": problem.prompt},)
        return cls(
            response, problem.answer, problem.prompt, messages, problem.metadata, open_thought
        )

    @classmethod
    def of_text(cls, problem: Problem, text: TurnText, form: TextForm) -> Self:
        """The input with one form of a response's text."""
        if form == "answer":
            return cls.of(problem, text.answer)
        if form == "special-text":
            return cls.of(problem, text.special_text, text.open_thought)
        return cls.of(problem, text.text, text.open_thought)

    @property
    def turn(self) -> str:
        """The response with the thought that the prompt opened, so that a reader sees where the thought begins."""
        return self.open_thought + self.response


FIELDS = tuple(f.name for f in fields(RewardInput))
RECORD, RECORDS = "record", "records"


class RewardForm(NamedTuple):
    """The form of a reward's calls, read from its signature.

    Attributes:
        reads: Names of the parameters for the reward's input. Each name is a field of RewardInput, ``record`` for a
            whole RewardInput, or ``records`` for a list of RewardInputs. With ``records``, the reward returns a list.
        is_async: Whether the reward is a coroutine function: it waits for a service.
        columns: Names of all other parameters. They are columns of the problem's metadata.
    """

    reads: tuple[str, ...]
    is_async: bool
    columns: tuple[str, ...] = ()

    @property
    def takes_many(self) -> bool:
        return RECORDS in self.reads

    @property
    def needs_answer(self) -> bool:
        """Whether the reward cannot score a problem without an answer."""
        return "answer" in self.reads

    def calls_at_once(self, batch_size: int) -> int:
        """Number of responses that a worker process scores at a time."""
        if self.takes_many or self.is_async:
            return batch_size
        return 1


@dataclass(frozen=True)
class BoundReward:
    """A reward's function with its options. A call takes a list: one input, or several if the form allows several."""

    function: Callable[..., Any]
    form: RewardForm

    @classmethod
    def of(cls, target: Callable[..., Any], options: Mapping[str, Any]) -> Self:
        """Bind options to a reward's function or class, and read its form from the signature.

        A parameter named like a field, ``record`` or ``records`` gets the reward's input. A parameter is an option if
        it has a value in ``options`` or a default, or if it is keyword-only. All other named parameters are columns of
        the problem's metadata.

        Raises:
            ValueError: An option has no parameter or no value, or no parameter gets the reward's input.
        """
        try:
            # A class holds state that its calls share. Its constructor takes the options.
            if isinstance(target, type):
                inspect.signature(target).bind(**options)
                target = _construct(target, options)
                options = {}
            parameters = inspect.signature(target).parameters
            reads = tuple(name for name in parameters if name in (*FIELDS, RECORD, RECORDS))
            ambiguous_names = sorted(options.keys() & set(reads))
            if ambiguous_names:
                raise TypeError(
                    f"the option {ambiguous_names[0]!r} has the name of a reward's input"
                )
            columns: tuple[str, ...] = ()
            if RECORDS not in reads:
                columns = _columns_of(parameters, {*reads, *options})
            # Try a call with all arguments, without making it: this raises TypeError for unknown or missing options.
            input_arguments = dict.fromkeys((*reads, *columns))
            inspect.signature(target).bind(**input_arguments, **options)
        except TypeError as error:
            raise ValueError(
                f"{error}; expected parameters named {', '.join(FIELDS)}, {RECORD} or {RECORDS}, and options"
            ) from error
        has_more_than_records = RECORDS in reads and len(reads) > 1
        if not reads or has_more_than_records:
            raise ValueError(
                f"its parameters are {list(parameters)}, expected some of {', '.join(FIELDS)}, {RECORD}, or "
                f"{RECORDS} alone"
            )
        return cls(partial(target, **options), RewardForm(reads, is_async(target), columns))

    def __call__(self, inputs: Sequence[RewardInput]) -> Any:
        """Call the function and return its result: an awaitable if the function is asynchronous."""
        if self.form.takes_many:
            return self.function(records=inputs)
        (record,) = inputs
        values: dict[str, Any] = {}
        for name in self.form.reads:
            values[name] = record if name == RECORD else getattr(record, name)
        for name in self.form.columns:
            if name not in record.metadata:
                raise ValueError(
                    f"the reward reads {name!r}, and the problem's metadata has {sorted(record.metadata)}; with the "
                    "file's metadata_key: '*' it has all columns of the record"
                )
            values[name] = record.metadata[name]
        return self.function(**values)


def _construct(kind: type[Any], options: Mapping[str, Any]) -> Any:
    """Construct an object of a reward's class. Raises ValueError for any exception of its constructor."""
    try:
        return kind(**options)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"its constructor raised {reason_of(error)}") from error


def _columns_of(
    parameters: Mapping[str, inspect.Parameter], known_names: Collection[str]
) -> tuple[str, ...]:
    """Names of the required positional parameters that are not in ``known_names``.

    Keyword-only parameters are options, not columns.
    """
    columns: list[str] = []
    for name, parameter in parameters.items():
        is_required = parameter.default is parameter.empty
        is_positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if name not in known_names and is_required and is_positional:
            columns.append(name)
    return tuple(columns)


@dataclass(frozen=True)
class Reward:
    """A reward function that is imported on first use.

    Attributes:
        target: ``package.module:function``, or a class whose objects are called.
        runs_inline: Whether the verifier calls the function in the verifier's process, without a time limit. Only for
            functions of text whose time is linear in the response's length.
        gold_target: Path, like ``target``, of the function that checks gold answers before the run. The check calls
            this function with the gold answer as both response and answer. The answer is good if the score is 1. None:
            the check calls ``target`` in this way, and any score is good.
        answer_target: Path, like ``target``, of a function that extracts the part of a response that the reward
            compares with the answer. ``reason`` calls it to explain a score. It imports no library. None: the reward
            has no function for this.
        reads_solutions: Whether gold answers may be worked solutions. The reward then gets the final answer of the
            solution. A user's own reward gets the answer unchanged.
        reads: The form of the response that the reward gets unless ``RewardTerm.reads`` names another form.
    """

    target: str
    runs_inline: bool = False
    gold_target: str | None = None
    answer_target: str | None = None
    reads_solutions: bool = False
    reads: TextForm = "text"

    def load(self) -> Callable[..., Any]:
        """Import the function. Raises ValueError if the module or the function does not exist."""
        return _import_function(self.target)

    def bind(self, options: Mapping[str, Any]) -> BoundReward:
        """Import the function and bind its options.

        Raises ValueError if the function's signature does not fit a reward or the options.
        """
        target = self.load()
        try:
            return BoundReward.of(target, options)
        except ValueError as error:
            raise ValueError(f"the reward {self.target!r}: {error}") from error

    @property
    def checks_itself(self) -> bool:
        """Whether ``target`` checks the gold answers: ``gold_target`` is None or names the same function."""
        return self.gold_target in (None, self.target)

    def final(self, answer: str) -> str:
        """The part of a problem's answer that responses are compared with.

        If the reward reads solutions, this part is the final answer of the worked solution; else the whole answer.
        """
        if self.reads_solutions:
            return gold_answer(answer)
        return answer

    def with_final_answer(self, record: RewardInput) -> RewardInput:
        """A copy of ``record`` with the final answer in place of the whole answer."""
        return replace(record, answer=self.final(record.answer))

    def found_answer(self, response: str) -> str | None:
        """The part of ``response`` that the reward compares with the answer. None: the reward has no such part."""
        if self.answer_target is None:
            return None
        return _import_function(self.answer_target)(response[-_MAX_SEARCHED:])

    def reason(self, response: str, answer: str, score: float) -> str:
        """Explain the score of ``response``, as far as possible without the reward's libraries."""
        found_answer = self.found_answer(response)
        if found_answer is None:
            return f"by {self.target}"
        shown_answer = cut(found_answer, _MAX_SHOWN)
        if score > 0:
            return f"{shown_answer!r} is right"
        if found_answer == answer:
            return f"{shown_answer!r} is right, but the check ended without a score"
        if not found_answer:
            return f"no answer, expected {answer!r}"
        return f"{shown_answer!r}, expected {answer!r}"


def form_read_by(term: RewardTerm) -> TextForm:
    """The form of the response that a configured reward gets."""
    return term.reads or find_reward(term.name).reads


def _import_function(target: str) -> Callable[..., Any]:
    try:
        return import_target(target)
    except ImportTargetError as error:
        raise ValueError(f"the reward {target!r} can't be imported: {error}") from error


_EXACT = "megatron_dppo.rewards:exact_integer"
_MATH = "megatron_dppo.rewards.math_verify"
_HTTP = "megatron_dppo.rewards.over_http"
_GYM = "megatron_dppo.rewards.reasoning_gym"
REWARDS: dict[str, Reward] = {
    "exact_integer": Reward(
        _EXACT,
        runs_inline=True,
        gold_target=_EXACT,
        answer_target="megatron_dppo.rewards:stated_result",
        reads_solutions=True,
        reads="answer",
    ),
    "math_verify": Reward(
        f"{_MATH}:math_verify",
        gold_target=f"{_MATH}:check_gold",
        answer_target="megatron_dppo.rewards.answers:final_answer",
        reads_solutions=True,
        reads="answer",
    ),
    "reward_model": Reward(f"{_HTTP}:RewardModel"),
    "judge": Reward(f"{_HTTP}:Judge"),
    "verl": Reward("megatron_dppo.rewards.verl:ComputeScore"),
    "reasoning_gym": Reward(f"{_GYM}:score", reads="answer"),
    "environment": Reward("megatron_dppo.rewards:no_reward", runs_inline=True),
}


def find_reward(name: str) -> Reward:
    """Find a reward by its name in ``REWARDS``, by its entry point's name, or by ``package.module:function``.

    Raises ValueError for any other name; the message lists the names.
    """
    if name in REWARDS:
        return REWARDS[name]
    form = "package.module:function"
    return Reward(plugins.target_of("reward", name, plugins.REWARDS, REWARDS, form))


def no_reward(response: str) -> float:
    """Score 0: the environment's turns earn the whole reward of an episode."""
    return 0.0


INTEGER = re.compile(r"[+-]?[0-9]+")


def exact_integer(response: str, answer: str) -> float:
    """Score 1 if the text after the response's last ``=`` is the integer ``answer``, else 0.

    Without ``=`` the whole response is compared. White space around the integer, a plus sign and leading zeros are
    ignored; any other character scores 0. Raises ValueError if ``answer`` is not an integer.
    """
    integer = answer.strip()
    if not INTEGER.fullmatch(integer):
        raise ValueError(f"the answer is {answer!r}, expected an integer")
    result = stated_result(response)
    return float(bool(INTEGER.fullmatch(result)) and _normalise(result) == _normalise(integer))


def stated_result(response: str) -> str:
    """The text after the response's last ``=``; the whole response if it has no ``=``."""
    return response.rpartition("=")[2].strip()


def _normalise(integer: str) -> str:
    """``integer`` without plus sign and leading zeros."""
    # Compare integers as text, because int() takes quadratic time. Zero becomes "", with any sign.
    digits = integer.lstrip("+-").lstrip("0")
    if digits and integer.startswith("-"):
        return f"-{digits}"
    return digits
