"""Checks that need more than one field, or the file system: all run, and all problems are one
error.

Nothing here imports torch, Megatron or SGLang. What only those can tell (names of rewards, the
libraries' own options) is checked by ``launch/library_checks.py`` before anything starts.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from megatron_dppo.algorithms.table import carried_topk
from megatron_dppo.config.checkpoint_folder import read_checkpoint_folder
from megatron_dppo.config.data_checks import data_file_problems, prompt_form_problems
from megatron_dppo.config.errors import ConfigError
from megatron_dppo.config.expectations import given
from megatron_dppo.config.forwarded import (
    SGLANG,
    expert_kernel_problems,
    megatron_problems,
    replay_problems,
)
from megatron_dppo.config.forwarded_training import training_problems
from megatron_dppo.config.layout import LAYOUT_CHECKS, Plan, world_problems
from megatron_dppo.config.lora import (
    adapter_update_problems,
    engine_adapter_problems,
    lora_problems,
)
from megatron_dppo.config.schema import (
    AlgorithmConfig,
    PolicyConfig,
    SupervisedConfig,
    TrainConfig,
)
from megatron_dppo.config.values import (
    engine_split_problems,
    length_problems,
    refuse_unusable_values,
    url_problems,
    without_os_errors,
)
from megatron_dppo.model.shape import ModelShape

MOST_RESPONSES = 2**24
"""Of a batch: every rank holds a line on each, and nobody has published a tenth of it."""

BATCH_FILES = "step_*.safetensors"
"""As ``data/batch_file.py`` names saved batches."""

P = TypeVar("P", bound=PolicyConfig)
Problems = Iterator[str]
Check = Callable[[TrainConfig], Problems]
ModelCheck = Callable[[TrainConfig, ModelShape], Problems]


def check_config(
    config: TrainConfig, source: str = "configuration", *, weights: bool = True
) -> Plan:
    """Run every check. Returns what follows from the configuration. Raises ConfigError naming
    ``source``.

    ``weights``: the model's weights must be there; its config.json and tokenizer always must.
    """
    refuse_unusable_values(config, source)
    problems = [problem for check in CHECKS for problem in without_os_errors(check(config))]
    model = _checked_model(config, MODEL_CHECKS, problems, source, weights=weights)
    return Plan.of(config, model)


def check_supervised_config(config: SupervisedConfig, source: str = "configuration") -> None:
    """As :func:`check_config`, of a supervised run."""
    refuse_unusable_values(config, source)
    problems = [
        *world_problems(config),
        *megatron_problems(config.megatron),
        *training_problems(config),
        *schedule_problems(config),
    ]
    if not Path(config.data.train).is_file():
        problems.append(f"data.train: got {config.data.train!r}, expected a JSONL or Parquet file")
    if config.training.sequences_per_step < config.parallel.data:
        problems.append(
            f"training.sequences_per_step: got {config.training.sequences_per_step}, expected at "
            f"least one for each of the {config.parallel.data} data-parallel ranks"
        )
    _checked_model(config, (*LAYOUT_CHECKS, lora_problems), problems, source)


def _checked_model(
    config: P,
    checks: Sequence[Callable[[P, ModelShape], Problems]],
    problems: list[str],
    source: str,
    *,
    weights: bool = True,
) -> ModelShape:
    """The model's shape, when neither it nor what was found before is a problem."""
    model = None
    try:
        model = read_checkpoint_folder(config.model.hf_checkpoint, weights=weights)
    except ConfigError as error:
        problems += error.problems
    if model is not None:
        problems += [p for check in checks for p in check(config, model)]
    if problems or model is None:
        raise ConfigError(problems, source)
    return model


