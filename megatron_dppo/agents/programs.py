"""Agents as programs: Python functions, and commands that run in processes, with or without a sandbox."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any

from megatron_dppo.agents.conversation import MODEL
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments.sandbox import ALLOW, SandboxError, sandboxed
from megatron_dppo.system import processes, secret_variables
from megatron_dppo.system.imports import ImportTargetError, import_target, is_async
from megatron_dppo.system.text import short_json

_SANDBOX_START_S = 30.0
_MAX_OUTPUT_SHOWN = 160
"""The error of a failed command quotes this many characters from the end of the command's output."""
_MAX_OUTPUT_READ = 65536
"""Only this many bytes at the end of a command's output are read."""
FUNCTION_PATH = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True)
class AgentSession:
    """Address and key of the policy for an agent, as OpenAI's clients take them."""

    base_url: str
    api_key: str
    model: str = MODEL


AgentResult = float | str | None
"""Result of an agent: a reward, or a text that the run's rewards score. None: the rewards score the last turn."""
AgentFunction = Callable[[Problem, AgentSession], Coroutine[Any, Any, AgentResult]]


def agent_of(agent: str, sandbox_paths: Sequence[str] | None = None) -> AgentFunction:
    """Return the function that runs an agent. Raises ValueError for an unknown agent.

    ``agent``: ``package.module:function``, or a command. ``sandbox_paths``: the paths that a command's sandbox has in
    addition to the current folder; None: no sandbox.
    """
    if not FUNCTION_PATH.fullmatch(agent):
        command = shlex.split(agent)
        if not command:
            raise ValueError(
                "options: agent: got no command, expected a command or package.module:function"
            )
        if shutil.which(command[0]) is None:
            raise ValueError(f"options: agent: there is no program {command[0]!r} here")
        return partial(_run_command, command, sandbox_paths=sandbox_paths)
    try:
        function: AgentFunction = import_target(agent)
    except ImportTargetError as error:
        raise ValueError(f"options: the agent {agent!r} can't be imported: {error}") from error
    if not callable(function) or not is_async(function):
        type_name = type(function).__name__
        raise ValueError(
            f"options: agent: {agent} is a {type_name}, expected an async function of a problem and a session"
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
    """Run a command with the problem as JSON on its standard input, and return its result."""
    variables = {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "OPENAI_MODEL": session.model,
    }
    with (
        tempfile.TemporaryFile() as problem_file,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        problem_file.write(json.dumps(asdict(problem)).encode())
        problem_file.seek(0)
        with (
            _command_to_start(command, variables, sandbox_paths) as (
                whole_command,
                environment,
                inherited,
            ),
            processes.guarded(
                whole_command,
                environment=environment,
                stdin=problem_file.fileno(),
                output=output.fileno(),
                errors=errors.fileno(),
                inherited=inherited,
                # Lift the worker's limit of address space. It is too low for some programs: node, for example, reserves
                # far more than it uses.
                lifts_memory_limit=True,
            ) as process,
        ):
            code = await _exit_code_of(process)
        output_text = _end_of(output)
        error_text = _end_of(errors)
    if code != 0:
        shown_text = (error_text or output_text)[-_MAX_OUTPUT_SHOWN:]
        raise RuntimeError(f"its command {processes.describe_exit(code)}: {shown_text}")
    return result_of(output_text)


@contextmanager
def _command_to_start(
    command: Sequence[str], variables: Mapping[str, str], sandbox_paths: Sequence[str] | None
) -> Iterator[tuple[Sequence[str], Mapping[str, str], Sequence[int]]]:
    """Yield the command to start, its environment, and the descriptors that it must inherit.

    If ``sandbox_paths`` is None, the command to start is ``command``. Otherwise bubblewrap is started, and runs
    ``command`` in a sandbox.
    """
    environment = {**secret_variables.program_environment(os.environ), **variables}
    if sandbox_paths is None:
        yield command, environment, ()
        return
    with sandboxed(command, environment, sandbox_paths) as (whole_command, environment, filter_fd):
        yield whole_command, environment, [filter_fd]


def check_sandbox(paths: Sequence[str]) -> None:
    """Raise SandboxError if a program can't run in a sandbox with ``paths``."""
    variables = secret_variables.program_environment(os.environ)
    with sandboxed(["echo", "42"], variables, paths) as (whole_command, environment, filter_fd):
        try:
            completed = subprocess.run(
                whole_command,
                env=environment,
                pass_fds=[filter_fd],
                capture_output=True,
                text=True,
                check=False,
                timeout=_SANDBOX_START_S,
            )
        except subprocess.TimeoutExpired:
            message = f"the sandbox did not start within {_SANDBOX_START_S:g} s"
            raise SandboxError(message) from None
    if completed.stdout != "42\n":
        raise SandboxError(f"the sandbox does not start: {completed.stderr.strip()[:500]}; {ALLOW}")


def _end_of(file: IO[bytes]) -> str:
    """Return the text at the end of ``file``."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MAX_OUTPUT_READ))
    return file.read().decode(errors="replace").strip()


async def _exit_code_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of the process without a thread, and return its exit code."""
    loop = asyncio.get_running_loop()
    has_ended = asyncio.Event()
    # A process descriptor becomes readable when its process ends.
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


def result_of(output: str) -> AgentResult:
    """Return the result in the last line of a command's output: its ``reward``, or else its ``answer``.

    Returns None if the last line is no JSON object with one of these fields. Raises ValueError if the reward is no
    number, or if the answer is neither text nor a number.
    """
    last_line = output.rpartition("\n")[2]
    try:
        fields = json.loads(last_line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    if "reward" in fields:
        reward = fields["reward"]
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise ValueError(f"reward: got {short_json(reward)}, expected a number")
        return float(reward)
    if "answer" in fields:
        answer = fields["answer"]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise ValueError(f"answer: got {short_json(answer)}, expected text or a number")
        return str(answer)
    return None
