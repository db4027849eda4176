"""The SGLang servers of a run: their layout, their options, and the limits that they must keep.

The module imports neither torch nor sglang.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.config import speculation
from megatron_dppo.config.forwarded import EXPERT_KERNEL
from megatron_dppo.config.machine import Device, engine_device
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.model.engine_layout import EngineLayout, attention_replicas, current_names
from megatron_dppo.model.quantization import SCHEME
from megatron_dppo.model.shape import ITEM_BYTES, ModelShape
from megatron_dppo.spec.model import ModelSpec

CPU_KV_CACHE_BYTES = 1 << 30
"""Largest key-value cache on a CPU. SGLang's default takes most of the machine's memory."""
CPU_NGRAM_NODES = 200_000
"""Nodes of the n-grams that a CPU server remembers. SGLang's default, 10 million, takes gigabytes at the start."""
LORA_SLOTS = 2
"""Number of adapters in a server's batch: the adapter of the committed version, and "no adapter" of health checks."""

_STATES_PER_REQUEST = 3
"""Number of recurrent states that SGLang needs for a request."""


@dataclass(frozen=True)
class ServersSpec:
    """The servers of a run: the servers that it starts, and the servers of ``engine.urls``.

    Attributes:
        started: number of servers that the run starts; 0 if it replays saved batches.
        urls: addresses of the attached servers.
        device: device of the started servers.
        layout: layout of a started server.
        options: fields of SGLang's ServerArgs that all started servers have. Each server adds its address, its seed
            and its devices.
        sequence_tokens: tokens of the longest sequence, prompt and continuation.
        switches: SGLang's switches that must be on in every server.
        has_states: whether the model has recurrent states.
        needs_hooks: whether the run needs this package's additions to SGLang's answers.
    """

    started: int
    urls: tuple[str, ...]
    device: Device
    layout: EngineLayout
    options: Mapping[str, Any]
    sequence_tokens: int
    switches: tuple[str, ...]
    has_states: bool
    needs_hooks: bool

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        model: ModelSpec,
        sequence_tokens: int,
        device: Device | None = None,
    ) -> ServersSpec:
        """Return the servers of a configuration.

        ``device``: device of the servers; None: ``engine.device``, or this machine's. Raises LayoutError if the sizes
        of a server do not fit each other.
        """
        engine = config.engine
        device = device or engine_device(engine)
        has_drafts = speculation.algorithm_of(config.sglang) == speculation.NGRAM
        rollout = config.rollout
        switches = {
            "enable_return_routed_experts": rollout.router_replay,
            "enable_fp32_lm_head": config.head.dtype == "float32",
            "enable_deterministic_inference": engine.deterministic,
        }
        return cls(
            started=engine.servers_to_start if not rollout.replays else 0,
            urls=tuple(engine.urls),
            device=device,
            layout=EngineLayout.of_options(config.sglang),
            options=_options(config, model, sequence_tokens, device),
            sequence_tokens=sequence_tokens,
            switches=tuple(name for name, is_required in switches.items() if is_required),
            has_states=model.shape.delta is not None,
            needs_hooks=rollout.router_replay or rollout.interrupt == "abort" or has_drafts,
        )

    @property
    def is_quantized(self) -> bool:
        """Whether linear layers and experts are block FP8."""
        return "quantization" in self.options


def _options(
    config: TrainConfig, model: ModelSpec, sequence_tokens: int, device: Device
) -> dict[str, Any]:
    """Return the options that all servers have; the ``sglang:`` table overrides the package's defaults."""
    shape = model.shape
    options: dict[str, Any] = {
        "model_path": str(Path(config.model.hf_checkpoint).resolve()),
        "dtype": model.dtype,
        "device": device,
        "enable_return_routed_experts": config.rollout.router_replay,
        "skip_server_warmup": True,
        "log_level_http": "warning",
    }
    if device == "cpu":
        options |= _cpu_options(config, shape, sequence_tokens)
    elif shape.is_moe:
        options["moe_runner_backend"] = EXPERT_KERNEL
    if shape.delta is not None:
        options |= _state_options(config, shape, device)
    options |= model.family.engine_options
    if shape.router.has_bias:
        # In some models whose routers have a bias, SGLang would append the shared expert to the other experts. The
        # tensors would then differ from the weight map.
        options["disable_shared_experts_fusion"] = True
    if config.head.dtype == "float32":
        options["enable_fp32_lm_head"] = True
    if config.engine.deterministic:
        options["enable_deterministic_inference"] = True
        if device == "cpu":
            # Disable chunked prefill: it cuts a prompt at a place that depends on the other requests. Lower the memory
            # fraction, because SGLang reserves too much memory without chunks.
            options |= {"chunked_prefill_size": -1, "mem_fraction_static": 0.8}
    changed_keys = dict(model.engine_keys)
    if model.quantization is not None:
        # The server starts with arbitrary weights: there is no checkpoint with quantised weights, and a weight update
        # is sent to a server before it generates.
        options |= {"quantization": model.quantization, "load_format": "dummy"}
        changed_keys["quantization_config"] = SCHEME
    if changed_keys:
        options["json_model_override_args"] = json.dumps(changed_keys)
    options |= _adapter_options(model, device)
    # A null in the table leaves the option as it is.
    options |= {k: v for k, v in current_names(config.sglang).items() if v is not None}
    # Without GPUs SGLang rejects this option, and accepts calls to release memory without releasing any.
    if config.engine.placement == "colocated" and device == "cuda":
        options["enable_memory_saver"] = True
    return options


