"""The fields of SGLang's ServerArgs that a configuration may set, and what SGLang's own parser says of values.

``python -m megatron_dppo.engine.server_args`` with the ``sglang:`` table as JSON on standard input prints the
problems as a JSON list: for whoever asks another interpreter, or will not import SGLang.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, get_type_hints

from megatron_dppo.config.expectations import closest, given
from megatron_dppo.config.forwarded import SGLANG
from megatron_dppo.config.library_fields import LibraryFields, LibraryMissingError

_PLAIN_PARSERS = (None, str, int, float)
_PATIENCE_S = 300.0


@functools.cache
def server_args_fields() -> LibraryFields:
    """Every field, computed where SGLang's command line has no flag for it; takes seconds.

    Raises LibraryMissingError where SGLang can't be imported.
    """
    try:
        from sglang.srt.server_args import ServerArgs
    except ImportError as error:
        raise LibraryMissingError(f"sglang can't be imported: {error}", name="sglang") from error
    types: dict[str, Any] = get_type_hints(ServerArgs)
    parser = _parser()
    flags = {action.dest: action for action in parser._actions if action.dest in types}
    for name, flag in flags.items():
        if flag.type not in _PLAIN_PARSERS:  # such as "128k" for a number, JSON for a table
            types[name] = types[name] | str
    version = importlib.metadata.version("sglang")
    return LibraryFields(f"ServerArgs (sglang {version})", types, frozenset(types) - flags.keys())


def table_problems(table: Mapping[str, Any]) -> list[str]:
    """A line for each key of an ``sglang:`` table that SGLang does not declare, or not with such a value, and
    for each value that its command line refuses.

    Raises LibraryMissingError where SGLang can't be imported.
    """
    problems = list(SGLANG.library_problems(table, server_args_fields()))
    told = {problem.partition(":")[0] for problem in problems}
    for key, value in SGLANG.free(table).items():
        if value is not None and f"{SGLANG.name}.{key}" not in told:
            problems += _refusals(key, value)
    return problems


def table_problems_elsewhere(table: Mapping[str, Any], python: str) -> list[str]:
    """``table_problems`` as the interpreter ``python`` finds them, whose SGLang will serve.

    Raises LibraryMissingError where it can't say.
    """
    command = [python, "-W", "ignore", "-m", "megatron_dppo.engine.server_args"]
    try:
        done = subprocess.run(
            command, input=json.dumps(table), capture_output=True, text=True, check=True,
            timeout=_PATIENCE_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LibraryMissingError(f"{python}: {error}", name="sglang") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no word").splitlines()[-1]
        raise LibraryMissingError(f"{python} says: {last}", name="sglang") from error
    return [str(problem) for problem in json.loads(done.stdout.splitlines()[-1])]


class _RefusedError(ValueError):
    """The command line's parser refuses a value."""


class _Parser(argparse.ArgumentParser):
    """argparse ends the process over a value that it refuses."""

    def error(self, message: str) -> NoReturn:
        raise _RefusedError(message)


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def _refusals(key: str, value: Any) -> Iterator[str]:
    """What the parser says of one option, given as the file of a server's options gives it."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = _parser()
    merger = ConfigArgumentMerger(parser)
    try:
        words = merger._convert_config_to_args({key.replace("_", "-"): value})
        parser.parse_args(["--model-path=any", *words])  # the one flag that it demands
    except (
        ValueError
    ) as error:  # _RefusedError, and the merger's for an action that it does not know
        choices = (a.choices for a in parser._actions if a.dest == key and a.choices)
        near = closest(str(value), map(str, next(choices, ())))
        hint = f"; did you mean {near[0]}?" if near else ""
        yield f"{SGLANG.name}.{key}: got {given(value)}, which SGLang refuses: {error}{hint}"


def main() -> None:
    """Print the problems of the table on standard input."""
    print(json.dumps(table_problems(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
