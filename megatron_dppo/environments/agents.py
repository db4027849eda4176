"""Agents as environments: a program that knows nothing of training talks to the policy by OpenAI's chat completions,
and its session becomes an episode.

The session's server listens where the agent runs, under a key of its own. A call waits until the policy's turn is
sampled, and its messages, as far as they are new, are what the environment says. A call whose messages don't begin with
those of a branch, as a shortened history's or another agent's, begins a branch of its own. Calls that come together
are answered one after another.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO, Any

from aiohttp import web

from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments import ChatCall, Step, Turn
from megatron_dppo.environments.sandbox import ALLOW, SandboxError, sandboxed
from megatron_dppo.system import processes, secret_variables
from megatron_dppo.system.imports import ImportTargetError, import_target, is_async
from megatron_dppo.system.network import host_fault, url_host

MODEL = "policy"
_LARGEST_BYTES = 1 << 20
_CANCEL_S = 5.0
_SANDBOX_START_S = 30.0
_KEEP_ALIVE_S = 15.0
_SHOWN = 80
_MOST_LEVELS = 200
"""Of brackets in a call; Python's own limit of nested calls, in which all of it is written and compared, is 1,000."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ANSWERED = {"model", "messages", "tools", "stream", "stream_options", "user", "metadata"}
_LIMITS = ("max_completion_tokens", "max_tokens")
# Values that ask for nothing.
_HARMLESS: Mapping[str, Any] = {
    "n": 1, "tool_choice": "auto", "parallel_tool_calls": True, "logprobs": False, "store": False,
    "frequency_penalty": 0, "presence_penalty": 0, "response_format": {"type": "text"},
}  # fmt: skip
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"[\w.]+:\w+")
MOST_BRANCHES = 8


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
    that its server listens on. ``branches``: at most so many in a session. ``tool_format``: how the policy writes calls
    of tools, a name in ``TOOL_FORMATS``. ``sandbox``: a command runs in a sandbox (``sandbox.sandboxed``), which shows
    it ``sandbox_paths`` beside the current folder.
    """

    makes_prompts = True

    def __init__(
        self,
        agent: str,
        ignored: Sequence[str] = (),
        host: str = "127.0.0.1",
        branches: int = MOST_BRANCHES,
        tool_format: str = "hermes",
        sandbox: bool = False,
        sandbox_paths: Sequence[str] = (),
    ) -> None:
        self._agent, self._host = agent, host
        self._sandbox_paths = tuple(sandbox_paths) if sandbox else None
        self._conversation = Conversation(frozenset(ignored), branches, TOOL_FORMATS[tool_format])
        self._task: asyncio.Task[AgentResult] | None = None
        self._server: web.AppRunner | None = None

    @staticmethod
    def check_options(
        agent: str,
        ignored: Sequence[str] = (),
        host: str = "127.0.0.1",
        branches: int = MOST_BRANCHES,
        tool_format: str = "hermes",
        sandbox: bool = False,
        sandbox_paths: Sequence[str] = (),
    ) -> None:
        """Raise ValueError where there is no such function or program, or no such format, and SandboxError where this
        machine has no sandbox for it."""
        agent_of(agent)
        if not isinstance(ignored, list | tuple):
            raise ValueError(f"options: ignored: got {ignored!r}, expected a list of names")
        if fault := host_fault(host):
            raise ValueError(f"options: host: {fault}")
        if type(branches) is not int or branches < 1:
            raise ValueError(f"options: branches: got {branches!r}, expected 1 or more")
        if tool_format not in TOOL_FORMATS:
            raise ValueError(
                f"options: tool_format: got {tool_format!r}, expected {' or '.join(TOOL_FORMATS)}"
            )
        if not isinstance(sandbox, bool):
            raise ValueError(f"options: sandbox: got {sandbox!r}, expected true or false")
        if not isinstance(sandbox_paths, list | tuple):
            raise ValueError(
                f"options: sandbox_paths: got {sandbox_paths!r}, expected a list of paths"
            )
        if sandbox and _FUNCTION.fullmatch(agent):
            raise ValueError(
                f"options: sandbox: got the function {agent}, expected a command: a function runs in this process"
            )
        if sandbox:
            check_sandbox(sandbox_paths)

    async def reset(self, problem: Problem) -> ChatCall:
        run, key = agent_of(self._agent, self._sandbox_paths), secrets.token_urlsafe(32)
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


def agent_of(agent: str, sandbox_paths: Sequence[str] | None = None) -> AgentFunction:
    """The function that runs an agent. ``sandbox_paths``: what a command's sandbox shows beside the current folder;
    None: it has no sandbox. Raises ValueError where there is none."""
    if not _FUNCTION.fullmatch(agent):
        command = shlex.split(agent)
        if not command:
            raise ValueError(
                "options: agent: got no command, expected one or package.module:function"
            )
        if shutil.which(command[0]) is None:
            raise ValueError(f"options: agent: there is no program {command[0]!r} here")
        return lambda problem, session: _run_command(command, problem, session, sandbox_paths)
    try:
        function: AgentFunction = import_target(agent)
    except ImportTargetError as error:
        raise ValueError(f"options: the agent {agent!r} can't be imported: {error}") from error
    if not callable(function) or not is_async(function):
        kind = type(function).__name__
        raise ValueError(
            f"options: agent: {agent} is a {kind}, expected an async function of a problem and a session"
        )
    try:
        inspect.signature(function).bind("problem", "session")
    except TypeError as error:
        raise ValueError(
            f"options: agent: {agent}: {error}; expected an async function of a problem and a session"
        ) from error
    return function


async def _run_command(
    command: Sequence[str],
    problem: Problem,
    session: AgentSession,
    sandbox_paths: Sequence[str] | None = None,
) -> AgentResult:
    variables = {
        "OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key,
        "OPENAI_MODEL": session.model,
    }  # fmt: skip
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        given.write(json.dumps(asdict(problem)).encode())
        given.seek(0)
        with (
            _walled(command, sandbox_paths, variables) as (words, environment, inherited),
            processes.guarded(
                words,
                environment=environment,
                stdin=given.fileno(),
                output=output.fileno(),
                errors=errors.fileno(),
                inherited=inherited,
                # Of the worker, for what runs in it: node, for one, reserves far more than it uses.
                lifts_memory_limit=True,
            ) as process,
        ):
            code = await _ended(process)
        printed, complaints = _end_of(output), _end_of(errors)
    if code != 0:
        text = (complaints or printed)[-2 * _SHOWN :]
        raise RuntimeError(f"its command {processes.describe_exit(code)}: {text}")
    return result_of(printed)


@contextmanager
def _walled(
    command: Sequence[str], sandbox_paths: Sequence[str] | None, variables: Mapping[str, str]
) -> Iterator[tuple[Sequence[str], Mapping[str, str], Sequence[int]]]:
    """The words and the variables of a command, in its sandbox where it has one, and the descriptors that it needs."""
    environment = {**secret_variables.program_environment(os.environ), **variables}
    if sandbox_paths is None:
        yield command, environment, ()
        return
    with sandboxed(command, environment, sandbox_paths) as (words, environment, filter_fd):
        yield words, environment, [filter_fd]


def check_sandbox(paths: Sequence[str]) -> None:
    """Raise SandboxError where no program can be run in a sandbox with ``paths``."""
    variables = secret_variables.program_environment(os.environ)
    with sandboxed(["echo", "42"], variables, paths) as (words, environment, filter_fd):
        try:
            done = subprocess.run(
                words, env=environment, pass_fds=[filter_fd], capture_output=True, text=True, check=False,
                timeout=_SANDBOX_START_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            message = f"the sandbox did not start within {_SANDBOX_START_S:g} s"
            raise SandboxError(message) from None
    if done.stdout != "42\n":
        raise SandboxError(f"the sandbox does not start: {done.stderr.strip()[:500]}; {ALLOW}")


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
    return file.read().decode(errors="replace").strip()


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
    """What the last line of a command's output says. Raises ValueError for a reward that is no number, and an answer
    that is neither text nor a number."""
    try:
        values = json.loads(output.rpartition("\n")[2])
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    for name, (kinds, expected) in _RESULTS.items():
        if name not in values:
            continue
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{name}: got {_shortened(value)}, expected {expected}")
        return float(value) if name == "reward" else str(value)
    return None


_RESULTS = {"reward": ((int, float), "a number"), "answer": ((str, int, float), "text or a number")}
"""What a command's last line may say, the first of these: its types, and how they are called."""


