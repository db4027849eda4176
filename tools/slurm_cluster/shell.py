"""Commands of the cluster: run a command, or raise an error with its output."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping


class CommandError(RuntimeError):
    """A command failed; the message has the command and its standard error."""


def run(*command: str, environment: Mapping[str, str] | None = None, check: bool = True) -> str:
    """Run ``command``, and return its standard output. With ``check``, raises CommandError if it failed."""
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if check and done.returncode:
        raise CommandError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def start_daemon(*command: str, environment: Mapping[str, str]) -> None:
    """Run a program that puts itself into the background. Raises CommandError if the program fails.

    Its output is discarded: a pipe would stay open as long as the daemon runs.
    """
    quiet = subprocess.DEVNULL
    done = subprocess.run(
        command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, timeout=60, check=False
    )
    if done.returncode:
        raise CommandError(f"{' '.join(command)}: exited with code {done.returncode}")
