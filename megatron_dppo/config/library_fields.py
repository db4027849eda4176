"""Fields of the pinned libraries' own options, read from their source: importing them takes seconds
and torch."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class LibraryMissingError(ImportError):
    """The library is not installed in this environment, or is not laid out as the pinned release
    is."""


@dataclass(frozen=True)
class LibraryFields:
    """Annotations by field. ``title``: class, library and version, as a message names them.

    ``computed``: fields that the library fills in itself and takes from nobody.
    """

    title: str
    annotations: Mapping[str, ast.expr]
    computed: frozenset[str] = frozenset()


@functools.cache
def transformer_config_fields() -> LibraryFields:
    """Fields of megatron.core's TransformerConfig, inherited ones included. Raises
    LibraryMissingError."""
    folder = _package_folder("megatron") / "core"
    sources = (
        folder / "model_parallel_config.py",
        folder / "transformer" / "transformer_config.py",
    )
    classes = {node.name: node for path in sources for node in _classes(path)}
    annotations: dict[str, ast.expr] = {}
    pending = ["TransformerConfig"]
    while pending:
        node = classes.get(pending.pop())
        if node is None:
            continue
        annotations = {**dict(_annotated(node)), **annotations}
        pending += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return _found("TransformerConfig", "megatron-core", annotations, "num_layers")


@functools.cache
def server_args_fields() -> LibraryFields:
    """Fields of SGLang's ServerArgs, which its ``arg_groups/fields`` declare. Raises
    LibraryMissingError."""
    folder = _package_folder("sglang") / "srt" / "arg_groups" / "fields"
    annotations: dict[str, ast.expr] = {}
    for path in sorted(folder.glob("*.py")):
        for node in _classes(path):
            if any(base.attr == "Struct" for base in node.bases if isinstance(base, ast.Attribute)):
                annotations |= dict(_annotated(node))
    fields = _found("ServerArgs", "sglang", annotations, "model_path")
    by_hand = _flags(folder.parents[1] / "server_args.py")
    hidden = {name for name, annotation in annotations.items() if _has_no_flag(name, annotation)}
    computed = frozenset(hidden - by_hand)
    return LibraryFields(fields.title, fields.annotations, computed)


def value_problem(annotation: ast.expr, value: Any) -> str | None:
    """What ``annotation`` expects, in words, where ``value`` is surely not that; None where it may
    be.

    Understands bool, int, float, str, None, Literal, Optional, Union, lists, tuples and tables of
    those; any other annotation takes what YAML can hold, except functions and types.
    """
    allowed = list(_alternatives(annotation))
    if any(matches(value) for matches, _ in allowed):
        return None
    return " or ".join(dict.fromkeys(words for _, words in allowed))


Alternative = tuple[Callable[[Any], bool], str]


def _is(kind: type | tuple[type, ...]) -> Callable[[Any], bool]:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


_SCALARS: dict[str, Alternative] = {
    "bool": (_is(bool), "true or false"),
    "int": (_is(int), "a whole number"),
    "float": (_is((int, float)), "a number"),
    "str": (_is(str), "text"),
    "None": (_is(type(None)), "null"),
    "Callable": (lambda value: False, "a Python function, which YAML can't hold"),
    "ContextManager": (lambda value: False, "a Python object, which YAML can't hold"),
    "torch.dtype": (lambda value: False, "a torch type, which YAML can't hold"),
}
_CONTAINERS: dict[str, Alternative] = {
    "list": (_is(list), "a list"),
    "tuple": (_is(list), "a list"),
    "dict": (_is(dict), "a table"),
}


def _alternatives(node: ast.expr) -> Iterator[Alternative]:
    """The plain kinds of value that an annotation allows; anything for what is not understood."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _alternatives(ast.parse(node.value, mode="eval").body)
        return
    if isinstance(node, ast.BinOp):
        yield from _alternatives(node.left)
        yield from _alternatives(node.right)
        return
    if not isinstance(node, ast.Subscript):
        anything: Alternative = (lambda value: True, "anything")
        name = ast.unparse(node)
        yield _SCALARS.get(name) or _CONTAINERS.get(name.lower(), anything)
        return
    inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    yield from _GENERICS.get(_last_name(node.value), _container)(node, inside)


def _literal(node: ast.Subscript, inside: list[ast.expr]) -> Iterator[Alternative]:
    values = [ast.literal_eval(item) for item in inside]
    yield (lambda value: value in values), "one of " + ", ".join(map(repr, values))


def _union(node: ast.Subscript, inside: list[ast.expr]) -> Iterator[Alternative]:
    for item in inside:
        yield from _alternatives(item)


def _optional(node: ast.Subscript, inside: list[ast.expr]) -> Iterator[Alternative]:
    yield from _union(node, inside)
    yield _SCALARS["None"]


def _annotated_type(node: ast.Subscript, inside: list[ast.expr]) -> Iterator[Alternative]:
    yield from _alternatives(inside[0])


def _container(node: ast.Subscript, inside: list[ast.expr]) -> Iterator[Alternative]:
    name = _last_name(node.value)
    if name == "Callable":
        yield _SCALARS["Callable"]
        return
    yield _CONTAINERS.get(name.lower(), (lambda value: True, "anything"))


_GENERICS: dict[str, Callable[[ast.Subscript, list[ast.expr]], Iterator[Alternative]]] = {
    "Literal": _literal,
    "Union": _union,
    "Optional": _optional,
    "A": _annotated_type,
    "Annotated": _annotated_type,
}


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rsplit(".", 1)[-1]


def _flags(path: Path) -> set[str]:
    """Fields whose command-line flags stand in a source as text: ``"--tp-size"`` gives
    ``tp_size``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    flags = {t for t in texts if isinstance(t, str) and t.startswith("--") and " " not in t}
    return {flag.removeprefix("--").replace("-", "_") for flag in flags}


def _has_no_flag(name: str, annotation: ast.expr) -> bool:
    return name.startswith("_") or any(
        isinstance(node, ast.keyword) and node.arg == "no_cli" for node in ast.walk(annotation)
    )


def _annotated(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id, item.annotation


def _classes(path: Path) -> Iterable[ast.ClassDef]:
    if not path.is_file():
        return []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def _package_folder(package: str) -> Path:
    """Folder of a top-level package, found without running any of its code."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LibraryMissingError(f"{package} is not installed in this environment", name=package)
    return Path(next(iter(spec.submodule_search_locations)))


def _found(
    name: str, distribution: str, annotations: dict[str, ast.expr], landmark: str
) -> LibraryFields:
    version = importlib.metadata.version(distribution)
    if landmark not in annotations:
        raise LibraryMissingError(
            f"{distribution} {version} does not declare {name} where the pinned release does",
            name=distribution,
        )
    return LibraryFields(f"{name} ({distribution} {version})", annotations)
