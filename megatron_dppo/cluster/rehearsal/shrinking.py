"""Make the configuration of a rehearsal from the recipe, and list the recipe's parts that the rehearsal leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_dppo.cluster.rehearsal import signal
from megatron_dppo.cluster.rehearsal.layout import small_stages
from megatron_dppo.config import SupervisedConfig, TrainConfig
from megatron_dppo.config.data_schema import REWARD_OF_ENVIRONMENT, EnvironmentConfig
from megatron_dppo.config.forwarded import (
    MEGATRON,
    MOMENT_DTYPES,
    OFFLOAD,
    PRECISION_AWARE,
    SGLANG,
    OptionFact,
)
from megatron_dppo.config.loading import merged
from megatron_dppo.config.schema import ParallelConfig, PolicyConfig
from megatron_dppo.model.engine_layout import server_ranks
from megatron_dppo.model.splits import ceil_to

STEPS = 3
"""Number of rollout batches: one before the stop, and at least one after the resume."""
RESPONSE_TOKENS = 16
"""Largest number of tokens of a response without an environment."""
TURN_TOKENS = 8
"""Largest number of sampled tokens of a turn."""
_TURNS = 2
"""Largest number of turns of an episode."""
_GROUP_SIZE = 4
"""Largest number of responses for each prompt."""
CHECKPOINTS = 2
"""Number of checkpoints to keep."""
MICRO_BATCH_SEQUENCES = 2
"""Sequences of the greatest length in a micro-batch."""
_TEACHER_TOP_K = 64
"""Largest K of a teacher's TopK; every tiny vocabulary has more tokens."""
_TEMPLATE = "{prompt} {answer}"
"""Template of a rehearsed teacher: every problem has these texts."""
_TEMPLATE_PROMPTS = 3
"""Longest prompt of the template, as a multiple of the longest prompt."""
_LEARNING_RATE = 1e-4
"""Least learning rate: large enough to change bfloat16 weights in every step, small enough to keep the policy nearly
random.
"""
_ANY_PROCESSES = 1024
"""Value of ``run.processes_per_core`` that accepts any number of processes."""
# Least time limits. They are long, because many ranks share few cores.
_WAIT_S = 3600.0
"""Limit of collectives, starts of servers and weight updates."""
_HANG_S = 600.0
_SCORE_S = 120.0

DeviceOfNodes = Literal["cpu", "gpu"]
ENGINE_SIZES = SGLANG.options_with(OptionFact.SIZE)
UNCHECKED_ENGINE_OPTIONS = frozenset((*ENGINE_SIZES, *SGLANG.options_with(OptionFact.ON_CPU)))
"""Options of SGLang that a rehearsal on CPUs keeps, or replaces by its own sizes. It leaves out all other options."""


@dataclass(frozen=True)
class RehearsalInputs:
    """The inputs and machines of a rehearsal, which replace the inputs and machines of the recipe.

    Attributes:
        directory: folder of the run.
        model: the tiny model's folder.
        train, evaluation: files of problems.
        longest_prompt: tokens of the longest prompt; of the longest sequence in a supervised recipe.
        has_own_tokenizer: whether the tokenizer is the recipe's own.
        servers: number of servers to start.
        unreachable: keys of tables whose service does not answer, each with the reason.
        scores_toys: whether the recipe's reward scores the toy problems that replace its data.
        node_device: kind of device on the nodes of a rehearsal on a cluster; None: it runs on this machine's CPUs.
    """

    directory: Path
    model: Path
    train: tuple[str, ...]
    evaluation: Mapping[str, str]
    longest_prompt: int
    has_own_tokenizer: bool
    servers: int = 1
    unreachable: Mapping[str, str] = field(default_factory=dict)
    scores_toys: bool = True
    node_device: DeviceOfNodes | None = None

    @property
    def on_gpus(self) -> bool:
        """Whether ranks and servers use GPUs."""
        return self.node_device == "gpu"


