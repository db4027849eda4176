"""SGLang 0.5.23's ``/generate``: requests and their JSON bodies; answers, checked and converted to trajectories.

All functions are pure: no network.

Shapes: R = response tokens, K = Top-K log-probabilities.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import orjson

from megatron_dppo.data.columns import check_log_probs, check_recording, check_topk, is_unwritten
from megatron_dppo.data.trajectory import FinishReason, Trajectory
from megatron_dppo.engine.errors import AbortedError, EngineAnswerError, StaleWeightsError
from megatron_dppo.model.shape import ModelShape

UNVERIFIED_VERSION = "unverified-"
"""Prefix of an engine's weight version during a weight update, and after a failed update."""


@dataclass(frozen=True)
class SamplingParams:
    """The sampling settings of one response.

    Attributes:
        stop_token_ids: stop tokens in addition to the model's own.
        stop: texts that end a response. The token that completes a stop text is the response's last token; the
            response's ``text`` ends before the stop text.
        seed: seed of this response; only a server with deterministic inference uses the seed.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0 or math.isinf(self.temperature):
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")

    def as_json(self) -> dict[str, Any]:
        """Return SGLang's ``sampling_params``. Every number is set, so that no default of the server or of the model's
        folder applies."""
        values: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": list(self.stop_token_ids) or None,
            "stop": list(self.stop) or None,
        }
        if self.seed is not None:
            values["sampling_seed"] = self.seed
        return values


def seed_of(*values: int | str) -> int:
    """Return a seed below 2^63 that depends only on ``values``."""
    text = ", ".join(map(str, values))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class RoutedShape:
    """The shape of the engine's routing capture of a model.

    Attributes:
        hidden_layers: number of layers in the capture.
        moe_layers: indices of the layers with experts.
        top_k: number of experts chosen for a token.
        experts: number of experts in a layer.
        start: number of leading rows that the caller already has. The server does not send them; they are 0 in the
            column.
    """

    hidden_layers: int
    moe_layers: tuple[int, ...]
    top_k: int
    experts: int
    start: int = 0

    @classmethod
    def of_model(cls, model: ModelShape) -> RoutedShape:
        """Return the shape for a mixture of experts. Raises ValueError for a model without routers."""
        if not model.is_moe:
            raise ValueError(f"rollout.router_replay: {model.family} has no experts")
        return cls(model.num_layers, model.moe_layers, model.experts_per_token, model.num_experts)

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """The smallest type that holds an expert's number."""
        if self.experts <= 256:
            return np.uint8
        return np.uint16


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one response.

    Attributes:
        key: the caller's name of the request; a retry has the same name.
        columns: options of the additional columns to request, by their names in ``SOURCES``.
        problem_id: copied to the trajectory.
        sample_index: copied to the trajectory.
        continues: if True, a response that the server aborts becomes an ``aborted`` trajectory, and the caller
            continues this trajectory. If False, the abort raises AbortedError.
    """

    key: Hashable
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    columns: Mapping[str, Any] = field(default_factory=dict)
    problem_id: int = 0
    sample_index: int = 0
    continues: bool = False


Meta = Mapping[str, Any]
"""``meta_info`` of an answer."""


@dataclass(frozen=True)
class Answered:
    """The tokens of an answer: the number of the prompt's tokens, and the ids of the response's tokens, int32 [R]."""

    prompt_tokens: int
    response_ids: np.ndarray


@dataclass(frozen=True)
class ColumnSource:
    """Functions that request one or several columns from the engine, and read them.

    Attributes:
        body: returns the fields of the request's body for an option.
        parse: returns the arrays by column name, from ``meta_info``, the answer's tokens and the option. A column may
            be missing if its declaration in ``data.columns`` allows that. Raises ValueError if the arguments contradict
            each other, and AbortedError if the request should be repeated.
        always: whether every request includes the source. If no option is given, the option is None.
    """

    body: Callable[[Any], dict[str, Any]]
    parse: Callable[[Meta, Answered, Any], dict[str, np.ndarray]]
    always: bool = False


SOURCES: dict[str, ColumnSource] = {}
"""All sources by name: the name of the column, or a common name of several columns."""


def provide(name: str, source: ColumnSource) -> None:
    """Register ``source``. Raises ValueError if the name is taken."""
    if name in SOURCES:
        raise ValueError(f"column source {name!r} is there already")
    SOURCES[name] = source


def requested_sources(columns: Mapping[str, Any]) -> list[tuple[ColumnSource, Any]]:
    """Return the sources of a request, each with its option. Raises ValueError for an unknown name."""
    unknown_names = columns.keys() - SOURCES.keys()
    if unknown_names:
        raise ValueError(
            f"no column source {', '.join(sorted(unknown_names))}; known are {', '.join(sorted(SOURCES))}"
        )
    sources: list[tuple[ColumnSource, Any]] = []
    for name, source in SOURCES.items():
        if source.always or name in columns:
            sources.append((source, columns.get(name)))
    return sources


def decode_base64(text: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Decode base64 ``text`` to an array. Raises ValueError if the bytes do not fit ``dtype`` and ``shape`` exactly."""
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"broken base64: {error}") from error
    expected_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if len(raw) != expected_bytes:
        raise ValueError(
            f"{len(raw)} bytes of {dtype}, expected {expected_bytes} for shape {shape}"
        )
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def _log_probs_fields(_: None) -> dict[str, Any]:
    # A start of -1 asks for no log-probabilities of the prompt.
    return {"return_logprob": True, "logprob_start_len": -1}


