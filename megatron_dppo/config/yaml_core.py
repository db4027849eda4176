"""YAML as people mean it: the 1.2 core schema, duplicate keys refused.

PyYAML reads YAML 1.1, where ``1e-6`` is text, ``1:30`` is 90, ``010`` is 8, ``no`` is false and
``2024-01-01`` a date. Here a number is a number (``1e-6``, ``1_000``, ``0x10``, ``.inf``),
``true``/``false`` are the only truth values, and all else is text. What :func:`dump_yaml` writes,
:func:`parse_yaml` reads back as it was.

Not ruamel.yaml, which reads 1.2 as well: a second YAML library beside the one that our dependencies
bring, it still turns ``2024-01-01`` into a date, and keys that are no text pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

MAX_VALUES = 100_000
"""Values of a document, counted as often as its aliases repeat them."""

_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_PLAIN_TYPES = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", rf"[-+]?{_DIGITS}|0x[0-9a-fA-F]+|0o[0-7]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        rf"[-+]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema's plain scalars, text keys only, and no key twice."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  PyYAML's own protocol

    def get_single_node(self) -> yaml.Node | None:
        """As PyYAML's, after refusing a few lines of aliases that stand for millions of values."""
        node = super().get_single_node()
        if node is not None:
            _count_values(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As PyYAML's, after refusing duplicates (keys of a ``<<`` merge may be set again)."""
        if not isinstance(node, yaml.MappingNode):  # ``!!map`` before something else
            raise yaml.MarkedYAMLError(
                problem="!!map is given to what is no table", problem_mark=node.start_mark
            )
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            line = key_node.start_mark.line + 1
            key = key_node.value
            if key_node.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is not text; put it in quotes",
                    problem_mark=key_node.start_mark,
                )
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is given twice, in lines {seen[key]} and {line}",
                    problem_mark=key_node.start_mark,
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


def _count_values(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Values in ``node`` with every alias written out. ``known``: the counts by node's id, None while
    one is being counted. Raises yaml.MarkedYAMLError above MAX_VALUES, or for a node in itself."""
    if id(node) not in known:
        known[id(node)] = None
        inside = 0
        for item in node.value if isinstance(node, yaml.CollectionNode) else ():
            for child in item if isinstance(item, tuple) else (item,):
                inside += _count_values(child, known)
                if inside >= MAX_VALUES:
                    problem = f"more than {MAX_VALUES} values, an alias counted as what it repeats"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        known[id(node)] = inside + 1
    count = known[id(node)]
    if count is None:
        raise yaml.MarkedYAMLError(
            problem="an alias stands for what contains it", problem_mark=node.start_mark
        )
    return count


def _value_of(node: yaml.Node, kind: str) -> str:
    """The text of a scalar of that kind, also where a tag such as ``!!bool`` says so; case as given."""
    if not isinstance(node, yaml.ScalarNode) or not _PATTERNS[kind].match(node.value):
        shown = node.value[:40] if isinstance(node, yaml.ScalarNode) else "a table or a list"
        raise yaml.MarkedYAMLError(
            problem=f"!!{kind} is given to {shown!r}", problem_mark=node.start_mark
        )
    return str(node.value)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which :class:`_Loader` would read as something else."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  PyYAML's own protocol


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = _value_of(node, "int")
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(re.sub(r"\.(?=inf|nan)", "", _value_of(node, "float").lower()))


def _truth(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bool:
    return _value_of(node, "bool").lower() == "true"


def _nothing(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> None:
    _value_of(node, "null")


_PATTERNS: dict[str, re.Pattern[str]] = {}
for _tag, _pattern, _first in _PLAIN_TYPES:
    _compiled = re.compile(rf"^(?:{_pattern})$")
    _PATTERNS[_tag.rpartition(":")[2]] = _compiled
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, _compiled, ["" if c == "\0" else c for c in _first])
_CONSTRUCTORS: dict[str, Callable[[Any, Any], Any]] = {
    "null": _nothing,
    "bool": _truth,
    "int": _integer,
    "float": _number,
    "str": yaml.SafeLoader.construct_yaml_str,
    "seq": yaml.SafeLoader.construct_yaml_seq,
    "map": yaml.SafeLoader.construct_yaml_map,
}
# Tags of YAML 1.1 alone (``!!timestamp``, ``!!binary``, ``!!set``) are unknown, as any other is.
_Loader.yaml_constructors = {None: yaml.SafeLoader.construct_undefined}
for _name, _constructor in _CONSTRUCTORS.items():
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _constructor)


def parse_yaml(text: str) -> Any:
    """The document's value. Raises yaml.YAMLError with line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("tables or lists are nested too deeply") from None


def parse_scalar(text: str) -> Any:
    """The value of ``key=text``: a plain scalar, or where it begins with a bracket or a quote, flow
    YAML.

    Text with ``#``, ``: `` or ``@`` in it needs no quotes. Empty text is null. Raises
    yaml.YAMLError.
    """
    text = text.strip()
    if text[:1] in ("[", "{", '"', "'"):
        return parse_yaml(text)
    loader = _Loader("")
    node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text)
    return loader.construct_document(node)


def dump_yaml(value: Any) -> str:
    """Block-style YAML in the order given."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
