"""Checks that need more than one field, or the file system. All checks run, and one error lists all faults.

This module imports no torch, Megatron or SGLang. ``launch/library_checks.py`` checks the names of rewards and the
options of libraries, before any process starts.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_dppo.algorithms.table import Preset, check_topk, find_preset
from megatron_dppo.config import forwarded, layout, schema, speculation
from megatron_dppo.config.data_files import data_files, repeated_files
from megatron_dppo.config.data_schema import REWARD_OF_ENVIRONMENT, EnvironmentConfig, RewardConfig
from megatron_dppo.config.errors import ConfigError, given
from megatron_dppo.config.lora import (
    adapter_folder_faults,
    adapter_update_faults,
    engine_adapter_faults,
    lora_faults,
    updates_adapters,
)
from megatron_dppo.config.machine import Device, engine_device
from megatron_dppo.metrics.records import BATCH_FILES
from megatron_dppo.model import quantization
from megatron_dppo.model.engine_layout import (
    REPLICAS,
    EngineLayout,
    current_names,
    engine_faults,
    engine_size_faults,
)
from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.families import FAMILIES, family_of
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.network import url_fault

PLACEHOLDER = "{prompt}"
"""Part of a prompt template that the problem's text replaces."""

RESERVED_ARGUMENTS = (
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
"""Arguments of ``apply_chat_template`` that the package sets itself, or that do not reach the template."""

ROLE = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
"""The name of a message's role. Templates write the name unchanged, so it must not contain a token that ends a turn."""

MOST_STOPS = 32
"""Largest number of stop texts that SGLang takes."""


def data_file_faults(data: schema.DataConfig) -> layout.Faults:
    """Report missing files, weights of only some files, and names that can't be metric names."""
    paths_by_key: dict[str, str] = {}
    for i, file in enumerate(data.train_files):
        key = "data.train" if isinstance(data.train, str) else f"data.train[{i}].path"
        paths_by_key[key] = file.path
    for name, evaluation_file in data.evaluation_files.items():
        paths_by_key[f"data.evaluation.{name}"] = evaluation_file.path
    for key, path in paths_by_key.items():
        if fault := data_files(path).fault:
            yield (
                f"{key}: got {path!r}, expected {fault}; docs/data.md tells how published sets are prepared"
            )
    if not data.train_files:
        yield "data.train: got an empty list, expected at least one file"
    paths = [file.path for file in data.train_files]
    repeated = sorted({path for path in paths if paths.count(path) > 1})
    if repeated:
        yield f"data.train: {repeated[0]!r} is there twice, expected each file once; see weight"
    elif repeated_file := next(repeated_files(paths), None):
        yield f"data.train: {repeated_file!r} is in two of the paths, expected each file once; see weight"
    has_weight = [file.weight is not None for file in data.train_files]
    if any(has_weight) and not all(has_weight):
        unweighted_index = has_weight.index(False)
        yield f"data.train[{unweighted_index}].weight: missing, expected one for each file, or for none"
    yield from _set_name_faults(data.evaluation)


def _set_name_faults(names: Iterable[str]) -> layout.Faults:
    """Report names of held-out sets that can't be a part of a metric's name."""
    for name in names:
        if not re.fullmatch(r"[\w.-]+", name):
            yield (
                f"data.evaluation: got the name {name!r}, expected letters, digits, '_', '-' and "
                "'.' (it names metrics)"
            )


def reward_faults(reward: RewardConfig) -> layout.Faults:
    """Report a further reward that has the first reward's key in ``reward.terms`` and would replace it."""
    if reward.first in reward.further:
        yield (
            f"reward.further.{reward.first}: is also the name of reward.name {reward.name}; expected another"
        )


def services_of(config: schema.TrainConfig) -> dict[str, Mapping[str, Any]]:
    """Return the options of the environment and of each reward that runs on another server.

    The keys are those of the options' tables, such as ``reward.options``. Only this package's own environments and
    rewards are included; their option ``url`` has the address. The result is empty for a run that replays rollouts.
    """
    services: dict[str, Mapping[str, Any]] = {}
    if config.rollout.replays:
        return services
    if config.environment.name == "over-http":
        services["environment.options"] = config.environment.options
    if config.reward.name in _REWARD_SERVICES:
        services["reward.options"] = config.reward.options
    for name, term in config.reward.further.items():
        if term.name in _REWARD_SERVICES:
            services[f"reward.further.{name}.options"] = term.options
    return services


_REWARD_SERVICES = ("judge", "reward_model")


def prompt_form_faults(data: schema.DataConfig, stop: Sequence[str]) -> layout.Faults:
    """Report templates without a placeholder for the problem, system prompts without a chat template, and bad stop
    texts.
    """
    if data.prompt_template is not None and data.prompt_template.count(PLACEHOLDER) != 1:
        yield (
            f"data.prompt_template: got {data.prompt_template!r}, expected {PLACEHOLDER} in it once, "
            "where the problem goes"
        )
    if data.system_prompt is not None and not data.apply_chat_template:
        yield (
            "data.system_prompt: got one with data.apply_chat_template false, expected null: only a "
            "chat template carries a system message"
        )
    yield from template_argument_faults(data.chat_template_arguments)
    if len(stop) > MOST_STOPS:
        yield f"rollout.stop: got {len(stop)} texts, expected at most {MOST_STOPS}"
    if "" in stop:
        yield "rollout.stop: got an empty text, expected texts that end a response"


def template_argument_faults(arguments: Mapping[str, Any]) -> layout.Faults:
    """Report arguments of a chat template that the package sets itself."""
    for name in sorted(arguments.keys() & set(RESERVED_ARGUMENTS)):
        yield (
            f"data.chat_template_arguments.{name}: got {arguments[name]!r}, expected a variable of the chat template: "
            f"{name} is no variable of it, or is set for every prompt"
        )


SPARE_POSITIONS = 2
"""Positions that SGLang 0.5.23 leaves unused at the end of its context and of its cache. ``max_req_len`` is the length
of the shorter of the two, minus 1 (``tp_worker.py``). A response is truncated one position before ``max_req_len``
(``scheduler.py``).
"""
PROMPT_SPARE_POSITIONS = 7
"""Positions of the context that a prompt must leave free in SGLang (``max_req_input_len``)."""


def without_os_errors(faults: layout.Faults) -> layout.Faults:
    """Yield ``faults``, and turn an error of the file system (path too long, no permission) into a fault."""
    try:
        yield from faults
    except OSError as error:
        yield f"{given(error.filename)}: {error.strerror}"


def url_faults(
    given_urls: Sequence[str], key: str = "engine.urls", others: Sequence[str] = ()
) -> layout.Faults:
    """Report URLs of ``key`` that are no base URL of a server, and servers that are listed twice: here, or in
    ``others``, the URLs of other keys.
    """
    urls = [url.rstrip("/") for url in given_urls]
    faults: list[str] = []
    for url in urls:
        if fault := url_fault(url):
            faults.append(f"{key}: {fault}")
    yield from faults
    if not faults and len(set(urls)) < len(urls):
        yield f"{key}: got {urls}, expected each server once"
    for url in sorted(set(urls) & {other.rstrip("/") for other in others}):
        yield f"{key}: got {url}, which another key has too, expected each server once"


def engine_dtype_faults(dtype: str, model: ModelShape) -> layout.Faults:
    """Compare the dtype of a server's weights with the dtype that SGLang's model of the family requires."""
    if family_of(model).engine_has_config_dtype and dtype != model.dtype:
        yield (
            f"model.dtype: got {dtype}, expected {model.dtype}, the type in config.json: SGLang's model of the family "
            f"{model.family} has linears of no other (`megatron-dppo convert hf-to-megatron --dtype`, then `convert "
            "megatron-to-hf`, makes a folder of another type)"
        )


def engine_split_faults(sglang: Mapping[str, Any], model: ModelShape) -> layout.Faults:
    """Compare the sizes of a server's layout with each other, and with the model's sizes."""
    options = current_names(sglang)
    sizes = [options.get(name) for name in ("tp_size", "ep_size", REPLICAS)]
    tensor, expert, replicas = [1 if size is None else size for size in sizes]
    if any(not isinstance(n, int) or isinstance(n, bool) for n in (tensor, expert, replicas)):
        # The check against SGLang's own fields reports such a value.
        return
    faults = list(engine_size_faults(tensor, expert, replicas))
    if not faults:
        faults += engine_faults(model, EngineLayout.of_options(sglang))
    for fault in faults:
        # A table without ``attn_dp_size`` has SGLang's older name of the option, ``dp_size``: report that name.
        named_fault = fault
        if fault.key == REPLICAS and not sglang.get(REPLICAS):
            named_fault = replace(fault, key="dp_size")
        yield named_fault.text("sglang.")
    if replicas == 1 and options.get("enable_dp_lm_head"):
        yield (
            "sglang.enable_dp_lm_head: got true, expected false without attention replicas (sglang.attn_dp_size)"
        )
    running = options.get("max_running_requests")
    if replicas > 1 and isinstance(running, int) and running < replicas:
        yield (
            f"sglang.max_running_requests: got {running}, expected at least {replicas}: SGLang divides them among the "
            "attention replicas"
        )


def length_faults(
    data: schema.DataConfig,
    rollout: schema.RolloutConfig,
    evaluation: schema.EvaluationConfig,
    sglang: Mapping[str, Any],
    model: ModelShape,
    environment: EnvironmentConfig,
) -> layout.Faults:
    """Compare the longest prompt, response and episode with the positions of the model and of the engine.

    A run that replays rollouts has no engine, so it may use all of the model's positions.
    """
    generates = not rollout.replays
    spare = 0
    # One position after the prompt is for a token of the response.
    prompt_spare = 1
    if generates:
        spare = SPARE_POSITIONS
        prompt_spare = PROMPT_SPARE_POSITIONS
    limits = dict(position_limits(sglang if generates else {}, model))
    prompt = data.max_prompt_tokens
    longest_responses = {"rollout": rollout.max_response_tokens}
    # An evaluation without its own limit has the rollout's limit.
    if evaluation.max_response_tokens is not None:
        longest_responses["evaluation"] = evaluation.max_response_tokens
    for owner, positions in limits.items():
        if prompt > positions - prompt_spare:
            reason = positions_text(owner, positions, f"{prompt_spare} with a prompt", generates)
            yield f"data.max_prompt_tokens: got {prompt}, expected at most {positions - prompt_spare}: {reason}"
            continue
        for section, response in longest_responses.items():
            section_spare = spare
            if generates and section == "rollout" and rollout.interrupt == "abort":
                # After an abort, the prompt and the response so far are the next request's prompt. This prompt lacks at
                # least the last token of the whole sequence. If the sequence leaves prompt_spare - 1 positions free,
                # the prompt leaves prompt_spare positions free.
                section_spare = prompt_spare - 1
            reason = positions_text(owner, positions, str(section_spare), generates)
            usable_positions = positions - section_spare
            episode_tokens = environment.longest(prompt, response)
            if prompt + response > usable_positions:
                yield (
                    f"{section}.max_response_tokens: got {response}, with data.max_prompt_tokens {prompt} "
                    f"that is {prompt + response}, expected at most {usable_positions - prompt}: {reason}"
                )
            elif episode_tokens > usable_positions:
                yield (
                    f"environment.max_tokens: got {given(environment.max_tokens)}, which is {episode_tokens} tokens of "
                    f"an episode, expected at most {usable_positions}: {reason}. null is what environment.max_turns, "
                    "rollout.max_response_tokens and environment.max_observation_tokens allow together"
                )


def position_limits(sglang: Mapping[str, Any], model: ModelShape) -> Iterator[tuple[str, int]]:
    """Yield the positions of the model, and those of a server if its options limit them, each after its owner."""
    yield "model's", model.max_position_embeddings
    for key in ("context_length", "max_total_tokens"):
        positions = sglang.get(key)
        # Another check reports an option that is no number.
        if isinstance(positions, int):
            yield f"engine's sglang.{key} of", positions


def positions_text(owner: str, positions: int, spare: str, has_engine: bool) -> str:
    """Return the part of a message about the positions of the model or the engine."""
    text = f"the {owner} {positions} positions"
    if has_engine:
        text += f", of which SGLang fills all but {spare}"
    return text


def environment_faults(
    environment: EnvironmentConfig,
    algorithm: str,
    max_prompt_tokens: int,
    rollout: schema.RolloutConfig,
) -> layout.Faults:
    """Compare the limits of an environment's episodes with the limits of a turn. ``algorithm``: the preset's name."""
    if environment.name is None:
        return
    if not ROLE.fullmatch(environment.role):
        yield (
            f"environment.role: got {given(environment.role)}, expected letters, digits, '_' and '-', as in "
            "user and tool"
        )
    preset = preset_of(algorithm)
    if environment.credit == "turn" and preset is not None and preset.sequences:
        yield (
            f"environment.credit: got turn with algorithm.name {algorithm}, expected trajectory: the rule of "
            f"{algorithm} needs one advantage for a whole response"
        )
    least_tokens = max_prompt_tokens + rollout.max_response_tokens
    if environment.max_tokens is not None and environment.max_tokens < least_tokens:
        yield (
            f"environment.max_tokens: got {environment.max_tokens}, expected at least {least_tokens}: "
            "data.max_prompt_tokens and rollout.max_response_tokens together"
        )
    if rollout.responses_per_call > 1:
        yield (
            f"rollout.responses_per_call: got {rollout.responses_per_call} with an environment, expected 1: "
            "each turn is a separate call"
        )


def _reward_of_environment(reward: RewardConfig, environment: EnvironmentConfig) -> layout.Faults:
    """Report a run without an environment whose reward is the environment's."""
    if reward.name == REWARD_OF_ENVIRONMENT and environment.name is None:
        yield (
            f"reward.name: got {REWARD_OF_ENVIRONMENT} and no environment.name, expected an environment that gives the "
            "rewards, or another reward"
        )


def preset_of(algorithm: str) -> Preset | None:
    """Return the preset with the name ``algorithm``; None for an unknown name, which another check reports."""
    try:
        return find_preset(algorithm)
    except ValueError:
        return None


MOST_RESPONSES = 2**24
"""Largest number of responses in a rollout batch: every rank holds a summary of each response. No published run has a
tenth of this number."""


def quantization_faults(config: schema.TrainConfig, model: ModelShape) -> layout.Faults:
    """Report why servers can't hold this model in the precision of ``engine.quantization``."""
    value = config.engine.quantization
    if value is None:
        return
    if config.model.dtype != "bfloat16":
        yield (
            f"engine.quantization: got {value} with model.dtype {config.model.dtype}, expected bfloat16: SGLang "
            "computes with FP8 weights in 16 bits only"
        )
    if not family_of(model).has_fp8_engine:
        families = sorted(name for name, family in FAMILIES.items() if family.has_fp8_engine)
        yield (
            f"engine.quantization: got {value} for a model of the family {model.family}, expected one of "
            f"{', '.join(families)}"
        )
    if updates_adapters(config.lora):
        yield (
            f"engine.quantization: got {value} with lora.update adapters, expected merged: a quantised server starts "
            "with arbitrary weights, and updates of adapters do not replace these weights"
        )
    try:
        quantization.check_block_widths(model, EngineLayout.of_options(config.sglang))
    except (LayoutError, TypeError, ValueError) as error:
        yield f"engine.quantization: got {value}: {error}"


def check_config(
    config: schema.TrainConfig, source: str = "configuration", *, weights: bool = True
) -> ModelShape:
    """Run every check and return the shape of the model. Raises ConfigError with ``source`` as its source.

    ``weights``: whether the model's weights must exist. Its config.json and tokenizer must exist in any case.
    """
    # Import here: the checks of teachers use the checks of this module.
    from megatron_dppo.config.distillation import distillation_faults, teacher_model_faults

    rollout = config.rollout
    algorithm = config.algorithm
    engine = config.engine
    checks = (
        url_faults(engine.urls),
        batch_faults(rollout, config.training.prompts_per_mini_batch, config.parallel.data),
        _untruncated_sampling(rollout),
        _algorithm(algorithm),
        _aggregation(algorithm),
        _reference(algorithm),
        length_penalty_faults(algorithm, rollout),
        data_file_faults(config.data),
        prompt_form_faults(config.data, rollout.stop),
        reward_faults(config.reward),
        _reward_of_environment(config.reward, config.environment),
        _replay_folder(rollout.replay_from),
        _profile(config.profile, config.parallel.world_size, config.run.steps),
        _upload(config.checkpoint.upload, exports=config.checkpoint.export_hf),
        _overlap(rollout, config.lora),
        _engine(engine, rollout),
        colocation_faults(config, engine_device(engine)),
        held_weight_faults(config.weight_sync, engine),
        _trainer_faults(config),
        forwarded.SGLANG.faults(config.sglang),
        engine_adapter_faults(config.lora, config.sglang, config.weight_sync, engine),
        environment_faults(
            config.environment, algorithm.name, config.data.max_prompt_tokens, rollout
        ),
        _sandbox_paths(config.environment, config.run.directory),
        _passed_names(config),
        distillation_faults(config),
    )
    faults: list[str] = []
    for check in checks:
        faults += without_os_errors(check)

    def model_checks(model: ModelShape) -> tuple[layout.Faults, ...]:
        return (
            _trainer_model_faults(config, model, has_engines=True),
            adapter_update_faults(config.lora, model),
            _router_replay(rollout, config.megatron, model),
            forwarded.expert_kernel_faults(config.sglang) if model.is_moe else iter(()),
            length_faults(
                config.data, rollout, config.evaluation, config.sglang, model, config.environment
            ),
            engine_split_faults(config.sglang, model),
            engine_dtype_faults(config.model.dtype, model),
            quantization_faults(config, model),
            speculation.run_faults(config, model),
            _topk(algorithm, rollout.topk_log_probs, model.vocab_size),
            _stop_tokens(rollout.stop_token_ids, model.vocab_size),
            teacher_model_faults(config, model, weights=weights),
        )

    return _checked_model(config.model, model_checks, faults, source, weights=weights)


def check_supervised_config(config: schema.SupervisedConfig, source: str = "configuration") -> None:
    """Run every check of a supervised run. Raises ConfigError with ``source`` as its source."""
    replicas = config.parallel.data
    training = config.training
    faults = [
        *without_os_errors(_trainer_faults(config)),
        *template_argument_faults(config.data.chat_template_arguments),
        *_set_name_faults(config.data.evaluation),
    ]
    for key, path in config.data.files.items():
        if fault := data_files(path).fault:
            faults.append(f"{key}: got {path!r}, expected {fault}")
    if training.sequences_per_step < replicas:
        faults.append(
            f"training.sequences_per_step: got {training.sequences_per_step}, expected at "
            f"least one for each of the {replicas} data-parallel ranks"
        )

    def model_checks(model: ModelShape) -> tuple[layout.Faults, ...]:
        return (_trainer_model_faults(config, model, has_engines=False),)

    _checked_model(config.model, model_checks, faults, source)


def _trainer_faults(config: schema.PolicyConfig) -> layout.Faults:
    """Report faults of the sections of every kind of run that do not depend on the model."""
    yield from layout.world_faults(config.parallel.sizes)
    yield from schedule_faults(config.optimizer)
    yield from forwarded.MEGATRON.faults(config.megatron)
    yield from forwarded.training_faults(
        config.megatron_ddp,
        config.megatron_optimizer,
        config.distributed_optimizer,
        config.model.dtype,
    )
    yield from _run_directory(config.run.directory)


def _trainer_model_faults(
    config: schema.PolicyConfig, model: ModelShape, *, has_engines: bool
) -> layout.Faults:
    """Report faults of the sections of every kind of run that depend on the model."""
    sizes = config.parallel.sizes
    yield from layout.layout_faults(sizes, config.megatron, model)
    yield from _recompute(config, model)
    yield from lora_faults(config.lora, sizes, model, has_engines=has_engines)
    yield from adapter_folder_faults(config.lora)


def _checked_model(
    section: schema.ModelConfig,
    checks: Callable[[ModelShape], tuple[layout.Faults, ...]],
    faults: list[str],
    source: str,
    *,
    weights: bool = True,
) -> ModelShape:
    """Read the model's shape and run ``checks`` on it.

    Raises ConfigError with the earlier ``faults`` and the faults of ``checks``.
    """
    model = None
    try:
        model = layout.read_checkpoint_folder(section, weights=weights)
    except ConfigError as error:
        faults += error.faults
    if model is not None:
        faults += chain.from_iterable(checks(model))
    if faults or model is None:
        raise ConfigError(faults, source)
    return model


def batch_faults(
    rollout: schema.RolloutConfig, prompts_per_mini_batch: int, replicas: int
) -> layout.Faults:
    """Report why a rollout batch can't be cut into mini-batches, or shared by the data-parallel ranks.

    ``replicas``: number of data-parallel ranks. It is 0 if the world is smaller than one replica; another check reports
    this fault.
    """
    if rollout.prompts_per_step % prompts_per_mini_batch:
        yield (
            f"training.prompts_per_mini_batch: got {prompts_per_mini_batch}, expected a divisor of "
            f"rollout.prompts_per_step = {rollout.prompts_per_step}"
        )
    responses = rollout.prompts_per_step * rollout.group_size
    if responses > MOST_RESPONSES:
        yield (
            f"rollout.group_size: got {rollout.group_size}, with rollout.prompts_per_step {rollout.prompts_per_step} "
            f"that is {responses} responses in a batch, expected at most {MOST_RESPONSES}"
        )
    if replicas and rollout.prompts_per_step % replicas:
        yield (
            f"rollout.prompts_per_step: got {rollout.prompts_per_step}, expected a multiple of the "
            f"{replicas} data-parallel ranks (world_size / (tensor x pipeline x context)), which share the prompts"
        )
    step_responses = prompts_per_mini_batch * rollout.group_size
    if step_responses < replicas:
        yield (
            f"training.prompts_per_mini_batch: got {prompts_per_mini_batch} x rollout.group_size "
            f"{rollout.group_size} = {step_responses} responses in an optimiser step, expected "
            f"at least one for each of the {replicas} data-parallel ranks"
        )


def schedule_faults(optimizer: schema.OptimizerConfig) -> layout.Faults:
    """Report numbers of the learning rate's schedule that contradict each other."""
    is_constant = optimizer.schedule == "constant"
    decay_steps = optimizer.decay_steps
    if not is_constant and (decay_steps is None or decay_steps <= optimizer.warmup_steps):
        yield (
            f"optimizer.decay_steps: got {given(decay_steps)} with schedule {optimizer.schedule!r}, expected more than "
            f"optimizer.warmup_steps, {optimizer.warmup_steps}: all optimiser steps of the run, for one"
        )
    if is_constant and (decay_steps is not None or optimizer.min_lr):
        yield (
            f"optimizer.schedule: got 'constant' with decay_steps {given(decay_steps)} and min_lr {optimizer.min_lr}, "
            "expected 'linear' or 'cosine', or no decay_steps and no min_lr"
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr: got {optimizer.min_lr}, expected at most optimizer.lr, {optimizer.lr}"


def _untruncated_sampling(rollout: schema.RolloutConfig) -> layout.Faults:
    reason = "the engine's log-probabilities ignore the truncation, the samples do not"
    if rollout.top_p != 1:
        yield f"rollout.top_p: got {rollout.top_p}, expected 1: {reason}"
    if rollout.top_k != -1:
        yield f"rollout.top_k: got {rollout.top_k}, expected -1 (off): {reason}"


def _algorithm(algorithm: schema.AlgorithmConfig) -> layout.Faults:
    try:
        algorithm.facts()
    except ValueError as error:
        yield f"algorithm: {error}"


def _aggregation(algorithm: schema.AlgorithmConfig) -> layout.Faults:
    takes_constant = algorithm.aggregation == "sequence-mean-with-constant"
    if not takes_constant and algorithm.aggregation_constant is not None:
        yield (
            f"algorithm.aggregation_constant: got {algorithm.aggregation_constant} with aggregation "
            f"{algorithm.aggregation!r}, expected null: only 'sequence-mean-with-constant' divides by it"
        )


def length_penalty_faults(
    algorithm: schema.AlgorithmConfig, rollout: schema.RolloutConfig
) -> layout.Faults:
    """Report settings of length penalties that contradict each other."""
    if algorithm.overlong_tokens > rollout.max_response_tokens:
        yield (
            f"algorithm.overlong_tokens: got {algorithm.overlong_tokens}, expected at most "
            f"rollout.max_response_tokens, {rollout.max_response_tokens}"
        )


def _reference(algorithm: schema.AlgorithmConfig) -> layout.Faults:
    """Report settings of the KL penalty if the penalty is off."""
    defaults = schema.AlgorithmConfig()
    if algorithm.reference_kl > 0:
        return
    for key in ("reference_estimator", "reference_importance_weights"):
        if getattr(algorithm, key) != getattr(defaults, key):
            yield (
                f"algorithm.{key}: got {given(getattr(algorithm, key))} with algorithm.reference_kl 0 "
                f"(off), expected algorithm.reference_kl above 0, or no algorithm.{key}"
            )


def _replay_folder(folder: str | None) -> layout.Faults:
    if folder is not None and not any(Path(folder).glob(BATCH_FILES)):
        yield (
            f"rollout.replay_from: got {folder!r}, expected a folder of rollout batches "
            f"({BATCH_FILES}) that a run with rollout.save wrote"
        )


def _profile(profile: schema.ProfileConfig, world: int, steps: int) -> layout.Faults:
    """Report steps and ranks of the profiler that the run does not have."""
    bad_ranks = [rank for rank in profile.ranks if not 0 <= rank < world]
    if bad_ranks:
        yield f"profile.ranks: got {bad_ranks}, expected ranks from 0 to {world - 1}"
    bad_steps = [step for step in profile.steps if not 1 <= step <= steps]
    if bad_steps:
        yield f"profile.steps: got {bad_steps}, expected steps from 1 to run.steps = {steps}"


def _upload(repository: str | None, *, exports: bool) -> layout.Faults:
    if repository is None:
        return
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        yield f"checkpoint.upload: got {repository!r}, expected OWNER/NAME"
    if not exports:
        yield f"checkpoint.upload: got {repository!r}, but checkpoint.export_hf is false: nothing is there to send"


def _overlap(rollout: schema.RolloutConfig, lora: schema.LoraConfig) -> layout.Faults:
    """Report contradictory settings of interrupted, stale and surplus responses."""
    if rollout.interrupt == "retract" and updates_adapters(lora):
        yield (
            "rollout.interrupt: got retract, expected drain or abort where updates send only adapters: a retracted "
            "response goes on with the adapters that it began with"
        )
    if rollout.replays and rollout.max_staleness:
        yield (
            f"rollout.max_staleness: got {rollout.max_staleness} with rollout.replay_from, "
            "expected 0: nothing is generated, so nothing can overlap"
        )
    if rollout.oversampling > 1 and not rollout.drop_zero_variance_groups:
        yield (
            f"rollout.oversampling: got {rollout.oversampling}, expected 1 without "
            "rollout.drop_zero_variance_groups: the surplus would be generated for nothing"
        )


def _passed_names(config: schema.TrainConfig) -> layout.Faults:
    """Report texts in lists of variables that can't be the name of one."""
    for key, names in config.passed_variables().items():
        for name in names:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                yield f"{key}: got {given(name)}, expected the name of an environment variable, without its value"


def _sandbox_paths(environment: EnvironmentConfig, run_directory: str) -> layout.Faults:
    """Report paths of an agent's sandbox that show the run's own folder, with its answers and checkpoints."""
    paths = environment.options.get("sandbox_paths")
    if environment.name != "agent" or not isinstance(paths, list):
        return
    run_folder = Path(run_directory).resolve()
    for path in paths:
        if not isinstance(path, str):
            continue
        shown_path = Path(path).resolve()
        if run_folder.is_relative_to(shown_path) or shown_path.is_relative_to(run_folder):
            yield (
                f"environment.options.sandbox_paths: got {path!r}, which shows run.directory {run_directory}: expected "
                "only the files and folders that the command needs"
            )


def _run_directory(directory: str) -> layout.Faults:
    path = Path(directory)
    if path.exists() and not path.is_dir():
        yield f"run.directory: got {directory!r}, which is a file, expected a folder"


def _engine(engine: schema.EngineConfig, rollout: schema.RolloutConfig) -> layout.Faults:
    if engine.port is not None and engine.port + engine.servers_to_start > 65536:
        yield (
            f"engine.port: got {engine.port} for {engine.servers_to_start} servers, expected at most "
            f"{65536 - engine.servers_to_start}: each further server has the next port"
        )
    if engine.deterministic and rollout.responses_per_call > 1:
        yield (
            f"rollout.responses_per_call: got {rollout.responses_per_call}, expected 1 with "
            "engine.deterministic: each response has its own seed"
        )
    if engine.ca_file is None:
        return
    try:
        ssl.create_default_context(cafile=engine.ca_file)
    except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
        yield f"engine.ca_file: got {engine.ca_file!r}, expected a PEM file of certificates: {error}"


def held_weight_faults(sync: schema.WeightSyncConfig, engine: schema.EngineConfig) -> layout.Faults:
    """Report settings that contradict ``weight_sync.changes_only`` or ``engine.atomic_updates``.

    With these options, servers hold the weights of the previous version until an update is complete.
    """
    disk_reasons = {}
    if sync.changes_only:
        disk_reasons["weight_sync.changes_only"] = "a folder holds whole weights"
    if engine.atomic_updates:
        disk_reasons["engine.atomic_updates"] = "servers load a folder's tensors as they read them"
    for key, disk_reason in disk_reasons.items():
        if sync.strategy == "disk":
            yield (
                f"{key}: got true with weight_sync.strategy disk, expected distributed or tensor: {disk_reason}"
            )
        if engine.placement == "colocated":
            yield (
                f"{key}: got true with engine.placement colocated, expected separate: engines give up their weights "
                "for every training step"
            )


def colocation_faults(config: schema.TrainConfig, device: Device) -> layout.Faults:
    """Report settings that do not work with colocated servers, because these servers stop for every training step.

    ``device``: device of the servers.
    """
    engine = config.engine
    rollout = config.rollout
    strategy = config.weight_sync.strategy
    if engine.placement != "colocated":
        return
    if engine.urls:
        yield (
            "engine.placement: got colocated with engine.urls, expected separate: servers that run elsewhere share no "
            "device with the trainer"
        )
    elif not engine.servers_to_start and not rollout.replays:
        yield (
            "engine.servers: got 0 with engine.placement colocated, expected at least 1: servers that are attached "
            "later share no device with the trainer"
        )
    if device == "cuda" and strategy == "distributed":
        yield (
            f"weight_sync.strategy: got {strategy} with engine.placement colocated, expected tensor or disk: NCCL "
            "takes no two ranks on one GPU"
        )
    if rollout.max_staleness and rollout.interrupt == "drain":
        yield (
            f"rollout.interrupt: got drain with engine.placement colocated and rollout.max_staleness "
            f"{rollout.max_staleness}, expected retract or abort: batches ahead can't be finished before the "
            "trainer's turn"
        )


def _router_replay(
    rollout: schema.RolloutConfig, megatron: Mapping[str, Any], model: ModelShape
) -> layout.Faults:
    if not rollout.router_replay:
        return
    yield from forwarded.replay_faults(megatron)
    if not model.is_moe:
        yield (
            f"rollout.router_replay: got true, expected false: {model.family} is a dense model, it routes nothing"
        )


def _recompute(config: schema.PolicyConfig, model: ModelShape) -> layout.Faults:
    if model.is_moe:
        yield from forwarded.recompute_faults(config.megatron, config.training.recompute)


def _topk(algorithm: schema.AlgorithmConfig, configured: int, vocab_size: int) -> layout.Faults:
    """Report a ``rollout.topk_log_probs`` (``configured``) that vocabulary or algorithm excludes."""
    if configured > vocab_size:
        yield (
            f"rollout.topk_log_probs: got {configured}, expected at most the vocabulary's {vocab_size}"
        )
    algorithm_faults = list(_algorithm(algorithm))
    # A faulty algorithm is reported elsewhere. It has no K to compare with.
    if not algorithm_faults:
        try:
            check_topk(algorithm.facts(), configured, vocab_size)
        except ValueError as error:
            yield f"algorithm: {error}"


def _stop_tokens(ids: Sequence[int], vocab_size: int) -> layout.Faults:
    unknown = [token for token in ids if not 0 <= token < vocab_size]
    if unknown:
        yield f"rollout.stop_token_ids: got {unknown}, expected ids below the vocabulary's {vocab_size}"