def batch_problems(config: TrainConfig) -> Problems:
    """Why a rollout batch can't be cut into optimiser steps, or shared by the data-parallel ranks."""
    rollout, size = config.rollout, config.training.prompts_per_mini_batch
    if rollout.prompts_per_step % size:
        yield (
            f"training.prompts_per_mini_batch: got {size}, expected a divisor of "
            f"rollout.prompts_per_step = {rollout.prompts_per_step}"
        )
    if (responses := rollout.prompts_per_step * rollout.group_size) > MOST_RESPONSES:
        yield (
            f"rollout.group_size: got {rollout.group_size}, with rollout.prompts_per_step "
            f"{rollout.prompts_per_step} that is {responses} responses in a batch, expected at most "
            f"{MOST_RESPONSES}"
        )
    data = config.parallel.data
    if data and rollout.prompts_per_step % data:
        yield (
            f"rollout.prompts_per_step: got {rollout.prompts_per_step}, expected a multiple of the "
            f"{data} data-parallel ranks (world_size / (tensor x pipeline)), which share the "
            "prompts"
        )
    if size * rollout.group_size < data:
        yield (
            f"training.prompts_per_mini_batch: got {size} x rollout.group_size "
            f"{rollout.group_size} = "
            f"{size * rollout.group_size} responses in an optimiser step, expected at least one "
            "for "
            f"each of the {data} data-parallel ranks"
        )


