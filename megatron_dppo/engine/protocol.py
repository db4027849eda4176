"""SGLang 0.5.23's ``/generate``, both ways: the body of a request, and its answer parsed and
checked.

Pure functions: no network. What the fields mean, as measured on the real server:

* ``output_token_logprobs`` are log_softmax(logits / temperature) *before* top-p and top-k cut the
  distribution, so training samples with top_p = 1 and top_k = -1.
* A response that ends by an end-of-sequence token includes that token in ``output_ids``, with its
  log-probability: the decision to stop is trained like any other. ``text`` leaves it out.
* ``weight_versions`` are spans over the output tokens.
* ``routed_experts`` is int32 ``[prompt + output - 1, hidden layers, top-k]`` (the last token is
  never fed back). With one expert a token, zeros alone count as no recording.

Shapes: R = response tokens, K = Top-K log-probabilities, L = mixture-of-experts layers, E = experts
a token.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from megatron_dppo.data.log_prob_checks import LOG_PROB_ROUNDING
from megatron_dppo.data.routing import check_recording, is_unwritten
from megatron_dppo.engine.errors import AbortedError, EngineAnswerError, StaleWeightsError
from megatron_dppo.engine.requests import GenerationRequest, GenerationResult, RoutedShape
from megatron_dppo.types import UNVERIFIED_VERSION, FinishReason, VersionSpan


def request_ids(rid: str, count: int) -> list[str]:
    """The ids that SGLang gives to the ``count`` requests of a call with the id ``rid``."""
    return [rid] if count == 1 else [f"{rid}_{i}" for i in range(count)]


def request_body(
    requests: Sequence[GenerationRequest], rid: str, *, model: str | None = None
) -> bytes:
    """The JSON body that asks for ``requests`` in one call. They must agree on the sampling, Top-K
    and the capture of routing.

    One id and one sampling for the call: the router takes no lists of them. ``model``: its name
    there; SGLang's own server needs none.
    """
    first = requests[0]
    if any(
        (r.sampling, r.topk_log_probs, r.routed_experts)
        != (first.sampling, first.topk_log_probs, first.routed_experts)
        for r in requests
    ):
        raise ValueError(
            "requests of one call must ask for the same sampling, Top-K and routed experts"
        )
    body: dict[str, Any] = {
        "rid": rid,
        # A call for one response is no list of one: that would take SGLang's slower path for batches.
        "input_ids": [r.prompt_ids for r in requests] if len(requests) > 1 else first.prompt_ids,
        "sampling_params": first.sampling.as_json(),
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    if model is not None:
        body["model"] = model
    if first.topk_log_probs:
        body |= {
            "top_logprobs_num": first.topk_log_probs,
            "return_flat_raw_output_top_logprobs": True,
            "return_flat_raw_top_logprobs_b64": True,
        }
    if first.routed_experts is not None:
        body["return_routed_experts"] = True
    return orjson.dumps(body)


def parse_answers(
    payload: bytes, requests: Sequence[GenerationRequest], version: int | None = None
) -> list[GenerationResult]:
    """Results of one call, in the order of ``requests``.

    ``version``: the weight version that every token must come from. Raises AbortedError,
    EngineAnswerError, and StaleWeightsError where a token comes from other weights.
    """
    answers = orjson.loads(payload)
    if isinstance(answers, dict) and len(requests) == 1:
        answers = [answers]
    if not isinstance(answers, list) or len(answers) != len(requests):
        count = len(answers) if isinstance(answers, list) else type(answers).__name__
        raise EngineAnswerError(f"/generate answered {count} for {len(requests)} requests")
    if version is not None:
        for answer, request in zip(answers, requests, strict=True):
            _check_version(answer.get("meta_info", {}), request, version)
    return [
        parse_answer(answer, request) for answer, request in zip(answers, requests, strict=True)
    ]


def _check_version(meta: dict[str, Any], request: GenerationRequest, version: int) -> None:
    found = {str(span["version"]) for span in meta.get("weight_versions", ())}
    if found - {str(version)}:
        raise StaleWeightsError(
            f"request {request.key}: drawn from weights {', '.join(sorted(found))}, "
            f"expected the committed version {version}"
        )


def parse_answer(answer: dict[str, Any], request: GenerationRequest) -> GenerationResult:
    """One answer, checked against its request.

    Raises AbortedError where the server ended it early, and EngineAnswerError where a field is
    missing or contradicts.
    """
    meta = answer.get("meta_info", {})
    try:
        reason = _finish_reason(meta["finish_reason"])
        output_ids = [int(token) for token in answer["output_ids"]]
        _check_length(output_ids, reason, request)
        topk_ids, topk_log_probs = _topk(meta, len(output_ids), request.topk_log_probs)
        return GenerationResult(
            key=request.key,
            output_ids=output_ids,
            log_probs=_log_probs(meta["output_token_logprobs"], output_ids),
            finish_reason=reason,
            text=answer["text"],
            weight_versions=_weight_versions(meta["weight_versions"], len(output_ids)),
            topk_ids=topk_ids,
            topk_log_probs=topk_log_probs,
            routed_experts=_routed_experts(
                meta, len(request.prompt_ids) + len(output_ids) - 1, request.routed_experts
            ),
            cached_tokens=int(meta.get("cached_tokens", 0)),
        )
    except KeyError as error:
        raise EngineAnswerError(f"request {request.key}: the answer lacks {error}") from error
    except AbortedError as error:
        raise AbortedError(f"request {request.key}: {error}") from error
    except ValueError as error:
        raise EngineAnswerError(f"request {request.key}: {error}") from error


def _finish_reason(reason: dict[str, Any]) -> FinishReason:
    kinds: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
    if reason["type"] == "abort":
        raise AbortedError(f"aborted by the engine: {reason.get('message')}")
    if reason["type"] not in kinds:
        raise ValueError(f"finish reason {reason['type']!r}, expected stop or length")
    return kinds[reason["type"]]


def _check_length(output_ids: list[int], reason: FinishReason, request: GenerationRequest) -> None:
    """SGLang shortens max_new_tokens silently to what its context and cache hold; that would pass
    as a truncation.
    """
    limit = request.sampling.max_new_tokens
    if not 0 < len(output_ids) <= limit:
        raise ValueError(f"{len(output_ids)} output tokens, expected 1 to {limit}")
    if reason == "length" and len(output_ids) < limit:
        raise ValueError(
            f"cut off after {len(output_ids)} tokens, max_new_tokens is {limit}: the engine's "
            "context length or key-value cache (sglang.max_total_tokens) is too small"
        )


def _log_probs(entries: list[list[Any]], output_ids: list[int]) -> list[float]:
    if [entry[1] for entry in entries] != output_ids:
        raise ValueError(
            f"{len(entries)} log-probabilities, not those of the {len(output_ids)} output tokens"
        )
    log_probs = [entry[0] for entry in entries]
    for position, value in enumerate(log_probs):
        if not isinstance(value, float | int) or not -math.inf < value <= LOG_PROB_ROUNDING:
            raise ValueError(
                f"log-probability {value} at output token {position}, expected a finite number <= 0"
            )
    return log_probs


def _weight_versions(spans: list[dict[str, Any]], length: int) -> tuple[VersionSpan, ...]:
    parsed, expected_start = [], 0
    for span in spans:
        if str(span["version"]).startswith(UNVERIFIED_VERSION):
            raise AbortedError("it ran while a weight update was being verified")
        if not str(span["version"]).isdecimal():
            raise ValueError(
                f"weight version {span['version']!r} is no integer: "
                "the engine holds no weights of this run yet"
            )
        parsed.append(VersionSpan(int(span["version"]), span["start"], span["end"]))
        if span["start"] != expected_start or span["end"] <= span["start"]:
            raise ValueError(f"weight version spans {spans} are not contiguous")
        expected_start = span["end"]
    if expected_start != length:
        raise ValueError(
            f"weight version spans end at {expected_start}, expected the {length} output tokens"
        )
    return tuple(parsed)


def _topk(meta: dict[str, Any], length: int, k: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """int32 ids and float32 log-probabilities ``[R, K]``, from little-endian base64."""
    if k == 0:
        return None, None
    shape = tuple(meta["output_top_logprobs_shape"])
    if shape != (length, k) or meta["output_top_logprobs_null_prefix"] != 0:
        raise ValueError(f"Top-K log-probabilities of shape {shape}, expected {(length, k)}")
    ids = _decode(meta["output_top_logprobs_idx_flat_b64"], "<i4", shape)
    log_probs = _decode(meta["output_top_logprobs_val_flat_b64"], "<f4", shape)
    if not np.isfinite(log_probs).all() or log_probs.max() > LOG_PROB_ROUNDING or ids.min() < 0:
        raise ValueError(
            "Top-K log-probabilities with a value not finite or above 0, or a negative id"
        )
    return ids, log_probs


def _routed_experts(
    meta: dict[str, Any], tokens: int, shape: RoutedShape | None
) -> np.ndarray | None:
    if shape is None:
        return None
    captured = _decode(meta["routed_experts"], "<i4", (tokens, shape.hidden_layers, shape.top_k))
    routed = np.ascontiguousarray(captured[:, list(shape.moe_layers)])
    check_recording(routed, shape.experts)
    return None if is_unwritten(routed) else routed.astype(shape.dtype)


def _decode(text: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"broken base64: {error}") from error
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if len(raw) != expected:
        raise ValueError(f"{len(raw)} bytes of {dtype}, expected {expected} for shape {shape}")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)
