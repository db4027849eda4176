"""Train on prompts and responses by maximum likelihood, as a warm start.

``megatron-dppo supervised CONFIG.yaml [key.path=value ...]``.

The trainer of RL runs maximises the likelihood of the responses. The result is a Hugging Face folder,
``<run.directory>/hf``, from which an RL run can start. A stopped run goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megatron_dppo.config import SupervisedConfig, check_supervised_config, load_as
from megatron_dppo.config.machine import this_machine
from megatron_dppo.launch.arguments import add_config_arguments
from megatron_dppo.launch.library_checks import (
    CHECK,
    check_everything_supervised,
    check_in_child,
    untried_options,
)
from megatron_dppo.launch.local import run_local
from megatron_dppo.launch.rank_start import begin_rank
from megatron_dppo.launch.srun import adopt_slurm_rank
from megatron_dppo.launch.stops import exit_by_code
from megatron_dppo.logging import fatal
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.secret_variables import hide_secrets

MODULE = "megatron_dppo.supervised"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, validate and run; return the exit code: 0 done, 1 failed, 2 refused, 130 stopped by Ctrl-C."""
    options = _parser().parse_args(arguments)
    hide_secrets()
    adopt_slurm_rank()
    try:
        config = load_as(SupervisedConfig, options.config, options.overrides)
        if options.check:
            from megatron_dppo.data.problems import TurnSets

            check_everything_supervised(config, options.config)
            TurnSets.load(config)
            for warning in untried_options(config):
                print(f"warning: {warning}")
            return 0
        # Ranks check the configuration themselves. The starting process, which has no RANK, leaves the check to a child
        # process if options are forwarded to Megatron-Core: the child imports the library for the check.
        if "RANK" in os.environ or not config.forwards_to_megatron:
            check_supervised_config(config, options.config)
        if "RANK" not in os.environ:
            exit_by_code()
            if config.forwards_to_megatron:
                check_code = check_in_child(MODULE, [options.config, *options.overrides])
                if check_code:
                    return check_code
            return run_local(config, None, MODULE, this_machine())
        begin_rank(config, options.config)
    except RunError as error:
        fatal(str(error))
    # Import late: the import takes seconds, and a process that only starts ranks does not need it.
    from megatron_dppo.loop.supervised_run import run_supervised_rank

    run_supervised_rank(config)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo supervised",
        description="Train on prompts and responses by maximum likelihood; writes a Hugging Face folder.",
        epilog="Keys and their meaning: SupervisedConfig in megatron_dppo/config/schema.py.",
    )
    add_config_arguments(parser)
    parser.add_argument(CHECK, action="store_true", help="validate and exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
