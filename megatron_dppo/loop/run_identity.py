"""The identity of a run: settings that must not change between its starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dppo.config.data_schema import ProblemFile, RewardConfig, RewardTerm
from megatron_dppo.config.schema import AlgorithmConfig, TrainConfig


def identity_of(config: TrainConfig, data_sha256: str) -> dict[str, Any]:
    """Return the settings that must not change between two starts of a run, with their values.

    With another value, the metrics after the resume would not continue the metrics before it. Learning rates, batch
    sizes, layouts, limits and schedules may change.
    """
    algorithm = config.algorithm
    data = config.data
    return {
        "algorithm.name": algorithm.name,
        "algorithm.settings": algorithm.settings,
        "algorithm.options": dict(algorithm.options),
        "algorithm.aggregation": algorithm.aggregation,
        "algorithm.reference_estimator": algorithm.reference_estimator,
        "algorithm.reference_importance_weights": algorithm.reference_importance_weights,
        "algorithm.reference_kl": algorithm.reference_kl,
        "algorithm.truncated_responses": algorithm.truncated_responses,
        **_advantage_identity(algorithm),
        "data.train (SHA-256)": data_sha256,
        "data.train (keys)": [_identity_of_keys(file) for file in data.train_files],
        "data.system_prompt": data.system_prompt,
        "data.prompt_template": data.prompt_template,
        **_argument_identity(data.chat_template_arguments),
        **_mark_identity(data.thought_marks),
        "data.max_prompt_tokens": data.max_prompt_tokens,
        "data.shuffle": data.shuffle,
        "reward.name": config.reward.name,
        **_reward_identity(config.reward),
        "rollout.stop": list(config.rollout.stop),
        "rollout.temperature": config.rollout.temperature,
        "run.seed": config.run.seed,
    }


def _identity_of_keys(file: ProblemFile) -> list[str | None]:
    """Return the keys of a file's rows. A metadata key that is not set is left out."""
    keys = [file.prompt_key, file.answer_key]
    if file.metadata_key:
        keys.append(file.metadata_key)
    if file.metadata:
        keys.append(json.dumps(file.metadata, sort_keys=True, default=str))
    return keys


def _argument_identity(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's arguments.

    Without arguments the key is left out, because checkpoints of earlier versions lack the key.
    """
    if arguments:
        return {"data.chat_template_arguments": dict(arguments)}
    return {}


def _mark_identity(marks: Sequence[Sequence[str]] | None) -> dict[str, Any]:
    """Return the marks of thoughts. The default is left out, because checkpoints of earlier versions lack the key."""
    if marks is None:
        return {}
    return {"data.thought_marks": [list(pair) for pair in marks]}


def _advantage_identity(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return the settings that decide the advantages, except the rewards.

    Defaults are left out, because checkpoints of earlier versions lack these keys.
    """
    defaults = AlgorithmConfig()
    identity: dict[str, Any] = {}
    for key in ("advantage", "overlong_tokens", "length_penalty"):
        value = getattr(algorithm, key)
        if value != getattr(defaults, key):
            identity[f"algorithm.{key}"] = value
    return identity


_ADDRESS_OPTIONS = ("url", "api_key_variable")
"""Options of rewards that are a server's address or key. These options do not change the server's answers."""


def _reward_identity(reward: RewardConfig) -> dict[str, Any]:
    """Return the settings that decide the rewards' values, except the first reward's name.

    Defaults are left out, because checkpoints of earlier versions lack these keys.
    """
    term_settings: dict[str, list[Any]] = {}
    for name, term in reward.terms.items():
        options = {k: v for k, v in term.options.items() if k not in _ADDRESS_OPTIONS}
        term_settings[name] = [term.name, term.weight, options]
        if term.reads is not None:
            term_settings[name].append(term.reads)
    default = RewardTerm(name=reward.name)
    default_settings = [default.name, default.weight, default.options]
    identity: dict[str, Any] = {}
    if list(term_settings.values()) != [default_settings]:
        identity["reward (weights, options)"] = term_settings
    if reward.column is not None:
        identity["reward.column"] = reward.column
    return identity
