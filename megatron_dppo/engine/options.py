"""The requirements on a run's SGLang servers.

The module computes the options of the servers that a run starts, validates an ``sglang:`` table with SGLang's own
command line, and checks whether a running server fits the run.

``python -m megatron_dppo.engine.options`` with the ``sglang:`` table as JSON on standard input prints the faults that
SGLang finds as a JSON list. Use it to check the table with another interpreter, or without importing SGLang into this
process. The module itself imports neither torch nor sglang.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_type_hints

import orjson

from megatron_dppo.config import schema
from megatron_dppo.config.checks import PROMPT_SPARE_POSITIONS, SPARE_POSITIONS
from megatron_dppo.config.data_schema import EnvironmentConfig
from megatron_dppo.config.errors import closest, given
from megatron_dppo.config.forwarded import EXPERT_KERNEL, SGLANG, LibraryFields, LibraryMissingError
from megatron_dppo.config.lora import adapters_of, updates_adapters
from megatron_dppo.engine.errors import EngineMismatchError, EngineRequestError
from megatron_dppo.model.families import family_of, load_model_shape
from megatron_dppo.model.shape import ITEM_BYTES, ModelShape
from megatron_dppo.system.compute import has_visible_gpu
from megatron_dppo.system.network import url_host
from megatron_dppo.system.secret_variables import chosen_variables, without_secrets

if TYPE_CHECKING:
    from megatron_dppo.engine.client import EngineClient

CPU_KV_CACHE_BYTES = 1 << 30
"""Largest key-value cache on a CPU. SGLang's default takes most of the machine's memory."""
FIRST_WEIGHT_VERSION = 0
"""The weight version of an engine that has just loaded its checkpoint; weight updates count up from 1."""

ADAPTER_DIGESTS = "sha256"
"""Key in ``loaded_adapters`` of a server's response whose value is the digests of the adapters, as JSON."""
LORA_SLOTS = 2
"""Number of adapters in a server's batch: that of the committed version, and no adapter (health checks)."""

_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


HOSTS_VARIABLE = "MEGATRON_DPPO_SERVER_HOSTS"
"""Variable of every task of a server over several hosts; its value is the hosts' names and addresses, as JSON."""


@dataclass(frozen=True)
class ServerHosts:
    """The hosts of a server that runs over several hosts.

    ``addresses``: for each host, by the launcher's name for it, its address; clients connect to the first host.
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

    @property
    def where_generated(self) -> ServerSections | None:
        """The sections themselves, or None if the run replays saved batches and needs no server."""
        return None if self.rollout.replay_from is not None else self

    @property
    def sequence_tokens(self) -> int:
        """The largest total of prompt and response, or of an episode, in training and evaluation, in tokens."""
        evaluation_tokens = self.evaluation.max_response_tokens or 0
        response_tokens = max(self.rollout.max_response_tokens, evaluation_tokens)
        return self.environment.longest(self.data.max_prompt_tokens, response_tokens)


def engine_device(engine: schema.EngineConfig) -> Literal["cpu", "cuda"]:
    """Return ``engine.device`` or, if it is not set, cuda if this process sees a device of the NVIDIA driver."""
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
    if config.head.dtype == "float32":
        options["enable_fp32_lm_head"] = True
    if config.engine.deterministic:
        options["enable_deterministic_inference"] = True
        if device == "cpu":
            # Disable chunked prefill: where a prompt is cut depends on the other requests. Lower the memory fraction,
            # because SGLang reserves too much memory without chunks.
            options |= {"chunked_prefill_size": -1, "mem_fraction_static": 0.8}
    options |= adapter_options(config)
    options |= {name: value for name, value in config.sglang.items() if value is not None}
    if hosts is not None:
        options |= hosts.options
    if device == "cuda":
        options["base_gpu_id"] = first_device
    # SGLang rejects the option without GPUs. It still accepts calls to release memory, and releases nothing.
    if config.engine.placement == "colocated" and device == "cuda":
        options["enable_memory_saver"] = True
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


def cpu_kv_tokens(config: ServerSections) -> int:
    """Return the size of the key-value cache of a CPU server, in tokens.

    The cache holds every concurrent request at full length, limited to CPU_KV_CACHE_BYTES, and at least two sequences.
    """
    sequence_tokens = config.sequence_tokens
    requested_tokens = config.rollout.max_concurrent_requests * sequence_tokens
    model = load_model_shape(config.model.hf_checkpoint)
    values = 2 * model.num_layers * model.num_query_groups * model.head_dim
    token_bytes = values * ITEM_BYTES[config.model.dtype]
    return max(2 * sequence_tokens, min(requested_tokens, CPU_KV_CACHE_BYTES // token_bytes))


def write_options(options: Mapping[str, Any], path: Path) -> None:
    """Write SGLang's ``--config`` file: YAML (here JSON, a subset of it), with hyphens in the names of flags."""
    flags = {name.replace("_", "-"): value for name, value in options.items()}
    path.write_text(json.dumps(flags, indent=2) + "\n")


