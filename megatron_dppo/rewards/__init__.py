"""Rewards: what they see and return, the table of them, and the one that needs no library. A further one is a file and
a row.

Imports no reward's libraries.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, Self

from megatron_dppo.rewards.answers import gold_answer
from megatron_dppo.system import plugins
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.imports import ImportTargetError, import_target, reason_of

_LONGEST_SHOWN_VALUE = 200
# Characters of a response's end that are read for a reason: the patterns take quadratic time.
_LONGEST_READ = 4000
_LONGEST_SHOWN = 80


class RewardUnavailableError(RunError):
    """No reward could be had, for a reason that isn't the response's: a service that is away or answers nonsense.

    A reward raises it, or any OSError (broken connections and TimeoutError are some); it is asked again, and at last
    another response takes the place of the one without a reward. A run ends with it where that does not help.
    """


@dataclass(frozen=True)
class RewardInput:
    """What a reward may see of a response.

    Attributes:
        response: its text, without special tokens and stop texts.
        answer: the problem's; empty where it has none.
        prompt: the problem's own text; of chat messages the last one's.
        messages: all that was put to the model, system prompt and template included, as chat messages.
        metadata: the problem's, any JSON object.
    """

    response: str
    answer: str = ""
    prompt: str = ""
    messages: Sequence[Mapping[str, str]] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """What a reward returns instead of a number where it has more to say.

    ``value``: any finite number. ``components``: named numbers that it is made of, which become metrics and stand in
    samples. ``reason``: of the value, in words.
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


FIELDS = tuple(f.name for f in fields(RewardInput))
RECORD, RECORDS = "record", "records"


class RewardForm(NamedTuple):
    """How a reward is called, by its signature.

    ``reads``: the parameters that it is given, by name: fields of RewardInput; ``record``, all of it; ``records``, a
    list of these, for which it returns a list. ``is_async``: it is a coroutine function, and waits for others.
    ``columns``: further parameters, which are named as columns of the problem's metadata.
    """

    reads: tuple[str, ...]
    is_async: bool
    columns: tuple[str, ...] = ()

    @property
    def takes_many(self) -> bool:
        return RECORDS in self.reads

    @property
    def needs_answer(self) -> bool:
        """Whether a problem without an answer can't be scored."""
        return "answer" in self.reads

    def calls_at_once(self, batch_size: int) -> int:
        """Responses that a process has at a time."""
        return batch_size if self.takes_many or self.is_async else 1


@dataclass(frozen=True)
class BoundReward:
    """A reward's callable with its options. Called with some inputs: one, unless its form takes many."""

    function: Callable[..., Any]
    form: RewardForm

    @classmethod
    def of(cls, target: Callable[..., Any], options: Mapping[str, Any]) -> Self:
        """A parameter that is neither a field, ``record(s)``, nor an option that is given or has a default is a column
        of the problem's metadata. Raises ValueError where an option has no parameter, or no parameter is a field."""
        try:
            # A class keeps what its calls share; its constructor takes the options.
            if isinstance(target, type):
                inspect.signature(target).bind(**options)
                target, options = _made(target, options), {}
            parameters = inspect.signature(target).parameters
            reads = tuple(name for name in parameters if name in (*FIELDS, RECORD, RECORDS))
            if clash := sorted(options.keys() & set(reads)):
                raise TypeError(f"the option {clash[0]!r} has the name of what a reward reads")
            columns = _columns_of(parameters, {*reads, *options}) if RECORDS not in reads else ()
            inspect.signature(target).bind(**dict.fromkeys((*reads, *columns)), **options)
        except TypeError as error:
            raise ValueError(
                f"{error}; expected parameters named {', '.join(FIELDS)}, {RECORD} or {RECORDS}, and options"
            ) from error
        if not reads or (RECORDS in reads and len(reads) > 1):
            raise ValueError(
                f"its parameters are {list(parameters)}, expected some of {', '.join(FIELDS)}, {RECORD}, or "
                f"{RECORDS} alone"
            )
        # Of an object it is the method's.
        called = target if inspect.isroutine(target) else type(target).__call__
        is_async = inspect.iscoroutinefunction(called)
        return cls(partial(target, **options), RewardForm(reads, is_async, columns))

    def __call__(self, inputs: Sequence[RewardInput]) -> Any:
        """What the function returns; an awaitable of it where it is asynchronous."""
        if self.form.takes_many:
            return self.function(records=inputs)
        (given,) = inputs
        values = {
            name: given if name == RECORD else getattr(given, name) for name in self.form.reads
        }
        for name in self.form.columns:
            if name not in given.metadata:
                raise ValueError(
                    f"the reward reads {name!r}, and the problem's metadata has {sorted(given.metadata)}; with the "
                    "file's metadata_key: '*' it has all columns of the record"
                )
            values[name] = given.metadata[name]
        return self.function(**values)


