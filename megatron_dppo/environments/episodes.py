"""Episodes: the turns of a policy and the answers of an environment as one trajectory, token by token.

The prompt of a turn is every token of its branch so far, as it was sampled or given, and after them those of the
template (``TurnTemplate``), whose loss mask is False. Recorded routing is asked for from the first row that
is not there yet. So versions, log-probabilities and routing of each token are those of the call that sampled it.

A new branch begins with a prompt that the template makes of messages, what the policy said in others among them: it is
given there, not sampled. So each sampled token is trained once, in the branch that it was sampled in.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_dppo.chat import ChatTemplateError, ControlTokens, render
from megatron_dppo.config.checks import ROLE
from megatron_dppo.data.records import DataError
from megatron_dppo.data.trajectory import FinishReason, Problem, Trajectory
from megatron_dppo.engine.continuation import after, join
from megatron_dppo.engine.protocol import GenerationRequest, seed_of
from megatron_dppo.environments import (
    ChatCall,
    Environment,
    EnvironmentFaultError,
    Observation,
    Step,
    Turn,
)
from megatron_dppo.environments.workers import EnvironmentPool

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeLimits:
    """``turns``: of the policy. ``tokens``: of a trajectory with its prompt, all branches together.
    ``observation_tokens``: of what an environment may say at once, the template's included. ``retries``: after so many
    further faults a sample is given up. ``answers_cut_turns``: an episode goes on after a turn that was cut off."""

    turns: int
    tokens: int
    observation_tokens: int
    retries: int
    answers_cut_turns: bool = False


@dataclass(eq=False)
class _Episode:
    """``observation``: the first one, which ``request`` has; ``last``: the newest. ``past``: turns with what the
    environment answered; ``branch_numbers``: of the turns that were sampled. ``branches``: all tokens of each so far.
    ``turn``: sampled, and not yet answered. ``delta``: what stands before the next one; of a new branch all its
    prompt. ``turn_limit``: the key that bounds the turn that is sampled; ``ended_by``: the limit that ended it, in
    words."""

    request: GenerationRequest
    observation: Observation = ""
    last: Observation = ""
    past: list[tuple[Turn, Step]] = field(default_factory=list)
    branches: list[Trajectory] = field(default_factory=list)
    branch_numbers: list[int] = field(default_factory=list)
    turn: Turn | None = None
    delta: Sequence[int] = ()
    turn_limit: str = ""
    ended: FinishReason | None = None
    ended_by: str = ""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Anew, after the first observation."""
        self.past, self.branches, self.branch_numbers, self.turn = [], [], [], None
        self.last, self.delta = self.observation, self.request.prompt_ids

    @property
    def branch(self) -> int:
        """The number of the one that the next turn belongs to."""
        return self.last.branch if isinstance(self.last, ChatCall) else 0

    @property
    def length(self) -> int:
        return sum(branch.length for branch in self.branches)


