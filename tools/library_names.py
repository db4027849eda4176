"""Every name of SGLang and Megatron-Core that the package imports, hooks or replaces, and those that a version lacks.

python tools/library_names.py                          # what the installed versions lack; exit code 1 if anything
python tools/library_names.py --list                   # every name, with the files that use it
PYTHONPATH=NEW python tools/library_names.py           # what the versions in the folder NEW lack (docs/upgrading.md)
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_dppo"
LIBRARIES = {"sglang": "sglang", "megatron": "megatron-core"}
"""Top-level module -> distribution."""
_DOTTED = re.compile(r"(sglang|megatron)(\.\w+){2,}")


def names_in(path: Path) -> Iterator[str]:
    """Yield the libraries' dotted names in a file: its imports, and texts such as the targets of hooks."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for alias in names:
                    yield f"{module}.{alias.name}"
            case ast.Import(names=names):
                for alias in names:
                    yield alias.name
            case ast.Constant(value=str(text)) if _DOTTED.fullmatch(text):
                yield text


def names_of_package(package: Path = PACKAGE) -> dict[str, list[str]]:
    """Return each dotted name of a library -> the package's files that use it."""
    files: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        own_names = {name for name in names_in(path) if name.partition(".")[0] in LIBRARIES}
        for name in own_names:
            files.setdefault(name, []).append(str(path.relative_to(package.parent)))
    return dict(sorted(files.items()))


class UncheckedError(Exception):
    """A module can't be imported on this machine, because it needs a package that is not installed, such as kernels."""


def fault_of(name: str) -> str | None:
    """Return why a dotted name can't be resolved to a module or to an attribute of one; None if it can.

    Raises UncheckedError if the module needs a package that is not installed here.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module_name = ".".join(parts[:count])
        try:
            value = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing_name = error.name or ""
            if missing_name.partition(".")[0] not in LIBRARIES:
                raise UncheckedError(f"{module_name} needs {missing_name}") from error
            if module_name.startswith(missing_name):
                continue
            return f"{module_name} can't be imported: {error}"
        except Exception as error:  # a hook of this package that does not fit raises any error
            return f"{module_name} can't be imported: {type(error).__name__}: {error}"
        for attribute in parts[count:]:
            if not hasattr(value, attribute):
                return f"{module_name} has no {'.'.join(parts[count:])}"
            value = getattr(value, attribute)
        return None
    return f"there is no module {parts[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--list", action="store_true", help="print every name, with the files that use it"
    )
    options = parser.parse_args()
    names = names_of_package()
    if options.list:
        for name, files in names.items():
            print(f"{name}: {', '.join(files)}")
        return 0
    from megatron_dppo.trainer import platform

    platform.prepare()
    missing, unchecked = 0, 0
    for name, files in names.items():
        try:
            fault = fault_of(name)
        except UncheckedError as error:
            unchecked += 1
            print(f"{name}: not checked: {error}")
            continue
        if fault is not None:
            missing += 1
            print(f"{name}: {fault} ({', '.join(files)})")
    versions = ", ".join(f"{d} {importlib.metadata.version(d)}" for d in LIBRARIES.values())
    found = len(names) - missing - unchecked
    print(
        f"{versions}: {found} of {len(names)} names are there, {missing} are not, {unchecked} not checked"
    )
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
