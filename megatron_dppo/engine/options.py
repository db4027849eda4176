"""What a run's SGLang servers must be: the options of those that it starts, SGLang's own word on an ``sglang:`` table,
and whether a server that runs already fits.

``python -m megatron_dppo.engine.options`` with the ``sglang:`` table as JSON on standard input prints SGLang's faults
as a JSON list: for whoever asks another interpreter, or will not import SGLang. Loads neither torch nor sglang by
itself.
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
"""Budget of the key-value cache on a CPU; SGLang's own takes most of the machine's memory."""
FIRST_WEIGHT_VERSION = 0
"""What an engine that has just loaded its checkpoint calls its weights; updates count up from 1."""

ADAPTER_DIGESTS = "sha256"
"""Name among the loaded adapters of a server's answer under which their digests stand, as JSON."""
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

    ``addresses``: by the name that the launcher knows a host by; the first answers clients. ``port``: of the first,
    where the server's ranks meet.
    """

    addresses: Mapping[str, str]
    port: int

    @property
    def options(self) -> dict[str, Any]:
        """SGLang's, which are alike on all hosts."""
        first = next(iter(self.addresses.values()))
        address = f"{url_host(first)}:{self.port}"
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
        """These; None where the run replays a recording."""
        return None if self.rollout.replay_from is not None else self

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the longest prompt and the longest response, or episode, together, in training or evaluation."""
        evaluated = self.evaluation.max_response_tokens or 0
        response = max(self.rollout.max_response_tokens, evaluated)
        return self.environment.longest(self.data.max_prompt_tokens, response)


def engine_device(engine: schema.EngineConfig) -> Literal["cpu", "cuda"]:
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

    ``host``, ``port``: where it listens. ``seed``: of its sampling. ``first_device``: the first of its GPUs on its
    host, or on each of its ``hosts``.
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
            # Where a prompt is cut depends on its neighbours; without cuts SGLang reserves too much.
            options |= {"chunked_prefill_size": -1, "mem_fraction_static": 0.8}
    options |= adapter_options(config)
    options |= {name: value for name, value in config.sglang.items() if value is not None}
    if hosts is not None:
        options |= hosts.options
    if device == "cuda":
        options["base_gpu_id"] = first_device
    # Without GPUs SGLang refuses it, takes the calls, and lets go of nothing.
    if config.engine.placement == "colocated" and device == "cuda":
        options["enable_memory_saver"] = True
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

    Enough for every request in flight at full length, within CPU_KV_CACHE_BYTES, and never below two sequences.
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
    """This process's environment, less what names a trainer rank and what holds keys, plus what SGLang reads."""
    plain = without_secrets(os.environ)
    env = {name: value for name, value in plain.items() if name not in _RANK_VARIABLES}
    env |= chosen_variables(os.environ, config.engine.passed_variables)
    env |= {
        "PYTHONUNBUFFERED": "1",
        # /health would otherwise generate a token: a second each time, and 503 while generation is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # Longer than the client keeps an idle connection, so that the server never closes one under a request.
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
        env[HOSTS_VARIABLE] = json.dumps(dict(hosts.addresses))
    return env


def bind_cores(ranks: int) -> str:
    """This process's cores dealt to ``ranks`` engine ranks, as SGLang writes it: ``0,1|2,3``."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    groups = [
        [cores[(rank * share + i) % len(cores)] for i in range(share)] for rank in range(ranks)
    ]
    return "|".join(",".join(map(str, group)) for group in groups)


# --- SGLang's own word on an ``sglang:`` table

_PLAIN_PARSERS = (None, str, int, float)
_PATIENCE_S = 300.0


@functools.cache
def server_args_fields() -> LibraryFields:
    """Every field, computed where SGLang's command line has no flag for it; takes seconds.

    Raises LibraryMissingError where SGLang can't be imported.
    """
    try:
        from sglang.srt.server_args import ServerArgs
    except ImportError as error:
        raise LibraryMissingError(f"sglang can't be imported: {error}", name="sglang") from error
    types: dict[str, Any] = get_type_hints(ServerArgs)
    parser = _parser()
    flags = {action.dest: action for action in parser._actions if action.dest in types}
    for name, flag in flags.items():
        # Such as "128k" for a number, JSON for a table.
        if flag.type not in _PLAIN_PARSERS:
            types[name] = types[name] | str
    version = importlib.metadata.version("sglang")
    return LibraryFields(f"ServerArgs (sglang {version})", types, frozenset(types) - flags.keys())


def table_faults(table: Mapping[str, Any]) -> list[str]:
    """A line for each key of an ``sglang:`` table that SGLang does not declare, or not with such a value, and
    for each value that its command line refuses.

    Raises LibraryMissingError where SGLang can't be imported.
    """
    faults = list(SGLANG.library_faults(table, server_args_fields()))
    undeclared = {fault.partition(":")[0] for fault in faults}
    for key, value in SGLANG.free(table).items():
        if value is not None and f"{SGLANG.name}.{key}" not in undeclared:
            faults += _refusals(key, value)
    return faults


def table_faults_elsewhere(table: Mapping[str, Any], python: str) -> list[str]:
    """``table_faults`` as the interpreter ``python`` finds them, whose SGLang will serve.

    Raises LibraryMissingError where it can't say.
    """
    command = [python, "-W", "ignore", "-m", "megatron_dppo.engine.options"]
    try:
        done = subprocess.run(
            command, input=json.dumps(table), capture_output=True, text=True, check=True,
            timeout=_PATIENCE_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LibraryMissingError(f"{python}: {error}", name="sglang") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no word").splitlines()[-1]
        raise LibraryMissingError(f"{python} says: {last}", name="sglang") from error
    return [str(fault) for fault in json.loads(done.stdout.splitlines()[-1])]


class _Parser(argparse.ArgumentParser):
    """argparse ends the process over a value that it refuses."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def _refusals(key: str, value: Any) -> Iterator[str]:
    """What the parser says of one option, given as the file of a server's options gives it."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = _parser()
    merger = ConfigArgumentMerger(parser)
    try:
        flags = merger._convert_config_to_args({key.replace("_", "-"): value})
        # The model's path is the one flag that it demands.
        parser.parse_args(["--model-path=any", *flags])
    # The parser's refusal, and the merger's own for an action that it does not know.
    except ValueError as error:
        choices = (a.choices for a in parser._actions if a.dest == key and a.choices)
        near = closest(str(value), map(str, next(choices, ())))
        hint = f"; did you mean {near[0]}?" if near else ""
        yield f"{SGLANG.name}.{key}: got {given(value)}, which SGLang refuses: {error}{hint}"


def main() -> None:
    print(json.dumps(table_faults(json.load(sys.stdin))))


# --- whether a server that runs already fits

log = logging.getLogger(__name__)

_SINGLE = ("pp_size", "dp_size", "ep_size", "moe_dp_size")

# What must be in an answer, by its type; ``object``: anything, null included.
_SERVER_INFO = {"version": str, "dtype": str, "quantization": object, "max_total_num_tokens": int}
_MODEL_INFO = {"model_type": str, "architectures": list}
_LAYOUT = {"dtype": str, "tp_size": int, "device": str}

SGLANG_VERSION = "0.5.23"
"""The release whose protocol this package speaks; requirements pin it."""


async def check_engine(config: ServerSections, client: EngineClient) -> None:
    """Compare the server's release, model, vocabulary, type, room and switches with the run's.

    Needed for a server that was started elsewhere (``engine.urls``), harmless for our own. Raises
    EngineMismatchError with every difference, and the client's errors.
    """
    info, model_info = await client.get_json("/server_info"), await client.get_json("/model_info")
    switches = dict.fromkeys(required_switches(config), bool)
    _require(f"{client.url}/server_info", info, _SERVER_INFO | switches)
    _require(f"{client.url}/model_info", model_info, _MODEL_INFO)
    differences = compare_server(config, info, model_info)
    size = load_model_shape(config.model.hf_checkpoint).vocab_size
    # A paused one, which a failed weight update leaves, would hold the request that tells the vocabulary. A wrong
    # vocabulary makes the next weight update fail there.
    if not differences and not await client.ready():
        log.info("the engine at %s is paused; its vocabulary is not compared", client.url)
    elif not differences and not await _serves_vocabulary(client, size):
        differences.append(f"vocabulary: the engine's is not {size} tokens")
    changed = config.rollout.router_replay or config.rollout.interrupt == "abort"
    if changed and not differences and not await client.offers_recordings():
        differences.append(
            "recorded routing: not offered beside the JSON, and tokens of aborted responses may be lost, expected a "
            "server that was started by megatron_dppo.engine.launch_server"
        )
    if differences:
        raise EngineMismatchError(
            f"the engine at {client.url} does not fit this run:\n  " + "\n  ".join(differences)
        )


def required_switches(config: ServerSections) -> list[str]:
    """SGLang's switches that this run needs to be on."""
    wanted = {
        "enable_return_routed_experts": config.rollout.router_replay,
        "enable_fp32_lm_head": config.head.dtype == "float32",
        "enable_deterministic_inference": config.engine.deterministic,
    }
    return [field for field, is_wanted in wanted.items() if is_wanted]


def compare_server(
    config: ServerSections, info: dict[str, Any], model_info: dict[str, Any]
) -> list[str]:
    """One line for each thing that ``/server_info`` and ``/model_info`` say and the run does not expect."""
    family = family_of(load_model_shape(config.model.hf_checkpoint))
    wanted: dict[str, tuple[Any, Any]] = {
        "sglang version": (info["version"], SGLANG_VERSION),
        "model type": (model_info["model_type"], family.model_type),
        "architectures": (model_info["architectures"], [family.architecture]),
        "dtype (--dtype)": (info["dtype"], config.model.dtype),
        "quantization": (info["quantization"], None),
    }
    if updates_adapters(config.lora):
        wanted["--enable-lora"] = (info.get("enable_lora"), True)
        wanted["--max-lora-rank"] = (info.get("max_lora_rank"), config.lora.rank)
    for switch in required_switches(config):
        wanted[f"--{switch.replace('_', '-')}"] = (info[switch], True)
    differences = [
        f"{name}: {actual!r}, expected {expected!r}"
        for name, (actual, expected) in wanted.items()
        if actual != expected
    ]
    room = config.sequence_tokens + SPARE_POSITIONS * info.get("page_size", 1)
    if info["max_total_num_tokens"] < room:
        differences.append(
            f"--max-total-tokens: the cache holds {info['max_total_num_tokens']} tokens, "
            f"a full sequence of {config.sequence_tokens} needs {room}"
        )
    # The longest prompt plus one is what SGLang tells of its context, or of its cache where that is smaller.
    context = info.get("max_req_input_len", room) + PROMPT_SPARE_POSITIONS - 1
    if room <= info["max_total_num_tokens"] and context < config.sequence_tokens + SPARE_POSITIONS:
        differences.append(
            f"--context-length: it has {context} positions, a full sequence of {config.sequence_tokens} "
            f"needs {config.sequence_tokens + SPARE_POSITIONS}"
        )
    return differences


async def _serves_vocabulary(client: EngineClient, size: int) -> bool:
    """SGLang publishes no vocabulary size, but refuses to score a token outside it."""
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
    """Raise EngineMismatchError where ``/server_info`` names a layout, or a type of weights, whose weight updates can't
    be verified, or does not say which."""
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
    served = shape.dtype if info["dtype"] == "auto" else info["dtype"]
    if served != dtype:
        raise EngineMismatchError(
            f"{url}: the engine's weights are {served}, the trainer's {dtype}"
        )


def _require(where: str, answer: Mapping[str, Any], fields: Mapping[str, type]) -> None:
    """Raise EngineMismatchError where an answer lacks what SGLang's holds: another program's."""
    missing = [
        name
        for name, kind in fields.items()
        if name not in answer or not isinstance(answer[name], kind)
    ]
    if missing:
        raise EngineMismatchError(
            f"{where} does not say {', '.join(missing)} as SGLang {SGLANG_VERSION} does; is it a "
            "server of SGLang?"
        )


if __name__ == "__main__":
    main()
