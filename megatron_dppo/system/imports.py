"""Import of objects that a user names as ``package.module:name``: a reward, an environment, an agent, a tracker."""

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
    """A target is not of the form ``package.module:name``, or can't be imported."""


def import_target(target: str) -> Any:
    """Return the object with the name ``package.module:name``.

    Raises ImportTargetError, also if the module raises another error when it is imported.
    """
    if not _TARGET.fullmatch(target):
        raise ImportTargetError(f"got {target!r}, expected package.module:name")
    module, _, names = target.partition(":")
    try:
        target_object: Any = importlib.import_module(module)
    # A module may raise any exception when it is imported, or call sys.exit.
    except (Exception, SystemExit) as error:
        raise ImportTargetError(reason_of(error)) from error
    for name in names.split("."):
        if not hasattr(target_object, name):
            raise ImportTargetError(f"module {module!r} has no attribute {names!r}")
        target_object = getattr(target_object, name)
    return target_object


def reason_of(error: BaseException) -> str:
    """Return one line about an exception of a user's code: type, message, file and line.

    Of an ImportError, only the message is returned: it names the module.
    """
    message = " ".join(str(error).split())[:_LONGEST_REASON]
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
