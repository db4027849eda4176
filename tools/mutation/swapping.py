"""A mutant in a running process: the mutant's functions replace the code of the module's functions, or
the whole module is loaded from the mutant's source.
"""

from __future__ import annotations

import functools
import gc
import importlib.abc
import importlib.util
import inspect
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType

from mutation.making import Mutant

Key = tuple[str, str, int]
"""Identity of a code object: file, qualified name, first line."""


def key(code: CodeType) -> Key:
    """Return the identity of a code object."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


class Change:
    """The change of a mutant to the code of ``functions``, the functions of the process.

    ``codes``: old -> new code of every function around the changed place; the bodies of modules and
    classes count as functions. ``inner``: the codes that change themselves, not only a function
    inside them. ``outer``: the outermost code. ``fits``: whether functions can take the new code.
    """

    def __init__(self, mutant: Mutant, functions: Sequence[FunctionType]) -> None:
        self._functions = functions
        file = str(mutant.file)
        old = compile(Path(file).read_text(), file, "exec", dont_inherit=True)
        new = compile(mutant.source, file, "exec", dont_inherit=True)
        pairs = list(_pairs(old, new))
        self.codes = {a: b for a, b in pairs if a != b}
        self.inner = {key(a) for a, b in pairs if _own_content(a) != _own_content(b)}
        self.fits = all(a.co_freevars == b.co_freevars for a, b in pairs)
        outer = [key(a) for a in self.codes if a.co_flags & inspect.CO_NEWLOCALS]
        self.outer = outer[0] if outer else None

    def apply(self) -> None:
        """Replace the old code by the new code in all functions."""
        for found in self._functions:
            found.__code__ = self.codes.get(found.__code__, found.__code__)


def functions_in(files: Collection[str]) -> list[FunctionType]:
    """All functions of this process that are written in these files."""
    everything = gc.get_objects()
    return [f for f in everything if type(f) is FunctionType and f.__code__.co_filename in files]


def forget_answers(files: Collection[str]) -> None:
    """Empty the caches of this process's functions that are written in these files.

    A function that answers from its cache would not run the mutant.
    """
    for wrapper in gc.get_objects():
        if type(wrapper) is functools._lru_cache_wrapper:
            code = getattr(inspect.unwrap(wrapper), "__code__", None)
            if code is not None and code.co_filename in files:
                wrapper.cache_clear()


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield each code of a module with the mutant's code, outer codes before inner codes."""
    yield old, new
    for a, b in zip(_nested(old), _nested(new), strict=False):
        yield from _pairs(a, b)


def _nested(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]


def _own_content(code: CodeType) -> tuple[object, ...]:
    """Return the content of a code without the codes nested in it."""
    plain = [repr(const) for const in code.co_consts if not isinstance(const, CodeType)]
    return code.co_code, plain, code.co_names, code.co_varnames, code.co_exceptiontable


class MutantLoader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a mutant's source instead of its file."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = "megatron_dppo." + mutant.path.removesuffix(".py").replace("/", ".")

    def find_spec(self, name, path=None, target=None):
        """Find only the mutated module."""
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, self._mutant.file, loader=self)

    def exec_module(self, module) -> None:
        """Run the changed source."""
        exec(compile(self._mutant.source, str(self._mutant.file), "exec"), module.__dict__)
