"""Every check of a configuration, including the checks that need torch, Megatron-Core or SGLang.

The checks run in a child process before anything starts: the imports take seconds, and the supervisor stays small.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from megatron_dppo.config import (
    ConfigError,
    SupervisedConfig,
    TrainConfig,
    check_config,
    check_supervised_config,
)
from megatron_dppo.config.data_schema import EnvironmentConfig, RewardTerm
from megatron_dppo.config.distillation import key_of
from megatron_dppo.config.forwarded import (
    DDP,
    MEGATRON,
    OPTIMIZER,
    SGLANG,
    LibraryMissingError,
    adam_faults,
    precision_faults,
)
from megatron_dppo.config.layout import missing_weights
from megatron_dppo.config.option_values import option_value_faults
from megatron_dppo.config.schema import AlgorithmConfig, PolicyConfig
from megatron_dppo.engine.server_arguments import table_faults, table_faults_elsewhere
from megatron_dppo.environments import check_environment, find_environment
from megatron_dppo.logging import INTERRUPTED
from megatron_dppo.metrics.table import add_metrics
from megatron_dppo.metrics.trackers import find_trackers
from megatron_dppo.model.errors import CheckpointError, ModelError
from megatron_dppo.model.families import family_of, unknown_key_warnings
from megatron_dppo.model.hf_config import check_transformers_config
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.rewards import find_reward
from megatron_dppo.spec import ModelSpec, Roles
from megatron_dppo.system.fork_server import run_forked
from megatron_dppo.system.gpus import has_megatrons_deep_ep, has_visible_gpu
from megatron_dppo.system.secret_variables import split_environment
from megatron_dppo.system.text import first_of

CHECK = "--check"
"""Option of an entry point that checks everything, describes the run, and exits."""

T = TypeVar("T")


def check_in_child(module: str, arguments: Sequence[str]) -> int:
    """Run ``python -m <module> <arguments> --check`` in a child process, and return its exit code.

    The child has this process's output. The result is 130 after Ctrl-C.
    """
    # A fork starts in milliseconds, but is possible only if a fork server has imported the module.
    try:
        code = run_forked(module, [*arguments, CHECK])
    except KeyboardInterrupt:
        return INTERRUPTED
    if code is not None:
        return code
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments, CHECK]
    plain, secrets = split_environment(os.environ)
    try:
        return subprocess.run(command, check=False, env=plain, input=secrets).returncode
    except KeyboardInterrupt:
        return INTERRUPTED


def check_everything(config: TrainConfig, source: str, *, weights: bool) -> ModelShape:
    """Run every check of a run of reinforcement learning.

    Returns the model's shape. ``weights``: as in ``check_config``. Raises ConfigError, with the name ``source`` and all
    faults: the faults of ``check_config``, unknown names of rewards, and options that a library does not accept.
    """
    checks_by_key: dict[str, Callable[[], object]] = {
        "reward.name": partial(_check_reward, config.reward),
        **{
            f"reward.further.{name}.name": partial(_check_reward, term)
            for name, term in config.reward.further.items()
        },
        "environment.name": partial(_check_environment, config.environment),
        **_checks_of_every_run(config),
        "algorithm.name": partial(_check_algorithm, config.algorithm),
        "checkpoint.upload": partial(_check_upload, config.checkpoint.upload),
    }
    return _check_all(
        partial(check_config, config, source, weights=weights),
        source,
        checks_by_key,
        gpu_faults(config.engine.device),
        _trainer_faults(config),
        server_faults(config),
    )


def check_everything_supervised(config: SupervisedConfig, source: str) -> None:
    """Run every check of a supervised run. Raises ConfigError with all faults, those of the checkpoint too."""
    _check_all(
        partial(check_supervised_config, config, source),
        source,
        _checks_of_every_run(config),
        gpu_faults(None),
        _trainer_faults(config),
        checkpoint_faults(config),
    )


def _checks_of_every_run(config: TrainConfig | SupervisedConfig) -> dict[str, Callable[[], object]]:
    return {
        "lora.start_from": partial(_check_adapters, config),
        "tracking.trackers": partial(find_trackers, config.tracking.trackers),
        "tracking.metrics": partial(add_metrics, config.tracking.metrics),
    }


def _trainer_faults(config: PolicyConfig) -> Iterator[str]:
    """Report options of the trainer that the libraries here do not accept."""
    yield from library_faults(config.megatron, config.megatron_ddp, config.megatron_optimizer)
    yield from kernel_faults(config.megatron)
    yield from optimizer_faults(config.megatron_optimizer)


def untried_options(config: PolicyConfig) -> list[str]:
    """Return a warning for each forwarded option, and each key of the model's config.json, whose effect is unknown."""
    sglang = config.sglang if isinstance(config, TrainConfig) else {}
    model_warnings = [
        f"model.hf_checkpoint: {warning}"
        for warning in unknown_key_warnings(config.model.hf_checkpoint)
    ]
    return [*MEGATRON.untried(config.megatron), *SGLANG.untried(sglang), *model_warnings]


