"""How a command is started at a host and ended there: the interface, and this machine's form of it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megatron_dppo.system.ports import require_free_port
from megatron_dppo.system.processes import kill_families, start_process


class Running(Protocol):
    """A command that was started."""

    @property
    def pid(self) -> int:
        """Process id on this machine: of the command, or of what runs it elsewhere."""

    def poll(self) -> int | None:
        """None while it runs, else its exit code (negative: the signal that ended it)."""

    def stop(self, grace_s: float) -> None:
        """Ask it to end, by force after ``grace_s`` seconds; returns when it is gone."""

    def kill(self) -> None:
        """End it and every descendant by force; returns when they are gone. Harmless twice."""


class Launcher(Protocol):
    """Starts commands at one host."""

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: bytes
    ) -> Running:
        """Start ``command`` and return at once.

        Args:
            command: program and arguments. Everybody can read them with ``ps``: secrets go through
                ``stdin``.
            environment: all of its variables.
            log: its output is appended there.
            stdin: what it reads from its standard input.
        """

    def require_free_port(self, address: str, port: int) -> None:
        """Raise PortTakenError where the port can't be bound, as far as that can be told from here."""


class LocalLauncher:
    """Starts commands on this machine.

    A command dies with the *thread* that called ``start`` (the kernel counts the thread, not the
    process): start it from the main thread.
    """

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: bytes
    ) -> Running:
        """See Launcher."""
        return LocalProcess(start_fed(command, environment=environment, log=log, stdin=stdin))

    def require_free_port(self, address: str, port: int) -> None:
        """See Launcher."""
        require_free_port(address, port)


class LocalProcess:
    """A command on this machine; see Running."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id, which is its process group's id too."""
        return self._process.pid

    def poll(self) -> int | None:
        """See Running."""
        return self._process.poll()

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        kill_families([self._process])

    def kill(self) -> None:
        """See Running."""
        kill_families([self._process])


def start_fed(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: bytes
) -> subprocess.Popen[bytes]:
    """``start_process`` with all of its standard input, its output appended to ``log``.

    Where it dies before it has read that, its exit code tells.
    """
    with open(log, "ab") as file:
        process = start_process(
            command, environment=environment, output=file.fileno(), stdin=subprocess.PIPE
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(stdin)
    return process
