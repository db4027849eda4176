"""Comparison of a running server with the run: its release, model, dtype, layout and switches."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from megatron_dppo.config import speculation
from megatron_dppo.config.checks import PROMPT_SPARE_POSITIONS, SPARE_POSITIONS
from megatron_dppo.config.forwarded import EXPERT_KERNEL, SGLANG, OptionFact
from megatron_dppo.engine.errors import EngineMismatchError, EngineRequestError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.spec import ModelSpec, ServersSpec

if TYPE_CHECKING:
    from megatron_dppo.engine.client import EngineClient

log = logging.getLogger(__name__)


_UNSUPPORTED_DIMENSIONS = ("pp_size", "dp_size", "moe_dp_size")
"""Dimensions of SGLang's layout that must be 1."""


NO_EXCHANGE = "none"
"""SGLang's ``moe_a2a_backend`` without an exchange of tokens: each rank computes its experts for all tokens."""


# The required fields of a response and their types; ``object`` accepts any value, including null.
_SERVER_INFO = {"version": str, "dtype": str, "quantization": object, "max_total_num_tokens": int}


_MODEL_INFO = {"model_type": str, "architectures": list}


_LAYOUT = {"dtype": str, "tp_size": int, "device": str}


SGLANG_VERSION = "0.5.23"
"""The release whose protocol this package uses; the package's requirements pin it."""


async def check_engine(
    model: ModelSpec, servers: ServersSpec, client: EngineClient, folder_key: str | None = None
) -> None:
    """Compare the server's release, model, vocabulary, dtype, cache size and switches with the run's configuration.

    The check is needed for a server that was started elsewhere (``engine.urls``), and harmless for the run's own
    servers. ``folder_key``: key of the folder that the server must have loaded, or one of its name; None if weight
    updates replace the weights. Raises EngineMismatchError with every difference, and the client's errors.
    """
    info = await client.get_json("/server_info")
    model_info = await client.get_json("/model_info")
    switches = dict.fromkeys(servers.switches, bool)
    _require(f"{client.url}/server_info", info, _SERVER_INFO | switches)
    _require(f"{client.url}/model_info", model_info, _MODEL_INFO)
    differences = compare_server(model, servers, info, model_info)
    if folder_key is not None:
        folder = Path(str(model_info.get("model_path")))
        expected_folder = Path(servers.options["model_path"])
        if folder.name != expected_folder.name:
            differences.append(
                f"it serves {folder}, expected {expected_folder} ({folder_key}) or a folder of this name"
            )
    size = model.shape.vocab_size
    # A failed weight update leaves a server paused. A paused server would hold back the request that tests the
    # vocabulary, so its vocabulary is not tested. If it is wrong, the next weight update of this server will fail.
    if not differences and not await client.ready():
        log.info("the engine at %s is paused; its vocabulary is not compared", client.url)
    elif not differences and not await _serves_vocabulary(client, size):
        differences.append(f"vocabulary: the engine has another size, expected {size} tokens")
    if servers.needs_hooks and not differences and not await client.offers_recordings():
        differences.append(
            "recorded routing: not offered beside the JSON answer, tokens of aborted responses may be lost, and drafts "
            "of n-grams may repeat a token, expected a server that was started by megatron_dppo.engine.launch_server"
        )
    if differences:
        raise EngineMismatchError(
            f"the engine at {client.url} does not fit this run:\n  " + "\n  ".join(differences)
        )


def compare_server(
    model: ModelSpec, servers: ServersSpec, info: dict[str, Any], model_info: dict[str, Any]
) -> list[str]:
    """Return one line for each value of ``/server_info`` and ``/model_info`` that differs from the run's value."""
    family = model.family
    actual_and_expected: dict[str, tuple[Any, Any]] = {
        "sglang version": (info["version"], SGLANG_VERSION),
        "model type": (model_info["model_type"], family.model_type),
        "architectures": (model_info["architectures"], [family.architecture]),
        "dtype (--dtype)": (info["dtype"], model.dtype),
        "quantization": (info["quantization"], model.quantization),
        "--speculative-algorithm": (
            speculation.algorithm_of(info),
            speculation.algorithm_of(servers.options),
        ),
    }
    if model.sends_adapters:
        assert model.adapters is not None
        actual_and_expected["--enable-lora"] = (info.get("enable_lora"), True)
        actual_and_expected["--max-lora-rank"] = (info.get("max_lora_rank"), model.adapters.rank)
    for switch in servers.switches:
        actual_and_expected[f"--{switch.replace('_', '-')}"] = (info[switch], True)
    if family.outer_engine_keys.get("language_model_only"):
        # SGLang's option --language-model-only refuses these models.
        name = "vision tower (language_model_only in --json-model-override-args)"
        actual_and_expected[name] = (model_info.get("has_image_understanding"), False)
    differences: list[str] = []
    for name, (actual_value, expected_value) in actual_and_expected.items():
        if actual_value != expected_value:
            differences.append(f"{name}: {actual_value!r}, expected {expected_value!r}")
    for name in SGLANG.options_with(OptionFact.SPECULATION):
        if not SGLANG.leaves_off(name, info.get(name)):
            differences.append(f"{name}: {info[name]!r}, expected it off: {SGLANG.off[name]}")
    needed_tokens = servers.sequence_tokens + SPARE_POSITIONS * info.get("page_size", 1)
    if info["max_total_num_tokens"] < needed_tokens:
        differences.append(
            f"--max-total-tokens: the cache holds {info['max_total_num_tokens']} tokens, "
            f"a full sequence of {servers.sequence_tokens} needs {needed_tokens}"
        )
    # SGLang does not report its context length. It reports the length of the longest prompt plus one. This value
    # follows from the context length, or from the cache size if the cache is smaller. So the value says nothing about
    # the context length of a server whose cache is too small.
    longest_prompt = info.get("max_req_input_len", needed_tokens) - 1
    context_positions = longest_prompt + PROMPT_SPARE_POSITIONS
    needed_positions = servers.sequence_tokens + SPARE_POSITIONS
    has_enough_cache = needed_tokens <= info["max_total_num_tokens"]
    if has_enough_cache and context_positions < needed_positions:
        differences.append(
            f"--context-length: it has {context_positions} positions, a full sequence of {servers.sequence_tokens} "
            f"needs {needed_positions}"
        )
    return differences


