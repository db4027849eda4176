"""Logging of several processes that share a terminal.

Every process writes a whole log of its own in ``<directory>/logs``. Only rank 0 and the supervisor write to the
terminal, through one rich console, so that log lines do not break progress bars. A rank's standard output and error are
a file. Rank 0 also inherits a descriptor of the supervisor's standard output; ``MEGATRON_DPPO_TERMINAL`` has its
number.
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
LOGS_FOLDER = "logs"
"""Folder of the logs in the folder of a run."""
TERMINAL_VARIABLE = "MEGATRON_DPPO_TERMINAL"
"""Variable of rank 0 with the number of the descriptor of the user's terminal (or pipe)."""
REFUSED = 2
"""Exit status of a process that ends by an error that the user can correct."""
FAILED = 1
"""Exit status of a process that ends by a failure after which another start may succeed."""
INTERRUPTED = 130
"""Exit status of a program that Ctrl-C ended, by the convention of shells."""
_FORMAT = "%(asctime)s.%(msecs)03d [{process}] %(levelname)s %(name)s: %(message)s"
_CONSOLE_FORMAT = "%(asctime)s [{process}] %(message)s"
_STYLES = {logging.DEBUG: "dim", logging.WARNING: "yellow", logging.ERROR: "bold red"}

_console: Console | None = None
_own_failure_mark: Path | None = None


class FatalError(SystemExit):
    """Ends the process with a status. ``fatal`` has printed the message already."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(status)
        self.message = message

    def __str__(self) -> str:
        return self.message


def shared_console() -> Console:
    """Return the process's only console, on the terminal that the supervisor passed on, or else on standard output.

    Only the consoles of rank 0 and of the supervisor print: ``configure_logging`` silences the other ranks' consoles.
    """
    global _console  # noqa: PLW0603  one terminal, so one console in a process
    if _console is None:
        # Remove the variable, so that child processes do not inherit it.
        terminal = os.environ.pop(TERMINAL_VARIABLE, None)
        if terminal is None:
            _console = Console(file=_standard_output(), highlight=False, markup=False)
        else:
            _console = TerminalConsole(int(terminal))
    return _console


def say(line: str) -> None:
    """Print a line on the process's console without wrapping it."""
    shared_console().print(line, soft_wrap=True)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with two spaces between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


class TerminalConsole(Console):
    """A console on a descriptor, which also copies each printed line to standard output (a file) as plain text.

    Progress bars are drawn only on the descriptor, in its width.
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

    @property  # type: ignore[misc]  # rich's property has a setter; this one always asks the terminal
    def size(self) -> ConsoleDimensions:
        """Columns and rows of the descriptor. rich itself would read the size of the standard descriptors."""
        try:
            columns, rows = os.get_terminal_size(self.file.fileno())
        except OSError:
            # The descriptor is no terminal, or the terminal was closed.
            return super().size
        return ConsoleDimensions(columns or 80, rows or 25)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print like rich, and copy text to standard output."""
        super().print(*objects, **options)
        # Copy no tables and bars: they are drawn in the terminal's width.
        has_only_text = all(isinstance(renderable, str | Text) for renderable in objects)
        if has_only_text and not self.quiet:
            self._copy.print(*objects, **options)


class _Terminal(io.TextIOBase):
    """A text file on a descriptor that drops text which cannot be written.

    A run must not end because the terminal was closed, the pipe has no reader or the disk is full.
    """

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
                # A pipe may accept only a part of the bytes.
                unwritten_bytes = unwritten_bytes[os.write(self._descriptor, unwritten_bytes) :]
        return len(text)


class _StandardOutput(io.TextIOBase):
    """A text file on the current ``sys.stdout`` that drops text which cannot be written; see _Terminal."""

    def fileno(self) -> int:
        return sys.stdout.fileno()

    def isatty(self) -> bool:
        return sys.stdout.isatty()

    def write(self, text: str) -> int:
        try:
            descriptor = sys.stdout.fileno()
        except (OSError, ValueError):
            # A test may have replaced sys.stdout by an object without a descriptor.
            return sys.stdout.write(text)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        # Write to the descriptor: a buffer would keep text that a full disk did not accept.
        return _Terminal(descriptor).write(text)


def _standard_output() -> IO[str]:
    return cast(IO[str], _StandardOutput())


