"""The options and the environment of the SGLang servers that a run starts.

The module imports neither torch nor sglang.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_dppo.config import schema, speculation
from megatron_dppo.config.data_schema import EnvironmentConfig
from megatron_dppo.config.forwarded import EXPERT_KERNEL
from megatron_dppo.config.lora import adapters_of, updates_adapters
from megatron_dppo.engine.direct_loading import ATOMIC_VARIABLE
from megatron_dppo.model.engine_layout import attention_replicas, current_names, server_ranks
from megatron_dppo.model.families import family_of, load_model_shape, missing_engine_keys
from megatron_dppo.model.quantization import SCHEME
from megatron_dppo.model.shape import ITEM_BYTES, ModelShape
from megatron_dppo.system.gpus import has_visible_gpu
from megatron_dppo.system.network import free_port, url_host
from megatron_dppo.system.secret_variables import chosen_variables, without_secrets

CPU_KV_CACHE_BYTES = 1 << 30
"""Largest key-value cache on a CPU. SGLang's default takes most of the machine's memory."""
CPU_NGRAM_NODES = 200_000
"""Nodes of the n-grams that a CPU server remembers. SGLang's default, 10 million, takes gigabytes at the start."""
FIRST_WEIGHT_VERSION = 0
"""The weight version of an engine that has just loaded its checkpoint; weight updates count up from 1."""

ADAPTER_DIGESTS = "sha256"
"""Key in a response's ``loaded_adapters``. Its value is the digests of the adapters, as JSON."""
REPLICAS_PORT_DISTANCE = 13
"""A server with attention replicas also listens on its port plus this number (SGLang 0.5.23)."""
LORA_SLOTS = 2
"""Number of adapters in a server's batch: the adapter of the committed version, and "no adapter" of health checks."""

_STATES_PER_REQUEST = 3
"""Number of recurrent states that SGLang needs for a request."""

_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""torch.distributed's variables of a trainer rank, which a server must not have."""


HOSTS_VARIABLE = "MEGATRON_DPPO_SERVER_HOSTS"
"""Variable of every task of a server over several hosts: the hosts' names and addresses, as JSON."""


@dataclass(frozen=True)
class ServerHosts:
    """The hosts of a server that runs over several hosts.

    ``addresses``: the launcher's name of each host -> the host's address; clients connect to the first host.
    ``port``: the port of the first host for the rendezvous of the server's ranks.
    """

    addresses: Mapping[str, str]
    port: int

    @property
    def options(self) -> dict[str, Any]:
        """SGLang's options for several hosts, the same on all hosts."""
        first_host = next(iter(self.addresses.values()))
        address = f"{url_host(first_host)}:{self.port}"
        return {"nnodes": len(self.addresses), "dist_init_addr": address}


@dataclass(frozen=True)
class ServerSections:
    """The sections of a configuration that determine a run's servers."""

    model: schema.ModelConfig
    data: schema.DataConfig
    rollout: schema.RolloutConfig
    engine: schema.EngineConfig
    sglang: Mapping[str, Any]
    head: schema.HeadConfig = field(default_factory=schema.HeadConfig)
    lora: schema.LoraConfig = field(default_factory=schema.LoraConfig)
    evaluation: schema.EvaluationConfig = field(default_factory=schema.EvaluationConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    @classmethod
    def of(cls, config: schema.TrainConfig) -> ServerSections:
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})

    @classmethod
    def needed_by(cls, config: schema.TrainConfig) -> ServerSections | None:
        """Return the sections of a run that needs servers; None if the run replays saved batches."""
        if config.rollout.replay_from is not None:
            return None
        return cls.of(config)

    @property
    def sequence_tokens(self) -> int:
        """The largest number of tokens of prompt and response, or of an episode, in training and evaluation."""
        evaluation_tokens = self.evaluation.max_response_tokens or 0
        response_tokens = max(self.rollout.max_response_tokens, evaluation_tokens)
        return self.environment.longest(self.data.max_prompt_tokens, response_tokens)


def engine_device(engine: schema.EngineConfig) -> Literal["cpu", "cuda"]:
    """Return ``engine.device``. If it is not set, return cuda if this process sees a GPU of the NVIDIA driver."""
    if engine.device is not None:
        return engine.device
    return "cuda" if has_visible_gpu() else "cpu"


