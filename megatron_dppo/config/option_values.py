"""Values of ``options`` tables against the types that the function or class which takes them declares."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_dppo.config.errors import expectation, given

OWN_PACKAGE = "megatron_dppo"
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def option_value_faults(target: Callable[..., Any], options: Mapping[str, Any]) -> Iterator[str]:
    """``NAME: got VALUE, expected TYPE`` for each option of another type than its parameter's.

    Only of this package's own functions and classes: what others write into an annotation need not hold. Names that no
    parameter has are left to the call's own check.
    """
    # A value that is no function has none.
    module = getattr(target, "__module__", None) or ""
    if module.partition(".")[0] != OWN_PACKAGE:
        return
    called = target.__init__ if inspect.isclass(target) else target
    types = get_type_hints(called)
    for name, value in options.items():
        if name not in types:
            continue
        try:
            TypeAdapter(types[name], config=_STRICT).validate_python(value)
        except ValidationError:
            yield f"{name}: got {given(value)}, expected {expectation(types[name])}"