async def _serves_vocabulary(client: EngineClient, size: int) -> bool:
    """Return whether the server's vocabulary has ``size`` tokens.

    SGLang does not report the size of its vocabulary, but rejects a request to score a token outside it.
    """
    return await _scores(client, size - 1) and not await _scores(client, size)


async def _scores(client: EngineClient, token: int) -> bool:
    """Return whether the server accepts a request to score ``token``."""
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


def check_layout(
    url: str,
    info: Mapping[str, Any],
    dtype: str,
    shape: ModelShape,
    quantization: str | None = None,
) -> None:
    """Raise EngineMismatchError if the layout or dtype in ``/server_info`` prevents the verification of weight updates,
    or is missing.

    Args:
        url: address of the server.
        info: the answer of ``/server_info``.
        dtype: dtype of the trainer's weights.
        shape: shape of the model.
        quantization: quantization of the weights that updates send, "fp8" or None.
    """
    _require(f"{url}/server_info", info, _LAYOUT)
    for dimension in _UNSUPPORTED_DIMENSIONS:
        if info.get(dimension, 1) != 1:
            raise EngineMismatchError(
                f"{url}: {dimension} is {info[dimension]}; verified weight updates know tensor and expert "
                f"parallelism and attention replicas only, expected 1"
            )
    for name in SGLANG.options_with(OptionFact.SHARES):
        if not SGLANG.leaves_off(name, info.get(name)):
            raise EngineMismatchError(
                f"{url}: {name} is {info[name]!r}, which divides weights in a way that verified weight updates do not "
                "know; expected it off"
            )
    backend = info.get("moe_a2a_backend", NO_EXCHANGE)
    if backend != NO_EXCHANGE:
        raise EngineMismatchError(
            f"{url}: moe_a2a_backend is {backend!r}, which brings kernels with a layout of their own for the experts' "
            f"weights; expected {NO_EXCHANGE!r}"
        )
    if info.get("quantization") != quantization:
        raise EngineMismatchError(
            f"{url}: quantization is {info.get('quantization')!r}, expected {quantization!r} (engine.quantization)"
        )
    kernel = info.get("moe_runner_backend")
    if shape.is_moe and info["device"] != "cpu" and kernel != EXPERT_KERNEL:
        raise EngineMismatchError(
            f"{url}: moe_runner_backend is {kernel!r}, which may keep the experts' weights in a layout of its own; "
            f"expected {EXPERT_KERNEL!r} (--moe-runner-backend)"
        )
    attention = info.get("attention_backend")
    if shape.has_sinks and attention in _FLOAT32_SINKS:
        raise EngineMismatchError(
            f"{url}: attention_backend is {attention!r}, with which SGLang keeps attention sinks in float32; expected "
            "another, such as 'triton' (--attention-backend)"
        )
    # With "auto", SGLang keeps a float32 model in float16.
    if info["dtype"] != dtype:
        raise EngineMismatchError(
            f"{url}: the engine's weights are {info['dtype']}, the trainer's {dtype}"
        )


_FLOAT32_SINKS = ("trtllm_mha",)
"""With these attention backends SGLang keeps sinks in float32 instead of the model's type."""


def check_placement(url: str, shape: ModelShape, *, places_directly: bool) -> None:
    """Raise EngineMismatchError if SGLang's loader would leave tensors of an update of ``shape`` unread."""
    if family_of(shape).needs_direct_placement and not places_directly:
        raise EngineMismatchError(
            f"{url}: SGLang's own loader leaves updates of single experts of the family {shape.family} unread, "
            "expected a server that was started by megatron_dppo.engine.launch_server and loads updates directly (its "
            "log says why it does not)"
        )


def _require(url: str, answer: Mapping[str, Any], fields: Mapping[str, type]) -> None:
    """Raise EngineMismatchError if a response lacks fields of SGLang's responses: then another program sent it."""
    missing_fields: list[str] = []
    for name, expected_type in fields.items():
        if name not in answer or not isinstance(answer[name], expected_type):
            missing_fields.append(name)
    if missing_fields:
        raise EngineMismatchError(
            f"{url} does not say {', '.join(missing_fields)} as SGLang {SGLANG_VERSION} does; is it a "
            "server of SGLang?"
        )
