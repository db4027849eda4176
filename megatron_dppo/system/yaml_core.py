"""YAML of the 1.2 core schema, without duplicate keys.

PyYAML reads YAML 1.1: ``1e-6`` is text, ``1:30`` is 90, ``010`` is 8, ``no`` is false and ``2024-01-01`` a date. Here
``1e-6``, ``1_000``, ``0x10`` and ``.inf`` are numbers, ``true`` and ``false`` are the only truth values, and ``1:30``,
``no`` and ``2024-01-01`` are text. :func:`parse_yaml` reads back what :func:`dump_yaml` writes.

ruamel.yaml also reads YAML 1.2, but it turns ``2024-01-01`` into a date, and it accepts keys that are no text. It would
also be a second YAML library, because our dependencies bring PyYAML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

MAX_VALUES = 100_000
"""Largest number of values of a document. A value counts again for each alias of it."""

_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_PLAIN_TYPES = (
    # The YAML tag, the pattern of its texts, and the characters that its texts begin with (\0: the empty text).
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
    """SafeLoader with the plain scalars of YAML 1.2. It refuses duplicate keys, and keys that are no text."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  PyYAML's own protocol

    def get_single_node(self) -> yaml.Node | None:
        """Read the document's root as PyYAML does, but refuse a document of more than ``MAX_VALUES`` values."""
        node = super().get_single_node()
        if node is not None:
            _count_values(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Read a table as PyYAML does, but refuse duplicate keys (keys of a ``<<`` merge may be set again)."""
        # The tag ``!!map`` can stand before a value that is no table.
        if not isinstance(node, yaml.MappingNode):
            raise _fault("!!map is given to what is no table", node)
        line_of_key: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            line = key_node.start_mark.line + 1
            key = key_node.value
            if key_node.tag != "tag:yaml.org,2002:str":
                raise _fault(f"the key {key!r} is not text; put it in quotes", key_node)
            if key in line_of_key:
                lines = f"{line_of_key[key]} and {line}"
                raise _fault(f"the key {key!r} is given twice, in lines {lines}", key_node)
            line_of_key[key] = line
        return super().construct_mapping(node, deep)


def _fault(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _count_values(node: yaml.Node, counts: dict[int, int | None]) -> int:
    """Count the values in ``node`` with every alias written out.

    ``counts`` has the result by the node's id, None while the node is being counted. Raises yaml.MarkedYAMLError above
    MAX_VALUES, or for a node that contains itself.
    """
    if id(node) not in counts:
        counts[id(node)] = None
        value_count = 0
        for child in _children(node):
            value_count += _count_values(child, counts)
            if value_count >= MAX_VALUES:
                raise _fault(
                    f"more than {MAX_VALUES} values, an alias counted as what it repeats", node
                )
        counts[id(node)] = value_count + 1
    count = counts[id(node)]
    if count is None:
        raise _fault("an alias stands for what contains it", node)
    return count


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    """Yield the items of a list, or the keys and values of a table; nothing for a scalar."""
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            yield key_node
            yield value_node
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _value_of(node: yaml.Node, tag: str) -> str:
    """Return the text of a scalar with this tag (``int``, ``bool``, ...), with capital and small letters as written.

    An explicit tag such as ``!!bool`` may stand before any value. Raises yaml.MarkedYAMLError for a value that does not
    fit the tag.
    """
    if not isinstance(node, yaml.ScalarNode) or not _PATTERNS[tag].match(node.value):
        shown_value = "a table or a list"
        if isinstance(node, yaml.ScalarNode):
            shown_value = node.value[:40]
        raise _fault(f"!!{tag} is given to {shown_value!r}", node)
    return str(node.value)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which :class:`_Loader` would read as something else."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  PyYAML's own protocol


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = _value_of(node, "int")
    if text[:2] in ("0x", "0o"):
        return int(text, 0)
    return int(text)


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    # YAML writes .inf and .nan, Python reads inf and nan.
    return float(re.sub(r"\.(?=inf|nan)", "", _value_of(node, "float").lower()))


def _bool(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bool:
    return _value_of(node, "bool").lower() == "true"


def _null(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> None:
    _value_of(node, "null")


_PATTERNS: dict[str, re.Pattern[str]] = {}
for _tag, _pattern, _first_characters in _PLAIN_TYPES:
    _compiled = re.compile(rf"^(?:{_pattern})$")
    _PATTERNS[_tag.rpartition(":")[2]] = _compiled
    # In PyYAML's table the empty text has the first character "".
    _firsts = [character.strip("\0") for character in _first_characters]
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, _compiled, _firsts)
_CONSTRUCTORS: dict[str, Callable[[Any, Any], Any]] = {
    "null": _null,
    "bool": _bool,
    "int": _integer,
    "float": _float,
    "str": yaml.SafeLoader.construct_yaml_str,
    "seq": yaml.SafeLoader.construct_yaml_seq,
    "map": yaml.SafeLoader.construct_yaml_map,
}
# All tags without a constructor are unknown, also the tags that only YAML 1.1 has (``!!timestamp``, ``!!binary``,
# ``!!set``).
_Loader.yaml_constructors = {None: yaml.SafeLoader.construct_undefined}
for _name, _constructor in _CONSTRUCTORS.items():
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _constructor)


def parse_yaml(text: str) -> Any:
    """Return the document's value. Raises yaml.YAMLError with line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("tables or lists are nested too deeply") from None


def parse_scalar(text: str) -> Any:
    """Return the value of ``key=text``: a plain scalar, or flow YAML if the text begins with a bracket or a quote.

    Text with ``#``, ``: `` or ``@`` in it needs no quotes. Empty text is null. Raises yaml.YAMLError.
    """
    text = text.strip()
    if text[:1] in ("[", "{", '"', "'"):
        return parse_yaml(text)
    loader = _Loader("")
    # (True, False): the text is a plain scalar, not a quoted one.
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    return loader.construct_document(yaml.ScalarNode(tag, text))


def dump_yaml(value: Any) -> str:
    """Return ``value`` as block-style YAML; tables keep the order of their keys."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