def server_environment(config: ServerSections, hosts: ServerHosts | None = None) -> dict[str, str]:
    """Return the environment of a server: this process's, without the variables of trainer ranks and without secrets.

    ``engine.passed_variables`` and SGLang's own variables are added.
    """
    plain_variables = without_secrets(os.environ)
    env = {name: value for name, value in plain_variables.items() if name not in _RANK_VARIABLES}
    env |= chosen_variables(os.environ, config.engine.passed_variables)
    env |= {
        "PYTHONUNBUFFERED": "1",
        # Otherwise /health generates a token, which takes a second, and returns 503 while generation is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # Keep idle connections longer than the client does, so that the server never closes one during a request.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "60",
        # Seconds until the server notices a client's disconnect and aborts its request (default: 4 s).
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
    }
    if engine_device(config.engine) == "cpu":
        ranks = config.sglang.get("tp_size", 1) * config.sglang.get("dp_size", 1)
        env["SGLANG_PLATFORM"] = "torch_cpu"
        # Two threads that wait for each other while the trainer uses a core are 20 times slower than one thread. Set
        # the variable for a large model on its own cores.
        env.setdefault("OMP_NUM_THREADS", "1")
        count = 1 if hosts is None else len(hosts.addresses)
        if ranks > 1:
            bindings = [bind_cores(ranks // count)] * count
            env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(bindings))
    if hosts is not None:
        env[HOSTS_VARIABLE] = json.dumps(dict(hosts.addresses))
    return env


def bind_cores(ranks: int) -> str:
    """Distribute this process's cores over ``ranks`` engine ranks, in SGLang's notation: ``0,1|2,3``."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    groups = [
        [cores[(rank * share + i) % len(cores)] for i in range(share)] for rank in range(ranks)
    ]
    return "|".join(",".join(map(str, group)) for group in groups)


# --- validation of an ``sglang:`` table by SGLang itself

_PLAIN_PARSERS = (None, str, int, float)
_PATIENCE_S = 300.0


@functools.cache
def server_args_fields() -> LibraryFields:
    """Return every field of SGLang's ServerArgs; fields without a command-line flag count as computed. Takes seconds.

    Raises LibraryMissingError if SGLang cannot be imported.
    """
    try:
        from sglang.srt.server_args import ServerArgs
    except ImportError as error:
        raise LibraryMissingError(f"sglang can't be imported: {error}", name="sglang") from error
    types: dict[str, Any] = get_type_hints(ServerArgs)
    parser = _parser()
    flags = {action.dest: action for action in parser._actions if action.dest in types}
    for name, flag in flags.items():
        # The flag also accepts text, such as "128k" for a number or JSON for a table.
        if flag.type not in _PLAIN_PARSERS:
            types[name] = types[name] | str
    version = importlib.metadata.version("sglang")
    return LibraryFields(f"ServerArgs (sglang {version})", types, frozenset(types) - flags.keys())


def table_faults(table: Mapping[str, Any]) -> list[str]:
    """Return one fault for each key of an ``sglang:`` table that SGLang does not declare, or whose value it rejects.

    A value is rejected if it does not have the field's type, or if SGLang's command line refuses it. Raises
    LibraryMissingError if SGLang cannot be imported.
    """
    faults = list(SGLANG.library_faults(table, server_args_fields()))
    undeclared = {fault.partition(":")[0] for fault in faults}
    for key, value in SGLANG.free(table).items():
        if value is not None and f"{SGLANG.name}.{key}" not in undeclared:
            faults += _refusals(key, value)
    return faults


def table_faults_elsewhere(table: Mapping[str, Any], python: str) -> list[str]:
    """Return ``table_faults`` as computed by the interpreter ``python``, which will run the servers.

    Raises LibraryMissingError if the interpreter fails or cannot import SGLang.
    """
    command = [python, "-W", "ignore", "-m", "megatron_dppo.engine.options"]
    try:
        process = subprocess.run(
            command, input=json.dumps(table), capture_output=True, text=True, check=True,
            timeout=_PATIENCE_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LibraryMissingError(f"{python}: {error}", name="sglang") from error
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip() or "no word").splitlines()[-1]
        raise LibraryMissingError(f"{python} says: {last_line}", name="sglang") from error
    return [str(fault) for fault in json.loads(process.stdout.splitlines()[-1])]


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError for a rejected value, where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def _refusals(key: str, value: Any) -> Iterator[str]:
    """Yield SGLang's refusal of one option, passed in the same way as from a server's options file."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = _parser()
    merger = ConfigArgumentMerger(parser)
    try:
        flags = merger._convert_config_to_args({key.replace("_", "-"): value})
        # The model's path is the only flag that the parser requires.
        parser.parse_args(["--model-path=any", *flags])
    # The parser raises it for a rejected value, and the merger for an action that it does not know.
    except ValueError as error:
        choices = (a.choices for a in parser._actions if a.dest == key and a.choices)
        close_choices = closest(str(value), map(str, next(choices, ())))
        hint = f"; did you mean {close_choices[0]}?" if close_choices else ""
        yield f"{SGLANG.name}.{key}: got {given(value)}, which SGLang refuses: {error}{hint}"


def main() -> None:
    print(json.dumps(table_faults(json.load(sys.stdin))))


# --- comparison of a running server with the run

log = logging.getLogger(__name__)

_SINGLE = ("pp_size", "dp_size", "ep_size", "moe_dp_size")

# The required fields of a response and their types; ``object`` accepts any value, including null.
_SERVER_INFO = {"version": str, "dtype": str, "quantization": object, "max_total_num_tokens": int}
_MODEL_INFO = {"model_type": str, "architectures": list}
_LAYOUT = {"dtype": str, "tp_size": int, "device": str}

SGLANG_VERSION = "0.5.23"
"""The release whose protocol this package uses; the package's requirements pin it."""


async def check_engine(config: ServerSections, client: EngineClient) -> None:
    """Compare the server's release, model, vocabulary, dtype, cache size and switches with the run's.

    The check is needed for a server that was started elsewhere (``engine.urls``), and harmless for the run's own
    servers. Raises EngineMismatchError with every difference, and the client's errors.
    """
    info, model_info = await client.get_json("/server_info"), await client.get_json("/model_info")
    switches = dict.fromkeys(required_switches(config), bool)
    _require(f"{client.url}/server_info", info, _SERVER_INFO | switches)
    _require(f"{client.url}/model_info", model_info, _MODEL_INFO)
    differences = compare_server(config, info, model_info)
    size = load_model_shape(config.model.hf_checkpoint).vocab_size
    # A failed weight update leaves a server paused; it would hold back the request that tests the vocabulary. A wrong
    # vocabulary then makes the next weight update of this server fail.
    if not differences and not await client.ready():
        log.info("the engine at %s is paused; its vocabulary is not compared", client.url)
    elif not differences and not await _serves_vocabulary(client, size):
        differences.append(f"vocabulary: the engine's is not {size} tokens")
    needs_recordings = config.rollout.router_replay or config.rollout.interrupt == "abort"
    if needs_recordings and not differences and not await client.offers_recordings():
        differences.append(
            "recorded routing: not offered beside the JSON, and tokens of aborted responses may be lost, expected a "
            "server that was started by megatron_dppo.engine.launch_server"
        )
    if differences:
        raise EngineMismatchError(
            f"the engine at {client.url} does not fit this run:\n  " + "\n  ".join(differences)
        )


def required_switches(config: ServerSections) -> list[str]:
    """Return the names of SGLang's switches that this run requires to be on."""
    switches = {
        "enable_return_routed_experts": config.rollout.router_replay,
        "enable_fp32_lm_head": config.head.dtype == "float32",
        "enable_deterministic_inference": config.engine.deterministic,
    }
    return [name for name, is_required in switches.items() if is_required]


def compare_server(
    config: ServerSections, info: dict[str, Any], model_info: dict[str, Any]
) -> list[str]:
    """Return one line for each value of ``/server_info`` and ``/model_info`` that differs from the run's."""
    family = family_of(load_model_shape(config.model.hf_checkpoint))
    actual_and_expected: dict[str, tuple[Any, Any]] = {
        "sglang version": (info["version"], SGLANG_VERSION),
        "model type": (model_info["model_type"], family.model_type),
        "architectures": (model_info["architectures"], [family.architecture]),
        "dtype (--dtype)": (info["dtype"], config.model.dtype),
        "quantization": (info["quantization"], None),
    }
    if updates_adapters(config.lora):
        actual_and_expected["--enable-lora"] = (info.get("enable_lora"), True)
        actual_and_expected["--max-lora-rank"] = (info.get("max_lora_rank"), config.lora.rank)
    for switch in required_switches(config):
        actual_and_expected[f"--{switch.replace('_', '-')}"] = (info[switch], True)
    differences = [
        f"{name}: {actual_value!r}, expected {expected_value!r}"
        for name, (actual_value, expected_value) in actual_and_expected.items()
        if actual_value != expected_value
    ]
    needed_tokens = config.sequence_tokens + SPARE_POSITIONS * info.get("page_size", 1)
    if info["max_total_num_tokens"] < needed_tokens:
        differences.append(
            f"--max-total-tokens: the cache holds {info['max_total_num_tokens']} tokens, "
            f"a full sequence of {config.sequence_tokens} needs {needed_tokens}"
        )
    # SGLang does not report its context length. It reports the longest prompt plus one, which follows from the context
    # length, or from the cache size if that is smaller.
    context = info.get("max_req_input_len", needed_tokens) + PROMPT_SPARE_POSITIONS - 1
    if (
        needed_tokens <= info["max_total_num_tokens"]
        and context < config.sequence_tokens + SPARE_POSITIONS
    ):
        differences.append(
            f"--context-length: it has {context} positions, a full sequence of {config.sequence_tokens} "
            f"needs {config.sequence_tokens + SPARE_POSITIONS}"
        )
    return differences


async def _serves_vocabulary(client: EngineClient, size: int) -> bool:
    """Return whether the server's vocabulary has ``size`` tokens.

    SGLang does not report the size of its vocabulary, but rejects a request to score a token outside it.
    """
    return await _scores(client, size - 1) and not await _scores(client, size)


async def _scores(client: EngineClient, token: int) -> bool:
    body = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [token],
    }
    try:
        await client.request("POST", "/generate", orjson.dumps(body))
    except EngineRequestError as error:
        if error.status != 400:
            raise
        return False
    return True