@dataclass(frozen=True)
class Omission:
    """A part of the recipe that the rehearsal does not run. ``key``: the recipe's key, or the part in words."""

    key: str
    reason: str


NO_TOKENIZER = "no tokenizer in it; a byte-level one replaces it"


def changed_values(
    config: TrainConfig, rehearsal_config: TrainConfig
) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ, each with the recipe's value and the rehearsal's value."""
    recipe_tables = config.model_dump()
    changes = {}
    for section, table in rehearsal_config.model_dump().items():
        recipe_table = recipe_tables[section]
        for key in {**recipe_table, **table}:
            recipe_value = recipe_table.get(key)
            value = table.get(key)
            if recipe_value != value:
                changes[f"{section}.{key}"] = (recipe_value, value)
    return changes


def longest_sequence(environment: EnvironmentConfig, longest_prompt: int) -> int:
    """Return the tokens of a rehearsal's longest sequence: a prompt and a response, or an episode."""
    if environment.name is None:
        return longest_prompt + RESPONSE_TOKENS
    turns = min(environment.max_turns, _TURNS)
    return longest_prompt + turns * (TURN_TOKENS + environment.max_observation_tokens)


def problems_needed(config: TrainConfig, parallel: ParallelConfig) -> int:
    """Return twice the number of training problems of all steps.

    More problems are needed than the steps train on: filters may drop some, and with staleness some are drawn ahead.
    """
    _, prompts_per_step = _batch_sizes(config, parallel)
    return 2 * STEPS * prompts_per_step


def shrink(config: TrainConfig, parallel: ParallelConfig, inputs: RehearsalInputs) -> TrainConfig:
    """Return the rehearsal's configuration: ``config`` with as few changes as a run of minutes on CPUs needs.

    Args:
        config: the recipe, with the user's overrides.
        parallel: the layout to rehearse: the recipe's own layout, or a smaller layout (``smaller_layout``).
        inputs: the model, the problems and the folder of the rehearsal.
    """
    dropped_keys = dropped_options(config, inputs)
    if not inputs.on_gpus:
        dropped_keys["sglang"] += ENGINE_SIZES
    values = changed_tables(config, _changes(config, parallel, inputs), dropped_keys)
    values["data"] = {**values["data"], **_data(config, inputs)}
    values["reward"] = _reward(config, inputs)
    values["distillation"] = _distillation(config, inputs)
    return TrainConfig.model_validate(values)


