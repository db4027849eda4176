"""Checks of the ``lora:`` section against the model, the layout and the other sections."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.config.errors import given
from megatron_dppo.config.layout import Faults
from megatron_dppo.config.schema import EngineConfig, LoraConfig, WeightSyncConfig
from megatron_dppo.model.adapters import (
    EXPERTS,
    HEAD,
    AdapterError,
    Adapters,
    adapter_faults,
    module_groups,
    resolve_modules,
)
from megatron_dppo.model.layout import Layout, LayoutSizes, model_faults, size_faults
from megatron_dppo.model.shape import ModelShape

_FUSED_IN_ENGINE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Matrices that SGLang fuses into one: all of a group must have adapters, or none."""
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapters_of(lora: LoraConfig, shape: ModelShape) -> Adapters | None:
    """Return the adapters that the section configures; None with rank 0.

    Raises AdapterError for an unknown name in ``target_modules``.
    """
    if not lora.rank:
        return None
    modules = resolve_modules(lora.target_modules, shape)
    return Adapters(lora.rank, lora.filled_alpha, modules, lora.experts == "shared")


def lora_faults(
    lora: LoraConfig, sizes: LayoutSizes, shape: ModelShape, *, has_engines: bool
) -> Faults:
    """Report faults of the ``lora:`` section, without a look at ``start_from``.

    ``has_engines``: false for a supervised run.
    """
    if not lora.rank:
        yield from _without_adapters(lora)
        return
    try:
        adapters = adapters_of(lora, shape)
    except AdapterError as error:
        yield f"lora.target_modules: {error}"
        return
    assert adapters is not None
    if updates_adapters(lora) and not has_engines:
        yield "lora.update: got 'adapters', expected 'merged': a supervised run has no engines to send them to"
    expert_modules = set(module_groups(shape).get(EXPERTS, ())) & set(adapters.modules)
    if lora.experts == "shared" and not expert_modules:
        yield "lora.experts: got 'shared', expected 'each': no expert has an adapter"
    if lora.train_router and not shape.is_moe:
        yield f"lora.train_router: got true, expected false: {shape.family} is a dense model"
    if not size_faults(sizes) and not model_faults(sizes, shape):
        faults = adapter_faults(adapters, shape, Layout.of(sizes))
        yield from (f"lora: {fault}" for fault in faults)


def engine_adapter_faults(
    lora: LoraConfig, sglang: Mapping[str, Any], weight_sync: WeightSyncConfig, engine: EngineConfig
) -> Faults:
    """Report settings that contradict ``lora.update``: engines receive merged weights, or load the run's adapters."""
    allowed_keys: tuple[str, ...] = ()
    if updates_adapters(lora):
        allowed_keys = ("lora_backend",)
    for key, value in sglang.items():
        if "lora" in key and key not in allowed_keys:
            yield (
                f"sglang.{key}: got {given(value)}, expected nothing: with lora.update merged, engines have no "
                "adapters; with lora.update adapters, the run sets this option"
            )
    if not updates_adapters(lora):
        return
    with_adapters = "with lora.update 'adapters'"
    if weight_sync.strategy != "disk":
        yield (
            f"weight_sync.strategy: got {weight_sync.strategy!r} {with_adapters}, expected 'disk': SGLang reads "
            "adapters from a folder; what it takes over the network it unpickles"
        )
    if lora.train_router:
        yield f"lora.train_router: got true {with_adapters}, expected false: routers are no adapters"
    if engine.deterministic:
        yield (
            f"engine.deterministic: got true {with_adapters}, expected false: what SGLang's LoRA adds to an answer "
            "may depend on its neighbours in the batch"
        )
    if engine.uses_router:
        yield (
            f"engine.router: got {given(engine.router)} {with_adapters}, expected false: requests that name "
            "adapters were not tested through the HTTP router"
        )


def adapter_update_faults(lora: LoraConfig, shape: ModelShape) -> Faults:
    """Report why SGLang's LoRA can't compute with the adapters that ``lora.update: adapters`` would send."""
    if not updates_adapters(lora):
        return
    try:
        adapters = adapters_of(lora, shape)
    except AdapterError:
        # The function lora_faults reports this error.
        return
    assert adapters is not None
    if shape.latent is not None:
        yield (
            "lora.update: got 'adapters', expected 'merged': SGLang's LoRA of latent attention is not "
            "tested here"
        )
        return
    if shape.delta is not None:
        yield (
            "lora.update: got 'adapters', expected 'merged': SGLang's LoRA of models with delta nets leaves out some "
            "of their matrices, and is not tested here"
        )
        return
    if shape.has_sinks:
        yield (
            "lora.update: got 'adapters', expected 'merged': SGLang's LoRA of models with attention sinks is not "
            "tested here"
        )
        return
    modules = set(adapters.modules)
    expert_modules = sorted(modules & set(module_groups(shape).get(EXPERTS, ())))
    if expert_modules:
        yield (
            f"lora.update: got 'adapters' with {expert_modules} of experts, expected 'merged', or lora.target_modules "
            "of the attention and dense MLP only: SGLang's LoRA of experts runs in GPU kernels that are not tested here"
        )
    head_modules = sorted(modules & set(module_groups(shape).get(HEAD, ())))
    if head_modules:
        yield (
            f"lora.target_modules: got {head_modules} with lora.update 'adapters', expected no output layer, or "
            "'merged': an adapter beside SGLang's logits is not tested here"
        )
    for group in _FUSED_IN_ENGINE:
        adapted_modules = modules & set(group)
        if adapted_modules and adapted_modules != set(group):
            yield (
                f"lora.target_modules: got {sorted(adapted_modules)} with lora.update 'adapters', expected all of "
                f"{list(group)} or none of them: SGLang fuses these matrices"
            )


def updates_adapters(lora: LoraConfig) -> bool:
    """Whether weight updates send only adapters."""
    return lora.rank > 0 and lora.update == "adapters"


def _without_adapters(lora: LoraConfig) -> Faults:
    """Report keys of the section that have no effect with rank 0."""
    given_keys = sorted(lora.model_fields_set - {"rank"})
    changed_keys = [key for key in given_keys if getattr(lora, key) != getattr(LoraConfig(), key)]
    if changed_keys:
        keys = ", ".join(f"lora.{key}" for key in changed_keys)
        yield f"lora.rank: got 0 (off) with {keys}, expected a rank above 0, or none of these keys"


def adapter_folder_faults(lora: LoraConfig) -> Faults:
    """Report a folder ``start_from`` that lacks files of adapters. ``lora_faults`` reports the key without adapters."""
    if not lora.rank or lora.start_from is None:
        return
    missing_files: list[str] = []
    for name in (PEFT_CONFIG, PEFT_WEIGHTS):
        if not (Path(lora.start_from) / name).is_file():
            missing_files.append(name)
    if missing_files:
        yield (
            f"lora.start_from: got {lora.start_from!r}, which lacks {' and '.join(missing_files)}, expected "
            "a folder of adapters in PEFT's format"
        )
