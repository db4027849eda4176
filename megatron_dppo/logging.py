"""Logging of several processes that share a terminal.

Every process keeps a whole log of its own in ``<directory>/logs``; the terminal belongs to rank 0
(and to the supervisor), whose lines go through one rich console, so that they never tear a
progress bar apart. A rank's standard output and error are a file; the supervisor hands its own
standard output down to rank 0 as a further descriptor, ``MEGATRON_DPPO_TERMINAL``.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, cast

from rich.console import Console, ConsoleDimensions
from rich.text import Text

PACKAGE = "megatron_dppo"
TERMINAL_VARIABLE = "MEGATRON_DPPO_TERMINAL"
"""Names the descriptor of the user's terminal (or pipe) in the environment of rank 0."""
REFUSED = 2
"""Exit status of a process that ends over something that the user can put right."""
INTERRUPTED = 130
"""Exit status of a program that Ctrl-C ended, as shells give it."""
_FORMAT = "%(asctime)s.%(msecs)03d [{process}] %(levelname)s %(name)s: %(message)s"
_CONSOLE_FORMAT = "%(asctime)s [{process}] %(message)s"
_STYLES = {logging.DEBUG: "dim", logging.WARNING: "yellow", logging.ERROR: "bold red"}

_console: Console | None = None
_failure_mark: Path | None = None


class FatalError(SystemExit):
    def __init__(self, message: str) -> None:
        super().__init__(REFUSED)
        self.message = message

    def __str__(self) -> str:
        return self.message


def shared_console() -> Console:
    """The process's one console: standard output, or what the supervisor handed down.

    Silent in ranks other than 0.
    """
    global _console  # noqa: PLW0603  one terminal, so one console in a process
    if _console is None:
        # Our children don't inherit it.
        terminal = os.environ.pop(TERMINAL_VARIABLE, None)
        _console = (
            Console(file=_standard_output(), highlight=False, markup=False)
            if terminal is None
            else TerminalConsole(int(terminal))
        )
    return _console


def say(line: str) -> None:
    """Print a line on the process's console, whatever its width: a job's log must not fold it."""
    shared_console().print(line, soft_wrap=True)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table's lines, two spaces between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


class TerminalConsole(Console):
    """A console on a descriptor; standard output, a file, gets a plain copy of every line printed.

    Progress bars are drawn on the descriptor alone, at its own width.
    """

    def __init__(self, descriptor: int) -> None:
        terminal = cast(IO[str], _Terminal(descriptor))
        super().__init__(file=terminal, highlight=False, markup=False)
        self._copy = Console(
            file=_standard_output(),
            force_terminal=False,
            color_system=None,
            highlight=False,
            markup=False,
        )

    @property  # type: ignore[misc]  # rich's own may be set, this one follows the terminal
    def size(self) -> ConsoleDimensions:
        """Columns and rows; rich itself asks the standard descriptors alone."""
        try:
            columns, rows = os.get_terminal_size(self.file.fileno())
        except OSError:  # no terminal, or none any more
            return super().size
        return ConsoleDimensions(columns or 80, rows or 25)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print like rich; text goes to standard output too."""
        super().print(*objects, **options)
        # Tables and bars are drawn for a terminal's width; a file has the log's lines.
        if not self.quiet and all(isinstance(renderable, str | Text) for renderable in objects):
            self._copy.print(*objects, **options)


class _Terminal(io.TextIOBase):
    """A descriptor to write text to. What can't be written any more, because the terminal is closed,
    nobody reads the pipe or the disk is full, is dropped: a run must not end over it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        unwritten_bytes = text.encode(errors="replace")
        with contextlib.suppress(OSError):
            while unwritten_bytes:
                # A pipe may take a part of it.
                unwritten_bytes = unwritten_bytes[os.write(self._descriptor, unwritten_bytes) :]
        return len(text)


class _StandardOutput(io.TextIOBase):
    """``sys.stdout``, whatever stands there now, less its errors: see _Terminal."""

    def fileno(self) -> int:
        return sys.stdout.fileno()

    def isatty(self) -> bool:
        return sys.stdout.isatty()

    def write(self, text: str) -> int:
        try:
            descriptor = sys.stdout.fileno()
        except (OSError, ValueError):  # no file: a test's
            return sys.stdout.write(text)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        # No buffer keeps what a full disk did not take.
        return _Terminal(descriptor).write(text)