def _log_probs(meta: Meta, answered: Answered, _: None) -> dict[str, np.ndarray]:
    """Read the log-probability of each output token, float32 [R]."""
    entries = meta["output_token_logprobs"]
    expected_ids = answered.response_ids
    if [entry[1] for entry in entries] != expected_ids.tolist():
        raise ValueError(
            f"got {len(entries)} log-probabilities, expected one for each of the {len(expected_ids)} output tokens, in "
            "their order"
        )
    # SGLang computes log_softmax(logits / temperature) before top-p and top-k cut the distribution. So only with
    # top_p = 1 and top_k = -1, as in training, these are the log-probabilities of the sampling. An entry None becomes
    # NaN, and the check rejects NaN.
    values = np.array([entry[0] for entry in entries], np.float64)
    check_log_probs(values, "output log-probabilities")
    return {"rollout_log_probs": values.astype(np.float32)}


def _weight_version_fields(_: None) -> dict[str, Any]:
    # SGLang reports weight versions in every answer.
    return {}


def _weight_version(meta: Meta, answered: Answered, _: None) -> dict[str, np.ndarray]:
    """Read the weight version of each output token, int32 [R], from spans of tokens with one version."""
    spans = meta["weight_versions"]
    length = len(answered.response_ids)
    versions = []
    lengths = []
    end = 0
    for span in spans:
        if str(span["version"]).startswith(UNVERIFIED_VERSION):
            raise AbortedError("the response was sampled while a weight update was being verified")
        if not str(span["version"]).isdecimal():
            raise ValueError(
                f"weight version {span['version']!r} is no integer: "
                "the engine holds no weights of this run yet"
            )
        if span["start"] != end or span["end"] <= end:
            raise ValueError(f"weight version spans {spans} are not contiguous")
        versions.append(int(span["version"]))
        lengths.append(span["end"] - end)
        end = span["end"]
    if end != length:
        raise ValueError(f"weight version spans end at {end}, expected the {length} output tokens")
    return {"weight_version": np.repeat(np.array(versions, np.int32), lengths)}


def topk_fields(k: int, option: str = "return_flat_raw_output_top_logprobs") -> dict[str, Any]:
    """Return the fields of a request for Top-K log-probabilities that ``read_topk`` reads.

    ``option``: SGLang's option for the tokens that need them; by default the output tokens.
    """
    return {"top_logprobs_num": k, option: True, "return_flat_raw_top_logprobs_b64": True}


def read_topk(
    meta: Meta, tokens: Literal["input", "output"], shape: tuple[int, int], nulls: int
) -> tuple[np.ndarray, np.ndarray]:
    """Read int32 ids and float32 log-probabilities of ``shape`` from little-endian base64.

    ``nulls``: number of first tokens without a row. Raises ValueError for other shapes.
    """
    found_shape = tuple(meta[f"{tokens}_top_logprobs_shape"])
    if found_shape != shape or meta[f"{tokens}_top_logprobs_null_prefix"] != nulls:
        raise ValueError(f"Top-K log-probabilities of shape {found_shape}, expected {shape}")
    ids = decode_base64(meta[f"{tokens}_top_logprobs_idx_flat_b64"], "<i4", shape)
    log_probs = decode_base64(meta[f"{tokens}_top_logprobs_val_flat_b64"], "<f4", shape)
    return ids, log_probs


def _topk(meta: Meta, answered: Answered, k: int) -> dict[str, np.ndarray]:
    """Read int32 ids and float32 log-probabilities ``[R, K]``."""
    ids, log_probs = read_topk(meta, "output", (len(answered.response_ids), k), nulls=0)
    if ids.min() < 0:
        raise ValueError("Top-K log-probabilities with a negative id")
    check_topk(ids, log_probs, "the answer")
    return {"topk_ids": ids, "topk_log_probs": log_probs}


