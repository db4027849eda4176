"""The console command: ``megatron-dppo COMMAND ...``, also ``python -m megatron_dppo COMMAND ...``.

Each command is a module with ``main(arguments) -> int | None``, registered as an entry point of the group
``megatron_dppo.commands`` (``system/plugins.py``). Other packages may register commands too. A command is imported when
it runs, so that ``--help`` is immediate. ``python -m`` of such a module is the same command.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint

from megatron_dppo import EXAMPLES, __version__
from megatron_dppo.system import plugins
from megatron_dppo.system.imports import leave_current_folder

REFUSED = 2
"""Exit code of a wrong command line, as in ``megatron_dppo.logging``. Importing that module would delay ``--help``."""


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Run the command that the first of ``arguments`` names, with the other arguments; return its exit code.

    Default of ``arguments``: the command line.
    """
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        # ``import_target`` imports the user's rewards and environments from the current folder.
        leave_current_folder()
    if not command_line or command_line[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if command_line else REFUSED
    name, *command_arguments = command_line
    if name in ("-V", "--version"):
        print(f"megatron-dppo {__version__}")
        return 0
    commands = _commands()
    if name not in commands:
        print(f"error: {_unknown_command(name, commands)}", file=sys.stderr)
        return REFUSED
    try:
        run_command = plugins.load_command(commands[name])
    except plugins.PluginError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    code: int | None = run_command(command_arguments)
    return code


def _commands() -> Mapping[str, EntryPoint]:
    """Return the commands by name. A faulty command of another package costs a warning, and no other command."""
    commands, faults = plugins.sound_plugins(plugins.COMMANDS)
    for fault in faults:
        print(f"warning: {fault}", file=sys.stderr)
    return commands


def _unknown_command(word: str, commands: Mapping[str, EntryPoint]) -> str:
    similar_commands = difflib.get_close_matches(word, commands, n=1)
    suggestion = f"expected one of {', '.join(commands)}"
    if similar_commands:
        suggestion = f"did you mean {similar_commands[0]!r}?"
    return f"megatron-dppo: no command {word!r}; {suggestion}"


def _help() -> str:
    commands = _commands()
    lines = "\n".join(f"  {name:12}{plugins.help_line(entry)}" for name, entry in commands.items())
    return (
        "usage: megatron-dppo COMMAND ... (also --version)\n\nRL training of language models by DPPO: Megatron-Core "
        f"trainers, SGLang rollouts.\n\ncommands:\n{lines}\n\nmegatron-dppo COMMAND --help tells more.\nRecipes and "
        f"model configurations to start from: {EXAMPLES}"
    )


if __name__ == "__main__":
    sys.exit(main())
