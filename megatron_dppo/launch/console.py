"""Rank 0's output, both on the terminal as it is and in a file as plain lines.

Where there is a terminal, rank 0 gets one too (a pseudo-terminal of the same size), so that its
progress bars are drawn. The file keeps what they looked like in the end, not every redraw.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import os
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_CONTROL = re.compile(
    r"\x1b\[(?P<number>[0-9;?]*)(?P<letter>[A-Za-z])"  # CSI: cursor and colours
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: titles and links
    r"|\x1b[^\[\]]|\r|\n"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;?]*|\][^\x07\x1b]*\x1b?)?\Z")
_CHUNK = 1 << 16


class PlainLines:
    """Turns a terminal's stream into the lines that stay: colours dropped, overwritten lines
    overwritten.

    Knows what progress bars use: carriage return, cursor up, erase line. The last ``live`` lines
    are held back, because the cursor may still return to them.
    """

    def __init__(self, live: int = 20) -> None:
        self._live = live
        self._lines: list[str] = []
        self._line = ""
        self._column = 0
        self._partial = ""

    def feed(self, text: str) -> list[str]:
        """Lines that are final now."""
        text = self._partial + text
        unfinished = _UNFINISHED.search(text)
        cut = unfinished.start() if unfinished else len(text)
        text, self._partial = text[:cut], text[cut:]
        position = 0
        for control in _CONTROL.finditer(text):
            self._write(text[position : control.start()])
            self._obey(control)
            position = control.end()
        self._write(text[position:])
        final = len(self._lines) - self._live
        done, self._lines = self._lines[: max(0, final)], self._lines[max(0, final) :]
        return done

    def finish(self) -> list[str]:
        """What was held back."""
        done, self._lines = [*self._lines, *([self._line] if self._line else [])], []
        self._line, self._column = "", 0
        return done

    def _write(self, text: str) -> None:
        end = self._column + len(text)
        self._line = self._line[: self._column].ljust(self._column) + text + self._line[end:]
        self._column = end

    def _obey(self, control: re.Match[str]) -> None:
        key = control["letter"] or control.group()
        action = _ACTIONS.get(key)
        if action is not None:
            count = control["number"]
            action(self, int(count) if count and count.isdigit() else None)

    def _new_line(self, count: int | None) -> None:
        self._lines.append(self._line)
        self._line, self._column = "", 0

    def _return(self, count: int | None) -> None:
        self._column = 0

    def _up(self, count: int | None) -> None:
        for _ in range(min(count or 1, len(self._lines))):
            self._line = self._lines.pop()

    def _erase(self, count: int | None) -> None:
        self._line = "" if count == 2 else self._line[: self._column]


_ACTIONS: dict[str, Callable[[PlainLines, int | None], None]] = {
    "\n": PlainLines._new_line,
    "\r": PlainLines._return,
    "A": PlainLines._up,
    "K": PlainLines._erase,
}


class Tee:
    """Copies what is written to ``descriptor`` to this process's standard output and, as plain
    lines, to ``path``.

    ``descriptor`` is the child's standard output; call :meth:`start` once the child has it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.on_terminal = sys.stdout.isatty()
        self._source, self.descriptor = os.openpty() if self.on_terminal else os.pipe()
        self._thread = threading.Thread(target=self._copy, name="tee", daemon=True)
        self.match_size()

    def start(self) -> None:
        """Begin to copy, and let go of the child's end: the copy ends when the child has closed its
        own."""
        os.close(self.descriptor)
        self._thread.start()

    def match_size(self) -> None:
        """Give the pseudo-terminal the terminal's size."""
        if self.on_terminal:
            size = fcntl.ioctl(
                sys.stdout.fileno(), termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0)
            )
            fcntl.ioctl(self._source, termios.TIOCSWINSZ, size)

    def finish(self, timeout_s: float = 5.0) -> None:
        """Wait until all that the child wrote has been copied."""
        self._thread.join(timeout_s)

    def _copy(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        lines, console = PlainLines(), _Console()
        with self._path.open("a", encoding="utf-8", buffering=1) as file:
            for chunk in self._chunks():
                console.write(chunk)
                file.writelines(f"{line}\n" for line in lines.feed(decoder.decode(chunk)))
            file.writelines(f"{line}\n" for line in lines.finish())
        os.close(self._source)

    def _chunks(self) -> Iterator[bytes]:
        while True:
            try:
                chunk = os.read(self._source, _CHUNK)
            except OSError as error:
                if (
                    error.errno == errno.EIO
                ):  # Linux: every copy of the pseudo-terminal's other end is closed
                    return
                raise
            if not chunk:
                return
            yield chunk


class _Console:
    """Standard output, until whoever reads it goes away."""

    def __init__(self) -> None:
        self._stream: BinaryIO | None = getattr(sys.stdout, "buffer", None)

    def write(self, data: bytes) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(data)
            self._stream.flush()
        except OSError:  # a closed pipe, or a terminal that is gone
            self._stream = None
