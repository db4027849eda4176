"""The fields of SGLang's ServerArgs that a configuration may set."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
from typing import Any, get_type_hints

from megatron_dppo.config.library_fields import LibraryFields, LibraryMissingError

_PLAIN_PARSERS = (None, str, int, float)


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
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = {action.dest: action for action in parser._actions if action.dest in types}
    for name, flag in flags.items():
        if flag.type not in _PLAIN_PARSERS:  # such as "128k" for a number, JSON for a table
            types[name] = types[name] | str
    version = importlib.metadata.version("sglang")
    return LibraryFields(f"ServerArgs (sglang {version})", types, frozenset(types) - flags.keys())
