"""SGLang 0.5.23's ``/generate``, both ways: the body of a request, and its answer as trajectories,
checked.

Pure functions: no network. ``column_sources`` holds what is said of each token. A response that ends
by an end-of-sequence token includes that token in ``output_ids``, with its log-probability: the
decision to stop is trained like any other. ``text`` leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from megatron_dppo.data.trajectory import FinishReason, Trajectory
from megatron_dppo.engine.column_sources import Answered, asked
from megatron_dppo.engine.errors import AbortedError, EngineAnswerError, StaleWeightsError
from megatron_dppo.engine.requests import GenerationRequest


def adapter_name(version: int) -> str:
    """What an engine calls the adapters of a weight version, where updates send adapters alone."""
    return f"policy-{version}"


def request_ids(rid: str, count: int) -> list[str]:
    """The ids that SGLang gives to the ``count`` requests of a call with the id ``rid``."""
    return [rid] if count == 1 else [f"{rid}_{i}" for i in range(count)]


def request_body(
    requests: Sequence[GenerationRequest],
    rid: str,
    *,
    model: str | None = None,
    adapter: str | None = None,
) -> bytes:
    """The JSON body that asks for ``requests`` in one call. They must agree on the sampling and on
    the columns.

    One id and one sampling for the call: the router takes no lists of them. ``model``: its name
    there; SGLang's own server needs none. ``adapter``: name of the engine's adapters that answer; None:
    the model without any.
    """
    first = requests[0]
    if any((r.sampling, r.columns) != (first.sampling, first.columns) for r in requests):
        raise ValueError("requests of one call must ask for the same sampling and the same columns")
    body: dict[str, Any] = {
        "rid": rid,
        # A call for one response is no list of one: that would take SGLang's slower path for batches.
        "input_ids": [r.prompt_ids for r in requests] if len(requests) > 1 else first.prompt_ids,
        "sampling_params": first.sampling.as_json(),
    }
    if model is not None:
        body["model"] = model
    if adapter is not None:
        body["lora_path"] = adapter
    for source, option in asked(first.columns):
        body |= source.body(option)
    return orjson.dumps(body)


def parse_answers(
    payload: bytes, requests: Sequence[GenerationRequest], version: int | None = None
) -> list[Trajectory]:
    """``read_answers`` and ``parse_answer``, where nothing is beside the JSON."""
    answers = read_answers(payload, requests, version)
    return [parse_answer(a, request) for a, request in zip(answers, requests, strict=True)]


def read_answers(
    payload: bytes, requests: Sequence[GenerationRequest], version: int | None = None
) -> list[dict[str, Any]]:
    """The answers of one call, in the order of ``requests``.

    ``version``: the weight version that every token must come from. Raises EngineAnswerError, and
    StaleWeightsError where a token comes from other weights.
    """
    try:
        answers = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        shown = payload[:200].decode(errors="replace")
        raise EngineAnswerError(f"/generate answered no JSON: {shown!r}") from error
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
        if version is not None:
            _check_version(answer.get("meta_info", {}), request, version)
    return answers


def _check_version(meta: dict[str, Any], request: GenerationRequest, version: int) -> None:
    try:
        found = {str(span["version"]) for span in meta.get("weight_versions", ())}
    except (KeyError, TypeError, IndexError) as error:
        raise EngineAnswerError(
            f"request {request.key}: weight_versions is not a list of objects with a version"
        ) from error
    if found - {str(version)}:
        raise StaleWeightsError(
            f"request {request.key}: drawn from weights {', '.join(sorted(found))}, "
            f"expected the committed version {version}"
        )


def parse_answer(answer: dict[str, Any], request: GenerationRequest) -> Trajectory:
    """One answer, checked against its request; reward and advantage are still 0.

    Raises AbortedError where the server ended it early, and EngineAnswerError where a field is
    missing or contradicts.
    """
    meta = answer.get("meta_info", {})
    try:
        reason = _finish_reason(meta["finish_reason"])
        response_ids = np.array(answer["output_ids"], np.int32)
        _check_length(len(response_ids), reason, request)
        answered = Answered(len(request.prompt_ids), response_ids)
        columns: dict[str, np.ndarray] = {}
        for source, option in asked(request.columns):
            columns |= source.parse(meta, answered, option)
        return Trajectory.of_response(
            request.prompt_ids,
            response_ids,
            problem_id=request.problem_id,
            sample_index=request.sample_index,
            columns=columns,
            finish_reason=reason,
            text=answer["text"],
        )
    except KeyError as error:
        raise EngineAnswerError(f"request {request.key}: the answer lacks {error}") from error
    except AbortedError as error:
        raise AbortedError(f"request {request.key}: {error}") from error
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError) as error:
        raise EngineAnswerError(f"request {request.key}: {error}") from error


def _finish_reason(reason: dict[str, Any]) -> FinishReason:
    kinds: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
    if reason["type"] == "abort":
        raise AbortedError(f"aborted by the engine: {reason.get('message')}")
    if reason["type"] not in kinds:
        raise ValueError(f"finish reason {reason['type']!r}, expected stop or length")
    return kinds[reason["type"]]


def _check_length(tokens: int, reason: FinishReason, request: GenerationRequest) -> None:
    """SGLang shortens max_new_tokens silently to what its context and cache hold; that would pass
    as a truncation.
    """
    limit = request.sampling.max_new_tokens
    if not 0 < tokens <= limit:
        raise ValueError(f"{tokens} output tokens, expected 1 to {limit}")
    if reason == "length" and tokens < limit:
        raise ValueError(
            f"cut off after {tokens} tokens, max_new_tokens is {limit}: the engine's "
            "context length or key-value cache (sglang.max_total_tokens) is too small"
        )
