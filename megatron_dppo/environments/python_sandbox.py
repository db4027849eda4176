"""A Python interpreter as an environment: a turn with a snippet between marks is answered with the snippet's output.

Any other turn is the answer to the problem, and ends the episode.

A snippet runs by bubblewrap (``bwrap``) in an interpreter of its own that has only the standard library: its own
namespaces for users, processes, network, IPC and mounts; a root that holds the interpreter and the system's libraries,
all of it read-only, without /proc, /dev, /etc, /tmp and any home; no capabilities; one process and one thread, no
socket, no shared memory, no further namespaces (a filter of system calls); limits on CPU seconds, memory, output and
wall time. A snippet never runs without these limits: where bubblewrap can't provide them, a run is refused.
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
# The snippet comes by standard input, so it can be longer than an argument.
_BOOT = (
    f"import sys; print({_STARTED.decode().strip()!r}, flush=True)\n"
    "try: exec(compile(sys.stdin.read(), '<snippet>', 'exec'), {'__name__': '__main__'})\n"
    "except Exception as error: print(type(error).__name__, error, sep=': ')\n"
)


class Python:
    """The interpreter's settings.

    Args:
        begin: mark before a snippet.
        end: mark after a snippet. If the turn lacks it, for example because it is a stop text, the snippet is the rest
            of the turn.
        seconds: CPU time; the limit of the wall time is twice as long.
        memory_mib: address space of a snippet.
        longest_output: bytes of output that are kept. A byte may take a token, and
            ``environment.max_observation_tokens`` limits the observation.
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
        self._marks = begin, end
        self._run = functools.partial(
            run_snippet,
            seconds=seconds,
            memory_mib=memory_mib,
            longest_output=longest_output,
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
        begin, end = self._marks
        _, mark, code = turn.text.partition(begin)
        if not mark:
            return Step(done=True, is_scored=True)
        return Step(await self._run(code.partition(end)[0].strip()))

    async def close(self) -> None:
        return


async def run_snippet(
    snippet: str,
    *,
    seconds: int = 5,
    memory_mib: int = 256,
    longest_output: int = 900,
) -> str:
    """Run ``snippet`` and return what it printed, its exception included, without surrounding white space.

    A text in brackets follows if the snippet was stopped, or ended with an exit code other than 0. This process runs at
    most as many snippets at the same time as there are cores. Raises SandboxError if the sandbox does not start.
    """
    async with _places(asyncio.get_running_loop()):
        with _command(seconds, memory_mib) as (command, filter_fd):
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT,
                env={},
                pass_fds=[filter_fd],
            )
        assert process.stdin is not None
        assert process.stdout is not None
        printed, ending = b"", ""
        try:
            process.stdin.write(snippet.encode(errors="replace"))
            process.stdin.close()
            started = await _first_line(process.stdout)
            if started != _STARTED:
                sandbox_error = started.decode(errors="replace").strip()
                raise SandboxError(f"the sandbox does not start: {sandbox_error[:500]}; {ALLOW}")
            async with asyncio.timeout(2 * seconds):
                while len(printed) <= longest_output and (more := await process.stdout.read(65536)):
                    printed += more
                if len(printed) > longest_output:
                    ending = f"[cut after {longest_output} bytes]"
                elif code := await process.wait():
                    # bwrap reports a signal as a shell does; a snippet may also end itself with such a code.
                    is_signal = code - 128 in set(signal.Signals)
                    ending = f"[{describe_exit(128 - code if is_signal else code)}]"
                    if code - 128 == signal.SIGXCPU:
                        ending = f"[used up {seconds} s of CPU time]"
        except TimeoutError:
            ending = f"[did not end within {2 * seconds} s]"
        finally:
            # The kernel then ends the processes inside, because they are in a process namespace whose parent is bwrap.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # Unread output would keep wait() from returning.
            await process.stdout.read()
            await process.wait()
    return f"{printed[:longest_output].decode(errors='replace').strip()} {ending}".strip()


async def _first_line(output: asyncio.StreamReader) -> bytes:
    """Return the sandbox's first line. Raises SandboxError if none comes in time: the snippet cannot be the cause."""
    try:
        return await asyncio.wait_for(output.readline(), _START_S)
    except TimeoutError:
        raise SandboxError(f"the sandbox did not start within {_START_S:g} s") from None


@functools.cache
def _places(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    return asyncio.Semaphore(os.cpu_count() or 1)


@contextlib.contextmanager
def _command(seconds: int, memory_mib: int) -> Iterator[tuple[list[str], int]]:
    """Yield the command that runs ``_BOOT`` in the sandbox, and a descriptor that it needs. Raises SandboxError."""
    sandbox = find_program("bwrap")
    limits = find_program("prlimit")
    with open_filter(is_snippet=True) as filter_fd:
        # At the first limit of CPU time the kernel sends a signal that tells the reason; a second later it kills the
        # process.
        yield (
            [
                limits,
                f"--as={memory_mib << 20}",
                f"--cpu={seconds}:{seconds + 1}",
                "--fsize=0",
                "--core=0",
                "--nofile=32",
                sandbox,
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
    """Return the interpreter of the virtual environment's base, which needs no installed package."""
    return Path(sys.executable).resolve()


def _files() -> Iterator[str]:
    """Yield mounts of the interpreter, its standard library without packages, and the system's libraries, read-only."""
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
