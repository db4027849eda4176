"""Record the package's files that a process enters, if ``TRACE_WALK_FOLDER`` names a folder.

``tools/trace_walk.py`` puts this folder on PYTHONPATH, so that Python imports the file at the start of every process
of the run. A line of the record is: seconds of the system's monotonic clock, ``call`` or ``return``, file of the
package, function. A thread's successive calls in one file are one line. Functions that bound a walk also write the line
of their return.
"""

import atexit
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TextIO

PACKAGE = f"{Path(__file__).resolve().parents[2] / 'megatron_dppo'}{os.sep}"
BOUNDS_VARIABLE = "TRACE_WALK_BOUNDS"
FOLDER_VARIABLE = "TRACE_WALK_FOLDER"


class Recorder:
    """Writes the entries of this process into ``folder``, in a file named by the process."""

    def __init__(self, folder: str, bounds: set[str]) -> None:
        self._folder = folder
        self._bounds = bounds
        self._file: TextIO | None = None
        self._pid = 0
        self._names: dict[CodeType, str | None] = {}
        self._local = threading.local()

    def on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace function of ``sys.settrace``: called at each call of a Python function."""
        name = self._name_of(frame.f_code)
        if name is None:
            return None
        file = name.partition(" ")[0]
        is_bound = name in self._bounds
        if is_bound:
            self._write_header()
        if is_bound or getattr(self._local, "file", None) != file:
            self._local.file = file
            self._write("call", name)
        if not is_bound:
            return None
        frame.f_trace_lines = False
        return self._on_return

    def _on_return(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._write("return", self._names[frame.f_code] or "")
        return self._on_return

    def _name_of(self, code: CodeType) -> str | None:
        """File and function, or None for code outside the package and for the body of a module or class."""
        if code not in self._names:
            is_function = code.co_flags & 2  # CO_NEWLOCALS: modules' bodies lack it
            is_inside = code.co_filename.startswith(PACKAGE) and is_function
            path = code.co_filename.removeprefix(PACKAGE)
            self._names[code] = f"{path} {code.co_qualname}" if is_inside else None
        return self._names[code]

    def _write_header(self) -> None:
        """Write rank and command line: a forked rank knows its rank only some time after its first line."""
        if self._file is not None:
            rank = os.environ.get("RANK", "")
            self._file.write(f"# {rank} {' '.join(sys.orig_argv)}\n")

    def _write(self, kind: str, name: str) -> None:
        if self._file is None or self._pid != os.getpid():  # a forked process has a separate file
            self._pid = os.getpid()
            path = Path(self._folder) / f"{self._pid}.txt"
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
            self._write_header()
        self._file.write(f"{time.monotonic():.6f} {kind} {name}\n")


def start() -> None:
    """Trace this process and its threads from now on, until it exits."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return
    recorder = Recorder(folder, set(os.environ.get(BOUNDS_VARIABLE, "").split(";")))
    threading.settrace(recorder.on_call)
    sys.settrace(recorder.on_call)
    atexit.register(sys.settrace, None)


start()
