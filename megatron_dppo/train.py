"""Train a model by RL, or check its configuration.

``megatron-dppo train CONFIG.yaml [key.path=value ...]``.

If RANK is in the environment (torchrun, Slurm, our own supervisor), this process is a rank of the trainer. Otherwise it
is the supervisor of a run, which starts the SGLang servers and the ranks. Before that, the supervisor lets a child
process check the configuration within seconds. Only the child imports the libraries, so the supervisor stays small.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Collection, Sequence

from megatron_dppo.config import (
    ConfigError,
    TrainConfig,
    check_config,
    load_config,
    load_remainder,
    resolved_yaml,
)
from megatron_dppo.config.layout import describe, missing_weights
from megatron_dppo.config.loading import Remainder, load_as
from megatron_dppo.config.machine import has_server_sizes, this_machine
from megatron_dppo.launch.arguments import add_config_arguments
from megatron_dppo.launch.hosts import HostsConfig, run_on_hosts
from megatron_dppo.launch.library_checks import (
    CHECK,
    check_everything,
    check_in_child,
    checkpoint_faults,
    embedding_warnings,
    untried_options,
)
from megatron_dppo.launch.local import run_local
from megatron_dppo.launch.rank_start import begin_rank
from megatron_dppo.launch.run_directory import is_finished
from megatron_dppo.launch.srun import adopt_slurm_rank
from megatron_dppo.launch.start_checks import check_start
from megatron_dppo.launch.stops import exit_by_code
from megatron_dppo.logging import INTERRUPTED, REFUSED, FatalError, fatal
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.rewards.checked_answers import checked_answers_file
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.processes import end_now
from megatron_dppo.system.secret_variables import hide_secrets

MODULE = "megatron_dppo.train"
ANSWERS = "--answers"
_NOT_HERE = "on this machine it can't be started: "
_MACHINE_SECTIONS = ("parallel", "engine", "model", "megatron", "sglang", "training", "lora")
"""Sections that a machine's processes and memory depend on."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a full or read-only file system."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, validate and run; return the exit code: 0 done, 1 failed, 2 refused, 130 stopped by Ctrl-C."""
    options = _parser().parse_intermixed_args(arguments)
    hide_secrets()
    adopt_slurm_rank()
    try:
        if options.check and not options.print_config:
            return _check(options)
        config = load_config(options.config, options.overrides)
        if options.print_config:
            print(resolved_yaml(config), end="")
            return 0
        if "RANK" in os.environ:
            spec = RunSpec.of(config, options.config)
            begin_rank(config, options.config, config.weight_sync.strategy)
    except ConfigError as error:
        fatal(str(error))
    if "RANK" not in os.environ:
        return _supervise(config, options)
    # Import late: the import takes seconds, and a process that only starts ranks does not need it.
    from megatron_dppo.loop import run_rank

    try:
        run_rank(config, spec)
    except FatalError:
        end_now(REFUSED)
    end_now(0)


def _check(options: argparse.Namespace) -> int:
    """Check the values, the libraries, the data, the checkpoints and this machine, and print what a start would do.

    Raises ConfigError with the faults of all stages. If all faults are faults of this machine, they are only printed:
    the run may be meant for another machine.
    """
    source = options.config
    try:
        config = load_config(source, options.overrides)
    except ConfigError as error:
        # Replace the faulty values by valid stand-ins, so that the later checks can run and find more faults.
        remainder = load_remainder(source, options.overrides)
        if remainder is None:
            raise
        raise ConfigError([*error.faults, *_further_faults(remainder, options)], source) from error
    shape, faults = _stage_faults(config, options)
    # Only the check before a start, in a child process, has the option ``ANSWERS``.
    precedes_start = options.answers is not None
    if faults or shape is None:
        # Before a start, the parent process has checked the machine already.
        if not precedes_start:
            faults += _machine_faults(config)
        raise ConfigError(faults, source)
    print(describe(config, shape))
    for warning in untried_options(config):
        print(f"warning: {warning}")
    if not precedes_start:
        for warning in embedding_warnings(config.model.hf_checkpoint, shape):
            print(f"warning: {warning}")
        # In a run, rank 0 logs these changes.
        changes = _changes(config)
        if changes is not None:
            print(changes)
    start_check = check_start(config, this_machine())
    print(start_check.summary)
    folder = config.model.hf_checkpoint
    weight_faults = [f"model.hf_checkpoint: {fault}" for fault in missing_weights(folder)]
    for fault in [*weight_faults, *start_check.faults]:
        print(_NOT_HERE + fault)
    return 0


