"""Entry point: ``megatron-dppo supervised CONFIG.yaml [key.path=value ...]``.

Maximum likelihood on prompt-response pairs by the same trainer as the RL run, as a warm start: the
result is a Hugging Face folder, ``<run.directory>/hf``. Short runs: nothing is checkpointed between.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megatron_dppo.config import SupervisedConfig, check_supervised_config, load_as
from megatron_dppo.config.machine import set_allocator, this_machine
from megatron_dppo.launch.library_checks import CHECK, check_everything_supervised, check_in_child
from megatron_dppo.launch.local import run_local
from megatron_dppo.launch.srun import adopt_slurm_rank
from megatron_dppo.logging import configure_logging, fatal
from megatron_dppo.system.errors import RunError

MODULE = "megatron_dppo.supervised"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, validate, run; the exit code: 0 done, 1 failed, 2 refused, 130 stopped by Ctrl-C."""
    options = _parser().parse_args(arguments)
    adopt_slurm_rank()
    try:
        config = load_as(SupervisedConfig, options.config, options.overrides)
        if options.check:
            check_everything_supervised(config, options.config)
            return 0
        if (
            "RANK" in os.environ or not config.forwards_to_megatron
        ):  # nothing that needs a library's word
            check_supervised_config(config, options.config)
        if "RANK" not in os.environ:
            command = [options.config, *options.overrides]
            refused = check_in_child(MODULE, command) if config.forwards_to_megatron else 0
            return refused or run_local(config, None, MODULE, this_machine())
    except RunError as error:
        fatal(str(error))
    if this_machine().gpus:
        set_allocator(None, os.environ)
    # First, so that what the libraries say while they are imported goes to the log.
    configure_logging(config.run.directory, int(os.environ["RANK"]))
    from megatron_dppo.loop.supervised_run import run_supervised_rank

    run_supervised_rank(config)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo supervised",
        description="Train on prompt-response pairs; writes a Hugging Face folder.",
        epilog="Keys and their meaning: SupervisedConfig in megatron_dppo/config/schema.py.",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration")
    parser.add_argument(
        "overrides", metavar="key.path=value", nargs="*", help="replaces one value of the file"
    )
    parser.add_argument(CHECK, action="store_true", help="validate and exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
