"""Refuse a server that does not serve what the run trains, before anything is generated on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson

from megatron_dppo.config.forwarded import EXPERT_KERNEL
from megatron_dppo.config.lora import updates_adapters
from megatron_dppo.config.values import PROMPT_SPARE_POSITIONS, SPARE_POSITIONS
from megatron_dppo.engine.client import EngineClient
from megatron_dppo.engine.errors import EngineMismatchError, EngineRequestError
from megatron_dppo.engine.options import ServerSections
from megatron_dppo.model.families import family_of, load_model_shape
from megatron_dppo.model.shape import ModelShape

log = logging.getLogger(__name__)

_SINGLE = ("pp_size", "dp_size", "ep_size", "moe_dp_size")

_SERVER_INFO = {"version": str, "dtype": str, "quantization": object, "max_total_num_tokens": int}
_MODEL_INFO = {"model_type": str, "architectures": list}
_LAYOUT = {"dtype": str, "tp_size": int, "device": str}
"""What must be in an answer, by its type; ``object``: anything, null included."""

SGLANG_VERSION = "0.5.23"
"""The release whose protocol this package speaks; requirements pin it."""


async def check_engine(config: ServerSections, client: EngineClient) -> None:
    """Compare the server's release, model, vocabulary, type, room and switches with the run's.

    Needed for a server that was started elsewhere (``engine.urls``), harmless for our own. A paused one,
    which a failed weight update leaves, would hold the request that tells the vocabulary: there
    that comparison is left to the weight update, which a wrong vocabulary makes fail. Raises
    EngineMismatchError with every difference, and the client's errors.
    """
    info, model_info = await client.get_json("/server_info"), await client.get_json("/model_info")
    switches = dict.fromkeys(required_switches(config), bool)
    _require(f"{client.url}/server_info", info, _SERVER_INFO | switches)
    _require(f"{client.url}/model_info", model_info, _MODEL_INFO)
    differences = compare_server(config, info, model_info)
    size = load_model_shape(config.model.hf_checkpoint).vocab_size
    if not differences and not await client.ready():
        log.info("the engine at %s is paused; its vocabulary is not compared", client.url)
    elif not differences and not await _serves_vocabulary(client, size):
        differences.append(f"vocabulary: the engine's is not {size} tokens")
    if differences:
        raise EngineMismatchError(
            f"the engine at {client.url} does not fit this run:\n  " + "\n  ".join(differences)
        )


def required_switches(config: ServerSections) -> list[str]:
    """SGLang's switches that this run needs to be on."""
    wanted = {
        "enable_return_routed_experts": config.rollout.router_replay,
        "enable_deterministic_inference": config.engine.deterministic,
    }
    return [field for field, is_wanted in wanted.items() if is_wanted]


def compare_server(
    config: ServerSections, info: dict[str, Any], model_info: dict[str, Any]
) -> list[str]:
    """One line for each thing that ``/server_info`` and ``/model_info`` say and the run does not
    expect.
    """
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
    for field in required_switches(config):
        wanted[f"--{field.replace('_', '-')}"] = (info[field], True)
    differences = [
        f"{what}: {found!r}, expected {expected!r}"
        for what, (found, expected) in wanted.items()
        if found != expected
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
    """Raise EngineMismatchError where ``/server_info`` names a layout, or a type of weights, whose
    weight updates can't be verified, or does not say which.
    """
    _require(f"{url}/server_info", info, _LAYOUT)
    for field in _SINGLE:
        if info.get(field, 1) != 1:
            raise EngineMismatchError(
                f"{url}: {field} is {info[field]}; verified weight updates know tensor parallelism "
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