def schedule_problems(config: PolicyConfig) -> Problems:
    """Numbers of the learning rate's schedule that don't go together."""
    optimizer = config.optimizer
    falls, end = optimizer.schedule != "constant", optimizer.decay_steps
    if falls and (end is None or end <= optimizer.warmup_steps):
        yield (
            f"optimizer.decay_steps: got {given(end)} with schedule {optimizer.schedule!r}, expected more than "
            f"optimizer.warmup_steps, {optimizer.warmup_steps}: all optimiser steps of the run, for one"
        )
    if not falls and (end is not None or optimizer.min_lr):
        yield (
            f"optimizer.schedule: got 'constant' with decay_steps {given(end)} and min_lr {optimizer.min_lr}, "
            "expected 'linear' or 'cosine', or neither of these"
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr: got {optimizer.min_lr}, expected at most optimizer.lr, {optimizer.lr}"


def _untruncated_sampling(config: TrainConfig) -> Problems:
    reason = "the engine's log-probabilities ignore the truncation, the samples do not"
    if config.rollout.top_p != 1:
        yield f"rollout.top_p: got {config.rollout.top_p}, expected 1: {reason}"
    if config.rollout.top_k != -1:
        yield f"rollout.top_k: got {config.rollout.top_k}, expected -1 (off): {reason}"


def _algorithm(config: TrainConfig) -> Problems:
    try:
        config.algorithm.facts()
    except ValueError as error:
        yield f"algorithm: {error}"


def _aggregation(config: TrainConfig) -> Problems:
    algorithm = config.algorithm
    own = algorithm.aggregation == "sequence-mean-with-constant"
    if not own and algorithm.aggregation_constant is not None:
        yield (
            f"algorithm.aggregation_constant: got {algorithm.aggregation_constant} with "
            f"aggregation {algorithm.aggregation!r}, expected null: only "
            "'sequence-mean-with-constant' divides by it"
        )


def _reference(config: TrainConfig) -> Problems:
    algorithm, unchanged = config.algorithm, AlgorithmConfig()
    if algorithm.reference_kl > 0:
        return
    for key in ("reference_estimator", "reference_importance_weights"):
        if getattr(algorithm, key) != getattr(unchanged, key):
            yield (
                f"algorithm.{key}: got {given(getattr(algorithm, key))} with algorithm.reference_kl 0 "
                "(off), expected a factor above 0, or nothing of it"
            )


def _replay_folder(config: TrainConfig) -> Problems:
    folder = config.rollout.replay_from
    if folder is not None and not any(Path(folder).glob(BATCH_FILES)):
        yield (
            f"rollout.replay_from: got {folder!r}, expected a folder of rollout batches "
            f"({BATCH_FILES}) that a run with rollout.save wrote"
        )


def _profile(config: TrainConfig) -> Problems:
    """Steps and ranks that there are none of, so that no trace would come."""
    world, steps = config.parallel.world_size, config.run.steps
    if odd := [rank for rank in config.profile.ranks if not 0 <= rank < world]:
        yield f"profile.ranks: got {odd}, expected ranks from 0 to {world - 1}"
    if odd := [step for step in config.profile.steps if not 1 <= step <= steps]:
        yield f"profile.steps: got {odd}, expected steps from 1 to run.steps = {steps}"


def _staleness(config: TrainConfig) -> Problems:
    if config.rollout.replay_from is not None and config.rollout.max_staleness:
        yield (
            f"rollout.max_staleness: got {config.rollout.max_staleness} with rollout.replay_from, "
            "expected 0: nothing is generated, so nothing can overlap"
        )


def _oversampling(config: TrainConfig) -> Problems:
    rollout = config.rollout
    if rollout.oversampling > 1 and not rollout.drop_zero_variance_groups:
        yield (
            f"rollout.oversampling: got {rollout.oversampling}, expected 1 without "
            "rollout.drop_zero_variance_groups: the surplus would be generated for nothing"
        )


def _run_directory(config: TrainConfig) -> Problems:
    path = Path(config.run.directory)
    if path.exists() and not path.is_dir():
        yield f"run.directory: got {config.run.directory!r}, which is a file, expected a folder"


def _engine_ports(config: TrainConfig) -> Problems:
    engine = config.engine
    if engine.port is not None and engine.port + engine.started > 65536:
        yield (
            f"engine.port: got {engine.port} for {engine.started} servers, expected at most "
            f"{65536 - engine.started}: they count on from it"
        )


def _deterministic(config: TrainConfig) -> Problems:
    if config.engine.deterministic and config.rollout.responses_per_call > 1:
        yield (
            f"rollout.responses_per_call: got {config.rollout.responses_per_call}, expected 1 with "
            "engine.deterministic: each response has a seed of its own"
        )


def _certificates(config: TrainConfig) -> Problems:
    path = config.engine.ca_file
    if path is None:
        return
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
        yield f"engine.ca_file: got {path!r}, expected a PEM file of certificates: {error}"


def _forwarded(config: TrainConfig) -> Problems:
    yield from megatron_problems(config.megatron)
    yield from training_problems(config)
    yield from SGLANG.problems(config.sglang)


def _router_replay(config: TrainConfig, model: ModelShape) -> Problems:
    if not config.rollout.router_replay:
        return
    yield from replay_problems(config.megatron)
    if not model.is_moe:
        yield (
            f"rollout.router_replay: got true, expected false: {model.family} is a dense "
            "model, "
            "it routes nothing"
        )


def _expert_kernel(config: TrainConfig, model: ModelShape) -> Problems:
    if model.is_moe:
        yield from expert_kernel_problems(config.sglang)


def _topk(config: TrainConfig, model: ModelShape) -> Problems:
    if config.rollout.topk_log_probs > model.vocab_size:
        yield (
            f"rollout.topk_log_probs: got {config.rollout.topk_log_probs}, expected at most the "
            f"vocabulary's {model.vocab_size}"
        )
    if not any(_algorithm(config)):
        try:
            carried_topk(config.algorithm.facts(), config.rollout.topk_log_probs, model.vocab_size)
        except ValueError as error:
            yield f"algorithm: {error}"


def _stop_tokens(config: TrainConfig, model: ModelShape) -> Problems:
    unknown = [t for t in config.rollout.stop_token_ids if not 0 <= t < model.vocab_size]
    if unknown:
        yield (
            f"rollout.stop_token_ids: got {unknown}, expected ids below the vocabulary's "
            f"{model.vocab_size}"
        )


CHECKS: tuple[Check, ...] = (
    url_problems,
    world_problems,
    batch_problems,
    schedule_problems,
    _untruncated_sampling,
    _algorithm,
    _aggregation,
    _reference,
    data_file_problems,
    prompt_form_problems,
    _replay_folder,
    _profile,
    _staleness,
    _oversampling,
    _run_directory,
    _engine_ports,
    _deterministic,
    _certificates,
    _forwarded,
    engine_adapter_problems,
)
MODEL_CHECKS: tuple[ModelCheck, ...] = (
    *LAYOUT_CHECKS,
    lora_problems,
    adapter_update_problems,
    _router_replay,
    _expert_kernel,
    length_problems,
    engine_split_problems,
    _topk,
    _stop_tokens,
)
