"""A Python interpreter as an environment: a turn with a snippet between marks is answered with the snippet's output.

Any other turn is the answer to the problem, and ends the episode.

A snippet runs in a new interpreter, with only the standard library, inside a sandbox of bubblewrap (``bwrap``):

- new namespaces for users, processes, network, IPC and mounts; no capabilities;
- a root with the interpreter and the system's libraries, read-only, without /proc, /dev, /etc, /tmp and any home;
- a filter of system calls: one process, one thread, no socket, no shared memory, no other namespaces;
- limits on CPU seconds, memory, output and wall time.

A snippet never runs without these limits: if bubblewrap can't provide them, the run is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
import sysconfig
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.environments import Step, Turn
from megatron_dppo.environments.sandbox import (
    ALLOW,
    NAMESPACES,
    SandboxError,
    find_program,
    open_filter,
    system_libraries,
)
from megatron_dppo.system.processes import describe_exit

if TYPE_CHECKING:
    from megatron_dppo.data.trajectory import Problem

_START_S = 30.0
"""Longest time for the sandbox to start."""
_STARTED = b"started\n"
# The program that runs a snippet. It reads the snippet from standard input: an argument has a limited length.
_BOOT = (
    f"import sys; print({_STARTED.decode().strip()!r}, flush=True)\n"
    "try: exec(compile(sys.stdin.read(), '<snippet>', 'exec'), {'__name__': '__main__'})\n"
    "except Exception as error: print(type(error).__name__, error, sep=': ')\n"
)


class Python:
    """The interpreter's settings.

    Args:
        begin: mark before a snippet.
        end: mark after a snippet. If the turn lacks the mark, the snippet is the rest of the turn. For example, a turn
            lacks the mark if the mark is a stop text of the run.
        seconds: limit of the CPU time; the limit of the wall time is twice as long.
        memory_mib: limit of a snippet's address space.
        longest_output: largest number of bytes of output that are kept. A byte may become one token, and
            ``environment.max_observation_tokens`` limits the tokens.
    """

    def __init__(
        self,
        begin: str = "```python",
        end: str = "```",
        seconds: int = 5,
        memory_mib: int = 256,
        longest_output: int = 900,
    ) -> None:
        if not begin or not end or min(seconds, memory_mib, longest_output) < 1:
            raise ValueError("expected marks that are not empty, and bounds of 1 or more")
        self._begin_mark = begin
        self._end_mark = end
        self._run = functools.partial(
            run_snippet, seconds=seconds, memory_mib=memory_mib, longest_output=longest_output
        )

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Raise ValueError for bad options, and SandboxError if the sandbox does not work on this machine.

        The error says what to install or to allow.
        """
        cls(**options)
        answer = asyncio.run(run_snippet("print(6 * 7)"))
        if answer != "42":
            raise SandboxError(f"print(6 * 7) was answered {answer[:300]!r}, expected 42")

    async def reset(self, problem: Problem) -> str:
        return ""

    async def step(self, turn: Turn) -> Step:
        _, begin_mark, text_after = turn.text.partition(self._begin_mark)
        if not begin_mark:
            return Step(done=True, is_scored=True)
        snippet = text_after.partition(self._end_mark)[0].strip()
        return Step(await self._run(snippet))

    async def close(self) -> None:
        return


