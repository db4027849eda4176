"""Where SGLang 0.5.23 says each column of a trajectory: the fields of a request that ask for it, and
of an answer's ``meta_info`` that hold it.

What the fields mean, as measured on the real server:

* ``output_token_logprobs`` are log_softmax(logits / temperature) *before* top-p and top-k cut the
  distribution, so training samples with top_p = 1 and top_k = -1.
* ``weight_versions`` are spans over the output tokens.
* ``routed_experts`` is int32 ``[prompt + output - 1, hidden layers, top-k]`` (the last token is
  never fed back), in base64; of a server with this project's plugin, an array that was fetched
  (``recordings/fetching.py``). With one expert a token, zeros alone count as no recording.

Shapes: R = response tokens, K = Top-K log-probabilities.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dppo.data.columns import LOG_PROB_ROUNDING, check_recording, check_topk, is_unwritten
from megatron_dppo.engine.errors import AbortedError
from megatron_dppo.engine.requests import RoutedShape
from megatron_dppo.types import UNVERIFIED_VERSION

Meta = Mapping[str, Any]
"""``meta_info`` of an answer."""


@dataclass(frozen=True)
class Answered:
    """The tokens of an answer: how many the prompt had, and the response's, int32 [R]."""

    prompt_tokens: int
    response_ids: np.ndarray


@dataclass(frozen=True)
class ColumnSource:
    """How columns are asked for and read.

    ``body``: the request's fields, from the option that it was given. ``parse``: arrays by column
    name from ``meta_info``, the answer's tokens and the option; a column may be missing where its
    declaration allows that. Raises ValueError where they contradict, AbortedError where the request
    should be made again. ``always``: every request asks for it, with the option None.
    """

    body: Callable[[Any], dict[str, Any]]
    parse: Callable[[Meta, Answered, Any], dict[str, np.ndarray]]
    always: bool = False


SOURCES: dict[str, ColumnSource] = {}
"""All sources by name: that of the column, or what several columns have in common."""


def provide(name: str, source: ColumnSource) -> None:
    """Make ``source`` known. Raises ValueError where the name is taken."""
    if name in SOURCES:
        raise ValueError(f"column source {name!r} is there already")
    SOURCES[name] = source


def asked(columns: Mapping[str, Any]) -> list[tuple[ColumnSource, Any]]:
    """The sources that a request with these options uses. Raises ValueError for an unknown name."""
    if unknown := columns.keys() - SOURCES.keys():
        raise ValueError(
            f"no column source {', '.join(sorted(unknown))}; known are {', '.join(sorted(SOURCES))}"
        )
    return [
        (source, columns.get(name))
        for name, source in SOURCES.items()
        if source.always or name in columns
    ]


def decode_base64(text: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array that base64 ``text`` holds. Raises ValueError unless it has exactly this size."""
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"broken base64: {error}") from error
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if len(raw) != expected:
        raise ValueError(f"{len(raw)} bytes of {dtype}, expected {expected} for shape {shape}")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def _log_probs(meta: Meta, answered: Answered, _: None) -> dict[str, np.ndarray]:
    entries, expected = meta["output_token_logprobs"], answered.response_ids
    if [entry[1] for entry in entries] != expected.tolist():
        raise ValueError(
            f"{len(entries)} log-probabilities, not those of the {len(expected)} output tokens"
        )
    values = np.array([entry[0] for entry in entries], np.float64)  # None becomes NaN
    right = (values > -np.inf) & (values <= LOG_PROB_ROUNDING)
    if not right.all():
        position = int(right.argmin())
        raise ValueError(
            f"log-probability {entries[position][0]} at output token {position}, expected a finite "
            "number <= 0"
        )
    return {"rollout_log_probs": values.astype(np.float32)}


def _weight_version(meta: Meta, answered: Answered, _: None) -> dict[str, np.ndarray]:
    spans, length = meta["weight_versions"], len(answered.response_ids)
    versions, lengths, end = [], [], 0
    for span in spans:
        if str(span["version"]).startswith(UNVERIFIED_VERSION):
            raise AbortedError("it ran while a weight update was being verified")
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


def _ask_topk(k: int) -> dict[str, Any]:
    return {
        "top_logprobs_num": k,
        "return_flat_raw_output_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
    }


def _topk(meta: Meta, answered: Answered, k: int) -> dict[str, np.ndarray]:
    """int32 ids and float32 log-probabilities ``[R, K]``, from little-endian base64."""
    shape, expected = tuple(meta["output_top_logprobs_shape"]), (len(answered.response_ids), k)
    if shape != expected or meta["output_top_logprobs_null_prefix"] != 0:
        raise ValueError(f"Top-K log-probabilities of shape {shape}, expected {expected}")
    ids = decode_base64(meta["output_top_logprobs_idx_flat_b64"], "<i4", shape)
    log_probs = decode_base64(meta["output_top_logprobs_val_flat_b64"], "<f4", shape)
    if not np.isfinite(log_probs).all() or log_probs.max() > LOG_PROB_ROUNDING or ids.min() < 0:
        raise ValueError(
            "Top-K log-probabilities with a value not finite or above 0, or a negative id"
        )
    check_topk(ids, log_probs, "the answer")
    return {"topk_ids": ids, "topk_log_probs": log_probs}


def _routed_experts(meta: Meta, answered: Answered, shape: RoutedShape) -> dict[str, np.ndarray]:
    tokens = answered.prompt_tokens + len(answered.response_ids) - 1
    recorded = (tokens, shape.hidden_layers, shape.top_k)
    found = meta["routed_experts"]
    captured = found if isinstance(found, np.ndarray) else decode_base64(found, "<i4", recorded)
    if len(shape.moe_layers) < shape.hidden_layers:
        captured = np.ascontiguousarray(captured[:, list(shape.moe_layers)])
    check_recording(captured, shape.experts)
    if is_unwritten(captured):
        return {}
    return {"routed_experts": captured.astype(shape.dtype, copy=False)}


provide("rollout_log_probs", ColumnSource(
    lambda _: {"return_logprob": True, "logprob_start_len": -1}, _log_probs, always=True
))  # fmt: skip
provide("weight_version", ColumnSource(lambda _: {}, _weight_version, always=True))
provide("topk", ColumnSource(_ask_topk, _topk))
provide("routed_experts", ColumnSource(lambda _: {"return_routed_experts": True}, _routed_experts))
