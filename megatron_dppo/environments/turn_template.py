"""The tokens that the chat template inserts between two turns of a conversation.

Sampled tokens are never encoded again. After them come the tokens of the template's own text, from the end of the turn
to the beginning of the next one: <|im_end|>, newline, <|im_start|>tool, newline, 4<|im_end|>, newline,
<|im_start|>assistant, newline. The first of these is left out where the policy sampled it; the newline after it is
kept, because only the template writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_dppo.config.checks import ROLE
from megatron_dppo.data.chat import ChatTemplateError, render
from megatron_dppo.data.control_tokens import ControlTokens
from megatron_dppo.data.records import DataError
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments import (
    ChatCall,
    Observation,
)

# A text that no template and no message contains.
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
    """The text that the chat template inserts after a turn depends on earlier messages."""


class TurnTemplate:
    """The tokens after a turn, by the chat template.

    An observation is text: where it contains the characters of a control token, such as ``<|im_end|>``, it is encoded
    as the tokens of these characters, and never ends a turn. Control tokens are the tokenizer's special ones, and added
    ones that the template writes around a message of that role, such as ``</tool_response>``. ``generation_tokens`` is
    the number of tokens with which a prompt asks for an answer.

    Args:
        tokenizer: tokenizer with the chat template.
        role: role of the observations.
        is_chat: whether to use the chat template; without it, an observation's text follows the turn directly.
        arguments: further variables of the template (``data.chat_template_arguments``).

    Raises TurnTemplateError where the text after a turn depends on earlier messages, where a message in that role
    disappears, or where the text after a turn has other tokens behind the turn than alone.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        role: str,
        *,
        is_chat: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._role = role
        self._is_chat = is_chat
        self._arguments = arguments or {}
        self._control = ControlTokens(tokenizer)
        # Roles whose messages are known to be allowed after a turn.
        self._roles: set[str] = set()
        self._framing: dict[str, frozenset[str]] = {}
        self.generation_tokens = 0
        if is_chat:
            self._check(role)
            generation_prompt = self._render([_USER])
            unasked = self._render([_USER], asks=False)
            self.generation_tokens = len(self._encoded(generation_prompt.removeprefix(unasked)))

    def opening(self, problem: Problem, observation: Observation) -> list[int]:
        """Return the tokens of the problem's prompt with ``observation`` as one more user message, or as more text.

        For a ChatCall the prompt is the call's own. Raises TurnTemplateError where the template takes no such message,
        or the prompt's tokens change.
        """
        if isinstance(observation, ChatCall):
            return self.prompt(observation)
        if not self._is_chat:
            return [*problem.prompt_ids, *self._plain(observation)]
        messages = problem.messages or ({"role": "user", "content": problem.prompt},)
        unasked = self._render(messages, problem.tools, asks=False)

        def with_observation(hold: _Hold) -> str:
            held_message = hold({"role": "user", "content": observation})
            return self._render([*messages, held_message], problem.tools)

        text = self._with_held(with_observation)
        unasked_ids = problem.prompt_ids[: len(problem.prompt_ids) - self.generation_tokens]
        ids = [*unasked_ids, *self._encoded(text.removeprefix(unasked))]
        if ids != self._encoded(text) or observation.strip() not in self._control.release(text):
            raise TurnTemplateError(
                f"the chat template does not put a second message of the user after {unasked!r}, but says {text!r}"
            )
        return ids

    def prompt(self, call: ChatCall) -> list[int]:
        """Return the tokens of messages that begin a branch, including earlier turns of the policy.

        Raises TurnTemplateError where the template leaves out a message, a tool call or a tool.
        """
        if not self._is_chat:
            raise TurnTemplateError(
                "messages are given where data.apply_chat_template is false, expected plain text"
            )
        self._require(call)

        def prompt(hold: _Hold) -> str:
            return self._render([hold(m) for m in call.messages], [hold(t) for t in call.tools])

        return self._encoded(self._with_held(prompt))

    def delta(self, turn_ids: Sequence[int], observation: Observation) -> list[int]:
        """Return the tokens between a turn with the tokens ``turn_ids`` and the next: int32, none of them sampled.

        Raises TurnTemplateError for a role of a ChatCall that the template can't write after a turn.
        """
        if not isinstance(observation, ChatCall):
            if not self._is_chat:
                return self._plain(observation)
            observation = ChatCall([{"role": self._role, "content": observation}])
        for role in {message["role"] for message in observation.messages} - self._roles:
            self._check(role)
        call = observation

        def after_turn(hold: _Hold) -> str:
            tools = [hold(tool) for tool in call.tools]
            return self._after([_USER], *map(hold, call.messages), tools=tools)[1]

        ids = self._encoded(self._with_held(after_turn))
        # Don't repeat an end-of-turn token that was sampled.
        if ids and len(turn_ids) and ids[0] == turn_ids[-1]:
            return ids[1:]
        return ids

    def _with_held(self, text_of: Callable[[_Hold], str]) -> str:
        """Return the text of ``text_of`` with marks in place of the control tokens in messages and tools.

        A template may parse added tokens that are not special, such as those around a thought. These then stay as they
        are. Raises TurnTemplateError where the template parses a special token of a message.
        """
        text = text_of(self._hold)
        if not self._control.has_marks(text):
            return text
        plain_text = text_of(dict)
        if self._control.release(text) != plain_text:
            text = text_of(self._hold_special)
        if self._control.release(text) != plain_text:
            raise TurnTemplateError(
                "the chat template alters a message that holds the text of a special token"
            )
        return text

    def _hold(self, message: Message) -> dict[str, Any]:
        """Return a message, or a tool's definition, without control tokens."""
        role = message.get("role", "")
        if role not in self._framing:
            self._framing[role] = self._frame_of(role)
        held_message: dict[str, Any] = self._control.hold(message, self._framing[role])
        return held_message

    def _hold_special(self, message: Message) -> dict[str, Any]:
        held_message: dict[str, Any] = self._control.hold(message, self._control.special)
        return held_message

    def _frame_of(self, role: str) -> frozenset[str]:
        """Return the control tokens that frame a message in ``role``, which its text may not hold.

        The assistant's text may hold those that are not special, such as the tokens around a thought.
        """
        special = self._control.special
        if role in ("", "assistant"):
            return special
        try:
            _, text_after = self._after([_USER], {"role": role, "content": _PROBE})
        except TurnTemplateError:
            return special
        return special | self._control.written_in(text_after)

    def _plain(self, observation: str) -> list[int]:
        """Return the tokens of an observation without a template."""
        return self._encoded(self._control.hold(observation, self._control.special))

    def _after(
        self,
        history: Sequence[Message],
        *replies: Message,
        tools: Sequence[Message] = (),
    ) -> tuple[str, str]:
        """Return the text up to the end of a turn's content, and the text after it."""
        turn = {"role": "assistant", "content": _MARK}
        text = self._render([*history, turn, *replies], tools)
        text_before, mark, text_after = text.partition(_MARK)
        if not mark:
            raise TurnTemplateError(
                "the chat template leaves out, or alters, what the assistant said before a message of "
                f"{replies[0]['role']}"
            )
        return text_before + mark, text_after

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        asks: bool = True,
    ) -> str:
        try:
            return render(
                self._tokenizer,
                messages,
                tools=tools,
                arguments=self._arguments,
                asks=asks,
            )
        except ChatTemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages[-3:])
            raise TurnTemplateError(
                f"the chat template fails on messages of {roles}: {error}"
            ) from error

    def _require(self, call: ChatCall) -> None:
        """Raise TurnTemplateError where the template leaves out a message, a tool call or a tool."""
        for message in call.messages:
            self._require_known(str(message["role"]))
        marked = [_marked(message, i) for i, message in enumerate(call.messages)]
        text = self._render(marked, call.tools)
        # A tool call may have no other content, and a template no place for it.
        lost = [f"a message of {m['role']}" for m in marked if m["content"] not in text]
        for message, probed in zip(call.messages, marked, strict=True):
            for sent, probe in zip(_calls_of(message), _calls_of(probed), strict=True):
                if probe["function"]["name"] not in text:
                    lost.append(f"a call of the tool {sent['function']['name']!r}")
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
        """Raise TurnTemplateError for an unknown role: many templates write any role that they are given."""
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
        text_before, text_after = self._after([_USER], probe)
        if _PROBE not in text_after:
            raise TurnTemplateError(
                f"the chat template drops a message of {role} after a turn (environment.role), expected it in "
                f"{text_after!r}"
            )
        earlier_turn = {"role": "assistant", "content": "2"}
        longer = [_USER, earlier_turn, {"role": role, "content": "3"}]
        system = [{"role": "system", "content": "4"}, _USER]
        for history in (longer, system) if self._takes(system) else (longer,):
            other = self._after(history, probe)[1]
            if other != text_after:
                raise TurnTemplateError(
                    f"the chat template is not stable: after a turn stands {text_after!r}, but {other!r} where "
                    f"{len(history)} messages precede it; expected the same, as sampled tokens are never encoded again"
                )
        if self._encoded(text_before + text_after) != self._encoded(text_before) + self._encoded(
            text_after
        ):
            raise TurnTemplateError(
                f"{text_after!r} has other tokens behind a turn than alone, so the tokens after a turn are unknown"
            )
        self._roles.add(role)


def _calls_of(message: Message) -> Sequence[Any]:
    return message.get("tool_calls", ())


def _marked(message: Message, number: int) -> dict[str, Any]:
    """Return the message with unique texts in place of its content and of the name of each tool that it calls."""
    probe = f"{_PROBE}{number}z"
    calls = _calls_of(message)
    marked = {**message, "content": probe if message["content"] or not calls else ""}
    if calls:
        functions = [
            {**c["function"], "name": f"{_PROBE}{number}c{i}z"} for i, c in enumerate(calls)
        ]
        marked["tool_calls"] = [{**c, "function": f} for c, f in zip(calls, functions, strict=True)]
    return marked