def _stage_faults(
    config: TrainConfig, options: argparse.Namespace, faulty_keys: Collection[str] = ()
) -> tuple[ModelShape | None, list[str]]:
    """Return the model's shape (None if a value is invalid), and faults of values, libraries, data and checkpoints.

    ``faulty_keys``: keys whose values in ``config`` are stand-ins. Checks that depend on these keys are skipped.
    """
    from megatron_dppo.loop.start_checks import data_and_resume_faults

    shape = None
    faults: list[str] = []
    try:
        shape = check_everything(config, options.config, weights=options.answers is not None)
    except ConfigError as error:
        faults += error.faults
    faults += checkpoint_faults(config)
    # The function takes faults like keys, because each fault begins with its key.
    faults += data_and_resume_faults(config, [*faulty_keys, *faults], options.answers)
    return shape, faults


def _further_faults(remainder: Remainder, options: argparse.Namespace) -> list[str]:
    """Return the faults that later checks find in a configuration with faulty values."""
    _, faults = _stage_faults(remainder.config, options, remainder.faulty_keys)
    if not remainder.has_faulty(_MACHINE_SECTIONS):
        faults += _machine_faults(remainder.config)
    # Leave out the faults that a stand-in may have caused.
    return [fault for fault in faults if remainder.is_certain(fault)]


def _machine_faults(config: TrainConfig) -> list[str]:
    """Return what this machine lacks."""
    # The checks of the machine read the sizes of the servers, so all sizes must be numbers.
    if not has_server_sizes(config.sglang):
        return []
    return [_NOT_HERE + fault for fault in check_start(config, this_machine()).faults]


def _changes(config: TrainConfig) -> str | None:
    """List the keys that changed since the checkpoint that a start would resume from."""
    from megatron_dppo.loop.start_checks import changes_since_checkpoint

    return changes_since_checkpoint(config)


def _supervise(config: TrainConfig, options: argparse.Namespace) -> int:
    """Check everything in a child process, then run to the end."""
    exit_by_code()
    machine = this_machine()
    faults = []
    # If a size of the servers is no number, the child process reports it.
    if options.hosts is None and has_server_sizes(config.sglang):
        faults = list(check_start(config, machine).faults)
    if faults:
        # In the same error, report the faults of the values, as far as they can be found without the libraries.
        try:
            check_config(config, options.config)
        except ConfigError as error:
            faults = [*error.faults, *faults]
        fatal(str(ConfigError(faults, f"{options.config}, on this machine")))
    if is_finished(config):
        print(
            f"nothing to do: the run in {config.run.directory} is at its last step, "
            f"{config.run.steps}; raise run.steps to go on, or begin anew with run.resume=never"
        )
        return 0
    try:
        with checked_answers_file() as path:
            arguments = [options.config, *options.overrides, ANSWERS, path]
            check_code = check_in_child(MODULE, arguments)
            if check_code:
                return check_code
            spec = RunSpec.of_checked(config)
            if options.hosts is not None:
                return _run_on_hosts(config, spec, options.hosts)
            return run_local(config, spec, MODULE, machine)
    except RunError as error:
        fatal(str(error))
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        fatal(f"{error.filename or config.run.directory}: {error.strerror}")
    except KeyboardInterrupt:
        # Ctrl-C came before the supervisor began to handle the signal.
        return INTERRUPTED


def _run_on_hosts(config: TrainConfig, spec: RunSpec, path: str) -> int:
    return run_on_hosts(config, spec, load_as(HostsConfig, path), MODULE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo train",
        description="Train a language model with RL: Megatron-Core trainers, SGLang rollouts.",
        epilog=(
            "Ctrl-C once: end the step, save a checkpoint, stop. Twice: end at once. The same "
            "command resumes from the newest checkpoint in run.directory (run.resume). Exit codes: "
            "0 done, 1 failed, 2 refused, 130 stopped by Ctrl-C. Keys and their meaning: "
            "megatron_dppo/config/schema.py. Relative paths are relative to the current directory."
        ),
    )
    add_config_arguments(parser)
    parser.add_argument(
        CHECK, action="store_true", help="validate, describe the layout in a line, and exit"
    )
    parser.add_argument(
        "--hosts",
        metavar="HOSTS.yaml",
        help="run on several hosts, through ssh or another remote shell; docs/hosts.md",
    )
    # Only the child process that checks a start gets this option: it writes its findings on answers to the file.
    parser.add_argument(ANSWERS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--print-config", action="store_true", help="print every value with its default, and exit"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