class ConsoleHandler(logging.Handler):
    """Prints each record as one line.

    Of other packages' records, only records from WARNING on are printed, and no Python warnings.

    rich's own handler wraps lines at the terminal's width (80 columns in a pipe), which breaks ``grep``.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.split(".")[0] == PACKAGE:
            return True
        return record.levelno >= logging.WARNING and record.name != "py.warnings"

    def emit(self, record: logging.LogRecord) -> None:
        # CRITICAL has the style of ERROR.
        style = _STYLES.get(min(record.levelno, logging.ERROR), "")
        self.console.print(Text(self.format(record), style=style), soft_wrap=True)


class LogFile(logging.FileHandler):
    """A process's log file. If it cannot be written, for example on a full disk, one line reports that."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self._has_reported = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's own name
        """Report an OSError once, on standard error. ``super`` would print a traceback for each record."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_reported:
            self._has_reported = True
            with contextlib.suppress(OSError):
                print(f"{self.baseFilename}: can't be written: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def configure_logging(directory: str | Path | None, rank: int | None = 0) -> None:
    """Send this process's records to its log file, and to the terminal too in rank 0 and in the supervisor.

    Records of this package are written from INFO on, records of other packages from WARNING on. Uncaught exceptions go
    to the file. A second call replaces the handlers of the first call.

    Args:
        directory: the run's folder. The file is ``logs/rank<N>.log``, or ``logs/supervisor.log`` for rank None; a
            resumed run appends to it. None: the terminal only.
        rank: global rank; None in the supervisor.
    """
    global _own_failure_mark  # noqa: PLW0603  a process is one rank, so it has one mark
    process = "supervisor" if rank is None else f"rank{rank}"
    console = shared_console()
    console.quiet = rank not in {None, 0}

    root = logging.getLogger()
    for handler in list(root.handlers):
        # Keep the handlers of tests and libraries.
        if getattr(handler, "from_megatron_dppo", False):
            root.removeHandler(handler)
            handler.close()
    handlers: list[logging.Handler] = []
    if not console.quiet:
        console_handler = ConsoleHandler(console)
        console_handler.setFormatter(
            logging.Formatter(_CONSOLE_FORMAT.format(process=process), datefmt="%H:%M:%S")
        )
        handlers.append(console_handler)
    if directory is not None:
        path = Path(directory) / LOGS_FOLDER / f"{process}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        _own_failure_mark = None
        if rank is not None:
            _own_failure_mark = failure_mark(path)
        # Remove the mark that an earlier start may have left.
        failure_mark(path).unlink(missing_ok=True)
        log_file = LogFile(path)
        log_file.setFormatter(
            logging.Formatter(_FORMAT.format(process=process), datefmt="%Y-%m-%d %H:%M:%S")
        )
        handlers.append(log_file)
    for handler in handlers:
        handler.from_megatron_dppo = True  # type: ignore[attr-defined]
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(PACKAGE).setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def failure_mark(output: Path) -> Path:
    """Return the path of the file with the time of a rank's failure, beside its output or log."""
    return output.with_suffix(".failed")


def note_failure() -> None:
    """Write the time at which this rank failed. Later calls have no effect.

    Call this before the rank releases its resources, because the release may take long. The rank with the earliest time
    is the likely cause. The order of exits does not show the cause: ranks that fail later may exit earlier.
    """
    if _own_failure_mark is not None:
        # Mode "x" keeps the time of the first failure: further failures may follow while the process ends.
        with contextlib.suppress(OSError), open(_own_failure_mark, "x") as file:
            file.write(f"{time.time()}\n")


def _log_uncaught(
    error_type: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Write the traceback to the log file, then to standard error as Python does."""
    if not issubclass(error_type, KeyboardInterrupt):
        note_failure()
        _to_files("uncaught exception", exc_info=(error_type, error, trace))
    sys.__excepthook__(error_type, error, trace)


def _to_files(
    message: str,
    exc_info: tuple[type[BaseException], BaseException, TracebackType | None] | None = None,
) -> None:
    """Write a CRITICAL record to the log files only: standard error shows the same text already."""
    record = logging.LogRecord(PACKAGE, logging.CRITICAL, "", 0, message, None, exc_info)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def fatal(message: str, status: int = REFUSED) -> NoReturn:
    """End the process without a traceback: with status 2, for an error that the user can correct, or with ``status``.

    The function prints ``error: <message>`` to standard error, and to the log file if one is configured. It raises
    FatalError, a SystemExit, so that ``with`` blocks still close files and child processes.
    """
    note_failure()
    _to_files(message)
    with contextlib.suppress(OSError):
        print(f"error: {message}", file=sys.stderr, flush=True)
    raise FatalError(message, status)
