"""The console command: ``megatron-dppo COMMAND ...``, also ``python -m megatron_dppo COMMAND ...``.

Each command is a module with ``main(arguments) -> int | None``, imported when it is asked for, so that ``--help`` is
immediate; ``python -m`` of such a module is the same command.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from megatron_dppo import EXAMPLES, __version__

COMMANDS = {
    "train": ("megatron_dppo.train", "train a model by RL, or check its configuration"),
    "supervised": ("megatron_dppo.supervised", "train on prompt-response pairs, as a warm start"),
    "demo": ("megatron_dppo.demo.__main__", "train a tiny mixture of experts on this machine"),
    "plan": ("megatron_dppo.cluster.plan", "what a recipe takes on a cluster, and whether it fits"),
    "data": ("megatron_dppo.data.__main__", "prepare and inspect problems, check a reward on them"),
    "convert": ("megatron_dppo.convert", "checkpoints between Hugging Face and Megatron"),
    "slurm": ("megatron_dppo.cluster.slurm.__main__", "submit, watch and stop runs on a Slurm cluster"),
    "fleet": ("megatron_dppo.fleet.__main__", "list, attach and detach the servers of a run"),
    "watch": ("megatron_dppo.diagnostics.watch", "a page of a run in the browser, live"),
    "report": ("megatron_dppo.metrics.report", "draw a run, or compare several"),
    "samples": (
        "megatron_dppo.metrics.samples",
        "read what the model said, with reward and reason",
    ),
    "explain": (
        "megatron_dppo.diagnostics.explain.__main__",
        "which tokens of a saved batch the mask blocks, and why",
    ),
    "replay": (
        "megatron_dppo.diagnostics.explain.replay",
        "what another rule would have blocked in a run; each step derived again",
    ),
    "doctor": (
        "megatron_dppo.diagnostics.doctor.__main__",
        "which cause makes engine and trainer differ in a saved batch",
    ),
    "preflight": ("megatron_dppo.cluster.preflight.__main__", "whether this machine is fit for a run"),
    "gpu-check": ("megatron_dppo.diagnostics.gpu_check.__main__", "what to run first on a machine with GPUs"),
    "bench-mask": (
        "megatron_dppo.diagnostics.mask_benchmark.__main__",
        "time of the policy statistics and masks here",
    ),
}
"""Module and purpose of every command."""
REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Run the command that ``arguments`` (default: the command line) begin with on the rest of them; its exit code."""
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and not sys.flags.safe_path:
        # As with ``python -m``: rewards and environments of one's own are modules in the folder that one is in.
        sys.path.insert(0, "")
    if not command_line or command_line[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if command_line else REFUSED
    if command_line[0] in ("-V", "--version"):
        print(f"megatron-dppo {__version__}")
        return 0
    if command_line[0] not in COMMANDS:
        print(f"error: {_unknown(command_line[0])}", file=sys.stderr)
        return REFUSED
    module = importlib.import_module(COMMANDS[command_line[0]][0])
    code: int | None = module.main(command_line[1:])
    return code


def _unknown(word: str) -> str:
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    expected = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(COMMANDS)}"
    return f"megatron-dppo: no command {word!r}; {expected}"


def _help() -> str:
    lines = "\n".join(f"  {name:12}{purpose}" for name, (_, purpose) in COMMANDS.items())
    return (
        "usage: megatron-dppo COMMAND ... (also --version)\n\nRL training of language models by DPPO: Megatron-Core "
        f"trainers, SGLang rollouts.\n\ncommands:\n{lines}\n\nmegatron-dppo COMMAND --help tells more.\nRecipes and "
        f"model configurations to start from: {EXAMPLES}"
    )


if __name__ == "__main__":
    sys.exit(main())