def changed_tables(
    config: PolicyConfig, changes: Mapping[str, Any], dropped_keys: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return the tables of ``config`` with ``changes``, and without the ``dropped_keys`` of each table of options."""
    values = merged(config.model_dump(), changes)
    # Replace these tables as a whole: a merge would keep the keys to drop.
    for table, keys in dropped_keys.items():
        options = getattr(config, table)
        values[table] = {key: value for key, value in options.items() if key not in keys}
    return values


def _changes(
    config: TrainConfig, parallel: ParallelConfig, inputs: RehearsalInputs
) -> dict[str, Any]:
    """Return the changed keys by section, without the sections data and reward and the libraries' tables."""
    prompts_per_mini_batch, prompts_per_step = _batch_sizes(config, parallel)
    environment = EnvironmentConfig()
    max_response_tokens = RESPONSE_TOKENS
    if _has_environment(config, inputs):
        environment = config.environment
        max_response_tokens = TURN_TOKENS
    longest = longest_sequence(environment, inputs.longest_prompt)
    rollout: dict[str, Any] = {
        "prompts_per_step": prompts_per_step,
        "group_size": _group_size(config),
        "max_response_tokens": max_response_tokens,
        "request_timeout_s": None,
        "max_concurrent_requests": min(config.rollout.max_concurrent_requests, 64),
        "replay_from": None,
    }
    if not inputs.has_own_tokenizer:
        rollout["stop_token_ids"] = []
    weights = None
    if config.weight_sync.directory is not None:
        # The recipe's servers may be on other hosts, which see the rehearsal's folder.
        weights = str(inputs.directory / "weights")
    return {
        **trainer_changes(config, parallel, inputs, STEPS),
        "rollout": rollout,
        "algorithm": {
            "aggregation_constant": None,
            "overlong_tokens": min(config.algorithm.overlong_tokens, max_response_tokens // 2),
        },
        "environment": _environment(config, inputs),
        "training": {
            "prompts_per_mini_batch": prompts_per_mini_batch,
            "micro_batch_tokens": MICRO_BATCH_SEQUENCES * longest,
        },
        "engine": {
            "servers": inputs.servers,
            "urls": [],
            "ca_file": None,
            "host": "127.0.0.1",
            "port": None,
            "device": "cuda" if inputs.on_gpus else "cpu",
            "python": None if inputs.node_device is None else config.engine.python,
            "max_restarts": 0,
            "start_timeout_s": max(config.engine.start_timeout_s, _WAIT_S),
            "hang_timeout_s": max(config.engine.hang_timeout_s, _HANG_S),
        },
        "weight_sync": {
            "bucket_mib": 1,
            "directory": weights,
            "timeout_s": max(config.weight_sync.timeout_s, _WAIT_S),
        },
        "evaluation": {"every": STEPS, "samples_per_prompt": 1, "max_response_tokens": None},
        "checkpoint": {
            "every": 1,
            "keep": CHECKPOINTS,
            "export_hf": True,
            "verify_export": True,
            "upload": None,
        },
        "profile": {"steps": [], "ranks": [0]},
        "tracking": {"trackers": []},
    }


def _distillation(config: TrainConfig, inputs: RehearsalInputs) -> dict[str, Any]:
    """Return the section with one teacher, the tiny model itself, for all problems."""
    section = config.distillation
    if not section.teachers:
        return section.model_dump()
    name, teacher = next(iter(section.teachers.items()))
    rehearsed_teacher: dict[str, Any] = {"hf_checkpoint": str(inputs.model), "servers": 1}
    if teacher.prompt_template is not None:
        rehearsed_teacher["prompt_template"] = _TEMPLATE
        rehearsed_teacher["max_prompt_tokens"] = _TEMPLATE_PROMPTS * inputs.longest_prompt
    changes = {
        "teachers": {name: rehearsed_teacher},
        # No problem has this name in its metadata, so the only teacher has all problems.
        "teacher_key": "rehearsal",
        "top_k": min(section.top_k, _TEACHER_TOP_K),
        "request_timeout_s": max(section.request_timeout_s, _WAIT_S),
    }
    return {**section.model_dump(), **changes}


def trainer_changes(
    config: PolicyConfig, parallel: ParallelConfig, inputs: RehearsalInputs, steps: int
) -> dict[str, Any]:
    """Return the changed keys, by section, that runs of both kinds share. ``steps``: steps of the run."""
    on_one_machine = inputs.node_device is None
    return {
        "run": {
            "directory": str(inputs.directory),
            "steps": steps,
            "resume": "auto",
            "sha256_list": None,
            "show_sample_every": 1,
            "processes_per_core": _ANY_PROCESSES,
            # Restart nothing: the death of a process is a finding.
            "max_restarts": 0,
        },
        "model": {"hf_checkpoint": str(inputs.model)},
        "lora": {"start_from": None},
        "parallel": {
            **parallel.model_dump(),
            **small_stages(parallel),
            "interface": None if on_one_machine else config.parallel.interface,
            "collective_timeout_s": max(parallel.collective_timeout_s, _WAIT_S),
        },
        "optimizer": {
            "lr": max(config.optimizer.lr, _LEARNING_RATE),
            "warmup_steps": 0,
            "schedule": "constant",
            "decay_steps": None,
            "min_lr": 0.0,
        },
    }


def _group_size(config: TrainConfig) -> int:
    return min(config.rollout.group_size, _GROUP_SIZE)


def _batch_sizes(config: TrainConfig, parallel: ParallelConfig) -> tuple[int, int]:
    """Return the prompts of an optimiser step and of a rollout batch.

    A rollout batch has two optimiser steps if the recipe's batch has several, else one.
    """
    # Every replica needs a micro-batch for each pipeline stage.
    least_responses = parallel.data * parallel.pipeline
    least_prompts = math.ceil(least_responses / _group_size(config))
    # The replicas divide a mini-batch evenly.
    mini_batch = ceil_to(max(2, least_prompts), parallel.data)
    steps = 2 if config.mini_batches > 1 else 1
    return mini_batch, mini_batch * steps


def _data(config: TrainConfig, inputs: RehearsalInputs) -> dict[str, Any]:
    """Return the changed keys of ``data``: the paths of the rehearsal's problems, and its limit of a prompt's tokens.

    Each file keeps the recipe's other settings.
    """
    train: Any
    if isinstance(config.data.train, str):
        train = inputs.train[0]
    else:
        train = []
        for file, path in zip(config.data.train_files, inputs.train, strict=True):
            train.append(file.model_copy(update={"path": path}).model_dump())
    evaluation = {}
    for name, evaluation_file in config.data.evaluation_files.items():
        path = inputs.evaluation[name]
        evaluation[name] = evaluation_file.model_copy(update={"path": path}).model_dump()
    return {"train": train, "evaluation": evaluation, "max_prompt_tokens": inputs.longest_prompt}


def _reward(config: TrainConfig, inputs: RehearsalInputs) -> dict[str, Any]:
    """Return the recipe's rewards that can run here, and a reward that differs between responses (``signal.py``)."""
    reward = config.reward.model_dump()
    timeout_s = max(config.reward.timeout_s, _SCORE_S)
    lacks_environment = config.reward.name == REWARD_OF_ENVIRONMENT and not _has_environment(
        config, inputs
    )
    is_absent = "reward.options" in inputs.unreachable or lacks_environment
    # A problem's own rewards would leave out the rehearsal's reward.
    is_alone = reward["column"] is not None
    reward["column"] = None
    if is_absent or is_alone or not inputs.scores_toys:
        reward |= {"name": signal.TARGET, "options": {}, "batch_size": 1}
    reward["timeout_s"] = timeout_s
    reward["workers"] = 1
    further_rewards: dict[str, Any] = {}
    for name, term in reward["further"].items():
        is_reachable = f"reward.further.{name}.options" not in inputs.unreachable
        if is_reachable and inputs.scores_toys and not is_alone:
            further_rewards[name] = term
    if reward["name"] != signal.TARGET:
        further_rewards["rehearsal"] = {
            "name": signal.TARGET,
            "weight": 1.0,
            "timeout_s": timeout_s,
            "workers": 1,
        }
    reward["further"] = further_rewards
    return reward


def _has_environment(config: TrainConfig, inputs: RehearsalInputs) -> bool:
    return config.environment.name is not None and "environment.options" not in inputs.unreachable


def _environment(config: TrainConfig, inputs: RehearsalInputs) -> dict[str, Any]:
    """Return the changed keys of ``environment``."""
    if not _has_environment(config, inputs):
        return {"name": None}
    turns = min(config.environment.max_turns, _TURNS)
    return {"max_turns": turns, "max_tokens": None}


def omissions(
    config: TrainConfig, parallel: ParallelConfig, inputs: RehearsalInputs
) -> Iterator[Omission]:
    """Yield the parts of the recipe that its rehearsal leaves out."""
    yield from trainer_omissions(config, parallel, inputs)
    yield from _replaced_parts(config, inputs)
    for key, reason in inputs.unreachable.items():
        yield Omission(key, reason)
    yield from _engine_parts(config, inputs)
    if config.checkpoint.upload is not None:
        yield Omission("checkpoint.upload", "nothing is sent")


def trainer_omissions(
    config: TrainConfig | SupervisedConfig, parallel: ParallelConfig, inputs: RehearsalInputs
) -> Iterator[Omission]:
    """Yield the parts that rehearsals of every kind of run leave out."""
    recipe_ranks = config.parallel.world_size
    if config.parallel.sizes != parallel.sizes:
        yield Omission(
            "parallel",
            f"the recipe's {recipe_ranks} ranks are rehearsed as {parallel.world_size} (--ranks)",
        )
    if not inputs.has_own_tokenizer:
        yield Omission("model.hf_checkpoint", NO_TOKENIZER)
    if config.lora.start_from is not None:
        yield Omission("lora.start_from", "adapters of the real model do not fit the tiny one")
    if inputs.node_device is None and config.parallel.interface is not None:
        yield Omission("parallel.interface", "all ranks are on one machine")
    for table, keys in dropped_options(config, inputs).items():
        if keys:
            yield Omission(table, f"{', '.join(keys)}: for GPUs")
    services = [name for name in config.tracking.trackers if name != "tensorboard"]
    if services:
        yield Omission("tracking.trackers", f"{', '.join(services)}: nothing is sent")


def _replaced_parts(config: TrainConfig, inputs: RehearsalInputs) -> Iterator[Omission]:
    if config.rollout.replays:
        yield Omission(
            "rollout.replay_from", "batches of the real model; a server generates instead"
        )
    if config.distillation.teachers:
        yield Omission(
            "distillation.teachers",
            "one server of the tiny model scores all responses in their place",
        )
    if config.reward.column is not None:
        yield Omission("reward.column", "one reward of the rehearsal scores all problems")
    if not inputs.scores_toys:
        yield Omission("reward.name", f"{config.reward.name} does not score toy problems")


def _engine_parts(config: TrainConfig, inputs: RehearsalInputs) -> Iterator[Omission]:
    engine = config.engine
    if engine.servers_to_start != inputs.servers or engine.urls:
        recipe_servers = f"{engine.servers_to_start} servers"
        if engine.urls:
            recipe_servers += f" and {len(engine.urls)} urls"
        yield Omission(
            "engine.servers", f"{inputs.servers} instead of {recipe_servers} (--servers)"
        )
    tp_size = server_ranks(config.sglang)
    if tp_size != 1 and not inputs.on_gpus:
        yield Omission(
            "sglang.tp_size", f"1 instead of {tp_size}: a server on a CPU is one process"
        )


def dropped_options(config: PolicyConfig, inputs: RehearsalInputs) -> dict[str, list[str]]:
    """Return the options of each table that a rehearsal on CPUs drops; none if the rehearsal has GPUs.

    ``ENGINE_SIZES`` are not in the result: ``shrink`` drops them, and ``_engine_parts`` reports only ``tp_size``.
    """
    if inputs.on_gpus:
        return {}
    gpu_options = MEGATRON.options_with(OptionFact.GPU_ONLY)
    dropped_keys = {
        "megatron": [key for key in config.megatron if key in gpu_options],
        "megatron_optimizer": _dropped_adam_options(config.megatron_optimizer),
    }
    if isinstance(config, TrainConfig):
        unknown = [key for key in config.sglang if key not in UNCHECKED_ENGINE_OPTIONS]
        dropped_keys = {"sglang": unknown, **dropped_keys}
    return dropped_keys


def _dropped_adam_options(optimizer: Mapping[str, Any]) -> list[str]:
    """Return the options that only Transformer Engine's Adam has; none for an offloaded optimizer.

    An offloaded optimizer runs on the CPU, so it keeps its options.
    """
    if optimizer.get(OFFLOAD):
        return []
    return [key for key in optimizer if key in {PRECISION_AWARE, *MOMENT_DTYPES}]
