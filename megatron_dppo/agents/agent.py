"""Agents as environments: a program that is not written for training calls the policy by OpenAI's chat completions.

A session of the program becomes an episode. Each session has its own server and key, on the machine on which the agent
runs. A call waits until the policy's turn is sampled. The new messages of a call are the environment's observation.

A branch is one conversation of a session. If a call has a branch's tools and messages, and further messages of others,
the call continues the branch. Any other call begins a new branch, for example because the agent shortened its history,
or because another agent calls. Simultaneous calls are answered in the order of their arrival.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from megatron_dppo.agents.conversation import MOST_BRANCHES, Conversation, unread_fields
from megatron_dppo.agents.programs import (
    FUNCTION_PATH,
    AgentResult,
    AgentSession,
    agent_of,
    check_sandbox,
)
from megatron_dppo.agents.server import serve
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.engine.tool_parsers import parser_names
from megatron_dppo.environments import ChatCall, PolicyFormat, Step, Turn
from megatron_dppo.system.network import host_fault

_CANCEL_S = 5.0
"""Longest wait for a cancelled agent to end."""
_MAX_ERROR_SHOWN = 80
"""Largest number of characters of an agent's error that the error of an episode quotes."""


class Agent:
    """An agent's session as an episode.

    Args:
        agent: an AgentFunction, named as ``package.module:function``; or a command. A command receives
            OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL as environment variables, and the problem as JSON on
            standard input. The command's result is the last line of its output, ``{"reward": 0.5}`` or
            ``{"answer": "8"}``. An exit code other than 0 is an error.
        ignored: fields of a request that are dropped. A request with any other field that would change the run's
            settings is refused.
        host: address that the session's server listens on.
        branches: largest number of branches in a session.
        tool_format: format of the policy's tool calls, SGLang's name of a parser; None: the format of the calls that
            the chat template writes.
        sandbox: whether a command runs in a sandbox (``sandbox.sandboxed``).
        sandbox_paths: paths that the sandbox contains in addition to the current folder.
    """

    makes_prompts = True

    def __init__(
        self,
        agent: str,
        ignored: Sequence[str] = (),
        host: str = "127.0.0.1",
        branches: int = MOST_BRANCHES,
        tool_format: str | None = None,
        sandbox: bool = False,
        sandbox_paths: Sequence[str] = (),
    ) -> None:
        _check_values(ignored, branches, tool_format)
        _check_sandbox_values(agent, sandbox, sandbox_paths)
        self._agent = agent
        self._host = host
        # None: without a sandbox.
        self._sandbox_paths = tuple(sandbox_paths) if sandbox else None
        self._ignored = frozenset(ignored)
        self._most_branches = branches
        self._tool_format = tool_format
        self._policy_format = PolicyFormat(tool_format)
        self._sampling: Mapping[str, float] = {}
        self._conversation = Conversation()
        self._task: asyncio.Task[AgentResult] | None = None
        self._server: web.AppRunner | None = None

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Raise ValueError for bad options, and SandboxError if the requested sandbox does not work on this machine."""
        environment = cls(**options)
        agent_of(environment._agent)
        # Check the host here, once: the constructor runs for every episode, and ``host_fault`` resolves the name.
        fault = host_fault(environment._host)
        if fault:
            raise ValueError(f"options: host: {fault}")
        if environment._sandbox_paths is not None:
            check_sandbox(environment._sandbox_paths)

    @classmethod
    def option_warnings(cls, ignored: Sequence[str] = (), **_options: Any) -> list[str]:
        """Return a warning for each name in ``ignored`` that drops nothing."""
        return [f"ignored: {warning}" for warning in unread_fields(ignored)]

    def note_sampling(self, sampling: Mapping[str, float]) -> None:
        """Accept calls that repeat the run's own ``sampling`` settings. Called before ``reset``."""
        self._sampling = sampling

    def note_policy_format(self, policy_format: PolicyFormat) -> None:
        """Read the policy's turns in this form. Called before ``reset``."""
        tool_format = self._tool_format or policy_format.tool_format
        self._policy_format = replace(policy_format, tool_format=tool_format)

    async def reset(self, problem: Problem) -> ChatCall:
        run_agent = agent_of(self._agent, self._sandbox_paths)
        self._conversation = Conversation(
            self._ignored, self._most_branches, self._policy_format, self._sampling
        )
        key = secrets.token_urlsafe(32)
        self._server, url = await serve(self._conversation, key, self._host)
        self._task = asyncio.create_task(run_agent(problem, AgentSession(url, key)))
        first_call = await self._next_call_or_end()
        if isinstance(first_call, Step):
            raise RuntimeError(f"{self._refusal()}the agent ended without a call")
        return first_call

    async def step(self, turn: Turn) -> Step:
        has_unread_call = self._conversation.answer(turn)
        call_or_end = await self._next_call_or_end()
        if isinstance(call_or_end, Step):
            return replace(call_or_end, has_unread_call=has_unread_call)
        return Step(call_or_end, has_unread_call=has_unread_call)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_CANCEL_S)
        if self._server is not None:
            await self._server.cleanup()

    async def _next_call_or_end(self) -> ChatCall | Step:
        """Return the agent's next call; or, if the agent ends, the last step of the episode."""
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
            reason = f"{type(error).__name__}: {str(error)[:_MAX_ERROR_SHOWN]}"
            raise RuntimeError(f"{self._refusal()}the agent failed: {reason}") from error
        if isinstance(result, int | float):
            return Step(done=True, reward=float(result))
        if not isinstance(result, AgentResult):
            raise TypeError(f"the agent's result is {result!r}, expected a number, text or None")
        return Step(done=True, is_scored=True, scored_text=result)

    def _refusal(self) -> str:
        """Return the last refusal as the beginning of an error message: the refusal may have ended the agent.

        The text is empty if no call was refused.
        """
        refusal = self._conversation.refusal
        if refusal:
            return f"a call was refused: {refusal}; "
        return ""


def _check_values(ignored: Any, branches: Any, tool_format: str | None) -> None:
    is_list = isinstance(ignored, list | tuple)
    if not is_list or not all(isinstance(name, str) for name in ignored):
        raise ValueError(f"options: ignored: got {ignored!r}, expected a list of names")
    # ``isinstance`` would accept true and false.
    if type(branches) is not int or branches < 1:
        raise ValueError(f"options: branches: got {branches!r}, expected 1 or more")
    if tool_format is not None and tool_format not in parser_names():
        raise ValueError(
            f"options: tool_format: got {tool_format!r}, expected nothing, or one of {', '.join(parser_names())}"
        )


def _check_sandbox_values(agent: str, sandbox: Any, sandbox_paths: Any) -> None:
    if not isinstance(sandbox, bool):
        raise ValueError(f"options: sandbox: got {sandbox!r}, expected true or false")
    is_list = isinstance(sandbox_paths, list | tuple)
    if not is_list or not all(isinstance(path, str) and path for path in sandbox_paths):
        raise ValueError(f"options: sandbox_paths: got {sandbox_paths!r}, expected a list of paths")
    if sandbox and FUNCTION_PATH.fullmatch(agent):
        raise ValueError(
            f"options: sandbox: got the function {agent}, expected a command: a function runs in this process"
        )
