"""Stand-ins for a GPU's libraries on a machine without one: modules that do nothing, and another device for cuda."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar

from torch.overrides import TorchFunctionMode


def provide(*packages: str) -> None:
    """Make ``packages`` and all their modules inert in this process."""
    sys.meta_path.insert(0, _Finder(packages))


class _Inert(types.ModuleType):
    """A module whose attributes are inert modules. A call returns the module; as a base class it adds nothing."""

    __path__: ClassVar[list[str]] = []  # type: ignore[misc]
    __version__ = "99.0"

    def __getattr__(self, name: str) -> _Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inert(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> _Inert:
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[()]:
        return ()


class _Finder(importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Inert(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: an inert module has no code."""


class CudaMeans(TorchFunctionMode):
    """Makes tensors that are requested on cuda on ``device``."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = self.device
        return func(*args, **kwargs)
