"""Import of what a user names as ``package.module:name``: a reward, an environment, an agent, a tracker."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TARGET = re.compile(r"[\w-]+(\.[\w-]+)*:\w+(\.\w+)*")
_LONGEST_REASON = 300


class ImportTargetError(ValueError):
    """A name is not of the form ``package.module:name``, or what it names can't be imported."""


def import_target(target: str) -> Any:
    """The object that ``package.module:name`` names. Raises ImportTargetError, whatever the module raises."""
    if not _TARGET.fullmatch(target):
        raise ImportTargetError(f"got {target!r}, expected package.module:name")
    module, _, names = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
    # A module is a program: it may raise anything, and end the process.
    except (Exception, SystemExit) as error:
        raise ImportTargetError(reason_of(error)) from error
    for name in names.split("."):
        if not hasattr(found, name):
            raise ImportTargetError(f"module {module!r} has no attribute {names!r}")
        found = getattr(found, name)
    return found


def reason_of(error: BaseException) -> str:
    """What another's code raised, in a line, with its place where the message alone does not tell it."""
    message = " ".join(str(error).split())[:_LONGEST_REASON]
    if isinstance(error, ImportError):
        return message
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}, line {frame.lineno})"


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine: of a decorated function as what it wraps, of an object as its ``__call__``."""
    if not inspect.isroutine(function) and not isinstance(function, functools.partial):
        function = type(function).__call__
    return inspect.iscoroutinefunction(inspect.unwrap(function))