def _standard_output() -> IO[str]:
    return cast(IO[str], _StandardOutput())


class ConsoleHandler(logging.Handler):
    """One unwrapped line a record; third-party records only from WARNING on, Python warnings never.

    rich's own handler folds lines at the terminal's width, 80 columns in a pipe, which nobody can grep.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.split(".")[0] == PACKAGE:
            return True
        return record.levelno >= logging.WARNING and record.name != "py.warnings"

    def emit(self, record: logging.LogRecord) -> None:
        text = Text(self.format(record), style=_STYLES.get(min(record.levelno, logging.ERROR), ""))
        self.console.print(text, soft_wrap=True)


class LogFile(logging.FileHandler):
    """A process's log. Where it can't be written, for one on a full disk, one line says so."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self._complained = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's own name
        """Say it once, on standard error; a traceback for each record would bury its reason."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._complained:
            self._complained = True
            with contextlib.suppress(OSError):
                print(f"{self.baseFilename}: can't be written: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def configure_logging(directory: str | Path | None, rank: int | None = 0) -> None:
    """Send this process's records to its log file, and to the terminal for rank 0 and supervisor.

    ``directory``: the run's; the file is ``logs/rank<N>.log`` (``logs/supervisor.log`` for rank None), appended to by a
    resumed run. None: the terminal only. Of this package from INFO on, of others from WARNING. An uncaught
    exception is written to the file too. A second call replaces what the first one set up.
    """
    global _failure_mark  # noqa: PLW0603  one process, one mark
    process = "supervisor" if rank is None else f"rank{rank}"
    console = shared_console()
    console.quiet = rank not in {None, 0}

    root = logging.getLogger()
    # Ours alone: a test, or a library, may have its own.
    for handler in [h for h in root.handlers if getattr(h, "from_megatron_dppo", False)]:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = []
    if not console.quiet:
        on_console = ConsoleHandler(console)
        on_console.setFormatter(
            logging.Formatter(_CONSOLE_FORMAT.format(process=process), datefmt="%H:%M:%S")
        )
        handlers.append(on_console)
    if directory is not None:
        path = Path(directory) / "logs" / f"{process}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        _failure_mark = None
        if rank is not None:
            _failure_mark = failure_mark(path)
        failure_mark(path).unlink(missing_ok=True)
        in_file = LogFile(path)
        in_file.setFormatter(
            logging.Formatter(_FORMAT.format(process=process), datefmt="%Y-%m-%d %H:%M:%S")
        )
        handlers.append(in_file)
    for handler in handlers:
        handler.from_megatron_dppo = True  # type: ignore[attr-defined]
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(PACKAGE).setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def failure_mark(output: Path) -> Path:
    """The file that says when a rank failed, beside its output or log."""
    return output.with_suffix(".failed")


def note_failure() -> None:
    """Mark the moment at which this rank failed, before it closes what is open, which may take time.

    The rank that failed first is the cause; those that fail because of it may exit, or fall silent,
    before it. Later calls change nothing.
    """
    if _failure_mark is not None:
        # "x": the first moment stays, whatever fails on the way out.
        with contextlib.suppress(OSError), open(_failure_mark, "x") as file:
            file.write(f"{time.time()}\n")


def forget_failure() -> None:
    """Remove the mark of a failure that this process recovered from."""
    if _failure_mark is not None:
        _failure_mark.unlink(missing_ok=True)


def _log_uncaught(
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Keep the traceback in the log files, then show it on standard error as Python always does."""
    if not issubclass(kind, KeyboardInterrupt):
        note_failure()
        _to_files("uncaught exception", exc_info=(kind, error, trace))
    sys.__excepthook__(kind, error, trace)


def _to_files(
    message: str,
    exc_info: tuple[type[BaseException], BaseException, TracebackType | None] | None = None,
) -> None:
    """A CRITICAL record for the log files alone: standard error shows the same thing already."""
    record = logging.LogRecord(PACKAGE, logging.CRITICAL, "", 0, message, None, exc_info)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def fatal(message: str) -> NoReturn:
    """End the process with status 2 over something that the user can put right: no traceback.

    Prints ``error: <message>`` to standard error, and to the log file where one is configured. Raises FatalError, a
    SystemExit, so that open files and child processes are still closed on the way out.
    """
    note_failure()
    _to_files(message)
    with contextlib.suppress(OSError):
        print(f"error: {message}", file=sys.stderr, flush=True)
    raise FatalError(message)
