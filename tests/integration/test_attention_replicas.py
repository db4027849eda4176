"""A real SGLang server on a CPU with data-parallel attention: each replica has its own requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.engine.protocol import GenerationRequest, RoutedShape, SamplingParams
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.weights.server.server_state import state_of
from megatron_dppo.weights.transaction import WeightUpdateError
from tests.integration.test_weight_sync import interrupt_update, nudge
from tests.integration.weight_server import (
    PROMPT,
    RUNNER,
    Generation,
    RunningServer,
    Source,
    generated,
    read,
    reference_log_probs,
    router_choices,
    serve,
    updater,
)
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

PATIENCE_S = 600.0
LAYOUTS = {
    "two": (500, {"tp_size": 2, "enable_dp_lm_head": True}),
    "two-one-output": (500, {"tp_size": 2, "enable_dp_lm_head": False}),
    "four": (512, {"tp_size": 4, "enable_dp_lm_head": True}),
    "four-one-output": (500, {"tp_size": 4, "enable_dp_lm_head": False}),
}
"""Size of the vocabulary, and options: two replicas of one or two ranks. The output matrix is divided among all ranks,
or among the ranks of each replica. SGLang pads a vocabulary of 500 tokens."""
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""Heads of the model. The ranks of a replica divide them."""


@pytest.fixture(scope="module", params=[*LAYOUTS.values()], ids=[*LAYOUTS])
def layout(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    return request.param


@pytest.fixture(scope="module")
def options(layout: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    return {**layout[1], "attn_dp_size": 2}


@pytest.fixture(scope="module")
def sizes(layout: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    return {"vocab_size": layout[0], **HEADS}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], sizes: dict[str, Any]
) -> Iterator[RunningServer]:
    folder = save_tiny_model(tmp_path_factory.mktemp("first"), **sizes)
    server = serve(folder, enable_return_routed_experts=True, **options)
    yield server
    server.process.kill()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, sizes: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return save_tiny_model(folder, seed=1, **sizes)


def assert_all_serve(server: RunningServer, folder: Path, version: int) -> None:
    """Assert that every replica serves ``folder``: more prompts than replicas go to the replicas in turn."""
    engine = server.weights()
    prompts = [PROMPT[:3], PROMPT, PROMPT[::-1], [*PROMPT, *PROMPT]]
    scores = RUNNER.run(engine.score(prompts))
    decoded = RUNNER.run(engine.decode(prompts, 8, end_before=2))
    for prompt, own_scores in zip(prompts, scores, strict=True):
        np.testing.assert_allclose(own_scores, reference_log_probs(folder, prompt), atol=1e-5)
    for as_decoded, as_prefilled in zip(decoded.decode, decoded.prefill, strict=True):
        np.testing.assert_allclose(as_decoded, as_prefilled, atol=1e-5)
    for prompt in prompts[:2]:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
        assert server.post("/generate", body)["meta_info"]["weight_version"] == str(version)


def test_updates_reach_every_replica(
    server: RunningServer, options: dict[str, Any], trained: Path
) -> None:
    assert_all_serve(server, server.folder, 0)
    engine = server.weights()
    assert engine.places_directly
    assert engine.tensors.layout == EngineLayout.of_options(options)
    assert engine.tensors.layout.attention_replicas == 2
    RUNNER.run(engine.check_tensors())
    for version, strategy in enumerate(("distributed", "tensor"), start=1):
        folder = (server.folder, trained)[version % 2]
        updates = updater(engine, Source(folder), strategy=strategy)
        assert updates.update(version).verified
        updates.close()
        assert_all_serve(server, folder, version)


def test_an_interrupted_update_is_served_by_no_replica(
    server: RunningServer, trained: Path
) -> None:
    """After an update of changes, all replicas serve the version before. After whole weights, all stay paused."""
    old = read(trained)
    updates = updater(server.weights(), Source(trained, weights=old), changes_only=True)
    updates.update(11)
    updates.source = Source(trained, weights=nudge(old), between=interrupt_update)
    with pytest.raises(WeightUpdateError, match="the update was interrupted"):
        updates.update(12)
    assert_all_serve(server, trained, 11)
    assert isinstance(updates.source, Source)
    updates.source.between = interrupt_update
    with pytest.raises(WeightUpdateError, match="the update was interrupted"):
        updates.update(12)
    assert server.version() == "unverified-12"
    waiting = [Generation(server, 2) for _ in range(4)]
    assert not any(request.begun.wait(1) for request in waiting)
    updates.source = Source(trained, weights=old)
    assert updates.update(12).verified
    for request in waiting:
        assert set(request.versions()) == {"12"}
    updates.close()
    assert_all_serve(server, trained, 12)


def test_every_replica_records_the_routing_of_its_requests(server: RunningServer) -> None:
    """Batches of several lengths run at the same time, so that a replica's rows begin at changing places."""
    updates = updater(server.weights(), Source(server.folder, weights=read(server.folder)))
    updates.update(21)
    updates.close()
    shape = RoutedShape.of_model(load_model_shape(server.folder))
    generator = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    requests: list[GenerationRequest] = []
    for number in range(9):
        prompt = tuple(generator.integers(3, 500, size=3 + 4 * number).tolist())
        requests.append(GenerationRequest(number, prompt, sampling, {"routed_experts": shape}))
    results = generated(server, requests)
    model = AutoModelForCausalLM.from_pretrained(server.folder, dtype=torch.float32)
    for request in requests:
        result = results[request.key]
        expected = router_choices(model, result.token_ids.tolist())
        np.testing.assert_array_equal(result.columns["routed_experts"], expected)


def test_all_replicas_flush_pause_and_park(server: RunningServer, trained: Path) -> None:
    engine = server.weights()
    # One request keeps one replica busy. The idle replica answers a flush first.
    version = server.version()
    running = Generation(server, 100)
    assert running.begun.wait(PATIENCE_S)
    assert not RUNNER.run(engine.pause_when_idle(0))
    assert RUNNER.run(engine.pause_when_idle(PATIENCE_S))
    assert running.versions() == [version]
    waiting = [Generation(server, 2) for _ in range(4)]
    assert not any(request.begun.wait(1) for request in waiting)
    RUNNER.run(engine.release(("weights", "kv_cache")))
    info = RUNNER.run(engine.client.get_json("/server_info"))
    assert len(info["internal_states"]) == 2
    state = state_of(engine.url, info)
    assert state is not None
    assert state.is_paused
    assert state.released == ("kv_cache", "weights")
    RUNNER.run(engine.restore())
    # Use no canary: during a canary the server would answer the waiting requests before the version is committed.
    updates = updater(engine, Source(trained, weights=read(trained)))
    assert updates.update(31).verified
    updates.close()
    for request in waiting:
        assert set(request.versions()) == {"31"}
    assert_all_serve(server, trained, 31)


def test_requests_of_all_replicas_are_interrupted(server: RunningServer) -> None:
    """Retracted requests of both replicas continue with their tokens."""
    engine = server.weights()
    running = [Generation(server, 60) for _ in range(4)]
    assert all(request.begun.wait(PATIENCE_S) for request in running)
    RUNNER.run(engine.interrupt())
    RUNNER.run(engine.resume())
    for request in running:
        request.versions()