def server_options(
    config: ServerSections,
    *,
    host: str,
    port: int,
    seed: int,
    first_device: int = 0,
    hosts: ServerHosts | None = None,
) -> dict[str, Any]:
    """Return the fields of SGLang's ServerArgs for one server; the ``sglang:`` table overrides the package's defaults.

    Args:
        config: the sections of the run's configuration that determine the options.
        host: address that the server listens on.
        port: port that the server listens on.
        seed: seed of the server's sampling.
        first_device: index of the server's first GPU on its host, or on each of ``hosts``.
        hosts: the hosts of a server that runs over several hosts.
    """
    device = engine_device(config.engine)
    model = load_model_shape(config.model.hf_checkpoint)
    options: dict[str, Any] = {
        "model_path": str(Path(config.model.hf_checkpoint).resolve()),
        "dtype": config.model.dtype,
        "host": host,
        "port": port,
        "device": device,
        "random_seed": seed,
        "weight_version": str(FIRST_WEIGHT_VERSION),
        "enable_return_routed_experts": config.rollout.router_replay,
        "skip_server_warmup": True,
        "log_level_http": "warning",
    }
    if device == "cpu":
        options |= _cpu_options(config, model)
    elif model.is_moe:
        options["moe_runner_backend"] = EXPERT_KERNEL
    if model.delta is not None:
        options |= _state_options(config, model, device)
    options |= family_of(model).engine_options
    if model.router.has_bias:
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
    changed_keys = missing_engine_keys(config.model.hf_checkpoint)
    if config.engine.quantization is not None:
        # The server starts with arbitrary weights: there is no checkpoint with quantised weights, and a weight update
        # is sent to a server before it generates.
        options |= {"quantization": config.engine.quantization, "load_format": "dummy"}
        changed_keys["quantization_config"] = SCHEME
    if changed_keys:
        options["json_model_override_args"] = json.dumps(changed_keys)
    options |= adapter_options(config)
    # A null in the table leaves the option as it is.
    options |= {k: v for k, v in current_names(config.sglang).items() if v is not None}
    if hosts is not None:
        options |= hosts.options
    if device == "cuda":
        options["base_gpu_id"] = first_device
    # Without GPUs SGLang rejects this option, and accepts calls to release memory without releasing any.
    if config.engine.placement == "colocated" and device == "cuda":
        options["enable_memory_saver"] = True
    return options


def _cpu_options(config: ServerSections, model: ModelShape) -> dict[str, Any]:
    """Return SGLang's options for a CPU server."""
    options: dict[str, Any] = {
        "attention_backend": "torch_native",
        "max_total_tokens": cpu_kv_tokens(config),
        "sleep_on_idle": True,
    }
    if speculation.algorithm_of(config.sglang) == speculation.NGRAM:
        options["speculative_ngram_capacity"] = CPU_NGRAM_NODES
    if model.window is not None:
        # Keep one cache for all layers: PyTorch's attention finds no tokens in a separate cache of windowed layers.
        options["disable_hybrid_swa_memory"] = True
    return options


def _state_options(config: ServerSections, model: ModelShape, device: str) -> dict[str, Any]:
    """Return SGLang's options for the recurrent states of a model with delta nets."""
    options: dict[str, Any] = {"mamba_ssm_dtype": "float32"}
    if device == "cpu":
        # SGLang's other strategies need snapshots of states, which the CPU platform lacks. ``no_buffer`` excludes
        # overlapped schedules.
        options |= {
            "mamba_radix_cache_strategy": "no_buffer",
            "disable_overlap_schedule": True,
            "max_mamba_cache_size": cpu_states(config, model),
        }
    return options


def adapter_options(config: ServerSections) -> dict[str, Any]:
    """Return SGLang's LoRA options if weight updates send only adapters; empty if they send merged weights."""
    if not updates_adapters(config.lora):
        return {}
    adapters = adapters_of(config.lora, load_model_shape(config.model.hf_checkpoint))
    assert adapters is not None
    options: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": adapters.rank,
        "lora_target_modules": list(adapters.modules),
        "max_loras_per_batch": LORA_SLOTS,
    }
    if engine_device(config.engine) == "cpu":
        options["lora_backend"] = "torch_native"
    return options


def free_server_port(config: ServerSections) -> int:
    """Return a free port for a server on ``engine.host``."""
    if attention_replicas(config.sglang) == 1:
        return free_port(config.engine.host)
    return free_port(config.engine.host, REPLICAS_PORT_DISTANCE)