def _cpu_options(config: TrainConfig, shape: ModelShape, sequence_tokens: int) -> dict[str, Any]:
    """Return SGLang's options for a CPU server."""
    options: dict[str, Any] = {
        "attention_backend": "torch_native",
        "max_total_tokens": cpu_kv_tokens(config, shape, sequence_tokens),
        "sleep_on_idle": True,
    }
    if speculation.algorithm_of(config.sglang) == speculation.NGRAM:
        options["speculative_ngram_capacity"] = CPU_NGRAM_NODES
    if shape.window is not None:
        # Keep one cache for all layers: PyTorch's attention finds no tokens in a separate cache of windowed layers.
        options["disable_hybrid_swa_memory"] = True
    return options


def _state_options(config: TrainConfig, shape: ModelShape, device: Device) -> dict[str, Any]:
    """Return SGLang's options for the recurrent states of a model with delta nets."""
    options: dict[str, Any] = {"mamba_ssm_dtype": "float32"}
    if device == "cpu":
        # SGLang's other strategies need snapshots of states, which the CPU platform lacks. ``no_buffer`` excludes
        # overlapped schedules.
        options |= {
            "mamba_radix_cache_strategy": "no_buffer",
            "disable_overlap_schedule": True,
            "max_mamba_cache_size": cpu_states(config.rollout.max_concurrent_requests, shape),
        }
    return options


def _adapter_options(model: ModelSpec, device: Device) -> dict[str, Any]:
    """Return SGLang's LoRA options if weight updates send only adapters; empty if they send merged weights."""
    if not model.sends_adapters:
        return {}
    assert model.adapters is not None
    options: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": model.adapters.rank,
        "lora_target_modules": list(model.adapters.modules),
        "max_loras_per_batch": LORA_SLOTS,
    }
    if device == "cpu":
        options["lora_backend"] = "torch_native"
    return options


def cpu_kv_tokens(config: TrainConfig, shape: ModelShape, sequence_tokens: int) -> int:
    """Return the size of the key-value cache of a CPU server, in tokens.

    All concurrent requests fit at full length, unless they take more than CPU_KV_CACHE_BYTES. Two sequences always fit.
    Each attention replica has a cache of this size for its share of the requests.
    """
    replicas = attention_replicas(config.sglang)
    requests = math.ceil(config.rollout.max_concurrent_requests / replicas)
    values = shape.attention_layers * shape.cached_elements()
    token_bytes = values * ITEM_BYTES[config.model.dtype]
    most_tokens = CPU_KV_CACHE_BYTES // token_bytes // replicas
    return max(2 * sequence_tokens, min(requests * sequence_tokens, most_tokens))


def cpu_states(concurrent_requests: int, shape: ModelShape) -> int:
    """Return the number of recurrent states that a CPU server of a model with delta nets keeps.

    The states of all concurrent requests fit, unless they take more than CPU_KV_CACHE_BYTES. The states of two requests
    always fit. SGLang's default takes half of the machine's memory.
    """
    assert shape.delta is not None
    state_bytes = (
        len(shape.delta_layers) * sum(shape.delta.state_elements()) * ITEM_BYTES["float32"]
    )
    most_requests = CPU_KV_CACHE_BYTES // (_STATES_PER_REQUEST * state_bytes)
    return _STATES_PER_REQUEST * max(2, min(concurrent_requests, most_requests))
