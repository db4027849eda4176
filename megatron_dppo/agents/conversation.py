"""The conversation of an agent's session: its chat completions as messages, branches and tool calls."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from megatron_dppo.config.errors import closest
from megatron_dppo.data.thoughts import answer_bounds
from megatron_dppo.engine.tool_calls import GPT_OSS, ReadTurn, ToolFormat
from megatron_dppo.environments import ChatCall, PolicyFormat, Turn
from megatron_dppo.system.text import short_json

MODEL = "policy"
"""Name of the model in the API of a session."""
_MAX_LEVELS = 200
"""Largest number of nested lists and objects in a call. Functions that write or compare a call recurse once for each
level, and Python allows 1,000 recursions."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_READ_FIELDS = {"model", "messages", "tools", "stream", "stream_options", "user", "metadata"}
"""Fields of a request that are accepted with any value."""
_LIMITS = ("max_completion_tokens", "max_tokens")
# Further fields, each with the value that changes nothing. Clients may write out the defaults of the API.
_HARMLESS_VALUES: Mapping[str, Any] = {
    "n": 1,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "logprobs": False,
    "store": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "top_logprobs": 0,
    "service_tier": "auto",
    "modalities": ["text"],
    "repetition_penalty": 1,
    "min_p": 0,
}
_EMPTY_VALUES: tuple[Any, ...] = (None, [], {})
"""Values that change nothing, in any field: ``stop: []``, ``logit_bias: {}``."""
_OTHER_FIELDS = {
    "audio",
    "documents",
    "echo",
    "extra_body",
    "function_call",
    "functions",
    "guided_choice",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "include_reasoning",
    "length_penalty",
    "logit_bias",
    "max_prompt_tokens",
    "min_p",
    "min_tokens",
    "modalities",
    "moderation",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "provider",
    "reasoning",
    "reasoning_effort",
    "regex",
    "repetition_penalty",
    "safety_identifier",
    "seed",
    "separate_reasoning",
    "service_tier",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "stream_reasoning",
    "temperature",
    "thinking",
    "top_k",
    "top_logprobs",
    "top_p",
    "verbosity",
    "web_search_options",
    "chat_template_kwargs",
}
"""Further fields that programs send in a request, of OpenAI's API and of servers with more fields."""
MOST_BRANCHES = 8
"""Default of ``environment.options.branches``."""


def unread_fields(ignored: Sequence[str]) -> list[str]:
    """Return a warning for each name in ``ignored`` that can't be dropped from a request, or is no known field."""
    # Import lazily: the workers, which import this module, stay small.
    droppable_fields = {*_LIMITS, *_HARMLESS_VALUES, *_OTHER_FIELDS}
    warnings: list[str] = []
    for name in ignored:
        if name in _READ_FIELDS:
            warnings.append(f"got {name!r}, which is accepted with any value and is not dropped")
        elif name not in droppable_fields:
            similar = closest(name, sorted(droppable_fields))
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            warnings.append(f"got {name!r}, which is no known field of a request{hint}")
    return warnings


class RefusedCallError(Exception):
    """A call that can't be answered; ``status`` is the HTTP status of the response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class _Branch:
    """A branch of the session.

    Attributes:
        tools: definitions of tools. All calls of the branch have equal tools.
        messages: messages up to the policy's last turn, including this turn; empty before the first turn.
        has_waiting_call: whether a call waits for the branch's next turn.
    """

    tools: list[dict[str, Any]]
    messages: Sequence[dict[str, Any]] = ()
    has_waiting_call: bool = True

    def deviation(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        """Return why a call with these messages doesn't continue the branch; empty if the call continues it."""
        if self.has_waiting_call:
            return "another call of this branch waits"
        for i, expected_message in enumerate(self.messages):
            sent_message = messages[i] if i < len(messages) else None
            if sent_message != expected_message:
                return (
                    f"message {i}: got {short_json(sent_message)}, "
                    f"expected {short_json(expected_message)}"
                )
        if tools != self.tools:
            return "tools: got others than in the first call of this branch"
        new_messages = messages[len(self.messages) :]
        if not new_messages or any(message["role"] == "assistant" for message in new_messages):
            return f"expected messages of others after the policy's turn, message {len(self.messages) - 1}"
        return ""


