"""A Python interpreter as an environment: a turn with a snippet between marks is answered with what the snippet prints;
any other turn is the answer to the problem, and ends the episode.

A snippet runs by bubblewrap (``bwrap``) in an interpreter of its own that has the standard library and nothing else:
namespaces of its own for users, processes, network, IPC and mounts; a root that holds the interpreter and the system's
libraries, all of it read-only, without /proc, /dev, /etc, /tmp and any home; no capabilities; one process and one
thread, no socket, no shared memory, no further namespaces (a filter of system calls); bounds on CPU seconds, memory,
output and wall time. There is no way to run it without: where bubblewrap can't do all that, a run is refused.
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
_STARTED = b"started\n"
# The snippet comes by standard input, so no argument is too long for it.
_BOOT = (
    f"import sys; print({_STARTED.decode().strip()!r}, flush=True)\n"
    "try: exec(compile(sys.stdin.read(), '<snippet>', 'exec'), {'__name__': '__main__'})\n"
    "except Exception as error: print(type(error).__name__, error, sep=': ')\n"
)


class Python:
    """``begin``, ``end``: the marks; a snippet without ``end`` goes on to the end of the turn, as after a stop text.
    ``seconds``: of CPU time; of wall time twice as much. ``longest_output``: bytes that are kept; a byte may
    take a token, and ``environment.max_observation_tokens`` holds for what is said."""

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
        self._marks = begin, end
        self._run = functools.partial(
            run_snippet, seconds=seconds, memory_mib=memory_mib, longest_output=longest_output
        )

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Raise ValueError where these are no options, and SandboxError, which says what to install or to allow, where
        snippets can't be run protected."""
        cls(**options)
        answer = asyncio.run(run_snippet("print(6 * 7)"))
        if answer != "42":
            raise SandboxError(f"print(6 * 7) was answered {answer[:300]!r}, expected 42")

    async def reset(self, problem: Problem) -> str:
        return ""

    async def step(self, turn: Turn) -> Step:
        begin, end = self._marks
        _, mark, rest = turn.text.partition(begin)
        if not mark:
            return Step(done=True, is_scored=True)
        return Step(await self._run(rest.partition(end)[0].strip()))

    async def close(self) -> None:
        return


async def run_snippet(
    snippet: str, *, seconds: int = 5, memory_mib: int = 256, longest_output: int = 900
) -> str:
    """What ``snippet`` prints, without white space around it, or what it raises, and in brackets what ended it.

    As many run at once in this process as there are cores. Raises SandboxError where the sandbox doesn't start.
    """
    async with _places(asyncio.get_running_loop()):
        with _command(seconds, memory_mib) as (command, filter_fd):
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, env={}, pass_fds=[filter_fd]
            )
        assert process.stdin is not None
        assert process.stdout is not None
        printed, ending = b"", ""
        try:
            process.stdin.write(snippet.encode(errors="replace"))
            process.stdin.close()
            started = await _first_line(process.stdout)
            if started != _STARTED:
                said = started.decode(errors="replace").strip()
                raise SandboxError(f"the sandbox does not start: {said[:500]}; {ALLOW}")
            async with asyncio.timeout(2 * seconds):
                while len(printed) <= longest_output and (more := await process.stdout.read(65536)):
                    printed += more
                if len(printed) > longest_output:
                    ending = f"[cut after {longest_output} bytes]"
                elif code := await process.wait():
                    # bwrap says by which signal as a shell does; a snippet may end itself with such a code.
                    is_signal = code - 128 in set(signal.Signals)
                    ending = f"[{describe_exit(128 - code if is_signal else code)}]"
                    if code - 128 == signal.SIGXCPU:
                        ending = f"[used up {seconds} s of CPU time]"
        except TimeoutError:
            ending = f"[did not end within {2 * seconds} s]"
        finally:
            # The kernel then ends what is inside, too: it is of a process namespace, and bwrap its parent.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # What nobody reads would keep wait() from returning.
            await process.stdout.read()
            await process.wait()
    return f"{printed[:longest_output].decode(errors='replace').strip()} {ending}".strip()


async def _first_line(output: asyncio.StreamReader) -> bytes:
    """Raises SandboxError where none comes in time: not the snippet's fault."""
    try:
        return await asyncio.wait_for(output.readline(), _START_S)
    except TimeoutError:
        raise SandboxError(f"the sandbox did not start within {_START_S:g} s") from None


@functools.cache
def _places(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    return asyncio.Semaphore(os.cpu_count() or 1)


@contextlib.contextmanager
def _command(seconds: int, memory_mib: int) -> Iterator[tuple[list[str], int]]:
    """The words that run ``_BOOT`` in the sandbox, and a descriptor that they name. Raises SandboxError."""
    sandbox, limits = find_program("bwrap"), find_program("prlimit")
    with open_filter(is_snippet=True) as filter_fd:
        # At its first bound of CPU time the kernel says what it ends; one who goes on is killed a second later.
        yield [
            limits,
            f"--as={memory_mib << 20}", f"--cpu={seconds}:{seconds + 1}", "--fsize=0", "--core=0", "--nofile=32",
            sandbox, *NAMESPACES, "--unshare-net",
            *_files(), "--remount-ro", "/", "--chdir", "/", "--seccomp", str(filter_fd),
            "--", str(_interpreter()), "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT,
        ], filter_fd  # fmt: skip


def _interpreter() -> Path:
    """That of the virtual environment's base, which needs nothing of ours."""
    return Path(sys.executable).resolve()


def _files() -> Iterator[str]:
    """The interpreter, its standard library without packages, and the system's libraries, read-only."""
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    python = Path(sys.base_prefix).resolve() / "lib"
    yield from system_libraries()
    for path in dict.fromkeys([python, standard]):
        if path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    yield from ("--ro-bind", str(_interpreter()), str(_interpreter()))
    for packages in ("site-packages", "dist-packages"):
        if (standard / packages).is_dir():
            yield from ("--tmpfs", str(standard / packages))
            yield from ("--remount-ro", str(standard / packages))
