"""SGLang's own parser of server arguments: its fields, and the faults that it finds in a table of options.

``python -m megatron_dppo.engine.server_arguments`` with the ``sglang:`` table as JSON on standard input prints the
faults as a JSON list. Use it to check the table with another interpreter, or without importing SGLang into this
process.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, get_type_hints

from megatron_dppo.config.errors import closest, given
from megatron_dppo.config.forwarded import SGLANG, LibraryFields, LibraryMissingError
from megatron_dppo.engine.options import flag_of
from megatron_dppo.model.engine_layout import current_names
from megatron_dppo.system.programs import ProgramError, output_of

_PLAIN_PARSERS = (None, str, int, float)
"""Types of a flag that accept only text of the field's own type."""


@functools.cache
def server_args_fields() -> LibraryFields:
    """Return every field of SGLang's ServerArgs; fields without a command-line flag count as computed. Takes seconds.

    Raises LibraryMissingError if SGLang cannot be imported.
    """
    try:
        from sglang.srt.server_args import ServerArgs
    except ImportError as error:
        raise LibraryMissingError(f"sglang can't be imported: {error}", name="sglang") from error
    types: dict[str, Any] = get_type_hints(ServerArgs)
    parser = _parser()
    flags = {action.dest: action for action in parser._actions if action.dest in types}
    for name, flag in flags.items():
        # The flag also accepts text, for example "128k" for a number or JSON for a table.
        if flag.type not in _PLAIN_PARSERS:
            types[name] = types[name] | str
    version = importlib.metadata.version("sglang")
    return LibraryFields(f"ServerArgs (sglang {version})", types, frozenset(types) - flags.keys())


def table_faults(table: Mapping[str, Any]) -> list[str]:
    """Return one fault for each key of an ``sglang:`` table that SGLang does not declare, or whose value it rejects.

    A value is rejected if it does not have the field's type, or if SGLang's command line refuses it. Raises
    LibraryMissingError if SGLang cannot be imported.
    """
    table = current_names(table)
    faults = list(SGLANG.library_faults(table, server_args_fields()))
    # A fault begins with the table's name and the key.
    undeclared = {fault.partition(":")[0] for fault in faults}
    for key, value in SGLANG.free(table).items():
        if value is not None and f"{SGLANG.name}.{key}" not in undeclared:
            faults += _refusals(key, value)
    return faults


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError for a rejected value. Python's own parser would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def _refusals(key: str, value: Any) -> Iterator[str]:
    """Yield SGLang's refusal of one option, passed in the same way as from a server's options file."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = _parser()
    merger = ConfigArgumentMerger(parser)
    try:
        flags = merger._convert_config_to_args({flag_of(key): value})
        # The model's path is the only flag that the parser requires.
        parser.parse_args(["--model-path=any", *flags])
    except ValueError as error:
        # The parser raises ValueError for a rejected value, and the merger raises it for an unknown kind of flag.
        choices: list[str] = []
        for action in parser._actions:
            if action.dest == key and action.choices:
                choices = [str(choice) for choice in action.choices]
        close_choices = closest(str(value), choices)
        hint = ""
        if close_choices:
            hint = f"; did you mean {close_choices[0]}?"
        yield f"{SGLANG.name}.{key}: got {given(value)}, which SGLang refuses: {error}{hint}"


def main() -> None:
    """Print the faults of the table on standard input."""
    print(json.dumps(table_faults(json.load(sys.stdin))))


_PATIENCE_S = 300.0
"""Longest time of a check by another interpreter. The interpreter imports SGLang within this time too."""


def table_faults_elsewhere(table: Mapping[str, Any], python: str) -> list[str]:
    """Return ``table_faults`` as computed by the interpreter ``python`` that will run the servers.

    Raises LibraryMissingError if the interpreter fails or cannot import SGLang.
    """
    command = [python, "-W", "ignore", "-m", "megatron_dppo.engine.server_arguments"]
    try:
        output = output_of(command, _PATIENCE_S, content=json.dumps(table))
    except ProgramError as error:
        raise LibraryMissingError(f"{python}: {error}", name="sglang") from error
    return [str(fault) for fault in json.loads(output.splitlines()[-1])]


if __name__ == "__main__":
    main()
