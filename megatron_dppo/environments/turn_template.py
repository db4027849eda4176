"""The tokens that the chat template inserts between two turns of a conversation.

Sampled tokens are never encoded again. The template writes a text between the end of a turn and the beginning of the
next turn. Only this text is encoded. For the observation "4" of a tool, for example, the text is <|im_end|>, newline,
<|im_start|>tool, newline, 4<|im_end|>, newline, <|im_start|>assistant, newline. The first token <|im_end|> is left out
if the policy sampled it. The first newline is kept, because only the template writes it.

Some templates end a turn in the history by another token than the policy does. For example, gpt-oss ends its last turn
by <|return|>, and its history has <|end|> there. The history then has the template's token alone (``AfterTurn``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from megatron_dppo.config.checks import ROLE
from megatron_dppo.data.chat import ChatTemplateError, generation_prompt, render
from megatron_dppo.data.control_tokens import ControlTokens
from megatron_dppo.data.records import DataError
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments import ChatCall, Observation

# Texts that no template and no real message contains. Tests of a template use _TURN_MARK as the content of a turn, and
# _PROBE as the content of other messages.
_TURN_MARK = "Turn7q3v9z"
# Name of the tool in the turns that tests of a template put before a tool's answer.
_CALLED_TOOL = "Called4n8t6j"
_CALL_ID = "call00001"
_PROBE = "Probe5x8w2k"
Message = Mapping[str, Any]
_Hold = Callable[[Message], Message]
"""Replaces control tokens in a message by marks (``ControlTokens.hold``)."""
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
    """The chat template can't write an episode's messages, or the text after a turn depends on earlier messages."""


class AfterTurn(NamedTuple):
    """The tokens after a turn of the policy. The policy samples none of them.

    Attributes:
        ids: the tokens.
        replaces_end: whether ``ids`` begins with the history's own end of the turn, so that the sampled end must be
            removed. Both ends together would be a text that no model has seen.
    """

    ids: list[int]
    replaces_end: bool = False


class TurnTemplate:
    """Encodes the text that the chat template inserts after a turn.

    If an observation contains the characters of a control token, for example ``<|im_end|>``, they are encoded as
    ordinary text, so an observation never ends a turn. Control tokens are the tokenizer's special tokens, and the added
    tokens that the template writes around a message of the observation's role, for example ``</tool_response>``.

    Some templates take a tool's answer only after a turn that calls a tool. The text after a turn is then taken from
    such a turn.

    ``generation_tokens`` is the number of tokens of the generation prompt.

    Args:
        tokenizer: tokenizer with the chat template.
        role: role of the observations.
        is_chat: whether to use the chat template. Without a template, an observation's text follows the turn directly.
        arguments: variables of the template (``data.chat_template_arguments``).
        end_tokens: tokens that end the policy's turn; None: the tokenizer's end of text.

    Raises:
        TurnTemplateError: the text after a turn depends on earlier messages, the template drops a message of ``role``,
            or the text after a turn has other tokens when it is encoded alone.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        role: str,
        *,
        is_chat: bool = True,
        arguments: Mapping[str, Any] | None = None,
        end_tokens: Collection[int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._role = role
        if end_tokens is None:
            end_tokens = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self._is_chat = is_chat
        self._arguments = arguments or {}
        self._control_tokens = ControlTokens(tokenizer)
        special_names = sorted(self._control_tokens.special)
        special_ids = tokenizer.convert_tokens_to_ids(special_names)
        # A list of names gives a list of ids.
        assert isinstance(special_ids, list)
        self._special_ids = frozenset(special_ids)
        # Other stop tokens of a run are a part of the turn's text.
        self._end_ids = self._special_ids & frozenset(end_tokens)
        # Roles that ``_check`` has accepted.
        self._checked_roles: set[str] = set()
        # Roles that the template takes only after a turn that calls a tool.
        self._answering_roles: set[str] = set()
        # Role -> the control tokens that the text of a message in this role may not contain.
        self._held_tokens: dict[str, frozenset[str]] = {}
        self.generation_tokens = 0
        if is_chat:
            self.delta([], _PROBE)
            prompt_end = generation_prompt(tokenizer, self._arguments)
            self.generation_tokens = len(self._encoded(prompt_end))

    def opening(self, problem: Problem, observation: Observation) -> list[int]:
        """Return the tokens of the problem's prompt with ``observation`` as one more user message.

        Without a chat template, the observation is text after the prompt. For a ChatCall, the prompt has only the
        call's messages. Raises TurnTemplateError if the template does not take one more user message, or if the tokens
        of the problem's prompt change.
        """
        if isinstance(observation, ChatCall):
            return self.prompt(observation)
        if not self._is_chat:
            return [*problem.prompt_ids, *self._plain(observation)]
        messages = problem.messages or ({"role": "user", "content": problem.prompt},)
        # The observation stands before the generation prompt. Keep the prompt's tokens without the generation prompt.
        bare_prompt = self._render(messages, problem.tools, add_generation_prompt=False)
        bare_ids = problem.prompt_ids[: len(problem.prompt_ids) - self.generation_tokens]

        # ``_held_text`` calls this function, with a function that replaces control tokens by marks.
        def with_observation(hold: _Hold) -> str:
            held_message = hold({"role": "user", "content": observation})
            return self._render([*messages, held_message], problem.tools)

        text = self._held_text(with_observation)
        ids = [*bare_ids, *self._encoded(text.removeprefix(bare_prompt))]
        has_observation = observation.strip() in self._control_tokens.release(text)
        if ids != self._encoded(text) or not has_observation:
            raise TurnTemplateError(
                f"the chat template does not put a second message of the user after {bare_prompt!r}, but says {text!r}"
            )
        return ids

    def prompt(self, call: ChatCall) -> list[int]:
        """Return the tokens of messages that begin a branch. They may include earlier turns of the policy.

        Raises TurnTemplateError if the template leaves out a message, a tool call or a tool.
        """
        if not self._is_chat:
            raise TurnTemplateError(
                "messages are given where data.apply_chat_template is false, expected plain text"
            )
        self._require_complete(call)

        def prompt_text(hold: _Hold) -> str:
            return self._render([hold(m) for m in call.messages], [hold(t) for t in call.tools])

        return self._encoded(self._held_text(prompt_text))

    def delta(self, turn_ids: Sequence[int], observation: Observation) -> list[int]:
        """Return the ``ids`` of ``after_turn``."""
        return self.after_turn(turn_ids, observation).ids

    def after_turn(self, turn_ids: Sequence[int], observation: Observation) -> AfterTurn:
        """Return the tokens between a turn that ends with ``turn_ids`` and the next turn.

        Raises TurnTemplateError for a role of a ChatCall that the template can't write after a turn.
        """
        if isinstance(observation, ChatCall):
            call = observation
        elif self._is_chat:
            call = ChatCall([{"role": self._role, "content": observation}])
        else:
            return AfterTurn(self._plain(observation))
        for role in {message["role"] for message in call.messages} - self._checked_roles:
            self._check(role)

        def text_after_turn(hold: _Hold) -> str:
            tools = [hold(tool) for tool in call.tools]
            calls = [hold(tool_call) for tool_call in call.calls]
            replies = map(hold, call.messages)
            _, text_after = self._split_at_turn([_USER], *replies, tools=tools, calls=calls)
            return text_after

        text = self._held_text(text_after_turn)
        if _CALLED_TOOL in text:
            raise TurnTemplateError(
                "the chat template writes the name of the called tool after a turn, and no call could be read in the "
                f"turn before a message of {call.messages[0]['role']}; expected a call, or another environment.role"
            )
        ids = self._encoded(text)
        if not ids or not len(turn_ids):
            return AfterTurn(ids)
        sampled_end = turn_ids[-1]
        # Don't repeat an end-of-turn token that was sampled.
        if ids[0] == sampled_end:
            return AfterTurn(ids[1:])
        is_replaced = ids[0] in self._special_ids and sampled_end in self._end_ids
        return AfterTurn(ids, replaces_end=is_replaced)

    def _held_text(self, text_of: Callable[[_Hold], str]) -> str:
        """Render with marks in place of the control tokens in messages and tools.

        ``text_of(hold)`` applies ``hold`` to each message and tool, and renders the results. A template may search
        messages for added tokens that are not special, for example to remove a thought. Then only special tokens are
        replaced.
        Raises TurnTemplateError if the template searches messages for special tokens.
        """
        text = text_of(self._hold)
        if not self._control_tokens.has_marks(text):
            return text
        # ``dict`` copies a message without a replacement. A template that searches a message for a token misses the
        # token's mark. Then the two texts differ, even with the marks changed back into tokens.
        unmarked_text = text_of(dict)
        if self._control_tokens.release(text) != unmarked_text:
            text = text_of(self._hold_special)
        if self._control_tokens.release(text) != unmarked_text:
            raise TurnTemplateError(
                "the chat template alters a message that holds the text of a special token"
            )
        return text

    def _hold(self, message: Message) -> dict[str, Any]:
        """Replace the control tokens in a message, or in a tool's definition, by marks. A definition has no role."""
        role = message.get("role", "")
        if role not in self._held_tokens:
            self._held_tokens[role] = self._tokens_to_hold(role)
        held_message: dict[str, Any] = self._control_tokens.hold(message, self._held_tokens[role])
        return held_message

    def _hold_special(self, message: Message) -> dict[str, Any]:
        """Replace only the special tokens by marks."""
        special = self._control_tokens.special
        held_message: dict[str, Any] = self._control_tokens.hold(message, special)
        return held_message

    def _tokens_to_hold(self, role: str) -> frozenset[str]:
        """Return the control tokens that the text of a message in ``role`` may not contain.

        They are the special tokens, and the tokens that the template writes around a message in this role. The
        assistant's text may contain tokens that are not special, for example the tokens around a thought.
        """
        special = self._control_tokens.special
        if role in ("", "assistant"):
            return special
        try:
            _, text_after = self._split_at_turn([_USER], {"role": role, "content": _PROBE})
        except TurnTemplateError:
            return special
        return special | self._control_tokens.written_in(text_after)

    def _plain(self, observation: str) -> list[int]:
        """Return the tokens of an observation without a template. Marks of special tokens are encoded as plain text."""
        special = self._control_tokens.special
        return self._encoded(self._control_tokens.hold(observation, special))

    def _split_at_turn(
        self,
        history: Sequence[Message],
        *replies: Message,
        tools: Sequence[Message] = (),
        calls: Sequence[Message] = (),
    ) -> tuple[str, str]:
        """Render ``history``, a turn and ``replies``; split the text at the end of the turn's content.

        ``calls``: the tool calls of the turn, as far as they are known. They count for a role that the template takes
        only after a call.
        """
        if replies[0]["role"] in self._answering_roles:
            return self._split_at_call(history, replies, tools, calls)
        turn = {"role": "assistant", "content": _TURN_MARK}
        text = self._render([*history, turn, *replies], tools)
        text_before, mark, text_after = text.partition(_TURN_MARK)
        if not mark:
            raise TurnTemplateError(
                "the chat template leaves out, or alters, what the assistant said before a message of "
                f"{replies[0]['role']}"
            )
        return text_before + mark, text_after

    def _split_at_call(
        self,
        history: Sequence[Message],
        replies: Sequence[Message],
        tools: Sequence[Message],
        calls: Sequence[Message],
    ) -> tuple[str, str]:
        """Do as ``_split_at_turn``, with a turn that calls tools: split the text at the token that ends the turn."""
        turn = _calling_turn(calls, str(replies[0].get("tool_call_id") or _CALL_ID))
        whole_text = self._render([*history, turn, *replies], tools)
        bare_text = self._render([*history, turn], tools, add_generation_prompt=False)
        # The policy samples the text of the call itself. So the text after the turn begins with the last special token
        # of the turn, or, without one, after the call.
        call_start = bare_text.find(_TURN_MARK)
        start = max(map(bare_text.rfind, self._control_tokens.special), default=-1)
        if start < call_start:
            start = len(bare_text)
        text_before = whole_text[:start]
        if call_start < 0 or text_before != bare_text[:start]:
            raise TurnTemplateError(
                f"the chat template writes another call of a tool before a message of {replies[0]['role']} than "
                f"without one: {whole_text!r}, expected it to begin with {bare_text[:start]!r}"
            )
        return text_before, whole_text[start:]

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages, with or without the generation prompt. Raises TurnTemplateError."""
        try:
            return render(
                self._tokenizer,
                messages,
                tools=tools,
                arguments=self._arguments,
                add_generation_prompt=add_generation_prompt,
            )
        except ChatTemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages[-3:])
            raise TurnTemplateError(
                f"the chat template fails on messages of {roles}: {error}"
            ) from error

    def _require_complete(self, call: ChatCall) -> None:
        """Raise TurnTemplateError if the template leaves out a message, a tool call or a tool."""
        for message in call.messages:
            self._require_known(str(message["role"]))
        probes = [_with_probes(message, i) for i, message in enumerate(call.messages)]
        text = self._render(probes, call.tools)
        missing_parts: list[str] = []
        for probe in probes:
            if probe["content"] not in text:
                missing_parts.append(f"a message of {probe['role']}")
        for message, probe in zip(call.messages, probes, strict=True):
            for tool_call, call_probe in zip(_calls_of(message), _calls_of(probe), strict=True):
                if call_probe["function"]["name"] not in text:
                    missing_parts.append(f"a call of the tool {tool_call['function']['name']!r}")
        for tool in call.tools:
            name = tool["function"]["name"]
            if name not in text:
                missing_parts.append(f"the tool {name!r}")
        if missing_parts:
            raise TurnTemplateError(f"the chat template leaves out, or alters, {missing_parts[0]}")

    def _takes(self, messages: Sequence[Message], content: str = "") -> bool:
        """Return whether the template renders these messages, with the text ``content``, without an error."""
        try:
            return content in self._render(messages)
        except TurnTemplateError:
            return False

    def _encoded(self, text: str) -> list[int]:
        return self._control_tokens.encode(text)

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
        """Raise TurnTemplateError unless the tokens after a turn are known for a message in ``role``."""
        if self._tokenizer.chat_template is None:
            raise TurnTemplateError(
                "the tokenizer has no chat template; set data.apply_chat_template to false for plain text"
            )
        self._require_known(role)
        probe = {"role": role, "content": _PROBE}
        earlier_turn: Message = {"role": "assistant", "content": "2"}
        calling_turn = _calling_turn((), _CALL_ID)
        is_taken = self._takes([_USER, earlier_turn, probe], _PROBE)
        if not is_taken and self._takes([_USER, calling_turn, probe], _PROBE):
            self._answering_roles.add(role)
            earlier_turn = calling_turn
        text_before, text_after = self._split_at_turn([_USER], probe)
        if _PROBE not in text_after:
            raise TurnTemplateError(
                f"the chat template drops a message of {role} after a turn (environment.role), expected it in "
                f"{text_after!r}"
            )
        # The text after a turn must not depend on earlier messages: compare it after other histories.
        longer_history = [_USER, earlier_turn, {"role": role, "content": "3"}]
        histories: list[Sequence[Message]] = [longer_history]
        history_with_system = [{"role": "system", "content": "4"}, _USER]
        if self._takes(history_with_system):
            histories.append(history_with_system)
        for history in histories:
            _, other_text = self._split_at_turn(history, probe)
            if other_text != text_after:
                raise TurnTemplateError(
                    f"the chat template is not stable: after a turn it writes {text_after!r}, but {other_text!r} if "
                    f"{len(history)} messages precede the turn; expected the same text, as sampled tokens are never "
                    "encoded again"
                )
        # ``delta`` encodes the text after a turn separately, so this text must have the same tokens in the whole text.
        whole_ids = self._encoded(text_before + text_after)
        if whole_ids != self._encoded(text_before) + self._encoded(text_after):
            raise TurnTemplateError(
                f"{text_after!r} has other tokens behind a turn than alone, so the tokens after a turn are unknown"
            )
        self._checked_roles.add(role)


def _calling_turn(calls: Sequence[Message], call_id: str) -> dict[str, Any]:
    """Return a turn that calls the tools of ``calls``, the last one with a mark as argument.

    Without ``calls``, the turn calls one tool, with the id ``call_id``.
    """
    if not calls:
        calls = [{"type": "function", "id": call_id, "function": {"name": _CALLED_TOOL}}]
    marked_calls: list[dict[str, Any]] = []
    for call in calls:
        function = {**call["function"], "arguments": {"text": _TURN_MARK}}
        marked_calls.append({**call, "function": function})
    return {"role": "assistant", "content": "", "tool_calls": marked_calls}


def _calls_of(message: Message) -> Sequence[Any]:
    return message.get("tool_calls", ())


def _with_probes(message: Message, number: int) -> dict[str, Any]:
    """Return the message with unique texts in place of its content and of the name of each tool that it calls.

    If a message has only tool calls, its content stays empty: a template may have no place for a content.
    """
    calls = _calls_of(message)
    content = f"{_PROBE}{number}z"
    if calls and not message["content"]:
        content = ""
    probe = {**message, "content": content}
    if calls:
        call_probes: list[dict[str, Any]] = []
        for i, call in enumerate(calls):
            function = {**call["function"], "name": f"{_PROBE}{number}c{i}z"}
            call_probes.append({**call, "function": function})
        probe["tool_calls"] = call_probes
    return probe
