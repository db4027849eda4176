"""The teachers of a run (``distillation``): the configuration of a teacher's servers, and the checks of the section."""

from __future__ import annotations

import re
from typing import Any

from megatron_dppo.config import checks, forwarded, layout, speculation
from megatron_dppo.config.errors import ConfigError, given
from megatron_dppo.config.schema import DistillationConfig, LoraConfig, TeacherConfig, TrainConfig
from megatron_dppo.model.shape import ModelShape

NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
"""The name of a teacher. It is part of file names."""
ONE_BRANCH = (None, "single-turn", "calculator", "python")
"""Environments whose episodes have one branch, which begins with the problem's prompt."""


def key_of(name: str) -> str:
    """Return the key of a teacher."""
    return f"distillation.teachers.{name}"


def dtype_of(shape: ModelShape) -> str:
    """Return the dtype of a teacher's weights: its config.json's, or bfloat16 for float16."""
    return "bfloat16" if shape.dtype == "float16" else shape.dtype


def serving_config(config: TrainConfig, name: str, shape: ModelShape) -> TrainConfig:
    """Return the configuration by which the servers of the teacher ``name`` are started.

    A teacher's servers are the servers of a run of the teacher's model: the sections ``model``, ``sglang`` and the
    numbers of servers are the teacher's. Options that serve training (LoRA, quantisation of updates, router replay,
    Top-K, shared devices) are off; all else is as in ``config``. ``shape``: the teacher's model.
    """
    teacher = config.distillation.teachers[name]
    changes: dict[str, dict[str, Any]] = {
        "model": {"hf_checkpoint": teacher.hf_checkpoint, "dtype": dtype_of(shape)},
        "engine": {
            "servers": teacher.servers_to_start,
            "urls": teacher.urls,
            "port": None,
            "router": False,
            "placement": "separate",
            "quantization": None,
            "atomic_updates": False,
        },
        "rollout": {
            "router_replay": False,
            "topk_log_probs": 0,
            "interrupt": "drain",
            "temperature": 1.0,
        },
    }
    sections: dict[str, Any] = {
        name: getattr(config, name).model_copy(update=update) for name, update in changes.items()
    }
    sections["lora"] = LoraConfig()
    sections["sglang"] = teacher.sglang
    # A teacher has no teachers. Its servers' clients wait as long as the run's.
    timeout_s = config.distillation.request_timeout_s
    sections["distillation"] = DistillationConfig(request_timeout_s=timeout_s)
    return config.model_copy(update=sections)


def longest_prompt(config: TrainConfig, teacher: TeacherConfig) -> int:
    """Return the length of a teacher's longest prompt, in tokens."""
    return teacher.max_prompt_tokens or config.data.max_prompt_tokens


def longest_sequence(config: TrainConfig, teacher: TeacherConfig) -> int:
    """Return the length of the longest sequence that a teacher scores, in tokens.

    ``environment.max_tokens`` limits an episode with the policy's prompt, which ``prompt_template`` replaces.
    """
    if teacher.prompt_template is None:
        return config.longest_sequence
    continuation = config.environment.longest_continuation(config.rollout.max_response_tokens)
    return longest_prompt(config, teacher) + continuation