def _routed_experts(meta: Meta, answered: Answered, shape: RoutedShape) -> dict[str, np.ndarray]:
    """Read the experts of each input token, [prompt + output - 1, MoE layers, top-k]."""
    # The server sends a notice of the recording. The module ``engine.server.recordings`` has replaced the notice by the
    # array, [prompt + output - 1, hidden layers, top-k]. The last token has no row, because it is never an input.
    if meta["finish_reason"]["type"] == "abort" and meta.get("routed_experts") is None:
        # The request was aborted in the queue. SGLang finds a request's rows by the slots of its keys and values, and a
        # queued request has no slots.
        return {}
    captured = meta["routed_experts"]
    if not isinstance(captured, np.ndarray):
        raise ValueError(f"routed_experts is no recording but {type(captured).__name__}")
    if len(shape.moe_layers) < shape.hidden_layers:
        captured = np.ascontiguousarray(captured[:, list(shape.moe_layers)])
    check_recording(captured, shape.experts)
    if is_unwritten(captured):
        # The server never wrote the recording, so the column is missing.
        return {}
    all_rows = np.zeros((shape.start + len(captured), *captured.shape[1:]), shape.dtype)
    all_rows[shape.start :] = captured
    return {"routed_experts": all_rows}


def _routed_experts_fields(shape: RoutedShape) -> dict[str, Any]:
    return {"return_routed_experts": True, "routed_experts_start_len": shape.start}


provide("rollout_log_probs", ColumnSource(_log_probs_fields, _log_probs, always=True))
provide("weight_version", ColumnSource(_weight_version_fields, _weight_version, always=True))
provide("topk", ColumnSource(topk_fields, _topk))
provide("routed_experts", ColumnSource(_routed_experts_fields, _routed_experts))


def adapter_name(version: int) -> str:
    """Return the name of a version's adapters in the engines, if updates send only adapters."""
    return f"policy-{version}"


def request_ids(rid: str, count: int) -> list[str]:
    """Return the ids that SGLang assigns to the ``count`` requests of a call with the id ``rid``."""
    if count == 1:
        return [rid]
    return [f"{rid}_{i}" for i in range(count)]


def request_body(
    requests: Sequence[GenerationRequest],
    rid: str,
    *,
    model: str | None = None,
    adapter: str | None = None,
) -> bytes:
    """Return the JSON body of one call for ``requests``. The requests must have equal sampling and columns.

    Args:
        requests: the requests of the call.
        rid: the call's id.
        model: the model's name at the router; SGLang's own server needs none.
        adapter: name of the engine's adapters to sample with; None: the model without adapters.
    """
    # A call has one id and one set of sampling parameters, because the router accepts no list of ids or of parameters.
    first_request = requests[0]
    if any(
        (r.sampling, r.columns) != (first_request.sampling, first_request.columns) for r in requests
    ):
        raise ValueError("requests of one call must ask for the same sampling and the same columns")
    # Send a single prompt without a list around it: SGLang's path for batches is slower.
    input_ids: Any = first_request.prompt_ids
    if len(requests) > 1:
        input_ids = [request.prompt_ids for request in requests]
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": input_ids,
        "sampling_params": first_request.sampling.as_json(),
    }
    if model is not None:
        body["model"] = model
    if adapter is not None:
        body["lora_path"] = adapter
    for source, option in requested_sources(first_request.columns):
        body |= source.body(option)
    return orjson.dumps(body)


def read_answers(
    payload: bytes, requests: Sequence[GenerationRequest], versions: range | None = None
) -> list[dict[str, Any]]:
    """Return the answers of one call, in the order of ``requests``.

    ``versions`` are the committed weight versions that may have sampled the tokens; None: any. Raises
    EngineAnswerError, and StaleWeightsError if other weights sampled a token.
    """
    try:
        answers = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        excerpt = payload[:200].decode(errors="replace")
        raise EngineAnswerError(f"/generate answered no JSON: {excerpt!r}") from error
    if isinstance(answers, dict) and len(requests) == 1:
        answers = [answers]
    if not isinstance(answers, list) or len(answers) != len(requests):
        count = len(answers) if isinstance(answers, list) else type(answers).__name__
        raise EngineAnswerError(f"/generate answered {count} for {len(requests)} requests")
    if not all(isinstance(answer, dict) for answer in answers):
        raise EngineAnswerError("/generate answered a list of something else than objects")
    for answer, request in zip(answers, requests, strict=True):
        if not isinstance(answer.get("meta_info", {}), dict):
            raise EngineAnswerError(f"request {request.key}: meta_info is no object")
        if versions is not None:
            _check_versions(answer.get("meta_info", {}), request, versions)
    return answers


