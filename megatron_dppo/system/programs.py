"""Programs that run to their end, with their output captured."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


class ProgramError(Exception):
    """A program can't be started, does not end in time, or fails. The message is one line.

    ``output``: all that a failed program wrote to its standard error, or else to its standard output.
    """

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def output_of(
    command: Sequence[str],
    timeout_s: float,
    *,
    content: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program and return its standard output as text. Raises ProgramError.

    Args:
        command: the program and its arguments.
        timeout_s: longest time of the program.
        content: text of the program's standard input.
        environment: all variables of the program; None: this process's variables.
    """
    try:
        completed = subprocess.run(
            command,
            input=content,
            env=environment,
            timeout=timeout_s,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise ProgramError(f"can't be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ProgramError(f"no answer within {timeout_s:.0f} s") from error
    if completed.returncode:
        output = completed.stderr.strip() or completed.stdout.strip()
        last_line = output.splitlines()[-1] if output else f"exit code {completed.returncode}"
        raise ProgramError(last_line, output)
    return completed.stdout
