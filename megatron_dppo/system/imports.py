"""Import of objects that a user names as ``package.module:name``: a reward, an algorithm, a metric, a tracker, ..."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_dppo.system.text import single_line

_TARGET = re.compile(r"[\w-]+(\.[\w-]+)*:\w+(\.\w+)*")


class ImportTargetError(ValueError):
    """A target is not of the form ``package.module:name``, or can't be imported."""


def import_target(target: str) -> Any:
    """Return the object that a user names as ``package.module:name``; the current folder is searched first.

    Raises ImportTargetError, also if the module raises another error when it is imported.
    """
    with _current_folder_first():
        return import_object(target)


def import_object(target: str) -> Any:
    """Return the object ``package.module:name``. Raises the errors of ``import_target``."""
    if not _TARGET.fullmatch(target):
        raise ImportTargetError(f"got {target!r}, expected package.module:name")
    module, _, names = target.partition(":")
    target_object: Any = import_module(module)
    for name in names.split("."):
        if not hasattr(target_object, name):
            raise ImportTargetError(f"module {module!r} has no attribute {names!r}")
        target_object = getattr(target_object, name)
    return target_object


def import_module(module: str) -> ModuleType:
    """Import a module of another package. Raises ImportTargetError in place of each of the module's errors."""
    try:
        return importlib.import_module(module)
    # A module may raise any exception when it is imported, or call sys.exit.
    except (Exception, SystemExit) as error:
        raise ImportTargetError(reason_of(error)) from error


def leave_current_folder() -> None:
    """Remove the current folder from the front of ``sys.path``, where ``python -m`` and ``python -c`` put it.

    A command must not import a file of the current folder in place of a library.
    """
    if sys.path[:1] in ([""], [_current_folder()]):
        del sys.path[0]


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Search the current folder first until the block ends, like ``python -m``; afterwards search it last.

    So a user's module finds its neighbours, also when it imports them later. ``python -P`` excludes the folder.
    """
    if sys.flags.safe_path or sys.path[:1] == [_current_folder()]:
        yield
        return
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
        if "" not in sys.path:
            sys.path.append("")


def _current_folder() -> str | None:
    """Return the current folder; None if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def reason_of(error: BaseException) -> str:
    """Return one line about an exception of a user's code: type, message, file and line.

    Of an ImportError, only the message is returned: it names the module.
    """
    message = single_line(error)
    if isinstance(error, ImportError):
        return message
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}, line {frame.lineno})"


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of ``function`` returns a coroutine.

    The function may be decorated, or an object with ``__call__``.
    """
    is_function = inspect.isroutine(function) or isinstance(function, functools.partial)
    if not is_function:
        # The function is an object, and a call runs the method of its class.
        function = type(function).__call__
    return inspect.iscoroutinefunction(inspect.unwrap(function))