@dataclass
class Episodes:
    """Plays the episodes of a rank; ``play`` is what a ``GenerationJob`` calls.

    ``faults``: how often each thing went wrong with an environment.
    """

    pool: EnvironmentPool
    template: TurnTemplate
    limits: EpisodeLimits
    faults: Counter[str] = field(default_factory=Counter)
    _taken: Counter[str] = field(default_factory=Counter)
    _has_warned: bool = False

    def take_faults(self) -> Counter[str]:
        """``faults`` since this was asked last."""
        new = self.faults - self._taken
        self._taken = self.faults.copy()
        return new

    async def play(
        self,
        problem: Problem,
        request: GenerationRequest,
        ask: Callable[[GenerationRequest], Awaitable[Trajectory]],
    ) -> Trajectory:
        """The trajectory of an episode that begins with ``request``; ``failed``, and of the prompt alone, where the
        environment failed once more than it may.

        A fault costs no sampled token: the turns are given again to a new environment, and only where that answers
        them otherwise the policy begins anew.
        """
        episode, faults, alone = _Episode(request), 0, False
        while True:
            try:
                async with self._opened(alone=alone) as environment:
                    self._begin(episode, problem, request, await environment.reset(problem))
                    await self._repeat(environment, episode)
                    while episode.ended is None:
                        await self._advance(environment, episode, ask)
                return _finished(episode)
            except EnvironmentFaultError as fault:
                # Where it shared its process, the next attempt tells whose fault it was.
                faults += not fault.is_shared
                alone = alone or fault.is_shared
                self._note(problem, fault, is_last=faults > self.limits.retries)
                if faults > self.limits.retries:
                    return _failed(request, str(fault))

    @asynccontextmanager
    async def _opened(self, *, alone: bool) -> AsyncIterator[Environment]:
        environment = await self.pool.open(alone=alone)
        try:
            yield environment
        finally:
            await environment.close()

    def _begin(
        self,
        episode: _Episode,
        problem: Problem,
        request: GenerationRequest,
        observation: Observation,
    ) -> None:
        """Put a new environment's first observation behind the prompt of ``request``, or in its place. Turns that
        followed another one are drawn anew."""
        if observation == episode.observation:
            return
        ids: Sequence[int] = problem.prompt_ids
        if observation:
            ids = self._encoded(lambda: self.template.opening(problem, observation))
        if not isinstance(observation, ChatCall):
            self._check_length(len(ids) - len(problem.prompt_ids))
        elif observation.branch:
            raise EnvironmentFaultError(f"reset: branch {observation.branch}, expected 0")
        if len(ids) >= self.limits.tokens:
            raise EnvironmentFaultError(
                f"reset: a prompt of {len(ids)} tokens, expected fewer than {self.limits.tokens} "
                "(environment.max_tokens)"
            )
        episode.request, episode.observation = replace(request, prompt_ids=ids), observation
        episode.begin()

    def _encoded(self, tokens: Callable[[], list[int]]) -> list[int]:
        """Tokens of what an environment said."""
        try:
            return tokens()
        # Whatever a template or a tokenizer makes of what comes from elsewhere.
        except Exception as error:
            kind = "" if isinstance(error, TurnTemplateError) else f"{type(error).__name__}: "
            raise EnvironmentFaultError(
                f"what it said can't be put to the model: {kind}{error}"
            ) from error

    def _check_length(self, tokens: int) -> None:
        if tokens > self.limits.observation_tokens:
            raise EnvironmentFaultError(
                f"an observation of {tokens} tokens, expected at most {self.limits.observation_tokens} "
                "(environment.max_observation_tokens)"
            )

    async def _repeat(self, environment: Environment, episode: _Episode) -> None:
        """Bring a new environment to where the episode is."""
        for turn, answered in episode.past:
            if await environment.step(turn) != answered:
                log.warning(
                    "an environment answered the same turns otherwise: its episode begins anew"
                )
                episode.begin()
                raise EnvironmentFaultError("the same turns were answered otherwise")

    async def _advance(
        self,
        environment: Environment,
        episode: _Episode,
        ask: Callable[[GenerationRequest], Awaitable[Trajectory]],
    ) -> None:
        """One turn, and the environment's answer to it."""
        turn = episode.turn
        if turn is None:
            answer = await ask(self._request(episode))
            branches, number = episode.branches, episode.branch
            if number < len(branches):
                branches[number] = join(branches[number], answer)
            else:
                branches.append(answer)
            episode.branch_numbers.append(number)
            ids = tuple(answer.response_ids.tolist())
            before = len(answer.prompt_ids)
            episode.turn = turn = Turn(answer.text, ids, answer.truncated, before)
        step = await environment.step(turn)
        if turn.is_truncated and (step.done or not self.limits.answers_cut_turns):
            self._end_cut(episode, turn, is_done=step.done)
        elif step.done:
            episode.ended = "stop"
        else:
            self._go_on(episode, turn, step)
        episode.past.append((turn, step))
        episode.turn = None

    def _end_cut(self, episode: _Episode, turn: Turn, *, is_done: bool) -> None:
        """The end after a turn that was cut off. ``is_done``: the environment would have ended it too."""
        episode.ended = "length"
        number, tokens = len(episode.past) + 1, len(turn.token_ids)
        episode.ended_by = f"turn {number} was cut off at {tokens} tokens ({episode.turn_limit})"
        if is_done or self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "an episode ended because its %s; environment.cut_turns=answer lets the environment answer such a turn. "
            "Further ones are only counted (rollout/truncated)",
            episode.ended_by,
        )

    def _go_on(self, episode: _Episode, turn: Turn, step: Step) -> None:
        """The tokens before the next turn, or the end where no turn or no token is left for it."""
        said, limits = step.observation, self.limits
        episode.last = said
        if episode.branch > len(episode.branches):
            raise EnvironmentFaultError(
                f"branch {episode.branch}, expected one of the {len(episode.branches)} there are, or the next"
            )
        if isinstance(said, ChatCall) and said.branch == len(episode.branches):
            # It repeats what was said in others, so the limit of an observation is none of it.
            delta = self._encoded(lambda: self.template.prompt(said))
        else:
            last = episode.branches[episode.branch].token_ids[-1:].tolist()
            delta = self._encoded(lambda: self.template.delta(last, said))
            self._check_length(len(delta))
        if not delta:
            raise EnvironmentFaultError(
                "an observation of no tokens, expected one: nothing would tell two turns apart"
            )
        episode.delta = delta
        if len(episode.past) + 1 == limits.turns:
            episode.ended = "length"
            episode.ended_by = f"all {limits.turns} turns were used (environment.max_turns)"
        elif episode.length + len(delta) >= limits.tokens:
            episode.ended = "length"
            episode.ended_by = f"no token was left of {limits.tokens} (environment.max_tokens)"

    def _request(self, episode: _Episode) -> GenerationRequest:
        """What is asked of the engine for the next turn."""
        first, said = episode.request, episode.last
        before = episode.length + len(episode.delta)
        limits = {
            "rollout.max_response_tokens": first.sampling.max_new_tokens,
            "environment.max_tokens": self.limits.tokens - before,
        }
        if isinstance(said, ChatCall) and said.max_tokens is not None:
            limits["the call's max_tokens"] = said.max_tokens
        episode.turn_limit = min(limits, key=limits.__getitem__)
        most = limits[episode.turn_limit]
        number, seed = episode.branch, first.sampling.seed
        if number and seed is not None:
            # A server draws by seed and position: the same prompt twice would have the same answer.
            seed = seed_of(seed, "branch", number)
        sampling = replace(first.sampling, max_new_tokens=most, seed=seed)
        request = replace(first, sampling=sampling)
        if number < len(episode.branches):
            return after(request, episode.branches[number], most, episode.delta)
        return replace(request, prompt_ids=episode.delta)

    def _note(self, problem: Problem, fault: EnvironmentFaultError, *, is_last: bool) -> None:
        self.faults[str(fault)[:300]] += 1
        consequence = "its sample is replaced" if is_last else "it begins again"
        log.warning("the environment of problem %d: %s; %s", problem.problem_id, fault, consequence)