def _made(kind: type[Any], options: Mapping[str, Any]) -> Any:
    """An object of a reward's class. Raises ValueError for whatever its constructor raises."""
    try:
        return kind(**options)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"its constructor raised {reason_of(error)}") from error


def _columns_of(
    parameters: Mapping[str, inspect.Parameter], known: Collection[str]
) -> tuple[str, ...]:
    """Names of the parameters that a call must give and that are not ``known``; behind a ``*`` they are options."""
    return tuple(
        name
        for name, parameter in parameters.items()
        if name not in known
        and parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    )


@dataclass(frozen=True)
class Reward:
    """A reward function that is imported on first use.

    Attributes:
        target: ``package.module:function``, or a class whose objects are called.
        runs_inline: the verifier calls the function in its own process, without a time limit. Only
            for string functions whose time is linear in the response's length.
        gold_target: as ``target``, of a function that scores an answer 1 where responses can match
            it, whatever the response. None: ``target`` itself; an answer need not match itself.
        answer_target: as ``target``, of a function from a response to the part of it that is compared
            with the answer, for people to read; imports no library. None: it can't be told.
        reads_solutions: gold answers may be worked solutions; one's own reward gets them as they stand.
    """

    target: str
    runs_inline: bool = False
    gold_target: str | None = None
    answer_target: str | None = None
    reads_solutions: bool = False

    def load(self) -> Callable[..., Any]:
        """Import the function. Raises ValueError where there is no such module or function."""
        return _imported(self.target)

    def bind(self, options: Mapping[str, Any]) -> BoundReward:
        """As ``load``, with its options. Raises ValueError where its signature is no reward's, or not for these."""
        target = self.load()
        try:
            return BoundReward.of(target, options)
        except ValueError as error:
            raise ValueError(f"the reward {self.target!r}: {error}") from error

    @property
    def checks_itself(self) -> bool:
        """Whether answers are checked by it, as responses, and not by a function of their own."""
        return self.gold_target in (None, self.target)

    def final(self, answer: str) -> str:
        """What of a problem's answer it compares with: of a worked solution its end, where it reads these."""
        return gold_answer(answer) if self.reads_solutions else answer

    def sees(self, given: RewardInput) -> RewardInput:
        """``given`` with the final answer."""
        return replace(given, answer=self.final(given.answer))

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
    ),
    "math_verify": Reward(
        f"{_MATH}:math_verify",
        gold_target=f"{_MATH}:check_gold",
        answer_target="megatron_dppo.rewards.answers:final_answer",
        reads_solutions=True,
    ),
    "reward_model": Reward(f"{_HTTP}:RewardModel"),
    "judge": Reward(f"{_HTTP}:Judge"),
    "verl": Reward("megatron_dppo.rewards.verl:ComputeScore"),
    "reasoning_gym": Reward(f"{_GYM}:score"),
}


def result_of(value: Any) -> RewardResult | str:
    """What a reward returned, as a result, or in words why it is none."""
    result = value if isinstance(value, RewardResult) else RewardResult(value)
    for name, number in {"": result.value, **result.components}.items():
        where = f" as {name!r}" if name else ""
        if not isinstance(number, Real):
            kind = type(number).__name__
            return f"it returned a {kind}{where}, expected a finite number or a RewardResult"
        if not is_usable(number):
            return f"it returned {_shown(number)}{where}, expected {USABLE_NUMBER}"
    components = {name: float(number) for name, number in result.components.items()}
    return RewardResult(float(result.value), components, str(result.reason))


LARGEST_REWARD = 1e18
"""Largest absolute value: a group's rewards are added up, and their squares too, in float32, which ends at 3.4e38."""
USABLE_NUMBER = f"a finite number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"


def is_usable(value: Any) -> bool:
    """Whether a value can be a reward, or a part of one: a finite number, and no sum of such numbers overflows."""
    if not isinstance(value, Real):
        return False
    # Compare without a conversion: an integer can be too large for a float. NaN compares as false.
    number: Any = value
    return bool(-LARGEST_REWARD <= number <= LARGEST_REWARD)


def _shown(value: Any) -> str:
    try:
        return str(value)[:_LONGEST_SHOWN_VALUE]
    # Python writes out no integer of more than some thousand digits.
    except ValueError:
        return "a number of thousands of digits"


def find_reward(name: str) -> Reward:
    """Find a reward by its name in ``REWARDS``, by its entry point's name, or by ``package.module:function``.

    Raises ValueError for any other name; the message lists the names.
    """
    if ":" in name:
        return Reward(name)
    if name in REWARDS:
        return REWARDS[name]
    registered = plugins.targets(plugins.REWARDS)
    if name not in registered:
        names = ", ".join(sorted({*REWARDS, *registered}))
        raise ValueError(f"unknown reward {name!r}; there are {names}, or package.module:function")
    return Reward(registered[name])


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
