"""Checks of ``options`` tables against the function or class that receives them: types of values, and unread names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_dppo.config.errors import expectation, given

OWN_PACKAGE = "megatron_dppo"
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def option_value_faults(target: Callable[..., Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Yield ``NAME: got VALUE, expected TYPE`` for each option whose type differs from its parameter's type.

    Only functions and classes of this package are checked: annotations of other packages need not be exact. Options
    without a parameter are not reported: the caller checks the names of the options.
    """
    # The configured name may be the name of an object without a module, for instance of a number.
    module = getattr(target, "__module__", None) or ""
    if module.partition(".")[0] != OWN_PACKAGE:
        return
    called = target
    if inspect.isclass(target):
        called = target.__init__
    types = get_type_hints(called)
    for name, value in options.items():
        if name not in types:
            continue
        try:
            TypeAdapter(types[name], config=_STRICT).validate_python(value)
        except ValidationError:
            yield f"{name}: got {given(value)}, expected {expectation(types[name])}"


def unread_options(target: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """Return the names of options that only a ``**`` parameter takes, and that the target's module does not mention.

    Options without any parameter are not reported: the caller checks the names of the options.
    """
    try:
        parameters = inspect.signature(target).parameters.values()
        source = inspect.getsource(inspect.getmodule(target) or target)
    # Python can't inspect every class that is written in C, and not every module has a source.
    except (OSError, TypeError, ValueError):
        return []
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return []
    words = set(re.findall(r"\w+", source))
    return [name for name in options if name not in words]
