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

from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments.agent_conversation import MODEL, shortened
from megatron_dppo.environments.sandbox import ALLOW, SandboxError, sandboxed
from megatron_dppo.system import processes, secret_variables
from megatron_dppo.system.imports import ImportTargetError, import_target, is_async

_SANDBOX_START_S = 30.0
_SHOWN = 80
FUNCTION_PATH = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True)
class AgentSession:
    """Address and key of the policy for an agent, as OpenAI's clients take them."""

    base_url: str
    api_key: str
    model: str = MODEL


AgentResult = float | str | None
"""Result of an agent: its reward; or a text that the run's rewards score; or None: they score the last turn's text."""
AgentFunction = Callable[[Problem, AgentSession], Coroutine[Any, Any, AgentResult]]


def agent_of(agent: str, sandbox_paths: Sequence[str] | None = None) -> AgentFunction:
    """Return the function that runs an agent. Raises ValueError for an unknown one.

    ``sandbox_paths`` are the paths in a command's sandbox in addition to the current folder; None: no sandbox.
    """
    if not FUNCTION_PATH.fullmatch(agent):
        command = shlex.split(agent)
        if not command:
            raise ValueError(
                "options: agent: got no command, expected one or package.module:function"
            )
        if shutil.which(command[0]) is None:
            raise ValueError(f"options: agent: there is no program {command[0]!r} here")
        return partial(_run_command, command, sandbox_paths=sandbox_paths)
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
        tempfile.TemporaryFile() as problem_file,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        problem_file.write(json.dumps(asdict(problem)).encode())
        problem_file.seek(0)
        with (
            _walled(command, sandbox_paths, variables) as (sandbox_command, environment, inherited),
            processes.guarded(
                sandbox_command,
                environment=environment,
                stdin=problem_file.fileno(),
                output=output.fileno(),
                errors=errors.fileno(),
                inherited=inherited,
                # The limit is the worker's and too low for programs in it: node, for one, reserves far more than it
                # uses.
                lifts_memory_limit=True,
            ) as process,
        ):
            code = await _ended(process)
        printed = _end_of(output)
        complaints = _end_of(errors)
    if code != 0:
        text = (complaints or printed)[-2 * _SHOWN :]
        raise RuntimeError(f"its command {processes.describe_exit(code)}: {text}")
    return result_of(printed)


@contextmanager
def _walled(
    command: Sequence[str],
    sandbox_paths: Sequence[str] | None,
    variables: Mapping[str, str],
) -> Iterator[tuple[Sequence[str], Mapping[str, str], Sequence[int]]]:
    """Yield the command and the variables, in a sandbox where there is one, and the descriptors that it needs."""
    environment = {**secret_variables.program_environment(os.environ), **variables}
    if sandbox_paths is None:
        yield command, environment, ()
        return
    with sandboxed(command, environment, sandbox_paths) as (
        sandbox_command,
        environment,
        filter_fd,
    ):
        yield sandbox_command, environment, [filter_fd]


def check_sandbox(paths: Sequence[str]) -> None:
    """Raise SandboxError where a program can't run in a sandbox with ``paths``."""
    variables = secret_variables.program_environment(os.environ)
    with sandboxed(["echo", "42"], variables, paths) as (sandbox_command, environment, filter_fd):
        try:
            completed = subprocess.run(
                sandbox_command,
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
    file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
    return file.read().decode(errors="replace").strip()


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the exit code, without a thread."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


def result_of(output: str) -> AgentResult:
    """Return the result in the last line of a command's output; None without one.

    Raises ValueError for a reward that is no number, and for an answer that is neither text nor a number.
    """
    try:
        values = json.loads(output.rpartition("\n")[2])
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    for name, (kinds, expectation) in _RESULTS.items():
        if name not in values:
            continue
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{name}: got {shortened(value)}, expected {expectation}")
        if name == "reward":
            return float(value)
        return str(value)
    return None


_RESULTS = {"reward": ((int, float), "a number"), "answer": ((str, int, float), "text or a number")}
"""Fields of a command's last line, of which the first present one counts, with their types and names of types."""