def _check_versions(meta: dict[str, Any], request: GenerationRequest, versions: range) -> None:
    """Write the committed version into every span. Raises StaleWeightsError for a span of another version."""
    committed_name = {str(version): str(version) for version in versions}
    # An update to version N may interrupt a response. The response continues when the engines resume for the canary,
    # which is the last check before the commit of N. Until the commit the response's tokens have the version
    # ``unverified-N``. No call begins between resume and commit, so the first version of a call is never unverified.
    for version in versions[1:]:
        committed_name[f"{UNVERIFIED_VERSION}{version}"] = str(version)
    try:
        spans = meta.get("weight_versions", ())
        sampled_versions = {str(span["version"]) for span in spans}
        if sampled_versions <= committed_name.keys():
            for span in spans:
                span["version"] = committed_name[str(span["version"])]
            return
    except (KeyError, TypeError, IndexError) as error:
        raise EngineAnswerError(
            f"request {request.key}: weight_versions is not a list of objects with a version"
        ) from error
    first_version = versions[0]
    last_version = versions[-1]
    expected_versions = f"versions {first_version} to {last_version}"
    if first_version == last_version:
        expected_versions = f"version {first_version}"
    raise StaleWeightsError(
        f"request {request.key}: drawn from weights {', '.join(sorted(sampled_versions))}, "
        f"expected the committed {expected_versions}"
    )


def parse_answer(answer: dict[str, Any], request: GenerationRequest) -> Trajectory:
    """Check one answer against its request, and convert it to a trajectory with reward and advantage 0.

    Raises AbortedError if the server aborted the response, and EngineAnswerError if a field is missing or contradicts
    another field.
    """
    meta = answer.get("meta_info", {})
    try:
        reason = _finish_reason(meta["finish_reason"], request)
        # The ids include an end-of-sequence token, with its log-probability, because the decision to stop is trained
        # too. ``text`` does not include it.
        response_ids = np.array(answer["output_ids"], np.int32)
        _check_length(len(response_ids), reason, request)
        answered = Answered(len(request.prompt_ids), response_ids)
        columns: dict[str, np.ndarray] = {}
        # A response that was aborted before its first token has no columns.
        if len(response_ids):
            for source, option in requested_sources(request.columns):
                columns |= source.parse(meta, answered, option)
        return Trajectory.of_response(
            request.prompt_ids,
            response_ids,
            problem_id=request.problem_id,
            sample_index=request.sample_index,
            columns=columns,
            finish_reason=reason,
            text=answer["text"],
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=int(meta.get("cached_tokens", 0)),
            verify_steps=int(meta.get("spec_verify_ct", 0)),
        )
    except KeyError as error:
        raise EngineAnswerError(f"request {request.key}: the answer lacks {error}") from error
    except AbortedError as error:
        raise AbortedError(f"request {request.key}: {error}") from error
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError) as error:
        raise EngineAnswerError(f"request {request.key}: {error}") from error


def _finish_reason(reason: dict[str, Any], request: GenerationRequest) -> FinishReason:
    """Convert SGLang's finish reason to a FinishReason. Raises AbortedError for an abort that ends the request."""
    reason_of_type: dict[str, FinishReason] = {
        "stop": "stop",
        "length": "length",
        "abort": "aborted",
    }
    # An abort with a status code is an error of the server, not the result of a client's call.
    if reason["type"] == "abort" and (reason.get("status_code") or not request.continues):
        raise AbortedError(f"aborted by the engine: {reason.get('message')}")
    if reason["type"] not in reason_of_type:
        raise ValueError(f"finish reason {reason['type']!r}, expected stop or length")
    return reason_of_type[reason["type"]]


def _check_length(tokens: int, reason: FinishReason, request: GenerationRequest) -> None:
    """Raise ValueError if the response is longer than the request allows, or was cut off at another length."""
    # SGLang silently reduces max_new_tokens to the room in its context and cache. The response would look truncated.
    limit = request.sampling.max_new_tokens
    is_empty = tokens == 0 and reason != "aborted"
    if is_empty or tokens > limit:
        raise ValueError(f"{tokens} output tokens, expected 1 to {limit}")
    if reason == "length" and tokens < limit:
        raise ValueError(
            f"cut off after {tokens} tokens, max_new_tokens is {limit}: the engine's "
            "context length or key-value cache (sglang.max_total_tokens) is too small"
        )
