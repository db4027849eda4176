"""The real SGLang server on this machine: its answers, and what happens when it is lost.

One server serves every test. The last tests kill it and start another server.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.config.checks import PROMPT_SPARE_POSITIONS, length_faults
from megatron_dppo.config.loading import merged
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.columns import usable_rows
from megatron_dppo.data.trajectory import Problem, Trajectory, VersionSpan
from megatron_dppo.engine.client import EngineClient, HttpClient
from megatron_dppo.engine.errors import (
    AbortedError,
    EngineAnswerError,
    EngineMismatchError,
    EngineRequestError,
    EngineStartError,
    GenerationInterruptedError,
    StopRequestedError,
)
from megatron_dppo.engine.process import EngineProcess
from megatron_dppo.engine.protocol import (
    UNVERIFIED_VERSION,
    GenerationRequest,
    RoutedShape,
    SamplingParams,
    request_body,
)
from megatron_dppo.engine.running_server import check_engine
from megatron_dppo.engine.server import recordings
from megatron_dppo.engine.server.continuation import Continuation
from megatron_dppo.fleet.client import FleetClient
from megatron_dppo.fleet.generation import GenerationJob, GenerationLimits, Results, generate_many
from megatron_dppo.fleet.membership import Member
from megatron_dppo.fleet.record import Keys, Server
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.ports import free_port
from megatron_dppo.system.scratch import SHARED_MEMORY
from megatron_dppo.weights.engine_weights import EngineWeights
from tests.integration.shared_launcher import server_of
from tests.integration.weight_server import router_choices
from tests.patience import UNBOUNDED_S, Patience, family_of, wait_healthy
from tests.small_config import small_config
from tests.tiny_models import save_tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

API_KEY, ADMIN_KEY = "5c0ffee5-api", "5c0ffee5-admin"
END_TOKENS = (2, *range(100, 160))  # so many that a response of 16 tokens often has an end token
PROMPTS = [
    tuple(np.random.default_rng(i).integers(3, 512, size=n).tolist())
    for i, n in enumerate((5, 17, 40))
]


def run_config(folder: Path, **sections) -> TrainConfig:
    sizes = {
        "data": {"max_prompt_tokens": 64},
        "rollout": {"router_replay": True},
        "engine": {"device": "cpu", "start_timeout_s": UNBOUNDED_S},
        "sglang": {"max_total_tokens": 16384},
    }
    return small_config(folder.parent, folder, **merged(sizes, sections))


def engine_of(config: TrainConfig, port: int, log_name: str = "server.log") -> EngineProcess:
    log_path = Path(config.run.directory) / "engine" / log_name
    return server_of(config, log_path, API_KEY, ADMIN_KEY, port=port)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "moe"
    return save_tiny_model(folder, "qwen3_moe", seed=3, eos_token_id=list(END_TOKENS))


@pytest.fixture(scope="module")
def engine(model) -> Iterator[EngineProcess]:
    process = engine_of(run_config(model), free_port("127.0.0.1"))
    try:
        process.start()
        wait_healthy(process)
        shutil.copy(process.log_path, process.log_path.with_suffix(".healthy"))
        yield process
    finally:
        process.kill()


def test_a_healthy_server_has_answered_with_both_samplings(engine):
    """Training samples with top_p = 1, evaluation with top_p < 1. A GPU compiles kernels at each first request."""
    log = engine.log_path.with_suffix(".healthy").read_text()
    assert log.count("Prefill batch") == 2
    assert log.count("Decode batch") <= 2


@pytest.fixture(scope="module")
def client(engine, runner) -> Iterator[EngineClient]:
    client = EngineClient(engine.url, API_KEY, ADMIN_KEY)
    yield client
    runner.run(client.close())


@pytest.fixture(scope="module")
def reference(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def generate(runner, client, requests, **limits) -> Results:
    return runner.run(
        generate_many(client, requests, GenerationLimits(**({"concurrency": 64} | limits)))
    )


def make_requests(count: int, **fields) -> list[GenerationRequest]:
    """Return ``count`` requests over the prompts in turn. ``fields``: SamplingParams or column sources."""
    columns: dict[str, Any] = {k: fields.pop(k) for k in ("topk", "routed_experts") if k in fields}
    sampling, prompts = SamplingParams(**fields), itertools.cycle(PROMPTS)
    return [GenerationRequest(i, next(prompts), sampling, columns) for i in range(count)]


async def wait_until_running(
    client: EngineClient, calls: Sequence[asyncio.Task], count: int, since: float
) -> None:
    """Wait until the engine's scheduler reports that it runs ``count`` requests.

    ``since``: ignore earlier reports (``time.time()``). ``calls``: tasks that wait for the requests. No task may end
    before.
    """
    while True:
        (load,) = (await client.get_json("/v1/loads"))["loads"]
        if load["timestamp"] > since and load["num_running_reqs"] == count:
            return
        assert not any(call.done() for call in calls), "requests ended before they were seen to run"
        await asyncio.sleep(0.02)


def long_requests(count: int) -> list[GenerationRequest]:
    """Return requests that each take seconds to minutes."""
    return make_requests(count, max_new_tokens=1500, ignore_eos=True)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        # The engine reports mu as if nothing had been cut off. Therefore training samples with top_p = 1.
        {"top_p": 0.5},
    ],
)
def test_log_probs_agree_with_transformers_and_ignore_top_p(runner, client, reference, sampling):
    requests = make_requests(9, max_new_tokens=16, **sampling)
    for request, result in zip(requests, generate(runner, client, requests).values(), strict=True):
        expected = response_log_probs(reference, request, result)
        np.testing.assert_allclose(log_mu(result), expected, atol=1e-5, rtol=0)


def log_mu(result: Trajectory) -> np.ndarray:
    return result.columns["rollout_log_probs"]


def response_log_probs(reference, request: GenerationRequest, result: Trajectory) -> np.ndarray:
    """Return log_softmax(logits / temperature) of the response tokens, in fp32."""
    logits = reference_logits(reference, request, result)
    log_probs = torch.log_softmax(logits / request.sampling.temperature, dim=-1)
    return log_probs.gather(1, torch.from_numpy(result.response_ids.astype(np.int64))[:, None])[
        :, 0
    ].numpy()


def reference_logits(reference, request, result) -> torch.Tensor:
    ids = torch.from_numpy(result.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        return reference(ids).logits[0, len(request.prompt_ids) - 1 : -1].float()


def test_the_end_token_is_part_of_the_response_and_has_a_log_prob(runner, client, reference):
    reasons = set()
    for limit in (16, 1):  # most responses end within 16 tokens, few within one
        requests = make_requests(32, max_new_tokens=limit)
        results = generate(runner, client, requests)
        for request, result in zip(requests, results.values(), strict=True):
            reasons.add(result.finish_reason)
            if result.finish_reason == "length":
                assert result.sampled == limit
                assert not set(END_TOKENS) & set(result.response_ids.tolist())
                continue
            assert result.response_ids[-1] in END_TOKENS
            assert not set(END_TOKENS) & set(result.response_ids[:-1].tolist())
            expected = response_log_probs(reference, request, result)
            assert abs(log_mu(result)[-1] - expected[-1]) < 1e-5
    assert reasons == {"stop", "length"}


def test_extra_stop_tokens_end_a_response(runner, client):
    half = tuple(range(3, 258))
    for result in generate(
        runner, client, make_requests(8, max_new_tokens=64, stop_token_ids=half)
    ).values():
        assert result.finish_reason == "stop"
        assert result.response_ids[-1] in (*half, *END_TOKENS)
        assert not {*half, *END_TOKENS} & set(result.response_ids[:-1].tolist())


def test_a_stop_text_ends_a_response_and_every_token_is_kept(runner, client, reference):
    """The tokens include the token that completes the stop text. The response's text ends before the stop text."""
    stop = ("3", "7", "+")  # No special token's name contains one of these texts.
    decode: Any = tiny_tokenizer().decode
    requests = make_requests(24, max_new_tokens=64, stop=stop)
    ended = 0
    for request, result in zip(requests, generate(runner, client, requests).values(), strict=True):
        ids = result.response_ids
        before, whole = decode(ids[:-1]), decode(ids)
        assert not any(text in before for text in stop)
        np.testing.assert_allclose(
            log_mu(result), response_log_probs(reference, request, result), atol=1e-5, rtol=0
        )
        if ids[-1] in END_TOKENS or result.finish_reason == "length":
            continue
        ended += 1
        assert result.finish_reason == "stop"
        text = whole[: whole.index(next(text for text in stop if text in whole))]
        # The engine's text may lack the bytes of a character that does not end.
        assert text.replace("\ufffd", "") == result.text.replace("\ufffd", "")
    assert ended > 4