@dataclass(eq=False)
class _Call:
    """A call of the agent. ``completion`` is the future of its answer.

    ``has_client`` is False if the client has disconnected. The client may send the call again.
    """

    branch: _Branch
    messages: list[dict[str, Any]]
    completion: asyncio.Future[dict[str, Any]]
    has_client: bool = True


class Conversation:
    """The messages of a session, by branch, and the calls that wait for the policy's turns.

    Args:
        ignored: fields of a request that are dropped.
        most_branches: largest number of branches in a session.
        policy_format: the form in which the policy writes calls and thoughts.
        sampling: the run's sampling settings by their names in a request. A request may have the same values.

    Attributes:
        calls: requests for turns of the policy, in the order of their arrival.
        refusal: why the last refused call was refused; empty if no call was refused.
    """

    def __init__(
        self,
        ignored: frozenset[str] = frozenset(),
        most_branches: int = MOST_BRANCHES,
        policy_format: PolicyFormat | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        self.calls: asyncio.Queue[ChatCall] = asyncio.Queue()
        self.refusal = ""
        self._ignored = ignored
        self._accepted_values = {**_HARMLESS_VALUES, **(sampling or {})}
        self._most_branches = most_branches
        self._policy_format = policy_format or PolicyFormat()
        self._branches: list[_Branch] = []
        # Calls that have no turn yet.
        self._unanswered: deque[_Call] = deque()
        # Calls whose answer no client has received yet.
        self._undelivered: list[_Call] = []
        self._turn_count = 0

    def answer(self, turn: Turn) -> bool:
        """Answer the oldest waiting call with the policy's turn. Return whether the turn has an unread call."""
        call = self._unanswered.popleft()
        branch = call.branch
        read_turn = ReadTurn()
        if branch.tools:
            read_turn = _read(turn, self._policy_format, branch.tools)
        message = _message_of(turn, self._turn_count, read_turn, self._policy_format)
        branch.messages = [*call.messages, _plain(message, "the turn")]
        branch.has_waiting_call = False
        self._turn_count += 1
        finish_reason = "stop"
        if turn.is_truncated:
            finish_reason = "length"
        elif read_turn.calls:
            finish_reason = "tool_calls"
        choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
        sampled = len(turn.token_ids)
        completion = {
            "id": f"chatcmpl-{self._turn_count}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": [choice],
            "usage": {
                "prompt_tokens": turn.prompt_tokens,
                "completion_tokens": sampled,
                "total_tokens": turn.prompt_tokens + sampled,
            },
        }
        call.completion.set_result(completion)
        return read_turn.is_unread

    @contextmanager
    def completion_of(self, body: Any) -> Iterator[asyncio.Future[dict[str, Any]]]:
        """Forward a request to the policy, and yield the future of its ``chat.completion``.

        If the client of a call has disconnected, a request that repeats the call gets the call's answer. The block must
        await the future without cancelling it. Raises RefusedCallError.
        """
        try:
            call = self._call_of(body)
        except RefusedCallError:
            raise
        # Answer with status 400: after status 500, a client would repeat the call for ever.
        except Exception as error:
            error_name = type(error).__name__
            raise RefusedCallError(400, f"the call can't be read: {error_name}: {error}") from error
        call.has_client = True
        try:
            yield call.completion
            # The block has ended without an exception, so the client has received the answer.
            self._undelivered.remove(call)
        finally:
            call.has_client = False

    def _call_of(self, body: Any) -> _Call:
        """Return the undelivered call that a request repeats. For any other request, queue and return a new call."""
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise RefusedCallError(400, "expected a JSON object with a list of messages")
        if _is_deeper(body, _MAX_LEVELS):
            raise RefusedCallError(400, f"expected at most {_MAX_LEVELS} levels of nested JSON")
        stream_options = body.get("stream_options")
        if not isinstance(stream_options, dict | None):
            raise RefusedCallError(
                400, f"stream_options: got {short_json(stream_options)}, expected an object"
            )
        max_tokens = self._max_tokens_of(body)
        messages = [_plain(m, f"message {i}") for i, m in enumerate(body["messages"])]
        tools = _checked_tools(body.get("tools") or [])
        if not messages:
            raise RefusedCallError(400, "messages: got none, expected one or more")
        for call in self._undelivered:
            is_repeated = call.messages == messages and call.branch.tools == tools
            if is_repeated and not call.has_client:
                return call
        branch_number = self._branch_of(messages, tools)
        if branch_number == len(self._branches):
            self._branches.append(_Branch(tools))
        branch = self._branches[branch_number]
        branch.has_waiting_call = True
        call = _Call(branch, messages, asyncio.get_running_loop().create_future())
        self._undelivered.append(call)
        self._unanswered.append(call)
        new_messages = messages[len(branch.messages) :]
        tool_calls = branch.messages[-1].get("tool_calls", ()) if branch.messages else ()
        chat_call = ChatCall(new_messages, tools, max_tokens, branch_number, tool_calls)
        self.calls.put_nowait(chat_call)
        return call

    def _branch_of(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
        """Return the number of the newest branch that these messages continue, or else the number of a new branch."""
        deviations = [branch.deviation(messages, tools) for branch in self._branches]
        fitting_numbers = [number for number, reason in enumerate(deviations) if not reason]
        if fitting_numbers:
            return fitting_numbers[-1]
        if len(deviations) == self._most_branches:
            raise RefusedCallError(
                409,
                f"{deviations[-1]}: the call continues none of the session's {len(deviations)} branches, and there may "
                "be no more (environment.options.branches)",
            )
        return len(deviations)

    def _max_tokens_of(self, body: Mapping[str, Any]) -> int | None:
        """Return the largest number of tokens of the turn; None without a limit.

        Raises RefusedCallError for a field that would change the run's own settings.
        """
        for name, value in body.items():
            is_known = name in _READ_FIELDS or name in _LIMITS or name in self._ignored
            is_harmless = value in _EMPTY_VALUES or value == self._accepted_values.get(name)
            if not (is_known or is_harmless):
                raise RefusedCallError(
                    400,
                    f"{name}: got {short_json(value)}, but the run's settings hold: leave it out, or name it in "
                    "environment.options.ignored",
                )
        limits: list[Any] = []
        for name in _LIMITS:
            if name not in self._ignored and body.get(name) is not None:
                limits.append(body[name])
        if any(type(limit) is not int or limit < 1 for limit in limits):
            raise RefusedCallError(400, f"{_LIMITS[0]}: got {limits}, expected 1 or more")
        return min(limits, default=None)


def _plain(message: Any, location: str) -> dict[str, Any]:
    """Convert a message to the form that chat templates take. Messages that differ only in form become equal."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RefusedCallError(
            400, f"{location}: got {short_json(message)}, expected a role and content"
        )
    if message["role"] not in _ROLES:
        raise RefusedCallError(
            400,
            f"{location}: got the role {short_json(message['role'])}, expected one of {', '.join(_ROLES)}",
        )
    content = _text_of(message.get("content"), location)
    is_turn = message["role"] == "assistant"
    if is_turn:
        content = content.strip()
    role = message["role"]
    if role == "developer":
        role = "system"
    plain = {"role": role, "content": content}
    if is_turn and message.get("tool_calls"):
        plain["tool_calls"] = _plain_calls(message["tool_calls"], location)
    for name in ("tool_call_id", "name"):
        if not is_turn and name in message:
            plain[name] = message[name]
            if not isinstance(plain[name], str | None):
                raise RefusedCallError(
                    400, f"{location}: {name}: got {short_json(plain[name])}, expected text"
                )
    return plain


def _text_of(content: Any, location: str) -> str:
    """Return the text of a message's ``content``: text, null, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    # The loop refuses None, like any other part that is no text.
    parts = content if isinstance(content, list) else [None]
    texts = []
    for part in parts:
        text = None
        if isinstance(part, dict) and part.get("type") == "text":
            text = part.get("text")
        if not isinstance(text, str):
            raise RefusedCallError(
                400, f"{location}: got {short_json(content)}, expected only text"
            )
        texts.append(text)
    return "".join(texts)


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value has more than ``levels`` nested lists and objects."""
    level_values = [value]
    for _ in range(levels + 1):
        containers = [v for v in level_values if isinstance(v, list | dict)]
        if not containers:
            return False
        level_values = []
        for container in containers:
            level_values += container.values() if isinstance(container, dict) else container
    return True


def _checked_tools(tools: Any) -> list[dict[str, Any]]:
    """Return ``tools`` if they are definitions of functions. Raises RefusedCallError."""
    if not isinstance(tools, list):
        raise RefusedCallError(400, f"tools: got {short_json(tools)}, expected a list")
    for tool in tools:
        function = None
        if isinstance(tool, dict):
            function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RefusedCallError(
                400,
                f'tools: got {short_json(tool)}, expected {{"type": "function", "function": {{"name": ...}}}}',
            )
    return tools


def _plain_calls(calls: Any, location: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RefusedCallError(
            400, f"{location}: tool_calls: got {short_json(calls)}, expected a list"
        )
    return [_plain_call(call, location) for call in calls]


def _plain_call(call: Any, location: str) -> dict[str, Any]:
    """Convert a tool call of a message: its arguments, JSON text in the API, become an object."""
    try:
        name = call["function"]["name"]
        arguments = json.loads(call["function"]["arguments"])
        if not isinstance(name, str) or _is_deeper(arguments, _MAX_LEVELS):
            raise ValueError(name)
        function = {"name": name, "arguments": arguments}
        return {"type": "function", "id": call["id"], "function": function}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RefusedCallError(
            400,
            f"{location}: got the tool call {short_json(call)}, expected id, name and arguments as JSON",
        ) from error


def _read(turn: Turn, policy_format: PolicyFormat, tools: Sequence[Mapping[str, Any]]) -> ReadTurn:
    """Read the calls in a turn, without the calls that its thoughts mention."""
    if policy_format.tool_format is None:
        return ReadTurn()
    text = turn.text if turn.special_text is None else turn.special_text
    tool_format = ToolFormat(policy_format.tool_format, tuple(policy_format.added_tokens))
    if policy_format.tool_format == GPT_OSS:
        # The parser itself reads the channels.
        return tool_format.read(text, tools)
    start, end = answer_bounds(turn.open_thought + text, policy_format.thought_marks)
    start = max(start - len(turn.open_thought), 0)
    end = max(end - len(turn.open_thought), 0)
    if not text[start:end].strip():
        # The turn consists of thoughts, so a call in them is lost.
        lost_turn = tool_format.read(text, tools)
        return ReadTurn(is_unread=bool(lost_turn.calls) or lost_turn.is_unread)
    read_turn = tool_format.read(text[start:end], tools)
    if any(_is_deeper(dict(call.arguments), _MAX_LEVELS) for call in read_turn.calls):
        return ReadTurn(is_unread=True)
    thoughts = text[:start].rstrip()
    if thoughts and read_turn.calls:
        read_turn = replace(read_turn, content=f"{thoughts}\n\n{read_turn.content}".rstrip())
    return read_turn


def _message_of(
    turn: Turn, number: int, read_turn: ReadTurn, policy_format: PolicyFormat
) -> dict[str, Any]:
    """Return a turn as a message. ``number``: number of the turn."""
    if not read_turn.calls:
        content = turn.text
        if policy_format.tool_format == GPT_OSS and turn.answer is not None:
            content = turn.answer
        return {"role": "assistant", "content": content}
    content = read_turn.content
    for token in policy_format.special_tokens:
        content = content.replace(token, "")
    calls: list[dict[str, Any]] = []
    for i, call in enumerate(read_turn.calls):
        function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
        calls.append({"id": f"call_{number}_{i}", "type": "function", "function": function})
    return {"role": "assistant", "content": content or None, "tool_calls": calls}