def distillation_faults(config: TrainConfig) -> layout.Faults:
    """Report faults of the section that do not depend on a model."""
    section = config.distillation
    teachers = section.teachers
    if not teachers:
        if section != DistillationConfig():
            yield "distillation.teachers: got none with other keys of distillation, expected at least one teacher"
        return
    if section.loss == "sampled" and section.top_k:
        yield f"distillation.top_k: got {section.top_k} with distillation.loss sampled, expected 0: it reads no Top-K"
    if section.loss != "sampled" and not section.top_k:
        yield f"distillation.top_k: got 0 with distillation.loss {section.loss}, expected at least 1"
    if config.rollout.temperature != 1:
        yield (
            f"rollout.temperature: got {config.rollout.temperature} with distillation.teachers, expected 1: SGLang "
            "scores the tokens of a prompt at temperature 1"
        )
    if config.rollout.drop_zero_variance_groups and not section.rewards:
        yield (
            "rollout.drop_zero_variance_groups: got true with distillation.rewards false, expected false: groups with "
            "equal rewards have a gradient too"
        )
    preset = checks.preset_of(config.algorithm.name)
    if preset is not None and preset.step_bound is not None:
        yield (
            f"algorithm.name: got {config.algorithm.name} with distillation.teachers, expected an algorithm without a "
            "bound that is computed from all tokens of a step: the bound would not know the teacher's advantages"
        )
    urls = list(config.engine.urls)
    for name, teacher in teachers.items():
        yield from checks.url_faults(teacher.urls, f"{key_of(name)}.urls", urls)
        urls += teacher.urls
        yield from _teacher_faults(name, teacher, config.environment.name)


def _teacher_faults(name: str, teacher: TeacherConfig, environment: str | None) -> layout.Faults:
    """Report faults of one teacher that do not depend on its model. ``environment``: ``environment.name``."""
    key = key_of(name)
    if not NAME.fullmatch(name):
        yield f"{key}: got {given(name)}, expected a name of letters, digits, '_', '-' and '.'"
    if not teacher.servers_to_start and not teacher.urls:
        yield f"{key}.servers: got 0 without urls, expected at least 1, or urls of servers"
    if teacher.max_prompt_tokens is not None and teacher.prompt_template is None:
        yield f"{key}.max_prompt_tokens: got {teacher.max_prompt_tokens} without prompt_template, expected nothing"
    if teacher.prompt_template is not None and environment not in ONE_BRANCH:
        yield (
            f"{key}.prompt_template: got one with environment.name {environment}, whose episodes may "
            "have several branches with prompts of their own, expected nothing"
        )
    for fault in forwarded.SGLANG.faults(teacher.sglang):
        yield f"{key}.{fault}"
    if speculation.algorithm_of(teacher.sglang) is not None:
        yield f"{key}.sglang.speculative_algorithm: got one, expected null: a teacher generates nothing"


def teacher_model_faults(
    config: TrainConfig, model: ModelShape, *, weights: bool = True
) -> layout.Faults:
    """Report teachers that can't be read or served, or that lack tokens of the policy's ``model``.

    ``weights``: whether the teachers' weights must exist.
    """
    section = config.distillation
    if section.teachers and section.top_k > model.vocab_size:
        yield (
            f"distillation.top_k: got {section.top_k}, expected at most the vocabulary's {model.vocab_size}"
        )
    for name, teacher in section.teachers.items():
        key = key_of(name)
        has_weights = weights and teacher.servers_to_start > 0
        try:
            shape = layout.read_checkpoint_folder(teacher, weights=has_weights)
        except ConfigError as error:
            for fault in error.faults:
                yield f"{key}.{fault.removeprefix('model.')}"
            continue
        if shape.vocab_size < model.vocab_size:
            yield (
                f"{key}.hf_checkpoint: got a model of {shape.vocab_size} tokens, expected at least the policy's "
                f"{model.vocab_size}"
            )
        longest = longest_sequence(config, teacher)
        for owner, positions in checks.position_limits(teacher.sglang, shape):
            # To a teacher, the whole sequence is a prompt.
            most = positions - checks.PROMPT_SPARE_POSITIONS
            if longest > most:
                spare = f"{checks.PROMPT_SPARE_POSITIONS} with a prompt"
                reason = checks.positions_text(owner, positions, spare, has_engine=True)
                yield f"{key}: got sequences of {longest} tokens, expected at most {most}: {reason}"
        for fault in checks.engine_split_faults(teacher.sglang, shape):
            yield f"{key}.{fault}"
        for fault in checks.engine_dtype_faults(dtype_of(shape), shape):
            yield f"{key}: {fault}"
