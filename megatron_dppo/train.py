"""Entry point: ``python -m megatron_dppo.train CONFIG.yaml [key.path=value ...]``.

Everything that can be refused is refused first, within seconds and without torch. Then this process
is either the supervisor of a run on this machine, which starts the SGLang server and the trainer's
ranks, or, where RANK is in the environment (torchrun, Slurm, our own supervisor), one of those
ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from megatron_dppo.config import (
    ConfigError,
    TrainConfig,
    check_config,
    load_config,
    resolved_yaml,
)
from megatron_dppo.launch.errors import LaunchError
from megatron_dppo.logging import configure_logging, fatal

MODULE = "megatron_dppo.train"
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, validate, run; the process's exit code: 0 done, 1 failed, 2 refused, 130 stopped by
    Ctrl-C."""
    words = _parser().parse_intermixed_args(arguments)
    try:
        config = load_config(words.config, words.overrides)
        if words.print_config:
            print(resolved_yaml(config), end="")
            return 0
        plan = check_config(config, words.config)
        if words.check:
            check_names(config, words.config)
            print(plan.summary())
            return 0
        if "RANK" in os.environ:
            _check_world(config, words.config)
    except ConfigError as error:
        fatal(str(error))
    return _run_rank(config) if "RANK" in os.environ else _supervise(config, words)


def check_names(config: TrainConfig, source: str) -> None:
    """Check what only the code that uses it can tell, at the price of importing torch.

    Raises ConfigError for an algorithm, an option of one or a reward that nobody knows.
    """
    problems = []
    for key, check in _NAME_CHECKS.items():
        try:
            check(config)
        except ValueError as error:
            problems.append(f"{key}: {error}")
    if problems:
        raise ConfigError(problems, source)


def _algorithm(config: TrainConfig) -> None:
    from megatron_dppo.algorithms.presets import build_algorithm

    algorithm = build_algorithm(config.algorithm.name, config.algorithm.options)
    carried = config.rollout.topk_log_probs
    if carried and carried < algorithm.topk:
        raise ValueError(
            f"needs the engine's top {algorithm.topk} log-probabilities, but "
            f"rollout.topk_log_probs is {carried}; expected 0, or at least {algorithm.topk}"
        )


def _reward(config: TrainConfig) -> None:
    from megatron_dppo.rewards import find_reward

    find_reward(config.reward.name).load()


_NAME_CHECKS: dict[str, Callable[[TrainConfig], None]] = {
    "algorithm": _algorithm,
    "reward.name": _reward,
}


def _check_world(config: TrainConfig, source: str) -> None:
    """A launcher's world must be the configuration's. Raises ConfigError."""
    world = os.environ.get("WORLD_SIZE")
    if world != str(config.parallel.world_size):
        problem = (
            f"parallel.world_size: got {config.parallel.world_size}, but the launcher set "
            f"WORLD_SIZE to {world}"
        )
        raise ConfigError([problem], source)


def _run_rank(config: TrainConfig) -> int:
    # First, so that what the libraries say while they are imported goes to the log.
    configure_logging(config.run.directory, int(os.environ["RANK"]))
    from megatron_dppo.loop import run_rank

    run_rank(config)
    return 0


def _supervise(config: TrainConfig, words: argparse.Namespace) -> int:
    """Check the names in a child, so that this process stays small, then run until the end."""
    from megatron_dppo.launch.local import run_local

    check = [sys.executable, "-m", MODULE, words.config, *words.overrides, "--check"]
    try:
        refused = subprocess.run(check, check=False).returncode
        return refused or run_local(config, MODULE)
    except LaunchError as error:
        fatal(str(error))
    except KeyboardInterrupt:  # before the supervisor took the signal over
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Train a language model with RL: Megatron-Core trainers, SGLang rollouts.",
        epilog=(
            "Ctrl-C once: end the step, save a checkpoint, stop. Twice: end at once. The same "
            "command resumes from the newest checkpoint in run.directory (run.resume). Exit codes: "
            "0 done, 1 failed, 2 refused, 130 stopped by Ctrl-C. Keys and their meaning: "
            "megatron_dppo/config/schema.py. Relative paths are relative to the current directory."
        ),
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration")
    parser.add_argument(
        "overrides",
        metavar="key.path=value",
        nargs="*",
        help="replaces one value, e.g. algorithm.name=grpo-clip-higher or optimizer.lr=1e-6; "
        "nothing after '=' means null",
    )
    parser.add_argument(
        "--check", action="store_true", help="validate, describe the layout in a line, and exit"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print every value with its default, and exit"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