def check_layout(url: str, info: Mapping[str, Any], dtype: str, shape: ModelShape) -> None:
    """Raise EngineMismatchError if the layout or dtype in ``/server_info`` prevents the verification of weight updates.

    A response without a layout or dtype raises it as well. ``dtype``: of the trainer's weights.
    """
    _require(f"{url}/server_info", info, _LAYOUT)
    for dimension in _SINGLE:
        if info.get(dimension, 1) != 1:
            raise EngineMismatchError(
                f"{url}: {dimension} is {info[dimension]}; verified weight updates know tensor parallelism "
                f"only, expected 1"
            )
    if info.get("quantization") is not None:
        raise EngineMismatchError(f"{url}: quantization is {info['quantization']!r}, expected none")
    kernel = info.get("moe_runner_backend")
    if shape.is_moe and info["device"] != "cpu" and kernel != EXPERT_KERNEL:
        raise EngineMismatchError(
            f"{url}: moe_runner_backend is {kernel!r}, which may keep the experts' weights in a layout of its own; "
            f"expected {EXPERT_KERNEL!r} (--moe-runner-backend)"
        )
    engine_dtype = shape.dtype if info["dtype"] == "auto" else info["dtype"]
    if engine_dtype != dtype:
        raise EngineMismatchError(
            f"{url}: the engine's weights are {engine_dtype}, the trainer's {dtype}"
        )


def _require(where: str, answer: Mapping[str, Any], fields: Mapping[str, type]) -> None:
    """Raise EngineMismatchError if a response lacks fields of SGLang's response, so that another program sent it."""
    missing_fields = [
        name
        for name, kind in fields.items()
        if name not in answer or not isinstance(answer[name], kind)
    ]
    if missing_fields:
        raise EngineMismatchError(
            f"{where} does not say {', '.join(missing_fields)} as SGLang {SGLANG_VERSION} does; is it a "
            "server of SGLang?"
        )


if __name__ == "__main__":
    main()