def _finished(episode: _Episode) -> Trajectory:
    assert episode.ended is not None
    numbers = episode.branch_numbers
    # As turns lie, those of a branch together.
    times = sorted(range(len(numbers)), key=numbers.__getitem__)
    turn, step = episode.past[-1]
    return replace(
        Trajectory.of_branches(episode.branches),
        finish_reason=episode.ended,
        ended_by=episode.ended_by,
        text=turn.text if step.scored_text is None else step.scored_text,
        turn_rewards=tuple(float(episode.past[time][1].reward) for time in times),
        turn_times=tuple(times),
        wants_score=step.is_scored,
    )


def _failed(request: GenerationRequest, reason: str) -> Trajectory:
    return Trajectory.of_response(
        request.prompt_ids,
        [],
        problem_id=request.problem_id,
        sample_index=request.sample_index,
        finish_reason="failed",
        reason=reason,
    )


# --- how a conversation goes on after a turn: the tokens that the chat template puts between two turns
#
# Sampled tokens are never encoded again. After them come those of the template's own text, from the end of the turn to
# the beginning of the next one: <|im_end|>, newline, <|im_start|>tool, newline, 4<|im_end|>, newline,
# <|im_start|>assistant, newline. The first of these is left out where the policy sampled it; the newline after it is
# not, which only the template writes.

# A text that no template and no message holds.
_MARK = "Turn7q3v9z"
_PROBE = "Probe5x8w2k"
Message = Mapping[str, Any]
_Hold = Callable[[Message], Message]
KNOWN_ROLES = (
    "user",
    "tool",
    "system",
    "assistant",
    "developer",
    "function",
    "observation",
    "ipython",
    "environment",
)
"""Roles of messages in published chat templates."""
_USER = {"role": "user", "content": "1"}


class TurnTemplateError(DataError):
    """The chat template can't say what follows a turn whatever came before it."""


