"""How a conversation goes on after a turn of the policy: the tokens that the chat template puts between two turns.

Sampled tokens are never encoded again. After them come those of the template's own text, from the end of the turn to
the beginning of the next one: ``<|im_end|>``, newline, ``<|im_start|>tool``, newline, ``4<|im_end|>``, newline,
``<|im_start|>assistant``, newline. The first of these is left out where the policy sampled it; the newline after it is
not, which only the template writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_dppo.data.records import DataError
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments import ChatCall, Observation

# A text that no template and no message holds.
_MARK = "Turn7q3v9z"
_PROBE = "Probe5x8w2k"
Message = Mapping[str, Any]
_USER = {"role": "user", "content": "1"}


class TurnTemplateError(DataError):
    """The chat template can't say what follows a turn whatever came before it."""


class TurnTemplate:
    """The tokens after a turn. ``role``: of what the environment says. ``is_chat``: by the chat template; else an
    observation's text follows the turn as it is. ``generation_tokens``: with which a prompt asks for an answer.

    Raises TurnTemplateError where what follows a turn depends on what precedes it, where a message in that role
    disappears, or where the text after a turn is encoded otherwise behind it than alone.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, role: str, *, is_chat: bool = True
    ) -> None:
        self._tokenizer, self._role, self._is_chat = tokenizer, role, is_chat
        # Of which it is known that they may follow a turn.
        self._roles: set[str] = set()
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
            return [*problem.prompt_ids, *self._encoded(observation)]
        messages = problem.messages or ({"role": "user", "content": problem.prompt},)
        unasked = self._render(messages, asks=False)
        text = self._render([*messages, {"role": "user", "content": observation}])
        kept = problem.prompt_ids[: len(problem.prompt_ids) - self.generation_tokens]
        ids = [*kept, *self._encoded(text.removeprefix(unasked))]
        if ids != self._encoded(text) or observation.strip() not in text:
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
        return self._encoded(self._render(call.messages, call.tools))

    def delta(self, turn_ids: Sequence[int], observation: Observation) -> list[int]:
        """The tokens between a turn, whose own are ``turn_ids``, and the next: int32, none of them sampled.

        Raises TurnTemplateError where a role of a ChatCall is none that the template can say after a turn.
        """
        if isinstance(observation, ChatCall):
            for role in {message["role"] for message in observation.messages} - self._roles:
                self._check(role)
            after = self._after([_USER], *observation.messages, tools=observation.tools)[1]
        elif self._is_chat:
            after = self._after([_USER], {"role": self._role, "content": observation})[1]
        else:
            return self._encoded(observation)
        ids = self._encoded(after)
        # An end-of-turn token that was sampled must not stand there twice.
        return ids[1:] if ids and len(turn_ids) and ids[0] == turn_ids[-1] else ids

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
            text: Any = self._tokenizer.apply_chat_template(
                list(map(dict, messages)),
                tools=list(map(dict, tools)) or None,
                add_generation_prompt=asks,
                tokenize=False,
            )
        # A template is a program: it may raise anything.
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            roles = ", ".join(str(message["role"]) for message in messages[-3:])
            raise TurnTemplateError(
                f"the chat template fails on messages of {roles}: {why}"
            ) from error
        return str(text)

    def _require(self, call: ChatCall) -> None:
        """Raise TurnTemplateError where the template leaves out a message, a call of a tool, or a tool."""
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
        ids: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids)

    def _check(self, role: str) -> None:
        if self._tokenizer.chat_template is None:
            raise TurnTemplateError(
                "the tokenizer has no chat template; set data.apply_chat_template to false for plain text"
            )
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