async def run_snippet(
    snippet: str, *, seconds: int = 5, memory_mib: int = 256, longest_output: int = 900
) -> str:
    """Run ``snippet`` and return its output without surrounding white space.

    If the snippet raises an exception, the output ends with the exception's type and message. If the snippet was
    stopped, or ended with an exit code other than 0, a text in brackets follows. This process runs at most as many
    snippets at the same time as there are cores. Raises SandboxError if the sandbox does not start.
    """
    async with _snippet_slots(asyncio.get_running_loop()):
        with _command(seconds, memory_mib) as (command, filter_fd):
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, env={}, pass_fds=[filter_fd]
            )
        assert process.stdin is not None
        assert process.stdout is not None
        output = b""
        ending = ""
        wall_seconds = 2 * seconds
        try:
            process.stdin.write(snippet.encode(errors="replace"))
            process.stdin.close()
            first_line = await _first_line(process.stdout)
            if first_line != _STARTED:
                sandbox_error = first_line.decode(errors="replace").strip()
                raise SandboxError(f"the sandbox does not start: {sandbox_error[:500]}; {ALLOW}")
            async with asyncio.timeout(wall_seconds):
                while len(output) <= longest_output:
                    piece = await process.stdout.read(65536)
                    if not piece:
                        break
                    output += piece
                if len(output) > longest_output:
                    ending = f"[cut after {longest_output} bytes]"
                else:
                    ending = _ending_of(await process.wait(), seconds)
        except TimeoutError:
            ending = f"[did not end within {wall_seconds} s]"
        finally:
            # The snippet is in a process namespace below bwrap: when bwrap ends, the kernel ends the snippet.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # Unread output would keep wait() from returning.
            await process.stdout.read()
            await process.wait()
    text = output[:longest_output].decode(errors="replace").strip()
    return f"{text} {ending}".strip()


def _ending_of(code: int, seconds: int) -> str:
    """Return the text about the exit code of a snippet: empty for 0, else in brackets."""
    if code == 0:
        return ""
    # bwrap reports a signal as a shell does: 128 plus the signal. A snippet may also exit with one of these codes.
    signal_number = code - 128
    if signal_number == signal.SIGXCPU:
        return f"[used up {seconds} s of CPU time]"
    if signal_number in set(signal.Signals):
        code = -signal_number
    return f"[{describe_exit(code)}]"


async def _first_line(output: asyncio.StreamReader) -> bytes:
    """Return the first line of the output. ``_BOOT`` writes this line before the snippet starts.

    Raises SandboxError if the line does not come in time: the snippet can't be the cause.
    """
    try:
        return await asyncio.wait_for(output.readline(), _START_S)
    except TimeoutError:
        raise SandboxError(f"the sandbox did not start within {_START_S:g} s") from None


@functools.cache
def _snippet_slots(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    """The slots for running snippets. Each event loop has a semaphore, because a semaphore belongs to one loop."""
    return asyncio.Semaphore(os.cpu_count() or 1)


@contextlib.contextmanager
def _command(seconds: int, memory_mib: int) -> Iterator[tuple[list[str], int]]:
    """Yield the command that runs ``_BOOT`` in the sandbox, and a descriptor that it needs. Raises SandboxError."""
    bwrap = find_program("bwrap")
    prlimit = find_program("prlimit")
    with open_filter(is_snippet=True) as filter_fd:
        # At the soft limit of CPU time the kernel sends SIGXCPU, so the exit code tells the reason. At the hard limit,
        # one second later, the kernel kills the process.
        yield (
            [
                prlimit,
                f"--as={memory_mib << 20}",
                f"--cpu={seconds}:{seconds + 1}",
                "--fsize=0",
                "--core=0",
                "--nofile=32",
                bwrap,
                *NAMESPACES,
                "--unshare-net",
                *_files(),
                "--remount-ro",
                "/",
                "--chdir",
                "/",
                "--seccomp",
                str(filter_fd),
                "--",
                str(_interpreter()),
                "-I",
                "-S",
                "-B",
                "-X",
                "utf8",
                "-c",
                _BOOT,
            ],
            filter_fd,
        )


def _interpreter() -> Path:
    """Return the interpreter that the virtual environment was made from. It does not see the environment's packages."""
    return Path(sys.executable).resolve()


def _files() -> Iterator[str]:
    """Yield bwrap's arguments that mount the interpreter, its standard library and the system's libraries, read-only.

    Empty folders hide the installed packages.
    """
    standard_library = Path(sysconfig.get_path("stdlib")).resolve()
    python_libraries = Path(sys.base_prefix).resolve() / "lib"
    yield from system_libraries()
    for path in dict.fromkeys([python_libraries, standard_library]):
        if path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    yield from ("--ro-bind", str(_interpreter()), str(_interpreter()))
    for packages in ("site-packages", "dist-packages"):
        folder = standard_library / packages
        if folder.is_dir():
            yield from ("--tmpfs", str(folder))
            yield from ("--remount-ro", str(folder))
