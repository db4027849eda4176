"""The engine's answers are parsed exactly, and refused where they contradict their request."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from megatron_dppo.data.trajectory import Problem, VersionSpan
from megatron_dppo.engine.errors import AbortedError, EngineAnswerError, StaleWeightsError
from megatron_dppo.engine.protocol import (
    GenerationRequest,
    RoutedShape,
    SamplingParams,
    adapter_name,
    parse_answer,
    request_body,
    request_ids,
)
from megatron_dppo.fleet.generation import GenerationJob
from tests.small_shapes import MOE
from tests.trajectories import parse_answers, same

SHAPE = RoutedShape(hidden_layers=2, moe_layers=(1,), top_k=2, experts=8)
TOPK_IDS = [[7, 1], [2, 7]]
TOPK_LOG_PROBS = [[-0.5, -1.5], [-0.25, -2.0]]
# 3 prompt tokens + 2 output tokens - 1, 2 layers (the first is dense: zeros), 2 experts.
ROUTED = [[[0, 0], [3, 1]], [[0, 0], [7, 0]], [[0, 0], [2, 5]], [[0, 0], [6, 4]]]


def b64(values: list, dtype: str) -> str:
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


def request(**changes) -> GenerationRequest:
    fields: dict[str, Any] = {
        "key": (0, 0),
        "prompt_ids": (4, 5, 6),
        "sampling": SamplingParams(max_new_tokens=8),
        "columns": {"topk": 2, "routed_experts": SHAPE},
    }
    return GenerationRequest(**(fields | changes))


def routing_request(shape: RoutedShape, **changes) -> GenerationRequest:
    return request(columns={"topk": 2, "routed_experts": shape}, **changes)


def read_routing(engine_answer: dict, answered: GenerationRequest) -> np.ndarray | None:
    """Return the routed experts that are read from an answer to the request ``answered``."""
    return parse_answer(engine_answer, answered).columns.get("routed_experts")


def answer(**changes) -> dict:
    meta = {
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 2, None]],
        "weight_versions": [
            {"version": "3", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 2},
        ],
        "output_top_logprobs_shape": [2, 2],
        "output_top_logprobs_null_prefix": 0,
        "output_top_logprobs_idx_flat_b64": b64(TOPK_IDS, "<i4"),
        "output_top_logprobs_val_flat_b64": b64(TOPK_LOG_PROBS, "<f4"),
        "routed_experts": np.array(ROUTED, np.uint8),  # fetched apart from the JSON, as an array
        "cached_tokens": 2,
        "spec_verify_ct": 1,
    }
    return {"text": "7", "output_ids": [7, 2], "meta_info": meta | changes}


def json_answer(**changes) -> dict:
    """The JSON of an answer to a request without routing."""
    fields = answer(**changes)
    if "routed_experts" not in changes:
        del fields["meta_info"]["routed_experts"]
    return fields


def unrouted_request(**changes) -> GenerationRequest:
    return request(**{"columns": {"topk": 2}, **changes})


def test_every_field_of_an_answer_is_read():
    got = parse_answer(answer(), request(problem_id=9, sample_index=3))
    assert (got.problem_id, got.sample_index) == (9, 3)
    assert got.token_ids.tolist() == [4, 5, 6, 7, 2]
    assert got.loss_mask.tolist() == [False, False, False, True, True]
    assert got.finish_reason == "stop"
    assert got.text == "7"
    assert (got.reward, got.advantage) == (0, 0)
    assert (got.prompt_tokens, got.cached_tokens, got.verify_steps) == (3, 2, 1)
    assert got.version_spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))
    assert {name: (array.dtype, array.tolist()) for name, array in got.columns.items()} == {
        "rollout_log_probs": (np.float32, [-0.5, -0.25]),
        "weight_version": (np.int32, [3, 4]),
        "topk_ids": (np.int32, TOPK_IDS),
        "topk_log_probs": (np.float32, TOPK_LOG_PROBS),
        "routed_experts": (np.uint8, [[[3, 1]], [[7, 0]], [[2, 5]], [[6, 4]]]),
    }


def test_routing_of_many_experts_needs_two_bytes():
    many = RoutedShape(hidden_layers=2, moe_layers=(1,), top_k=2, experts=257)
    assert read_routing(answer(), routing_request(many)).dtype == np.uint16


UNVERIFIED = [
    {"version": "unverified-4", "start": 0, "end": 1},
    {"version": "4", "start": 1, "end": 2},
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_token_logprobs": [[-0.5, 7, None]]}, "1 log-probabilities"),
        ({"output_token_logprobs": [[-0.5, 7, None], [-0.25, 3, None]]}, "in their order"),
        (
            {"output_token_logprobs": [[-0.5, 7, None], [None, 2, None]]},
            "log-probabilities: nan at token 1",
        ),
        ({"output_token_logprobs": [[-0.5, 7, None], [0.01, 2, None]]}, "at token 1"),
        ({"finish_reason": {"type": "length", "length": 2}}, "after 2"),
        ({"finish_reason": {"type": "other"}}, "expected stop or length"),
        ({"finish_reason": None}, "not subscriptable"),
        ({"output_token_logprobs": None}, "not iterable"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "end at 1"),
        ({"weight_versions": [{"version": "3", "start": 1, "end": 2}]}, "not contiguous"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "no integer"),
        ({"output_top_logprobs_shape": [1, 2]}, r"shape \(1, 2\), expected \(2, 2\)"),
        ({"output_top_logprobs_idx_flat_b64": b64([7], "<i4")}, "4 bytes of <i4, expected 16"),
        ({"output_top_logprobs_val_flat_b64": "!"}, "broken base64"),
        (
            {"output_top_logprobs_val_flat_b64": b64([[-0.5, np.nan], [-1, -2]], "<f4")},
            "nan at token 0",
        ),
        ({"routed_experts": "AAAA"}, "is no recording but str"),
        ({"routed_experts": np.array(ROUTED, np.uint8) + 5}, r"outside 0..7"),
        ({"routed_experts": np.zeros((4, 2, 2), np.uint8)}, "routed experts are all 0"),
        ({"routed_experts": np.full((4, 2, 2), 3, np.uint8)}, "same expert twice"),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused_by_name(changes, message):
    with pytest.raises(EngineAnswerError, match=rf"^request \(0, 0\): .*{message}"):
        parse_answer(answer(**changes), request())


def test_an_answer_that_is_asked_for_again_is_told_apart_from_a_broken_one():
    with pytest.raises(AbortedError, match=r"request \(0, 0\): "):
        parse_answer(answer(weight_versions=UNVERIFIED), request())
    aborted = answer(finish_reason={"type": "abort", "message": "by the admin"})
    with pytest.raises(AbortedError, match=r"request \(0, 0\): .*admin"):
        parse_answer(aborted, request())


def test_one_expert_a_token_recorded_as_zeros_alone_is_no_recording():
    """A short recording may be all zeros by chance. A long one was never written, and the column is missing."""
    shape = RoutedShape(hidden_layers=2, moe_layers=(0, 1), top_k=1, experts=8)
    of_8_tokens = routing_request(shape, prompt_ids=(4, 5, 6, 7, 8, 9, 10))
    for tokens, answered in ((4, routing_request(shape)), (8, of_8_tokens)):
        zeros = np.zeros((tokens, 2, 1), np.uint8)
        assert read_routing(answer(routed_experts=zeros), answered) is not None
    of_9_tokens = routing_request(shape, prompt_ids=range(4, 12))
    zeros = np.zeros((9, 2, 1), np.uint8)
    assert read_routing(answer(routed_experts=zeros), of_9_tokens) is None
    zeros[8, 1] = 1
    assert read_routing(answer(routed_experts=zeros), of_9_tokens).sum() == 1


def test_a_missing_field_is_named():
    broken = answer()
    del broken["meta_info"]["routed_experts"]
    with pytest.raises(EngineAnswerError, match="lacks 'routed_experts'"):
        parse_answer(broken, request())


def test_rounding_above_zero_passes():
    near_zero = [[5e-7, 7, None], [-0.25, 2, None]]
    got = parse_answer(answer(output_token_logprobs=near_zero), request())
    assert got.columns["rollout_log_probs"][0] == np.float32(5e-7)


def test_a_call_has_one_answer_for_each_request():
    requests = [unrouted_request(), unrouted_request(key=(0, 1), sample_index=1)]
    both = parse_answers(orjson.dumps([json_answer(), json_answer()]), requests)
    assert [t.sample_index for t in both] == [0, 1]
    # The answer to a single request may stand outside a list.
    without_list = orjson.dumps(json_answer())
    assert [t.sample_index for t in parse_answers(without_list, requests[1:])] == [1]
    with pytest.raises(EngineAnswerError, match="1 for 2"):
        parse_answers(orjson.dumps([json_answer()]), requests)
    with pytest.raises(EngineAnswerError, match="dict"):
        parse_answers(without_list, requests)


def test_the_body_asks_for_tokens_and_binary_forms():
    body = json.loads(request_body([request()], "a-00"))
    assert body["rid"] == "a-00"
    assert "model" not in body
    assert body["input_ids"] == [4, 5, 6]
    assert body["return_logprob"] is True
    assert body["logprob_start_len"] == -1
    assert body["top_logprobs_num"] == 2
    assert body["return_flat_raw_output_top_logprobs"] is True
    assert body["return_flat_raw_top_logprobs_b64"] is True
    assert body["return_routed_experts"] is True
    params = body["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"]) == (1.0, 1.0, -1)
    assert params["stop"] is None
    plain = json.loads(request_body([request(columns={})], "a-00"))
    assert "top_logprobs_num" not in plain
    assert "return_routed_experts" not in plain


def test_texts_that_end_a_response_are_asked_for():
    sampling = SamplingParams(max_new_tokens=8, stop=("\n\n", "Q:"))
    body = json.loads(request_body([request(sampling=sampling)], "a-00"))
    assert body["sampling_params"]["stop"] == ["\n\n", "Q:"]


def test_one_call_cannot_mix_forms():
    other_requests = [
        request(columns={"topk": 1}),
        request(sampling=SamplingParams(3, temperature=0.5)),
    ]
    for second in other_requests:
        with pytest.raises(ValueError, match="columns"):
            request_body([request(), second], "a")


def test_a_column_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match=r"mood; .* rollout_log_probs"):
        request_body([request(columns={"mood": 1})], "a")


def test_a_request_names_the_adapters_that_answer_it():
    body = json.loads(request_body([request()], "a-00", adapter=adapter_name(12)))
    assert body["lora_path"] == "policy-12"
    assert "lora_path" not in json.loads(request_body([request()], "a-00"))


def test_the_router_is_told_the_models_name_and_every_request_has_its_own_id():
    body = json.loads(request_body([request(), request(key=(0, 1))], "a-00", model="policy"))
    assert body["model"] == "policy"
    assert body["input_ids"] == [[4, 5, 6], [4, 5, 6]]
    assert request_ids("a-00", 2) == ["a-00_0", "a-00_1"]
    assert request_ids("a-00", 1) == ["a-00"]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"<html>busy</html>", "answered no JSON: '<html>busy</html>'"),
        (b"", "answered no JSON: ''"),
        (b"[1]", "something else than objects"),
        (b"[null]", "something else than objects"),
        ({"text": "", "output_ids": [1], "meta_info": None}, "meta_info is no object"),
        ({"text": "", "output_ids": [1], "meta_info": [1]}, "meta_info is no object"),
        ({"meta_info": {"weight_versions": [None]}}, "weight_versions is not a list of objects"),
        ({"meta_info": {"weight_versions": 7}}, "weight_versions is not a list of objects"),
        ({"meta_info": {"finish_reason": None}}, "NoneType"),
        ({"output_ids": [1 << 40], "meta_info": {"finish_reason": {"type": "stop"}}}, "too large|bounds"),
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_refused(payload, message):
    content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    with pytest.raises(EngineAnswerError, match=message):
        parse_answers(content, [unrouted_request()], versions=range(3, 4))


def test_tokens_of_other_weights_than_the_committed_are_no_answer():
    requests = [unrouted_request()]
    spans = [{"version": "7", "start": 0, "end": 2}]
    payload = orjson.dumps([json_answer(weight_versions=spans)])
    assert parse_answers(payload, requests, versions=range(7, 8))
    with pytest.raises(StaleWeightsError, match=r"weights 7, .* 8"):
        parse_answers(payload, requests, versions=range(8, 9))
    with pytest.raises(StaleWeightsError, match=r"weights 3, 4, .* 4"):
        parse_answers(orjson.dumps([json_answer()]), requests, versions=range(4, 5))
    spans = [{"version": "unverified-8", "start": 0, "end": 2}]
    payload = orjson.dumps([json_answer(weight_versions=spans)])
    with pytest.raises(StaleWeightsError, match="weights unverified-8"):
        parse_answers(payload, requests, versions=range(8, 9))


@pytest.mark.parametrize(
    "bad", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}]
)
def test_impossible_sampling_is_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        SamplingParams(**({"max_new_tokens": 1} | bad))


def test_routed_shape_of_a_model():
    moe = replace(MOE, num_layers=3, num_experts=128, experts_per_token=8)
    assert RoutedShape.of_model(moe) == RoutedShape(3, (0, 1, 2), 8, 128)
    with pytest.raises(ValueError, match=r"qwen3 "):
        RoutedShape.of_model(replace(moe, family="qwen3", num_experts=0))


def test_a_job_asks_only_for_what_is_missing():
    problems = [Problem(9, "a", "1", (4, 5, 6)), Problem(9, "a", "1", (4, 5, 6))]
    job = GenerationJob(problems, 2, SamplingParams(8), {"topk": 2, "routed_experts": SHAPE})
    assert [r.key for r in job.requests()] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(r.columns == {"topk": 2, "routed_experts": SHAPE} for r in job.requests())
    results = {r.key: parse_answer(answer(), r) for r in job.requests()}
    assert [r.key for r in job.requests({(0, 1): results[0, 1]})] == [(0, 0), (1, 0), (1, 1)]
    got = job.trajectories(results)
    assert [(t.problem_id, t.sample_index) for t in got] == [(9, 0), (9, 1)] * 2
    assert same(got[3], results[1, 1])


def test_tokens_of_an_interrupted_response_are_of_committed_versions():
    """The engine reports ``unverified-8`` for tokens that it samples after the transfer of version 8 and before the
    commit. They count as version 8, which is committed right after."""
    requests = [unrouted_request()]
    spans = [
        {"version": "7", "start": 0, "end": 1},
        {"version": "unverified-8", "start": 1, "end": 2},
    ]
    payload = orjson.dumps([json_answer(weight_versions=spans)])
    (got,) = parse_answers(payload, requests, range(7, 9))
    assert got.column("weight_version").tolist() == [7, 8]
    for versions in (range(8, 9), range(6, 8), range(8, 10)):
        with pytest.raises(StaleWeightsError, match="weights 7, unverified-8"):
            parse_answers(payload, requests, versions)
    with pytest.raises(StaleWeightsError, match=" 5 to 6"):
        parse_answers(payload, requests, range(5, 7))