def checkpoint_faults(config: PolicyConfig) -> Iterator[str]:
    """Yield why ranks or servers could not load the model in ``model.hf_checkpoint``.

    transformers may refuse a value of config.json. A file of weights may be damaged, or have other tensors than
    config.json describes. Only the headers of these files are read. The result is empty if config.json is invalid, or
    a file is missing: ``check_config`` reports both.
    """
    from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint

    checkpoint = config.model.hf_checkpoint
    try:
        shape = config.model.read_shape()
    except ModelError:
        return
    try:
        check_transformers_config(checkpoint)
    except ModelError as error:
        yield f"model.hf_checkpoint: {error}"
    if missing_weights(checkpoint):
        return
    try:
        with open_checkpoint(checkpoint) as reader:
            reader.check(shape)
    except CheckpointError as error:
        yield f"model.hf_checkpoint: {error}"


_ROWS_AT_ONCE = 16384
"""Rows of an embedding that are in memory at a time: 128 MiB of float32 for a width of 2048."""


def embedding_warnings(checkpoint: str, shape: ModelShape) -> list[str]:
    """Return a warning if tokens of the tokenizer have embedding rows of zeros in the Hugging Face folder.

    transformers may freeze such a row (``padding_idx``), and Megatron-Core trains it: once its token is sampled, the
    norm after the embedding divides by nearly 0, and the gradient explodes. The result is empty if a file is missing:
    other checks report it. ``shape``: shape of the model.
    """
    from megatron_dppo.checkpoint_conversion.hf_folder import SafetensorsReader
    from megatron_dppo.data.problems import load_tokenizer

    zero_ids: list[int] = []
    try:
        known_ids = set(load_tokenizer(checkpoint).get_vocab().values())
        name, _ = family_of(shape).vocabulary_tensors
        with SafetensorsReader(checkpoint) as reader:
            for start in range(0, shape.vocab_size, _ROWS_AT_ONCE):
                rows = reader.read_rows(name, start, min(_ROWS_AT_ONCE, shape.vocab_size - start))
                is_zero = (rows == 0).flatten(1).all(1)
                zero_ids += [start + row for row in is_zero.nonzero().flatten().tolist()]
    except (CheckpointError, ModelError, OSError, ValueError, KeyError):
        return []
    ids = [token_id for token_id in zero_ids if token_id in known_ids]
    if not ids:
        return []
    shown = first_of(ids, 8, ", ")
    return [
        f"model.hf_checkpoint: {name} has rows of zeros for {len(ids)} tokens of the tokenizer (ids {shown}): if one "
        "is sampled, its gradient can be a hundred thousand times a usual one; give the rows values, such as the mean "
        "row"
    ]


def _check_all(
    check: Callable[[], T],
    source: str,
    checks_by_key: Mapping[str, Callable[[], object]],
    *further_faults: Iterable[str],
) -> T:
    """Run ``check`` and the check of each key, and return the result of ``check``.

    Raises ConfigError that lists the faults of all these checks and ``further_faults``.
    """
    faults: list[str] = []
    results: list[T] = []
    try:
        results.append(check())
    except ConfigError as error:
        faults += error.faults
    for key, check_key in checks_by_key.items():
        # Report only one fault for each key.
        if any(fault.startswith(key) for fault in faults):
            continue
        try:
            check_key()
        except ModelError:
            # ``check`` has reported that this checkpoint's config.json can't be used.
            continue
        except _OptionValueError as error:
            # The options are in the table of the key: reward.name -> reward.options.
            table = key.removesuffix(".name")
            faults += [f"{table}.options.{fault}" for fault in error.faults]
        except ValueError as error:
            faults.append(f"{key}: {error}")
    for faults_of_check in further_faults:
        faults += faults_of_check
    if faults:
        raise ConfigError(faults, source)
    return results[0]


def gpu_faults(engine_device: str | None) -> Iterator[str]:
    """Yield why training would not use this machine's GPUs. ``engine_device``: ``engine.device``."""
    if not has_visible_gpu():
        return
    import torch

    from megatron_dppo.trainer import platform

    fault = platform.gpu_fault()
    # With torch for CPUs and servers on CPUs, the user chose to leave the GPUs unused.
    if fault is not None and not (engine_device == "cpu" and torch.version.cuda is None):
        yield fault


