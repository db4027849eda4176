"""SGLang's parsers of tool calls, loaded without SGLang's servers.

``import sglang`` loads torch, transformers and xgrammar: 480 MB and 13 s on two cores. The parsers themselves need none
of these; they are plain functions of text. So this module executes only SGLang's parser files, 40 MB with the whole
process and a fraction of a second. For the time of the import, stand-ins take the place of SGLang's packages and of the
two modules that the parser files name in annotations.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PARSERS = "sglang.srt.function_call.function_call_parser"
_NAMES = "sglang.srt.function_call.parser_names"
_PACKAGES = ("sglang", "sglang.srt", "sglang.srt.function_call")
_STAND_INS = ("sglang.srt.entrypoints.openai.protocol", "xgrammar", "xgrammar.structural_tag")
"""Modules that load torch. The parser files import only classes from them, for annotations and for grammars."""


def parser_names() -> list[str]:
    """Return the names of SGLang's parsers, without loading them. Raises ImportError without SGLang."""
    path = _sglang_folder() / "srt" / "function_call" / "parser_names.py"
    spec = importlib.util.spec_from_file_location(_NAMES, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.TOOL_CALL_PARSER_NAMES)


@functools.cache
def sglang_parsers() -> Any:
    """Return SGLang's module ``function_call_parser``. Raises ImportError without SGLang."""
    if _PARSERS in sys.modules:
        return sys.modules[_PARSERS]
    # A parser logs every call that it can't read. The caller counts these calls.
    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
    with _stand_ins():
        return importlib.import_module(_PARSERS)


def _sglang_folder() -> Path:
    spec = importlib.machinery.PathFinder.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("sglang is not installed: tool calls are read by its parsers")
    return Path(spec.submodule_search_locations[0])


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Put stand-ins into ``sys.modules``, and restore it at the end, so that ``import sglang`` loads SGLang itself."""
    roots = ("sglang", "xgrammar")
    earlier_modules: dict[str, types.ModuleType] = {}
    for name in list(sys.modules):
        if name.partition(".")[0] in roots:
            earlier_modules[name] = sys.modules.pop(name)
    folder = _sglang_folder()
    try:
        for name in _PACKAGES:
            package = types.ModuleType(name)
            package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
        for name in _STAND_INS:
            sys.modules[name] = _ModuleOfClasses(name)
        yield
    finally:
        for name in list(sys.modules):
            if name.partition(".")[0] in roots:
                del sys.modules[name]
        sys.modules.update(earlier_modules)


class _ModuleOfClasses(types.ModuleType):
    """A module that has an empty class of every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
