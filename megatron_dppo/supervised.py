"""Train on prompts and responses by maximum likelihood, as a warm start.

``megatron-dppo supervised CONFIG.yaml [key.path=value ...]``.

The trainer of RL runs maximises the likelihood of the responses. The result is a Hugging Face folder,
``<run.directory>/hf``, from which an RL run can start. A stopped run goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatron_dppo.config import ConfigError, SupervisedConfig, check_supervised_config, load_as
from megatron_dppo.config.data_files import data_files
from megatron_dppo.config.machine import set_allocator, set_precision, this_machine
from megatron_dppo.launch.arguments import add_config_arguments
from megatron_dppo.launch.library_checks import (
    CHECK,
    check_everything_supervised,
    check_in_child,
    checkpoint_faults,
    untried_options,
)
from megatron_dppo.launch.local import run_local
from megatron_dppo.launch.srun import adopt_slurm_rank
from megatron_dppo.launch.stops import exit_by_code
from megatron_dppo.logging import configure_logging, fatal
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.processes import name_rank
from megatron_dppo.system.secret_variables import hide_secrets

if TYPE_CHECKING:
    from megatron_dppo.data.problems import Turns, TurnSets

MODULE = "megatron_dppo.supervised"
log = logging.getLogger(MODULE)


def _load_data(config: SupervisedConfig) -> TurnSets:
    """Load the tokenizer and the sequences, and log what is seldom intended. Raises DataError."""
    from megatron_dppo.data.problems import (
        PromptForm,
        TurnSets,
        embedding_rows,
        load_tokenizer,
        load_turns,
        template_warnings,
    )
    from megatron_dppo.data.turn_ends import ResponseEnds

    folder = config.model.hf_checkpoint
    tokenizer = load_tokenizer(folder)
    rows = embedding_rows(folder)
    form = PromptForm(
        config.data.apply_chat_template, arguments=config.data.chat_template_arguments
    )
    for warning in template_warnings(tokenizer, form, ResponseEnds.of(folder, tokenizer), rows):
        log.warning("%s: %s", folder, warning)
    read_turns = partial(
        load_turns,
        tokenizer=tokenizer,
        form=form,
        embedding_rows=rows,
        only_last=config.data.turns == "last",
    )
    held_out: dict[str, list[Turns]] = {}
    for path in (config.data.train, *config.data.evaluation.values()):
        file_warning = data_files(path).warning
        if file_warning:
            log.warning("%s", file_warning)
    for name, path in config.data.evaluation.items():
        held_out[name] = read_turns(path)
    return TurnSets(read_turns(config.data.train), held_out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, validate and run; return the exit code: 0 done, 1 failed, 2 refused, 130 stopped by Ctrl-C."""
    options = _parser().parse_args(arguments)
    hide_secrets()
    adopt_slurm_rank()
    try:
        config = load_as(SupervisedConfig, options.config, options.overrides)
        if options.check:
            check_everything_supervised(config, options.config)
            faults = list(checkpoint_faults(config))
            if faults:
                raise ConfigError(faults, options.config)
            _load_data(config)
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
    except RunError as error:
        fatal(str(error))
    if this_machine().gpus:
        set_allocator(None, os.environ)
        set_precision(config.megatron, os.environ)
    rank = int(os.environ["RANK"])
    name_rank(rank)
    # Configure the log before libraries are imported, so that it has their messages.
    configure_logging(config.run.directory, rank)
    # Import late: the import takes seconds, and a process that only starts ranks does not need it.
    from megatron_dppo.loop.supervised_run import run_supervised_rank

    try:
        data = _load_data(config)
    except RunError as error:
        fatal(f"{type(error).__name__}: {error}")
    run_supervised_rank(config, data)
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
