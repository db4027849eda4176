"""Every check of a configuration, those that need torch, Megatron-Core or SGLang included.

Run in a child process before anything starts: the imports take seconds, and the supervisor stays
small.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from megatron_dppo.config import (
    ConfigError,
    Plan,
    SupervisedConfig,
    TrainConfig,
    check_config,
    check_supervised_config,
)
from megatron_dppo.config.forwarded import MEGATRON, SGLANG
from megatron_dppo.config.forwarded_training import DDP, OPTIMIZER
from megatron_dppo.config.library_fields import LibraryMissingError
from megatron_dppo.config.lora import adapters_of
from megatron_dppo.config.schema import PolicyConfig
from megatron_dppo.engine.options import engine_device
from megatron_dppo.logging import INTERRUPTED
from megatron_dppo.model.errors import ModelError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.preflight.evidence import CheckError
from megatron_dppo.preflight.gpus import toolkit_findings, toolkit_here
from megatron_dppo.preflight.needs import pythons_of
from megatron_dppo.preflight.software import inspect_python
from megatron_dppo.system.gpus import has_visible_gpu

CHECK = "--check"
"""The word that has an entry point check everything, describe what it found, and exit."""

C = TypeVar("C", bound=PolicyConfig)
R = TypeVar("R")


def check_in_child(module: str, words: Sequence[str]) -> int:
    """Have a child check what is about to be started.

    Returns the exit code of ``python -m <module> <words> --check``, whose output goes where ours goes;
    130 after Ctrl-C.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *words, CHECK]
    try:
        return subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return INTERRUPTED


def check_everything(config: TrainConfig, source: str, *, weights: bool) -> Plan:
    """Run every check of a run of reinforcement learning.

    Returns what follows from the configuration. Raises ConfigError with all problems, naming
    ``source``: those that need no library, and names of rewards and options of libraries
    that nobody knows. ``weights``: as in ``check_config``.
    """
    names: dict[str, Callable[[TrainConfig], None]] = {
        "reward.name": _reward,
        "lora.start_from": _adapters,
    }
    return _with_libraries(config, source, partial(check_config, weights=weights), names)


def check_everything_supervised(config: SupervisedConfig, source: str) -> None:
    """As :func:`check_everything`, of a supervised run."""
    _with_libraries(config, source, check_supervised_config, {"lora.start_from": _adapters})


def _with_libraries(
    config: C,
    source: str,
    check: Callable[[C, str], R],
    names: Mapping[str, Callable[[C], None]],
) -> R:
    """The result of ``check``, after the checks of ``names`` (by key) and of the libraries' tables."""
    problems: list[str] = []
    results: list[R] = []
    try:
        results.append(check(config, source))
    except ConfigError as error:
        problems += error.problems
    for key, check_name in names.items():
        if any(problem.startswith(key) for problem in problems):
            continue  # it would only be told twice
        try:
            check_name(config)
        except ModelError:
            continue  # a checkpoint that ``check`` has told of
        except ValueError as error:
            problems.append(f"{key}: {error}")
    problems += [
        *gpu_problems(config),
        *compiler_problems(config),
        *library_problems(config),
    ]
    if problems:
        raise ConfigError(problems, source)
    return results[0]


def gpu_problems(config: PolicyConfig) -> Iterator[str]:
    """Why training would leave this machine's GPUs alone.

    A torch for CPUs and servers on CPUs (``engine.device=cpu``) are a run that was meant so.
    """
    if not has_visible_gpu():
        return
    import torch

    from megatron_dppo.trainer import platform

    meant = isinstance(config, TrainConfig) and config.engine.device == "cpu"
    problem = platform.gpu_problem()
    if problem is not None and not (meant and torch.version.cuda is None):
        yield problem


def compiler_problems(config: PolicyConfig) -> Iterator[str]:
    """Why a server that is started on this machine's GPUs could not compile its kernels."""
    if not isinstance(config, TrainConfig) or engine_device(config.engine) == "cpu":
        return
    python = pythons_of(config.engine, generates=config.rollout.replay_from is None).get("engine")
    if python is None or not has_visible_gpu():  # it is checked on the nodes
        return
    try:
        here = toolkit_here(python, inspect_python(python)["cuda"])
    except CheckError as error:
        yield f"engine.python: {error}"
        return
    yield from map(str, toolkit_findings("this machine", here))


def library_problems(config: PolicyConfig) -> Iterator[str]:
    """Keys and values of the ``megatron:`` and ``sglang:`` tables that the library does not take.

    Imports a library only where its table has something for it. SGLang may lack where no server
    starts on this machine.
    """
    if MEGATRON.free(config.megatron):
        from megatron_dppo.trainer.megatron_config import transformer_fields

        yield from MEGATRON.library_problems(config.megatron, transformer_fields())
    if DDP.free(config.megatron_ddp) or OPTIMIZER.free(config.megatron_optimizer):
        from megatron_dppo.trainer.megatron_config import ddp_fields, optimizer_fields

        yield from DDP.library_problems(config.megatron_ddp, ddp_fields())
        yield from OPTIMIZER.library_problems(config.megatron_optimizer, optimizer_fields())
    if isinstance(config, TrainConfig) and SGLANG.free(config.sglang):
        yield from _server_problems(config)


def _server_problems(config: TrainConfig) -> Iterator[str]:
    """Of the ``sglang:`` table, as the interpreter that will serve sees it."""
    from megatron_dppo.engine.options import table_problems, table_problems_elsewhere

    python = config.engine.python
    try:
        if python is None:
            yield from table_problems(config.sglang)
        else:
            yield from table_problems_elsewhere(config.sglang, python)
    except LibraryMissingError as error:
        if config.engine.started > 0 and config.rollout.replay_from is None:
            yield f"{SGLANG.name}: can't be checked: {error}"


def _adapters(config: PolicyConfig) -> None:
    """Raise ValueError where the adapters to start from are not those that the run trains."""
    if config.lora.start_from is None or not config.lora.rank:
        return
    from megatron_dppo.checkpoint_conversion.peft import PeftReader
    from megatron_dppo.model.errors import CheckpointError

    shape = load_model_shape(config.model.hf_checkpoint)
    adapters = adapters_of(config.lora, shape)
    assert adapters is not None
    try:
        PeftReader(config.lora.start_from, adapters, shape).close()
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def _reward(config: TrainConfig) -> None:
    from megatron_dppo.rewards import find_reward

    find_reward(config.reward.name).load()