# --- its calls of tools

ToolFormat = Callable[[str], tuple[str, list[tuple[Any, Any]]]]
"""A turn's text -> what of it is no call, and of each call the name and its arguments. Raises KeyError, TypeError or
ValueError for what can't be read."""


def of_hermes(text: str) -> tuple[str, list[tuple[Any, Any]]]:
    """``<tool_call>{"name", "arguments"}</tool_call>``, any number of them between text."""
    calls = [json.loads(call) for call in _CALL.findall(text)]
    return _CALL.sub("", text).strip(), [(call["name"], call["arguments"]) for call in calls]


def of_llama3(text: str) -> tuple[str, list[tuple[Any, Any]]]:
    """``{"name", "parameters"}`` and nothing else: one call."""
    call = json.loads(text)
    return "", [(call["name"], call["parameters"])]


TOOL_FORMATS: Mapping[str, ToolFormat] = {"hermes": of_hermes, "llama3_json": of_llama3}
"""``environment.options.tool_format`` -> what reads it."""

# --- its messages


class RefusedCallError(Exception):
    """A call that can't be answered; ``status``: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class _Branch:
    """``messages``: up to its last turn; ``tools``: of each of its calls. ``is_asked``: its next turn is awaited."""

    tools: list[dict[str, Any]]
    messages: Sequence[dict[str, Any]] = ()
    is_asked: bool = True

    def deviation(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        """Why a call with all these messages doesn't go on with it; empty where it does."""
        if self.is_asked:
            return "another call of it waits"
        for i, expected in enumerate(self.messages):
            sent = messages[i] if i < len(messages) else None
            if sent != expected:
                return f"message {i}: got {_shortened(sent)}, expected {_shortened(expected)}"
        if tools != self.tools:
            return "tools: got others than in its first call"
        new = messages[len(self.messages) :]
        if not new or any(message["role"] == "assistant" for message in new):
            return f"expected messages of others after the policy's turn, message {len(self.messages) - 1}"
        return ""