def library_faults(
    megatron: Mapping[str, Any], ddp: Mapping[str, Any], optimizer: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a fault for each key or value in the ``megatron`` tables that Megatron-Core does not accept.

    Megatron-Core is imported only if a table has options for it.
    """
    for rules, values in ((MEGATRON, megatron), (DDP, ddp), (OPTIMIZER, optimizer)):
        # The library receives only the free keys: the keys that this project neither sets itself nor fixes.
        if rules.free(values):
            from megatron_dppo.trainer.megatron_config import library_fields

            yield from rules.library_faults(values, library_fields(rules.name))


def kernel_faults(megatron: Mapping[str, Any]) -> Iterator[str]:
    """Yield faults of options in the ``megatron:`` table whose kernels this GPU or environment lacks.

    The check of ``fp8`` and ``fp4`` has not yet run on a GPU.
    """
    dispatcher = megatron.get("moe_token_dispatcher_type")
    if dispatcher == "flex" and not has_megatrons_deep_ep():
        yield (
            "megatron.moe_token_dispatcher_type: got 'flex', expected 'alltoall': this environment has no DeepEP for "
            "Megatron-Core, or it has SGLang's package deep_ep, which Megatron-Core can't use"
        )
    if not has_visible_gpu() or not {"fp8", "fp4"} & megatron.keys():
        return
    from megatron_dppo.trainer import platform

    capability = platform.compute_capability()
    if capability is not None:
        yield from precision_faults(megatron, capability)


def optimizer_faults(optimizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of the ``megatron_optimizer:`` table that this environment's Adam does not have."""
    if not optimizer:
        return
    from megatron_dppo.trainer import platform

    yield from adam_faults(optimizer, has_fused_adam=platform.has_transformer_engine())


def server_faults(config: TrainConfig) -> Iterator[str]:
    """Yield the faults of the ``sglang:`` tables, the teachers' too, as the interpreter of the servers finds them.

    A missing SGLang is a fault only if servers start on this machine.
    """
    yield from _table_faults(config, config.sglang)
    for name, teacher in config.distillation.teachers.items():
        for fault in _table_faults(config, teacher.sglang):
            yield f"{key_of(name)}.{fault}"


def _table_faults(config: TrainConfig, table: Mapping[str, Any]) -> Iterator[str]:
    if not SGLANG.free(table):
        return
    python = config.engine.python
    try:
        if python is None:
            yield from table_faults(table)
        else:
            yield from table_faults_elsewhere(table, python)
    except LibraryMissingError as error:
        roles = Roles.of(config)
        if roles.servers or roles.teachers:
            yield f"{SGLANG.name}: can't be checked: {error}"


class _OptionValueError(ValueError):
    """Values of an ``options`` table have another type than declared. ``faults`` has a line for each."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def _check_option_values(target: Callable[..., object], options: Mapping[str, Any]) -> None:
    if faults := list(option_value_faults(target, options)):
        raise _OptionValueError(faults)


def _check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Raise ValueError if a function of the algorithm's row does not take the row's numbers."""
    from megatron_dppo.algorithms.algorithm import build_algorithm

    try:
        algorithm.facts()
    except ValueError:
        # ``check_config`` reports an unknown name or a bad number.
        return
    build_algorithm(algorithm.name, algorithm.options, algorithm.settings)


def _check_reward(term: RewardTerm) -> None:
    reward = find_reward(term.name)
    _check_option_values(reward.load(), term.options)
    reward.bind(term.options)


def _check_environment(environment: EnvironmentConfig) -> None:
    if environment.name is None:
        return
    _check_option_values(find_environment(environment.name), environment.options)
    check_environment(environment.name, environment.options)


def _check_upload(repository: str | None) -> None:
    if repository is None:
        return
    from huggingface_hub import get_token

    if get_token() is None:
        raise ValueError(
            f"got {repository!r}, but there is no token of huggingface.co here: hf auth login, or HF_TOKEN"
        )


def _check_adapters(config: PolicyConfig) -> None:
    start_from = config.lora.start_from
    if start_from is None or not config.lora.rank:
        return
    from megatron_dppo.checkpoint_conversion.adapters import PeftReader

    model = ModelSpec.read(config)
    assert model.adapters is not None
    try:
        PeftReader(start_from, model.adapters, model.shape).close()
    except CheckpointError as error:
        raise ValueError(str(error)) from error