def test_weights_that_were_never_updated_are_version_zero(runner, client):
    requests = make_requests(1, max_new_tokens=4, ignore_eos=True)
    (result,) = generate(runner, client, requests).values()
    assert result.version_spans == (VersionSpan(0, 0, 4),)


def test_binary_topk_equals_the_list_form_and_transformers(runner, client, reference):
    request = make_requests(1, max_new_tokens=8, temperature=0.7, ignore_eos=True, topk=5)[0]
    (result,) = generate(runner, client, [request]).values()
    logits = reference_logits(reference, request, result)
    values, ids = torch.log_softmax(logits / 0.7, dim=-1).topk(5)
    np.testing.assert_array_equal(result.columns["topk_ids"], ids.numpy())
    np.testing.assert_allclose(result.columns["topk_log_probs"], values.numpy(), atol=1e-5, rtol=0)

    greedy = make_requests(1, max_new_tokens=8, temperature=0.0, ignore_eos=True, topk=5)[0]
    (binary,) = generate(runner, client, [greedy]).values()
    body = {
        "input_ids": list(greedy.prompt_ids),
        "sampling_params": greedy.sampling.as_json(),
        "return_logprob": True,
        "top_logprobs_num": 5,
    }
    answer = orjson.loads(runner.run(client.request("POST", "/generate", orjson.dumps(body))))
    listed = answer["meta_info"]["output_top_logprobs"]
    assert binary.columns["topk_ids"].tolist() == [[entry[1] for entry in row] for row in listed]
    expected = [[entry[0] for entry in row] for row in listed]
    np.testing.assert_allclose(binary.columns["topk_log_probs"], expected, atol=1e-5, rtol=0)