def cpu_kv_tokens(config: ServerSections) -> int:
    """Return the size of the key-value cache of a CPU server, in tokens.

    All concurrent requests fit at full length, unless they take more than CPU_KV_CACHE_BYTES. Two sequences always fit.
    Each attention replica has a cache of this size for its share of the requests.
    """
    sequence_tokens = config.sequence_tokens
    replicas = attention_replicas(config.sglang)
    requests = math.ceil(config.rollout.max_concurrent_requests / replicas)
    requested_tokens = requests * sequence_tokens
    model = load_model_shape(config.model.hf_checkpoint)
    values = model.attention_layers * model.cached_elements()
    token_bytes = values * ITEM_BYTES[config.model.dtype]
    most_tokens = CPU_KV_CACHE_BYTES // token_bytes // replicas
    return max(2 * sequence_tokens, min(requested_tokens, most_tokens))


def cpu_states(config: ServerSections, model: ModelShape) -> int:
    """Return the number of recurrent states that a CPU server of a model with delta nets keeps.

    The states of all concurrent requests fit, unless they take more than CPU_KV_CACHE_BYTES. The states of two requests
    always fit. SGLang's default takes half of the machine's memory.
    """
    assert model.delta is not None
    state_bytes = (
        len(model.delta_layers) * sum(model.delta.state_elements()) * ITEM_BYTES["float32"]
    )
    most_requests = CPU_KV_CACHE_BYTES // (_STATES_PER_REQUEST * state_bytes)
    requests = min(config.rollout.max_concurrent_requests, most_requests)
    return _STATES_PER_REQUEST * max(2, requests)


FLAGS: Mapping[str, str] = {
    "fp8_gemm_runner_backend": "fp8-gemm-backend",
    "fp4_gemm_runner_backend": "fp4-gemm-backend",
    "ep_join_mode": "elastic-ep-join-mode",
    "ep_join_rank_offset": "elastic-ep-join-rank-offset",
}
"""Field of SGLang's ServerArgs whose flag has another name -> the flag, without its hyphens in front."""


def flag_of(field_name: str) -> str:
    """Return the name of the flag of a field of SGLang's ServerArgs, without its hyphens in front."""
    return FLAGS.get(field_name, field_name.replace("_", "-"))


def write_options(options: Mapping[str, Any], path: Path) -> None:
    """Write SGLang's ``--config`` file, with the names of flags. The file is YAML; JSON is a subset of YAML."""
    flags = {flag_of(name): value for name, value in options.items()}
    path.write_text(json.dumps(flags, indent=2) + "\n")


def server_environment(config: ServerSections, hosts: ServerHosts | None = None) -> dict[str, str]:
    """Return the environment of a server.

    It is this process's environment without the variables of trainer ranks and without secrets.
    ``engine.passed_variables`` and SGLang's own variables are added.
    """
    plain_variables = without_secrets(os.environ)
    env = {name: value for name, value in plain_variables.items() if name not in _RANK_VARIABLES}
    env |= chosen_variables(os.environ, config.engine.passed_variables)
    env |= {
        "PYTHONUNBUFFERED": "1",
        # By default /health generates a token. This takes a second, and returns 503 while generation is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # Keep idle connections longer than the client does, so that the server closes no connection during a request.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "60",
        # Seconds until the server notices a client's disconnect and aborts its request (default: 4 s).
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
    }
    if load_model_shape(config.model.hf_checkpoint).delta is not None:
        # By default SGLang keeps the last tokens before a convolution in bfloat16, even if the model has another dtype.
        env["SGLANG_MAMBA_CONV_DTYPE"] = config.model.dtype
    if engine_device(config.engine) == "cpu":
        ranks = server_ranks(config.sglang)
        env["SGLANG_PLATFORM"] = "torch_cpu"
        # Two threads that wait for each other while the trainer uses a core are 20 times slower than one thread. A user
        # can set the variable for a large model on its own cores.
        env.setdefault("OMP_NUM_THREADS", "1")
        host_count = 1 if hosts is None else len(hosts.addresses)
        if ranks > 1:
            # The variable has the cores of all hosts' ranks. Every host gets the core numbers of this machine.
            bindings = [bind_cores(ranks // host_count)] * host_count
            env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(bindings))
    if config.engine.atomic_updates:
        env[ATOMIC_VARIABLE] = "1"
    if hosts is not None:
        env[HOSTS_VARIABLE] = json.dumps(dict(hosts.addresses))
    return env


def bind_cores(ranks: int) -> str:
    """Distribute this process's cores over ``ranks`` engine ranks, in SGLang's notation: ``0,1|2,3``."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    groups: list[str] = []
    for rank in range(ranks):
        first_core = rank * share
        group = [cores[i % len(cores)] for i in range(first_core, first_core + share)]
        groups.append(",".join(map(str, group)))
    return "|".join(groups)