@dataclass(eq=False)
class _Call:
    """``completion``: the answer to it. ``is_waited_for``: else its client gave up, and may ask again."""

    branch: _Branch
    messages: list[dict[str, Any]]
    completion: asyncio.Future[dict[str, Any]]
    is_waited_for: bool = True


class Conversation:
    """The messages of a session, by branch, and the calls that wait for the policy's turns.

    ``calls``: what is asked of the policy, one after another. ``refusal``: why the last call that was refused was.
    """

    def __init__(
        self,
        ignored: frozenset[str] = frozenset(),
        most_branches: int = MOST_BRANCHES,
        tool_format: ToolFormat = of_hermes,
    ) -> None:
        self.calls: asyncio.Queue[ChatCall] = asyncio.Queue()
        self.refusal = ""
        self._ignored, self._most_branches, self._tool_format = ignored, most_branches, tool_format
        self._branches: list[_Branch] = []
        # Without a turn; and those that no client has the answer to.
        self._unanswered: deque[_Call] = deque()
        self._open: list[_Call] = []
        self._turns = 0

    def answer(self, turn: Turn) -> None:
        """The policy's turn, for the call that was asked first."""
        call = self._unanswered.popleft()
        branch = call.branch
        tool_format = self._tool_format if branch.tools else None
        message, tool_calls = _message_of(turn.text, self._turns, tool_format)
        branch.messages = [*call.messages, _plain(message, "the turn")]
        branch.is_asked = False
        self._turns += 1
        reason = "length" if turn.is_truncated else "tool_calls" if tool_calls else "stop"
        sampled = len(turn.token_ids)
        completion = {
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
        call.completion.set_result(completion)

    @contextmanager
    def asked(self, body: Any) -> Iterator[asyncio.Future[dict[str, Any]]]:
        """Put a request to the policy, or take up one that its client gave up: a ``chat.completion`` to come. The
        block must await it without cancelling it. Raises RefusedCallError."""
        try:
            call = self._call_of(body)
        except RefusedCallError:
            raise
        # A client repeats a call that ends with 500, and would repeat this one for ever.
        except Exception as error:
            kind = type(error).__name__
            raise RefusedCallError(400, f"the call can't be read: {kind}: {error}") from error
        call.is_waited_for = True
        try:
            yield call.completion
            self._open.remove(call)
        finally:
            call.is_waited_for = False

    def _call_of(self, body: Any) -> _Call:
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise RefusedCallError(400, "expected a JSON object with a list of messages")
        if _is_deeper(body, _MOST_LEVELS):
            raise RefusedCallError(400, f"expected at most {_MOST_LEVELS} levels of nested JSON")
        stream_options = body.get("stream_options")
        if not isinstance(stream_options, dict | None):
            raise RefusedCallError(
                400, f"stream_options: got {_shortened(stream_options)}, expected an object"
            )
        limit = self._limit_of(body)
        messages = [_plain(m, f"message {i}") for i, m in enumerate(body["messages"])]
        tools = _checked_tools(body.get("tools") or [])
        if not messages:
            raise RefusedCallError(400, "messages: got none, expected one or more")
        for call in self._open:
            if not call.is_waited_for and (call.messages, call.branch.tools) == (messages, tools):
                return call
        number = self._branch_of(messages, tools)
        if number == len(self._branches):
            self._branches.append(_Branch(tools))
        branch = self._branches[number]
        branch.is_asked = True
        call = _Call(branch, messages, asyncio.get_running_loop().create_future())
        self._open.append(call)
        self._unanswered.append(call)
        new = messages[len(branch.messages) :]
        self.calls.put_nowait(ChatCall(new, tools, limit, number))
        return call

    def _branch_of(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
        """The number of the branch that goes on, of those that may the newest; else the next one."""
        deviations = [branch.deviation(messages, tools) for branch in self._branches]
        fitting = [number for number, deviation in enumerate(deviations) if not deviation]
        if fitting:
            return fitting[-1]
        if len(deviations) == self._most_branches:
            raise RefusedCallError(
                409,
                f"{deviations[-1]}: it goes on with none of the session's {len(deviations)} branches, and there may be "
                "no more (environment.options.branches)",
            )
        return len(deviations)

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


def _plain(message: Any, where: str) -> dict[str, Any]:
    """A message as chat templates take it, and the same for all ways in which clients write it."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RefusedCallError(
            400, f"{where}: got {_shortened(message)}, expected a role and content"
        )
    if message["role"] not in _ROLES:
        raise RefusedCallError(
            400,
            f"{where}: got the role {_shortened(message['role'])}, expected one of {', '.join(_ROLES)}",
        )
    content = _text_of(message.get("content"), where)
    is_turn = message["role"] == "assistant"
    role = "system" if message["role"] == "developer" else message["role"]
    plain = {"role": role, "content": content.strip() if is_turn else content}
    if is_turn and message.get("tool_calls"):
        plain["tool_calls"] = _plain_calls(message["tool_calls"], where)
    for name in ("tool_call_id", "name"):
        if not is_turn and name in message:
            plain[name] = message[name]
            if not isinstance(plain[name], str | None):
                raise RefusedCallError(
                    400, f"{where}: {name}: got {_shortened(plain[name])}, expected text"
                )
    return plain


def _text_of(content: Any, where: str) -> str:
    """Return the text of a message's ``content``: text, null, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [None]
    texts = []
    for part in parts:
        text = None
        if isinstance(part, dict) and part.get("type") == "text":
            text = part.get("text")
        if not isinstance(text, str):
            raise RefusedCallError(400, f"{where}: got {_shortened(content)}, expected text alone")
        texts.append(text)
    return "".join(texts)


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether JSON is nested in more than ``levels`` lists and objects."""
    values = [value]
    for _ in range(levels + 1):
        containers = [v for v in values if isinstance(v, list | dict)]
        values = [part for v in containers for part in (v.values() if isinstance(v, dict) else v)]
        if not containers:
            return False
    return True


def _checked_tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise RefusedCallError(400, f"tools: got {_shortened(tools)}, expected a list")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RefusedCallError(
                400,
                f'tools: got {_shortened(tool)}, expected {{"type": "function", "function": {{"name": ...}}}}',
            )
    return tools


def _plain_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RefusedCallError(
            400, f"{where}: tool_calls: got {_shortened(calls)}, expected a list"
        )
    return [_plain_call(call, where) for call in calls]


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        if not isinstance(name, str) or _is_deeper(arguments, _MOST_LEVELS):
            raise ValueError(name)
        function = {"name": name, "arguments": arguments}
        return {"type": "function", "id": call["id"], "function": function}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RefusedCallError(
            400,
            f"{where}: got the tool call {_shortened(call)}, expected id, name and arguments as JSON",
        ) from error


def _message_of(
    text: str, turn: int, tool_format: ToolFormat | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A turn's text as a message, and the calls of tools in it. Text with one that can't be read stays text. ``turn``:
    its number; ``tool_format`` None: there are no tools."""
    try:
        content, named = (text, []) if tool_format is None else tool_format(text)
        if _is_deeper([a for _, a in named], _MOST_LEVELS):
            raise ValueError("arguments that no call may have")
        functions = [{"name": str(n), "arguments": json.dumps(dict(a))} for n, a in named]
    except (KeyError, TypeError, ValueError, RecursionError):
        functions = []
    if not functions:
        return {"role": "assistant", "content": text}, []
    calls = [
        {"id": f"call_{turn}_{i}", "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": calls}, calls


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


# --- its server


async def _serve(conversation: Conversation, key: str, host: str) -> tuple[web.AppRunner, str]:
    """A running server, and the base URL of its API."""

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        refusal: RefusedCallError
        try:
            sent = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(sent, f"Bearer {key}".encode()):
                raise RefusedCallError(401, "the key is not this session's")
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            refusal = RefusedCallError(
                413, f"the body has more than the {_LARGEST_BYTES} bytes that a call may have"
            )
        except RefusedCallError as error:
            refusal = error
        conversation.refusal = str(refusal)
        answer = {"message": str(refusal), "type": "invalid_request_error", "code": None}
        # OpenAI's clients repeat a call that ended with 409 otherwise.
        headers = {"x-should-retry": "false"}
        return web.json_response({"error": answer}, status=refusal.status, headers=headers)

    async def models(_: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_dppo"}
        return web.json_response({"object": "list", "data": [model]})

    async def complete(request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        # A charset that Python has not is a LookupError; deeply nested brackets are a RecursionError.
        except (ValueError, LookupError, RecursionError) as error:
            raise RefusedCallError(400, f"the body is no JSON: {error}") from error
        with conversation.asked(body) as completion:
            if body.get("stream"):
                return await _stream(request, body, completion)
            # The session waits on where a caller has gone: its client may ask again.
            return web.json_response(await asyncio.shield(completion))

    app = web.Application(middlewares=[check], client_max_size=_LARGEST_BYTES)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", complete)])
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    return runner, f"http://{url_host(host)}:{runner.addresses[0][1]}/v1"


async def _stream(
    request: web.Request, body: Mapping[str, Any], completion: asyncio.Future[dict[str, Any]]
) -> web.StreamResponse:
    """The answer as server-sent events: comments until the turn is there, then all of it in one piece, as its calls
    are known only then."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    while not completion.done():
        await response.write(b": the policy's turn is under way\n\n")
        await asyncio.wait([completion], timeout=_KEEP_ALIVE_S)
    answer = completion.result()
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
    for choices, used in zip(pieces, usage, strict=True):
        chunk = {**answer, "object": "chat.completion.chunk", "choices": choices, "usage": used}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response