class TurnTemplate:
    """The tokens after a turn. ``generation_tokens``: with which a prompt asks for an answer.

    What an environment says is text: where it holds the characters of a control token, such as ``<|im_end|>``, it gets
    the tokens of these characters, and never ends a turn. Control tokens are the tokenizer's special ones, and added
    ones that the template writes around a message of that role, such as ``</tool_response>``.

    Args:
        tokenizer: with the chat template.
        role: of what the environment says.
        is_chat: by the chat template; else an observation's text follows the turn as it is.
        arguments: further variables of the template (``data.chat_template_arguments``).

    Raises TurnTemplateError where what follows a turn depends on what precedes it, where a message in that role
    disappears, or where the text after a turn is encoded otherwise behind it than alone.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        role: str,
        *,
        is_chat: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer, self._role, self._is_chat = tokenizer, role, is_chat
        self._arguments = arguments or {}
        self._control = ControlTokens(tokenizer)
        # Of which it is known that they may follow a turn.
        self._roles: set[str] = set()
        self._framing: dict[str, frozenset[str]] = {}
        self.generation_tokens = 0
        if is_chat:
            self._check(role)
            whole, unasked = self._render([_USER]), self._render([_USER], asks=False)
            self.generation_tokens = len(self._encoded(whole.removeprefix(unasked)))

    def opening(self, problem: Problem, observation: Observation) -> list[int]:
        """The tokens of the problem's prompt with ``observation`` as one more message of the user, or as more text; of
        a ChatCall its own alone.

        Raises TurnTemplateError where the template takes no such message, or the prompt's tokens do not stay.
        """
        if isinstance(observation, ChatCall):
            return self.prompt(observation)
        if not self._is_chat:
            return [*problem.prompt_ids, *self._plain(observation)]
        messages = problem.messages or ({"role": "user", "content": problem.prompt},)
        unasked = self._render(messages, problem.tools, asks=False)

        def with_observation(hold: _Hold) -> str:
            said = hold({"role": "user", "content": observation})
            return self._render([*messages, said], problem.tools)

        text = self._with_held(with_observation)
        unasked_ids = problem.prompt_ids[: len(problem.prompt_ids) - self.generation_tokens]
        ids = [*unasked_ids, *self._encoded(text.removeprefix(unasked))]
        if ids != self._encoded(text) or observation.strip() not in self._control.release(text):
            raise TurnTemplateError(
                f"the chat template does not put a second message of the user after {unasked!r}, but says {text!r}"
            )
        return ids

    def prompt(self, call: ChatCall) -> list[int]:
        """The tokens of messages that begin a branch, what the policy said among them. Raises TurnTemplateError where
        the template leaves out a message, a call of a tool or a tool."""
        if not self._is_chat:
            raise TurnTemplateError(
                "messages are given where data.apply_chat_template is false, expected plain text"
            )
        self._require(call)

        def prompt(hold: _Hold) -> str:
            return self._render([hold(m) for m in call.messages], [hold(t) for t in call.tools])

        return self._encoded(self._with_held(prompt))

    def delta(self, turn_ids: Sequence[int], observation: Observation) -> list[int]:
        """The tokens between a turn, whose own are ``turn_ids``, and the next: int32, none of them sampled.

        Raises TurnTemplateError where a role of a ChatCall is none that the template can say after a turn.
        """
        if not isinstance(observation, ChatCall):
            if not self._is_chat:
                return self._plain(observation)
            observation = ChatCall([{"role": self._role, "content": observation}])
        for role in {message["role"] for message in observation.messages} - self._roles:
            self._check(role)
        said = observation

        def after_turn(hold: _Hold) -> str:
            tools = [hold(tool) for tool in said.tools]
            return self._after([_USER], *map(hold, said.messages), tools=tools)[1]

        ids = self._encoded(self._with_held(after_turn))
        # An end-of-turn token that was sampled must not stand there twice.
        return ids[1:] if ids and len(turn_ids) and ids[0] == turn_ids[-1] else ids

    def _with_held(self, text_of: Callable[[_Hold], str]) -> str:
        """The text of ``text_of`` with marks in place of the control tokens that messages and tools hold.

        Where a template reads an added token that is not special, as of a thought, that one stays what it is.
        Raises TurnTemplateError where the template reads a special token of a message.
        """
        text = text_of(self._hold)
        if not self._control.has_marks(text):
            return text
        unheld = text_of(dict)
        if self._control.release(text) != unheld:
            text = text_of(self._hold_special)
        if self._control.release(text) != unheld:
            raise TurnTemplateError(
                "the chat template alters a message that holds the text of a special token"
            )
        return text

    def _hold(self, message: Message) -> dict[str, Any]:
        """A message, or a tool's definition, without control tokens."""
        role = message.get("role", "")
        if role not in self._framing:
            self._framing[role] = self._frame_of(role)
        held: dict[str, Any] = self._control.hold(message, self._framing[role])
        return held

    def _hold_special(self, message: Message) -> dict[str, Any]:
        held: dict[str, Any] = self._control.hold(message, self._control.special)
        return held

    def _frame_of(self, role: str) -> frozenset[str]:
        """The control tokens of messages in ``role``; what the assistant said has its own ones that are not special."""
        special = self._control.special
        if role in ("", "assistant"):
            return special
        try:
            _, after = self._after([_USER], {"role": role, "content": _PROBE})
        except TurnTemplateError:
            return special
        return special | self._control.written_in(after)

    def _plain(self, observation: str) -> list[int]:
        """The tokens of an observation that no template is around."""
        return self._encoded(self._control.hold(observation, self._control.special))

    def _after(
        self, history: Sequence[Message], *replies: Message, tools: Sequence[Message] = ()
    ) -> tuple[str, str]:
        """The text up to the end of a turn's content, and from there on."""
        turn = {"role": "assistant", "content": _MARK}
        text = self._render([*history, turn, *replies], tools)
        before, mark, after = text.partition(_MARK)
        if not mark:
            raise TurnTemplateError(
                "the chat template leaves out, or alters, what the assistant said before a message of "
                f"{replies[0]['role']}"
            )
        return before + mark, after

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, asks: bool = True
    ) -> str:
        try:
            return render(
                self._tokenizer, messages, tools=tools, arguments=self._arguments, asks=asks
            )
        except ChatTemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages[-3:])
            raise TurnTemplateError(
                f"the chat template fails on messages of {roles}: {error}"
            ) from error

    def _require(self, call: ChatCall) -> None:
        """Raise TurnTemplateError where the template leaves out a message, a call of a tool, or a tool."""
        for message in call.messages:
            self._require_known(str(message["role"]))
        marked = [_marked(message, i) for i, message in enumerate(call.messages)]
        text = self._render(marked, call.tools)
        # A call may have no content beside, and a template no place for one.
        lost = [f"a message of {m['role']}" for m in marked if m["content"] not in text]
        lost += [
            f"a call of the tool {sent['function']['name']!r}"
            for message, probed in zip(call.messages, marked, strict=True)
            for sent, probe in zip(_calls_of(message), _calls_of(probed), strict=True)
            if probe["function"]["name"] not in text
        ]
        names = [tool["function"]["name"] for tool in call.tools]
        lost += [f"the tool {name!r}" for name in names if name not in text]
        if lost:
            raise TurnTemplateError(f"the chat template leaves out, or alters, {lost[0]}")

    def _takes(self, messages: Sequence[Message]) -> bool:
        try:
            self._render(messages)
        except TurnTemplateError:
            return False
        return True

    def _encoded(self, text: str) -> list[int]:
        return self._control.encode(text)

    def _require_known(self, role: str) -> None:
        """Raise TurnTemplateError for a role that no chat has: many templates write whatever role they are given."""
        if role in KNOWN_ROLES:
            return
        if not ROLE.fullmatch(role) or role not in str(self._tokenizer.chat_template):
            raise TurnTemplateError(
                f"got the role {role!r} (environment.role), expected one of {', '.join(KNOWN_ROLES)}, or one that the "
                "chat template names"
            )

    def _check(self, role: str) -> None:
        if self._tokenizer.chat_template is None:
            raise TurnTemplateError(
                "the tokenizer has no chat template; set data.apply_chat_template to false for plain text"
            )
        self._require_known(role)
        probe = {"role": role, "content": _PROBE}
        before, after = self._after([_USER], probe)
        if _PROBE not in after:
            raise TurnTemplateError(
                f"the chat template drops a message of {role} after a turn (environment.role), expected it in "
                f"{after!r}"
            )
        earlier = {"role": "assistant", "content": "2"}
        longer = [_USER, earlier, {"role": role, "content": "3"}]
        system = [{"role": "system", "content": "4"}, _USER]
        for history in (longer, system) if self._takes(system) else (longer,):
            other = self._after(history, probe)[1]
            if other != after:
                raise TurnTemplateError(
                    f"the chat template is not stable: after a turn stands {after!r}, but {other!r} where "
                    f"{len(history)} messages precede it; expected the same, as sampled tokens are never encoded again"
                )
        if self._encoded(before + after) != self._encoded(before) + self._encoded(after):
            raise TurnTemplateError(
                f"{after!r} is encoded otherwise behind a turn than alone, so nobody can say which tokens follow one"
            )
        self._roles.add(role)


def _calls_of(message: Message) -> Sequence[Any]:
    return message.get("tool_calls", ())


def _marked(message: Message, number: int) -> dict[str, Any]:
    """The message with a text of its own in place of what it says, and of the name of each tool that it calls."""
    probe, calls = f"{_PROBE}{number}z", _calls_of(message)
    marked = {**message, "content": probe if message["content"] or not calls else ""}
    if calls:
        functions = [
            {**c["function"], "name": f"{_PROBE}{number}c{i}z"} for i, c in enumerate(calls)
        ]
        marked["tool_calls"] = [{**c, "function": f} for c, f in zip(calls, functions, strict=True)]
    return marked
