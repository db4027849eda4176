"""Agents as environments: a program that knows nothing of training talks to the policy by OpenAI's chat completions,
and its session becomes an episode.

The session's server listens where the agent runs, under a key of its own. A call waits until the policy's turn is
sampled, and its messages, as far as they are new, are what the environment says. What the policy sampled is told from
what it was sent: a call whose messages don't begin with the session's own is refused (409).
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
import json
import os
import re
import secrets
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web

from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments import ChatCall, Step, Turn
from megatron_dppo.system import processes

MODEL = "policy"
_LARGEST_BYTES = 1 << 20
_CANCEL_S = 5.0
_SHOWN = 80
_ANSWERED = {"model", "messages", "tools", "stream", "stream_options", "user", "metadata"}
_LIMITS = ("max_completion_tokens", "max_tokens")
# Values that ask for nothing.
_HARMLESS: Mapping[str, Any] = {
    "n": 1, "tool_choice": "auto", "parallel_tool_calls": True, "logprobs": False, "store": False,
    "frequency_penalty": 0, "presence_penalty": 0, "response_format": {"type": "text"},
}  # fmt: skip
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True)
class AgentSession:
    """Where an agent's calls go: what OpenAI's clients take."""

    base_url: str
    api_key: str
    model: str = MODEL


AgentResult = float | str | None
"""What an agent ends with: its reward; a text that the run's rewards score; None: they score the last turn's."""
AgentFunction = Callable[[Problem, AgentSession], Coroutine[Any, Any, AgentResult]]


class Agent:
    """An agent's session as an episode.

    ``agent``: ``package.module:function``, an AgentFunction, or else a command. A command gets OPENAI_BASE_URL,
    OPENAI_API_KEY and OPENAI_MODEL as variables and the problem as JSON on standard input; a last line of output
    ``{"reward": 0.5}`` or ``{"answer": "8"}`` is its result, and an exit code other than 0 a fault. ``ignored``: fields
    of a request that are dropped, which are refused otherwise, as the run's own settings hold. ``host``: the address
    that its server listens on.
    """

    makes_prompts = True

    def __init__(self, agent: str, ignored: Sequence[str] = (), host: str = "127.0.0.1") -> None:
        self._agent, self._host = agent, host
        self._conversation = Conversation(frozenset(ignored))
        self._task: asyncio.Task[AgentResult] | None = None
        self._server: web.AppRunner | None = None

    @staticmethod
    def check_options(agent: str, **_: Any) -> None:
        """Raise ValueError where there is no such function or program."""
        agent_of(agent)

    async def reset(self, problem: Problem) -> ChatCall:
        run, key = agent_of(self._agent), secrets.token_urlsafe(32)
        self._server, url = await _serve(self._conversation, key, self._host)
        self._task = asyncio.create_task(run(problem, AgentSession(url, key)))
        first = await self._next()
        if isinstance(first, Step):
            raise RuntimeError(f"{self._refusal()}the agent ended without a call")
        return first

    async def step(self, turn: Turn) -> Step:
        self._conversation.answer(turn)
        said = await self._next()
        return said if isinstance(said, Step) else Step(said)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_CANCEL_S)
        if self._server is not None:
            await self._server.cleanup()

    async def _next(self) -> ChatCall | Step:
        """The agent's next call, or its end."""
        assert self._task is not None
        call = asyncio.ensure_future(self._conversation.calls.get())
        try:
            await asyncio.wait([call, self._task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
        if not self._task.done():
            return call.result()
        try:
            result = self._task.result()
        except Exception as error:
            why = f"{type(error).__name__}: {str(error)[:_SHOWN]}"
            raise RuntimeError(f"{self._refusal()}the agent failed: {why}") from error
        if isinstance(result, int | float):
            return Step(done=True, reward=float(result))
        if not isinstance(result, AgentResult):
            raise TypeError(f"the agent's result is {result!r}, expected a number, text or None")
        return Step(done=True, is_scored=True, scored_text=result)

    def _refusal(self) -> str:
        refusal = self._conversation.refusal
        return f"a call was refused: {refusal}; " if refusal else ""


# --- the program


def agent_of(agent: str) -> AgentFunction:
    """The function that runs an agent. Raises ValueError where there is none."""
    if not _FUNCTION.fullmatch(agent):
        command = shlex.split(agent)
        if not command:
            raise ValueError(
                "options: agent: got no command, expected one or package.module:function"
            )
        return lambda problem, session: _run_command(command, problem, session)
    module, _, name = agent.partition(":")
    try:
        function: AgentFunction = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"options: the agent {agent!r} can't be imported: {error}") from error
    return function


async def _run_command(
    command: Sequence[str], problem: Problem, session: AgentSession
) -> AgentResult:
    variables = {
        "OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key,
        "OPENAI_MODEL": session.model,
    }  # fmt: skip
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
        given.write(json.dumps(asdict(problem)).encode())
        given.seek(0)
        process = processes.start_process(
            command,
            environment=os.environ | variables,
            stdin=given.fileno(),
            output=output.fileno(),
            # Of the worker, for what runs in it: node, for one, reserves far more than it uses.
            lifts_memory_limit=True,
        )
        try:
            code = await _ended(process)
        finally:
            processes.kill_families([process])
        output.seek(max(0, output.seek(0, os.SEEK_END) - 65536))
        text = output.read().decode(errors="replace").strip()
    if code != 0:
        raise RuntimeError(f"its command {processes.describe_exit(code)}: {text[-2 * _SHOWN :]}")
    return result_of(text)


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit code, without a thread that waits for it."""
    loop, ended, descriptor = (
        asyncio.get_running_loop(),
        asyncio.Event(),
        os.pidfd_open(process.pid),
    )
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


def result_of(output: str) -> AgentResult:
    """What the last line of a command's output says."""
    try:
        values = json.loads(output.rpartition("\n")[2])
    except ValueError:
        return None
    return values.get("reward", values.get("answer")) if isinstance(values, dict) else None


# --- its messages


class RefusedCallError(Exception):
    """A call that can't be answered; ``status``: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Conversation:
    """The messages of a session, and the call that waits for the policy's turn.

    ``calls``: what is asked of the policy, one after another. ``refusal``: why the last call that was refused was.
    """

    def __init__(self, ignored: frozenset[str] = frozenset()) -> None:
        self.calls: asyncio.Queue[ChatCall] = asyncio.Queue()
        self.refusal = ""
        self._ignored = ignored
        self._history: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] = []
        self._asked: list[dict[str, Any]] | None = None
        self._turn: asyncio.Future[Turn] = asyncio.Future()
        self._turns, self._is_waiting = 0, False

    def answer(self, turn: Turn) -> None:
        """The policy's turn, for the call that waits for it."""
        self._turn.set_result(turn)

    async def complete(self, body: Any) -> dict[str, Any]:
        """The answer to the body of a request: a ``chat.completion``. Raises RefusedCallError."""
        try:
            self._ask(body)
        except RefusedCallError as refusal:
            self.refusal = str(refusal)
            raise
        self._is_waiting = True
        try:
            # The session waits on where a caller has gone: its client may ask again.
            turn = await asyncio.shield(self._turn)
        finally:
            self._is_waiting = False
        assert self._asked is not None
        message, calls = _message_of(turn.text, self._turns if self._tools else None)
        self._history, self._asked = [*self._asked, _plain(message, "the turn")], None
        self._turn = asyncio.Future()
        self._turns += 1
        reason = "length" if turn.is_truncated else "tool_calls" if calls else "stop"
        sampled = len(turn.token_ids)
        return {
            "id": f"chatcmpl-{self._turns}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": [
                {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
            ],
            "usage": {
                "prompt_tokens": turn.prompt_tokens,
                "completion_tokens": sampled,
                "total_tokens": turn.prompt_tokens + sampled,
            },
        }

    def _ask(self, body: Any) -> None:
        """Put a request to the policy, unless it is one that already waits."""
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise RefusedCallError(400, "expected a JSON object with a list of messages")
        limit = self._limit_of(body)
        messages = [_plain(m, f"message {i}") for i, m in enumerate(body["messages"])]
        tools = body.get("tools") or []
        if self._is_waiting:
            raise RefusedCallError(
                409, "another call of this session waits, expected one at a time"
            )
        if self._asked is not None and (messages, tools) == (self._asked, self._tools):
            return
        if self._asked is not None:
            raise RefusedCallError(
                409, "another call of this session was given up, expected it again"
            )
        new = self._new_of(messages, tools)
        self._asked, self._tools = messages, tools
        self.calls.put_nowait(ChatCall(new, tools, limit))

    def _limit_of(self, body: Mapping[str, Any]) -> int | None:
        """The most tokens of the turn. Raises RefusedCallError for settings that are not the caller's to make."""
        for name, value in body.items():
            is_known = name in _ANSWERED or name in _LIMITS or name in self._ignored
            if not (is_known or value is None or value == _HARMLESS.get(name)):
                raise RefusedCallError(
                    400,
                    f"{name}: got {_shortened(value)}, but the run's settings hold: leave it out, or name it in "
                    "environment.options.ignored",
                )
        limits = [body[name] for name in _LIMITS if body.get(name) is not None]
        if any(type(limit) is not int or limit < 1 for limit in limits):
            raise RefusedCallError(400, f"{_LIMITS[0]}: got {limits}, expected 1 or more")
        return min(limits, default=None)

    def _new_of(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The messages since the turn before. Raises RefusedCallError where those up to it are not the session's."""
        if not messages:
            raise RefusedCallError(400, "messages: got none, expected one or more")
        history = self._history
        if not history:
            return messages
        rule = "a session is one conversation, and what was said in it stays (docs/environments.md)"
        for i, expected in enumerate(history):
            sent = messages[i] if i < len(messages) else None
            if sent != expected:
                raise RefusedCallError(
                    409,
                    f"message {i}: got {_shortened(sent)}, expected {_shortened(expected)}: {rule}",
                )
        if tools != self._tools:
            raise RefusedCallError(409, f"tools: got others than in the first call, but {rule}")
        new = messages[len(history) :]
        if not new or any(message["role"] == "assistant" for message in new):
            raise RefusedCallError(
                409,
                f"expected messages of others after the policy's turn, message {len(history) - 1}: {rule}",
            )
        return new


def _plain(message: Any, where: str) -> dict[str, Any]:
    """A message as chat templates take it, and the same for all ways in which clients write it."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RefusedCallError(
            400, f"{where}: got {_shortened(message)}, expected a role and content"
        )
    content = message.get("content") or ""
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise RefusedCallError(400, f"{where}: got {_shortened(content)}, expected text alone")
        content = "".join(part["text"] for part in content)
    is_turn = message["role"] == "assistant"
    role = "system" if message["role"] == "developer" else message["role"]
    plain = {"role": role, "content": content.strip() if is_turn else content}
    if is_turn and message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call, where) for call in message["tool_calls"]]
    return plain | {n: message[n] for n in ("tool_call_id", "name") if not is_turn and n in message}


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    try:
        function = {
            "name": call["function"]["name"],
            "arguments": json.loads(call["function"]["arguments"]),
        }
        return {"type": "function", "id": call["id"], "function": function}
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedCallError(
            400,
            f"{where}: got the tool call {_shortened(call)}, expected id, name and arguments as JSON",
        ) from error


def _message_of(text: str, turn: int | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A turn's text as a message, and the calls of tools in it, ``<tool_call>{"name", "arguments"}</tool_call>``. Text
    with one that can't be read stays text. ``turn``: its number; None: there are no tools."""
    calls = []
    try:
        for i, found in enumerate(_CALL.findall(text) if turn is not None else ()):
            call = json.loads(found)
            function = {"name": str(call["name"]), "arguments": json.dumps(dict(call["arguments"]))}
            calls.append({"id": f"call_{turn}_{i}", "type": "function", "function": function})
    except (KeyError, TypeError, ValueError):
        calls = []
    if not calls:
        return {"role": "assistant", "content": text}, []
    content = _CALL.sub("", text).strip() or None
    return {"role": "assistant", "content": content, "tool_calls": calls}, calls


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


# --- its server


async def _serve(conversation: Conversation, key: str, host: str) -> tuple[web.AppRunner, str]:
    """A running server, and the base URL of its API."""

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            sent = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(sent, f"Bearer {key}".encode()):
                raise RefusedCallError(401, "the key is not this session's")
            return await handler(request)
        except RefusedCallError as refusal:
            error = {"message": str(refusal), "type": "invalid_request_error", "code": None}
            # OpenAI's clients repeat a call that ended with 409 otherwise.
            headers = {"x-should-retry": "false"}
            return web.json_response({"error": error}, status=refusal.status, headers=headers)

    async def models(_: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_dppo"}
        return web.json_response({"object": "list", "data": [model]})

    async def complete(request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError as error:
            raise RefusedCallError(400, f"the body is no JSON: {error}") from error
        answer = await conversation.complete(body)
        return (
            await _stream(request, body, answer)
            if body.get("stream")
            else web.json_response(answer)
        )

    app = web.Application(middlewares=[check], client_max_size=_LARGEST_BYTES)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", complete)])
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    address = f"[{host}]" if ":" in host else host
    return runner, f"http://{address}:{runner.addresses[0][1]}/v1"


async def _stream(
    request: web.Request, body: Mapping[str, Any], answer: Mapping[str, Any]
) -> web.StreamResponse:
    """The answer as server-sent events: the whole turn in one piece, as its calls are known only then."""
    (choice,) = answer["choices"]
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": i, **c} for i, c in enumerate(message["tool_calls"])]
    pieces = [
        [{"index": 0, "delta": message, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}],
    ]
    usage: list[Any] = [None, None]
    if (body.get("stream_options") or {}).get("include_usage"):
        pieces.append([])
        usage.append(answer["usage"])
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for choices, used in zip(pieces, usage, strict=True):
        chunk = {**answer, "object": "chat.completion.chunk", "choices": choices, "usage": used}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response
