"""A server's configuration file and environment, from a run's configuration.

Light: imports neither torch nor sglang.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_dppo.config.forwarded import EXPERT_KERNEL
from megatron_dppo.config.lora import adapters_of, updates_adapters
from megatron_dppo.config.schema import (
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.shape import ITEM_BYTES
from megatron_dppo.system.gpus import has_visible_gpu

CPU_KV_CACHE_BYTES = 1 << 30
"""Budget of the key-value cache on a CPU; SGLang's own takes most of the machine's memory."""
FIRST_WEIGHT_VERSION = 0
"""What an engine that has just loaded its checkpoint calls its weights; updates count up from 1."""

LORA_SLOTS = 2
"""Adapters in a server's batch: those of the committed version, and none (health checks)."""

_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


HOSTS_VARIABLE = "MEGATRON_DPPO_SERVER_HOSTS"
"""In the environment of every task of a server over several hosts: their names and addresses."""


@dataclass(frozen=True)
class ServerHosts:
    """The hosts of a server that runs over several.

    Attributes:
        addresses: by the name that the launcher knows a host by; the first answers clients.
        port: of the first, where the server's ranks meet.
    """

    addresses: Mapping[str, str]
    port: int

    @property
    def options(self) -> dict[str, Any]:
        """SGLang's, which are alike on all hosts."""
        first = next(iter(self.addresses.values()))
        place = f"[{first}]:{self.port}" if ":" in first else f"{first}:{self.port}"
        return {"nnodes": len(self.addresses), "dist_init_addr": place}

    @property
    def variable(self) -> str:
        """The value of HOSTS_VARIABLE."""
        return json.dumps(dict(self.addresses))


@dataclass(frozen=True)
class ServerSections:
    """The parts of a run's configuration that say what its SGLang servers must be."""

    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    engine: EngineConfig
    sglang: Mapping[str, Any]
    lora: LoraConfig = field(default_factory=LoraConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    @classmethod
    def of(cls, config: TrainConfig) -> ServerSections:
        """Those of a whole configuration."""
        return cls(
            config.model,
            config.data,
            config.rollout,
            config.engine,
            config.sglang,
            config.lora,
            config.evaluation,
        )

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the longest prompt and the longest response together, in training or evaluation."""
        evaluated = self.evaluation.max_response_tokens or 0
        return self.data.max_prompt_tokens + max(self.rollout.max_response_tokens, evaluated)


def engine_device(engine: EngineConfig) -> Literal["cpu", "cuda"]:
    """``engine.device``, or else cuda where the NVIDIA driver shows a device to this process."""
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
    """SGLang's ServerArgs fields for one server; the ``sglang:`` table overrides our defaults.

    Args:
        config: the run's sections.
        host: address where it listens.
        port: where it listens.
        seed: of its sampling.
        first_device: the first of its GPUs on its host, or on each of them.
        hosts: of a server over several.
    """
    device = engine_device(config.engine)
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
        options |= {
            "attention_backend": "torch_native",
            "max_total_tokens": cpu_kv_tokens(config),
            "sleep_on_idle": True,
        }
    elif load_model_shape(config.model.hf_checkpoint).is_moe:
        options["moe_runner_backend"] = EXPERT_KERNEL
    if config.engine.deterministic:
        options["enable_deterministic_inference"] = True
        if device == "cpu":
            # Where a prompt is cut depends on its neighbours; without cuts SGLang reserves too much.
            options |= {"chunked_prefill_size": -1, "mem_fraction_static": 0.8}
    options |= adapter_options(config)
    options |= {name: value for name, value in config.sglang.items() if value is not None}
    if hosts is not None:
        options |= hosts.options
    if device == "cuda":
        options["base_gpu_id"] = first_device
    return options


def adapter_options(config: ServerSections) -> dict[str, Any]:
    """SGLang's for a server that is sent adapters alone; none for one that is sent merged weights."""
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


def cpu_kv_tokens(config: ServerSections) -> int:
    """Tokens of key-value cache for a CPU server.

    Enough for every request in flight at full length, within CPU_KV_CACHE_BYTES, and never below
    two sequences.
    """
    sequence = config.sequence_tokens
    wanted = config.rollout.max_concurrent_requests * sequence
    model = load_model_shape(config.model.hf_checkpoint)
    values = 2 * model.num_layers * model.num_query_groups * model.head_dim
    token_bytes = values * ITEM_BYTES[config.model.dtype]
    return max(2 * sequence, min(wanted, CPU_KV_CACHE_BYTES // token_bytes))


def write_options(options: Mapping[str, Any], path: Path) -> None:
    """Write SGLang's ``--config`` file: YAML (here JSON, a subset), flags spelt with hyphens."""
    flags = {name.replace("_", "-"): value for name, value in options.items()}
    path.write_text(json.dumps(flags, indent=2) + "\n")


def server_environment(config: ServerSections, hosts: ServerHosts | None = None) -> dict[str, str]:
    """This process's environment, less what names a trainer rank, plus what SGLang reads.

    ``hosts``: as in :func:`server_options`.
    """
    env = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    env |= {
        "PYTHONUNBUFFERED": "1",
        # /health would otherwise generate a token: a second each time, and 503 while generation is
        # paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # Longer than the client keeps an idle connection, so that the server never closes one under
        # a request.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "60",
        # How soon the server sees that a client is gone and aborts its request (stock: 4 s).
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
    }
    if engine_device(config.engine) == "cpu":
        ranks = config.sglang.get("tp_size", 1) * config.sglang.get("dp_size", 1)
        env["SGLANG_PLATFORM"] = "torch_cpu"
        # Two threads that wait for each other while the trainer holds a core are 20 times slower
        # than one; a large model on cores of its own wants the variable set.
        env.setdefault("OMP_NUM_THREADS", "1")
        count = 1 if hosts is None else len(hosts.addresses)
        if ranks > 1:
            bound = [bind_cores(ranks // count)] * count
            env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(bound))
    if hosts is not None:
        env[HOSTS_VARIABLE] = hosts.variable
    return env


def bind_cores(ranks: int) -> str:
    """This process's cores dealt to ``ranks`` engine ranks, as SGLang writes it: ``0,1|2,3``."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    groups = [
        [cores[(rank * share + i) % len(cores)] for i in range(share)] for rank in range(ranks)
    ]
    return "|".join(",".join(map(str, group)) for group in groups)