def test_recorded_routing_is_the_same_by_each_way(runner, engine, model, monkeypatch, caplog):
    """Routing through shared memory equals routing in binary HTTP answers."""
    caplog.set_level(logging.INFO)
    shape = RoutedShape.of_model(load_model_shape(model))
    greedy = make_requests(
        3, max_new_tokens=8, temperature=0.0, ignore_eos=True, routed_experts=shape
    )

    def recorded() -> list[list]:
        client = EngineClient(engine.url, API_KEY, ADMIN_KEY)
        results = generate(runner, client, greedy)
        runner.run(client.close())
        return [result.columns["routed_experts"].tolist() for result in results.values()]

    ways = ["shared memory", "binary HTTP answers"]
    found = [recorded()]
    (folder,) = SHARED_MEMORY.glob(f"mdppo-*-{engine.pid}-*routing-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(recordings, "is_private", lambda folder: False)
    found.append(recorded())
    stranger, path = EngineClient(engine.url, "wrong"), f"/routed_experts/{'0' * 32}"
    with pytest.raises(EngineRequestError, match=r"routed_experts/0+ answered 401"):
        runner.run(stranger.download(path, 1, timeout_s=5))
    runner.run(stranger.close())
    assert list(folder.iterdir()) == []
    assert found[0] == found[1]
    assert [w for w in ways if f"recorded routing comes through {w}" in caplog.text] == ways


def test_routed_experts_agree_with_transformers(runner, client, reference, model):
    shape = RoutedShape.of_model(load_model_shape(model))
    requests = make_requests(9, max_new_tokens=16, routed_experts=shape)
    results = generate(runner, client, requests)
    answer = orjson.loads(
        runner.run(client.request("POST", "/generate", request_body(requests[:1], "cached-0")))
    )
    assert answer["meta_info"]["cached_tokens"] > 0  # cached prompts have routing too
    for request, result in zip(requests, results.values(), strict=True):
        tokens = result.token_ids.tolist()
        assert tokens[: len(request.prompt_ids)] == list(request.prompt_ids)
        routed = result.columns["routed_experts"]
        assert routed.shape == (len(tokens) - 1, 2, 2)
        assert routed.dtype == np.uint8
        np.testing.assert_array_equal(routed, router_choices(reference, tokens))


@pytest.fixture(scope="module")
def other(model) -> tuple[Path, Any]:
    """Another model of the same shape, with unrelated weights."""
    folder = model.parent / "other"
    save_tiny_model(folder, "qwen3_moe", seed=4, eos_token_id=list(END_TOKENS))
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def generate_under_updates(
    client: EngineClient, weights: EngineWeights, requests: list[GenerationRequest], folders
) -> list[Trajectory]:
    """Return the responses to ``requests``. Meanwhile the engine loads the ``folders`` one after another, as versions
    1, 2 and so on, and scores a prompt before each commit, as an update does."""
    short = [replace(make_requests(1, max_new_tokens=8, ignore_eos=True)[0], key="short")]
    began = time.time()
    calls = [asyncio.create_task(client.answer([r], f"long-{r.key}")) for r in requests]
    await wait_until_running(client, calls, len(requests), began)
    for version, folder in enumerate(folders, start=1):
        # The answer to the short request comes while the long requests are in the same batch.
        await client.answer(short, f"short-{version}")
        await weights.interrupt()
        await weights.set_version(f"{UNVERIFIED_VERSION}{version}")
        await weights.begin()
        await weights.load_folder(str(folder))
        await weights.end()
        await weights.flush()
        await weights.resume()
        await weights.score([PROMPTS[0]])
        await weights.set_version(str(version))
        await weights.resume()
    versions = range(len(folders) + 1)
    answers = [await call for call in calls]
    parsed = [
        await client.parse(answer, [request], versions)
        for answer, request in zip(answers, requests, strict=True)
    ]
    return [trajectory for (trajectory,) in parsed]


def gap(result: Trajectory, by_version: torch.Tensor, versions: np.ndarray) -> np.ndarray:
    """Return |log mu - log p| of each token, with p of the token's version in ``versions``.

    ``by_version``: log p [versions, tokens, vocabulary].
    """
    named = by_version[versions.astype(np.int64), np.arange(result.sampled), result.response_ids]
    return np.abs(log_mu(result) - named.numpy())


def test_every_token_of_an_interrupted_response_is_of_the_version_that_its_span_names(
    runner, engine, client, model, reference, other
):
    """Two updates come in mid-response. Log-probabilities and Top-K equal transformers' with each version's weights."""
    folder, second = other
    models, shape = [reference, second, reference], load_model_shape(model)
    routed = RoutedShape.of_model(shape)
    requests = make_requests(4, max_new_tokens=1000, ignore_eos=True, topk=3, routed_experts=routed)
    prefix = make_requests(1, max_new_tokens=2, ignore_eos=True)

    async def work():
        weights = await EngineWeights.connect(
            HttpClient(engine.url, API_KEY, ADMIN_KEY), shape, "float32"
        )
        try:
            trajectories = await generate_under_updates(client, weights, requests, [folder, model])
            cached = [
                orjson.loads(await client.answer(prefix, f"prefix-{i}"))["meta_info"][
                    "cached_tokens"
                ]
                for i in range(2)
            ]
            await weights.interrupt()
            await weights.resume()
            again = orjson.loads(await client.answer(prefix, "prefix-2"))
            await weights.set_version("0")
            return trajectories, [*cached, again["meta_info"]["cached_tokens"]]
        finally:
            await weights.close()

    trajectories, cached = runner.run(work())
    assert cached[1] > 0
    assert cached[2] == 0, "keys and values of the weights before the update"
    for request, result in zip(requests, trajectories, strict=True):
        versions = result.columns["weight_version"]
        assert [span.weight_version for span in result.version_spans] == [0, 1, 2]
        check_versions(request, result, models)
        # The engine's routing of earlier tokens comes from the weights that computed these tokens again.
        usable = usable_rows(result.loss_mask, result.columns)
        begin = len(request.prompt_ids) - 1
        assert usable[begin:].tolist() == (versions == 2).tolist()
        expected = router_choices(reference, result.token_ids)
        np.testing.assert_array_equal(result.columns["routed_experts"][usable], expected[usable])


def check_versions(request: GenerationRequest, result: Trajectory, models: list) -> None:
    """Assert that each token's log-probability and Top-3 come from the version that the token's span names.

    ``models``: the models by version.
    """
    versions = result.columns["weight_version"]
    logits = torch.stack([reference_logits(m, request, result) for m in models])
    by_version = torch.log_softmax(logits, dim=-1)
    assert gap(result, by_version, versions).max() < 5e-6
    of_tokens = by_version[versions.astype(np.int64), np.arange(result.sampled)]
    # Compare the values: if two tokens differ only by rounding, either may be in the Top-3.
    ids = torch.from_numpy(result.columns["topk_ids"].astype(np.int64))
    assert all(len(set(row)) == 3 for row in ids.tolist())
    for values in (of_tokens.topk(3).values, of_tokens.gather(1, ids)):
        np.testing.assert_allclose(
            result.columns["topk_log_probs"], values.numpy(), atol=5e-6, rtol=0
        )
    # If the boundary is one token off, the token at the boundary shows it.
    for shift in (1, -1):
        wrong = np.roll(versions, shift)
        changed = wrong != versions
        assert gap(result, by_version, wrong)[changed].max() > 1e-2


def decode(token_ids, *, special: bool = True) -> str:
    return str(tiny_tokenizer().decode(list(token_ids), skip_special_tokens=not special))


async def load(weights: EngineWeights, folder: Path, version: int) -> None:
    """Load weights as an update that drains does: no request may be in flight."""
    assert await weights.pause_when_idle(5)
    await weights.set_version(f"{UNVERIFIED_VERSION}{version}")
    await weights.begin()
    await weights.load_folder(str(folder))
    await weights.end()
    await weights.flush()
    await weights.set_version(str(version))
    await weights.resume()


def test_an_aborted_response_goes_on_under_the_new_weights(
    runner, engine, client, model, reference, other
):
    """Three updates in mid-response, in calls of one response and of several.

    Log-probabilities, Top-K and recorded routing of every token are compared with transformers with the weights of the
    token's version. Before the third update the responses are put back into the queue, as if the cache had no room.
    They lose the routing of this part, but no token.
    """
    folder, second = other
    models, shape = [reference, second, reference, second], load_model_shape(model)
    routed = RoutedShape.of_model(shape)
    length = 1200
    requests = make_requests(
        4, max_new_tokens=length, ignore_eos=True, topk=3, routed_experts=routed
    )
    short = make_requests(1, max_new_tokens=8, ignore_eos=True)
    member = Member(Server("engine", engine.url, 1, engine.pid), Keys(API_KEY, ADMIN_KEY))
    limits = GenerationLimits(concurrency=4, responses_per_call=2, hang_timeout_s=UNBOUNDED_S)
    continuation = Continuation(decode)

    async def work() -> tuple[Results, dict[str, str]]:
        weights = await EngineWeights.connect(
            HttpClient(engine.url, API_KEY, ADMIN_KEY), shape, "float32"
        )
        fleet = FleetClient(lambda lost: None)
        served_at = time.time()
        await fleet.serve([member], 0)
        generation = generate_many(fleet, requests, limits, continuation=continuation)
        running = asyncio.create_task(generation)
        for version, weights_folder in enumerate([folder, model, folder], start=1):
            # A call that reached a paused engine would wait in front of the scheduler, and no abort would end it.
            await wait_until_running(client, [running], len(requests), served_at)
            # The answer to the short request comes while the long requests are in the same batch.
            await client.answer(short, f"short-aborting-{version}")
            if version == 3:
                await client.control("/pause_generation", {"mode": "retract"})
            await fleet.hold(abort=True)
            await load(weights, weights_folder, version)
            served_at = time.time()
            await fleet.serve([member], version)
        results = await running
        await load(weights, model, 0)
        await fleet.close()
        await weights.close()
        return results, fleet.take_losses()

    results, losses = runner.run(work())
    assert losses == {}
    # The last token of each part is drawn again.
    assert continuation.redrawn == 4 * 3
    for request, result in zip(requests, results.values(), strict=True):
        assert (result.sampled, result.finish_reason) == (length, "length")
        assert [span.weight_version for span in result.version_spans] == [0, 1, 2, 3]
        assert result.text == decode(result.response_ids, special=False)
        check_versions(request, result, models)
        versions, begin = result.columns["weight_version"], len(request.prompt_ids) - 1
        choices_by_version = [router_choices(m, result.token_ids)[begin:] for m in models]
        of_version = np.stack(choices_by_version)[versions, np.arange(result.sampled)]
        rows = result.columns["routed_experts"][begin:]
        kept = versions != 2
        np.testing.assert_array_equal(rows[kept], of_version[kept])
        assert (
            rows[kept]
            != np.roll(np.stack(choices_by_version), 1, axis=0)[versions, np.arange(length)][kept]
        ).any()
        usable = usable_rows(result.loss_mask, result.columns)
        assert usable[:begin].all()
        assert usable[begin:].tolist() == kept.tolist()
        assert result.discarded_rows == (versions == 2).sum() > 0


def test_a_shared_call_answers_like_single_ones(runner, client, reference):
    requests = make_requests(10, max_new_tokens=12, topk=3)
    results = generate(runner, client, requests, responses_per_call=4)
    assert list(results) == list(range(10))
    for request, result in zip(requests, results.values(), strict=True):
        assert result.columns["topk_ids"].shape == (result.sampled, 3)
        expected = response_log_probs(reference, request, result)
        np.testing.assert_allclose(log_mu(result), expected, atol=1e-5, rtol=0)


def test_rollouts_come_in_order_of_problem_and_sample(runner, client):
    problems = [Problem(i, "", "", ids) for i, ids in enumerate(PROMPTS)]
    job = GenerationJob(problems, 4, SamplingParams(8))
    batch = job.trajectories(generate(runner, client, job.requests()))
    assert [(t.problem_id, t.sample_index) for t in batch] == [
        (p, s) for p in range(3) for s in range(4)
    ]
    assert len({tuple(t.response_ids.tolist()) for t in batch}) > 8  # samples of a group differ


def test_a_refused_request_says_why(runner, client):
    too_long = GenerationRequest("long", (5,) * 3000, SamplingParams(4))
    with pytest.raises(EngineRequestError, match=r"answered 400: .*3000"):
        generate(runner, client, [too_long])


@pytest.mark.parametrize("prompt", [2041, 2000])
def test_the_longest_sequences_that_the_checks_take_are_served_and_no_longer_ones(
    runner, engine, client, model, prompt
):
    """The real server answers a request with the largest values that a refusal names in full, and no longer request."""

    def sections_faults(config: TrainConfig, shape: ModelShape) -> Iterator[str]:
        sections = (config.data, config.rollout, config.evaluation, config.sglang)
        return length_faults(*sections, shape, config.environment)

    shape = load_model_shape(model)
    config = run_config(
        model, data={"max_prompt_tokens": prompt}, rollout={"max_response_tokens": 64}
    )
    (refusal,) = sections_faults(config, shape)
    longest = int(re.search(r"expected at most (\d+)", refusal)[1])
    sections = {"data": {"max_prompt_tokens": prompt}, "rollout": {"max_response_tokens": longest}}
    assert not list(sections_faults(run_config(model, **sections), shape))
    info = runner.run(client.get_json("/server_info"))
    assert info["max_req_input_len"] == 2048 - PROMPT_SPARE_POSITIONS + 1

    def answer(prompt_tokens: int, tokens: int) -> Results:
        sampling = SamplingParams(tokens, ignore_eos=True)
        request = GenerationRequest("long", (5,) * prompt_tokens, sampling)
        return generate(runner, client, [request])

    assert len(answer(prompt, longest)["long"].response_ids) == longest
    with pytest.raises(EngineAnswerError, match="cut off after"):
        answer(prompt, longest + 1)
    if prompt == 2041:  # the longest prompt
        with pytest.raises(EngineRequestError, match="answered 400"):
            answer(prompt + 1, longest - 1)


def test_the_keys_are_needed_and_told_to_nobody(runner, engine, client):
    async def answers(key: str | None, path: str, admin: str | None) -> int:
        async with EngineClient(engine.url, key, admin) as other:
            try:
                await (other.control(path) if admin else other.get_json(path))
            except EngineRequestError as error:
                return error.status
        return 200

    assert runner.run(answers("wrong", "/model_info", None)) == 401
    assert runner.run(answers(None, "/model_info", None)) == 401
    assert runner.run(answers(API_KEY, "/model_info", None)) == 200
    assert runner.run(answers(API_KEY, "/flush_cache", API_KEY)) == 401
    assert runner.run(answers(API_KEY, "/flush_cache", ADMIN_KEY)) == 200

    family = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
    visible_texts = [" ".join(p.cmdline()) + str(p.environ()) for p in family]
    visible_texts += [str(runner.run(client.get_json("/server_info"))), engine.log_path.read_text()]
    visible_texts += [engine.options_path.read_text()]
    assert not any("5c0ffee5" in text for text in visible_texts)


@pytest.mark.skipif(os.geteuid() != 0, reason="a server's memory is closed to its own user")
def test_the_processes_of_a_server_share_its_imports(engine):
    children = psutil.Process(engine.pid).children()
    (detokenizer,) = [c for c in children if "sglang::detokenizer" in " ".join(c.cmdline())]
    # A process that imports SGLang itself has 400 MiB that it does not share.
    assert detokenizer.memory_full_info().uss < 200 << 20


def test_an_engine_that_fits_is_accepted_and_others_are_refused(runner, client, model, tmp_path):
    def check(folder: Path, **sections: Any) -> None:
        spec = RunSpec.of_checked(run_config(folder, **sections))
        runner.run(check_engine(spec.model, spec.servers, client))

    check(model)
    with pytest.raises(EngineMismatchError, match=r"dtype.*'float32', expected 'bfloat16'"):
        check(model, model={"dtype": "bfloat16"})
    other = orjson.loads((model / "config.json").read_bytes()) | {"vocab_size": 511}
    (tmp_path / "config.json").write_bytes(orjson.dumps(other))
    with pytest.raises(EngineMismatchError, match=r"vocabulary: .* 511 tokens"):
        check(tmp_path)


def recorded_in_memory(engine: EngineProcess) -> list[Path]:
    (folder,) = SHARED_MEMORY.glob(f"mdppo-*-{engine.pid}-*routing-*")
    return list(folder.iterdir())


def test_what_was_recorded_of_a_request_that_was_given_up_is_not_kept(
    runner, engine, client, model
):
    """No client reads the answer to such a request. The reader of an answer removes its recording."""
    routed = RoutedShape.of_model(load_model_shape(model))
    short = make_requests(1, max_new_tokens=4, routed_experts=routed)
    long = [replace(long_requests(1)[0], columns={"routed_experts": routed})]

    async def give_up() -> list[int]:
        answer = await client.answer(short, "short-kept")
        counts = [len(recorded_in_memory(engine))]
        await client.parse(answer, short)
        call = asyncio.create_task(client.answer(long, "long-given-up"))
        await client.answer(make_requests(1, max_new_tokens=4), "short-meanwhile")
        await client.abort("long-given-up")
        await call
        return [*counts, len(recorded_in_memory(engine))]

    before = len(recorded_in_memory(engine))
    assert runner.run(give_up()) == [before + 1, before]


def test_an_abort_ends_one_request(runner, client):
    async def abort_one() -> list:
        requests, began = long_requests(2), time.time()
        calls = [
            asyncio.create_task(client.generate([request], f"abort-{i}"))
            for i, request in enumerate(requests)
        ]
        await wait_until_running(client, calls, 2, began)
        await asyncio.gather(client.abort("abort-0"), client.abort("abort-unknown"))
        outcome: list[Any] = [*await asyncio.gather(calls[0], return_exceptions=True)]
        still_running = not calls[1].done()
        await client.control("/abort_request", {"abort_all": True})
        outcome += await asyncio.gather(calls[1], return_exceptions=True)
        return [*outcome, still_running]

    first, second, still_running = runner.run(abort_one())
    assert isinstance(first, AbortedError)
    assert isinstance(second, AbortedError)
    assert still_running


def test_late_requests_are_aborted_and_given_up(runner, engine, client):
    with pytest.raises(GenerationInterruptedError, match="2 attempts failed"):
        generate(runner, client, long_requests(2), request_timeout_s=0.5, max_attempts=2)
    assert becomes_idle(runner, engine, client)


def test_stop_leaves_nothing_running(runner, engine, client):
    start = time.monotonic()
    with pytest.raises(StopRequestedError):
        runner.run(
            generate_many(
                client,
                long_requests(8),
                GenerationLimits(concurrency=8),
                stop=lambda: time.monotonic() > start + 0.5,
            )
        )
    assert becomes_idle(runner, engine, client)


def test_cancelled_background_work_leaves_nothing_running(runner, engine, client):
    work = generate_many(client, long_requests(8), GenerationLimits(concurrency=8))
    running = runner.submit(work)
    time.sleep(0.5)
    assert not running.done()
    runner.cancel_all()
    assert running.cancelled()
    assert becomes_idle(runner, engine, client)


def becomes_idle(runner, engine, client) -> bool:
    """Whether the server becomes idle soon. Only an idle server flushes its cache."""
    patience = Patience(10.0, lambda: family_of(engine.pid))
    while not patience.is_exhausted():
        try:
            runner.run(client.control("/flush_cache"))
            return True
        except EngineRequestError:
            time.sleep(0.1)
    return False


def test_a_paused_engine_answers_health_and_goes_on(runner, client):
    async def pause() -> Trajectory:
        await client.control("/pause_generation", {"mode": "retract"})
        call = asyncio.create_task(client.generate(make_requests(1, max_new_tokens=8), "paused-0"))
        await asyncio.sleep(0.5)
        assert await client.health()
        assert not call.done()
        await client.control("/continue_generation")
        return (await call)[0]

    assert runner.run(pause()).sampled


def test_a_port_taken_while_the_server_starts_is_named(model):
    process = engine_of(run_config(model), free_port("127.0.0.1"), "taken.log")
    process.start()
    taken = f"cannot bind 127.0.0.1:{process.port}"
    with (
        socket.create_server(("127.0.0.1", process.port)),
        pytest.raises(EngineStartError, match=f"(?s)exited with code 1 .*error: {taken}"),
    ):
        wait_healthy(process)


def test_a_server_that_does_not_come_up_shows_its_log(model):
    refused = run_config(model, sglang={"attention_backend": "nonsense"})
    process = engine_of(refused, free_port("127.0.0.1"), "refused.log")
    seen: list[str] = []
    process.start()
    with pytest.raises(
        EngineStartError, match=r"(?s)exited with code 2.*invalid choice: 'nonsense'"
    ):
        process.wait_healthy(lambda seconds, line: seen.append(line))
    assert seen
    assert process.poll() == 2


def test_a_server_dies_with_its_parent(model):
    """The parent is killed by SIGKILL while the server's own children still load. No other process ends the family."""
    port = free_port("127.0.0.1")
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tests.integration.test_engine import engine_of, run_config\n"
        "engine = engine_of(run_config(Path(sys.argv[1])), int(sys.argv[2]), 'orphan.log')\n"
        "engine.start(); print(engine.pid, flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(model), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        family = [psutil.Process(int(parent.stdout.readline()))]
        while len(family) < 4:  # the server, its scheduler, detokenizer and resource tracker
            time.sleep(0.1)
            family = [family[0], *family[0].children(recursive=True)]
        parent.kill()
    patience = Patience(30.0, lambda: [p.pid for p in family])
    while not all(map(has_ended, family)):
        assert not patience.is_exhausted()
        time.sleep(0.1)


def has_ended(process: psutil.Process) -> bool:
    """Whether the process runs no more; in a container it may stay as a zombie."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_killed_server_loses_nothing_that_was_finished(runner, engine, client, model):
    """SIGKILL ends the server in the middle of generation. A new server answers only the missing requests."""
    first, last = make_requests(24, max_new_tokens=4), long_requests(6)
    requests = [
        GenerationRequest(key, r.prompt_ids, r.sampling) for key, r in enumerate([*first, *last])
    ]
    killed: list[int] = []

    responses = itertools.count(1)

    def kill_after_some(key: Hashable, trajectory: Trajectory) -> None:
        if next(responses) >= 12 and not killed:
            killed.append(engine.pid)
            os.kill(engine.pid, signal.SIGKILL)

    # Only the broken connections may show the loss: the limits are unbounded.
    limits = GenerationLimits(32, request_timeout_s=UNBOUNDED_S, hang_timeout_s=UNBOUNDED_S)
    with pytest.raises(GenerationInterruptedError) as caught:
        runner.run(generate_many(client, requests, limits, on_response=kill_after_some))
    completed = caught.value.completed
    assert len(completed) >= 12
    assert set(completed) <= set(range(24))  # no long request
    assert not runner.run(client.health())
    while engine.poll() is None:  # The kernel is still freeing its memory.
        time.sleep(0.01)
    assert engine.poll() == -signal.SIGKILL
    engine.kill()

    second = engine_of(run_config(model), free_port("127.0.0.1"), "restarted.log")
    try:
        second.start()
        wait_healthy(second)
        missing = [
            GenerationRequest(r.key, r.prompt_ids, SamplingParams(8))
            for r in requests
            if r.key not in completed
        ]
        rest = runner.run(generate_missing(second.url, missing))
        assert not set(rest) & set(completed)
        assert set(rest) | set(completed) == set(range(30))
    finally:
        second.stop(grace_s=120)
    assert second.poll() == 0


async def generate_missing(url: str, missing: list[GenerationRequest]) -> Results:
    async with EngineClient(url, API_KEY, ADMIN_KEY) as client:
        return await generate_many(client, missing, GenerationLimits(concurrency=32))
