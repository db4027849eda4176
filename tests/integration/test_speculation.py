"""A real SGLang server on a CPU that drafts with n-grams: the same tokens and log-probabilities as plain decoding."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy import stats
from transformers import AutoModelForCausalLM

from megatron_dppo.engine.protocol import GenerationRequest, RoutedShape, SamplingParams
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.table import BY_METRIC
from megatron_dppo.model.families import load_model_shape
from tests.integration.runs import TrainingRun, records_of, summary_of, write_material
from tests.integration.weight_server import (
    RunningServer,
    Source,
    assert_serves,
    generated,
    read,
    router_choices,
    serve,
    updater,
)
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

VOCABULARY = 500
PROMPT = [5, 6, 7, 9, 5, 6]
TEMPERATURE = 0.15
"""A temperature so low that a random model repeats itself and drafts are accepted."""
SAMPLES, PER_CALL, TOKENS = 1600, 40, 4
LEAST_SAMPLES = 200
LEAST_P = 1e-6


def probabilities(model: Any, prefix: tuple[int, ...]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *prefix]])).logits[0, -1]
    return (logits.double() / TEMPERATURE).softmax(-1).numpy()


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which token 0 often follows the likeliest token. SGLang fills trees of drafts with token 0."""
    folder = save_tiny_model(tmp_path_factory.mktemp("served"), vocab_size=VOCABULARY)
    model = load(folder)
    first = int(probabilities(model, ()).argmax())
    second = int(probabilities(model, (first,)).argsort()[-2])
    weights = read(folder)
    head = weights["lm_head.weight"]
    head[[0, second]] = head[[second, 0]]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def path_without_ninja(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """This machine's programs but ninja, as on a machine that has ninja only in the virtual environment."""
    folder = tmp_path_factory.mktemp("programs")
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(place).glob("*"):
            (folder / program.name).unlink(missing_ok=True)
            if program.name != "ninja":
                (folder / program.name).symlink_to(program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder))
        patch.setenv("SGLANG_JIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield str(folder)


@pytest.fixture(scope="module")
def server(folder: Path, path_without_ninja: str) -> Iterator[RunningServer]:
    options: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
    server = serve(folder, enable_return_routed_experts=True, **options)
    yield server
    server.process.kill()


def generate(
    server: RunningServer, prompts: list[list[int]], tokens: int, temperature: float
) -> Any:
    sampling = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    return server.post("/generate", body, timeout=1200)


def test_tokens_are_drawn_with_the_models_probabilities(
    server: RunningServer, folder: Path
) -> None:
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    steps = accepted = 0
    for _ in range(SAMPLES // PER_CALL):
        for answer in generate(server, [PROMPT] * PER_CALL, TOKENS, TEMPERATURE):
            ids = answer["output_ids"]
            for depth in range(TOKENS):
                groups[tuple(ids[:depth])].append(ids[depth])
            steps += answer["meta_info"]["spec_verify_ct"]
            accepted += answer["meta_info"]["spec_num_correct_drafts"]
    assert accepted > 0.2 * steps
    model = load(folder)
    tested = []
    for prefix, tokens in groups.items():
        if len(tokens) < LEAST_SAMPLES:
            continue
        expected = probabilities(model, prefix) * len(tokens)
        counts = np.bincount(tokens, minlength=VOCABULARY)
        is_frequent = expected >= 5
        pooled_counts = np.append(counts[is_frequent], counts[~is_frequent].sum())
        pooled_expected = np.append(expected[is_frequent], expected[~is_frequent].sum())
        assert stats.chisquare(pooled_counts, pooled_expected).pvalue > LEAST_P
        tested.append(prefix)
    # The first token comes from the prompt's pass, without drafts.
    assert max(map(len, tested)) > 0


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE, 1.0])
def test_log_probabilities_are_those_of_plain_decoding(
    server: RunningServer, folder: Path, temperature: float
) -> None:
    prompts = [PROMPT, [*PROMPT, *PROMPT], [8, 9] * 5]
    steps = 0
    for prompt, answer in zip(prompts, generate(server, prompts, 24, temperature), strict=True):
        info = answer["meta_info"]
        own = [entry[0] for entry in info["output_token_logprobs"]]
        ids = [entry[1] for entry in info["output_token_logprobs"]]
        assert ids == answer["output_ids"]
        scale = temperature or 1.0
        with torch.no_grad():
            logits = load(folder)(torch.tensor([[*prompt, *ids]])).logits[0]
        log_probs = (logits[len(prompt) - 1 : -1] / scale).log_softmax(-1)
        expected = log_probs.gather(1, torch.tensor(ids)[:, None])[:, 0]
        np.testing.assert_allclose(own, expected.numpy(), atol=4e-6 / min(scale, 1.0))
        steps += info["spec_verify_ct"]
    if temperature < 1:
        # Fewer steps than tokens: drafts were accepted.
        assert steps < len(prompts) * 23


def test_recorded_routing_is_that_of_the_accepted_tokens(
    server: RunningServer, folder: Path
) -> None:
    shape = RoutedShape.of_model(load_model_shape(folder))
    sampling = SamplingParams(max_new_tokens=24, temperature=TEMPERATURE, ignore_eos=True)
    requests = [
        GenerationRequest(
            number, tuple(PROMPT * (1 + number % 3)), sampling, {"routed_experts": shape}
        )
        for number in range(12)
    ]
    results = generated(server, requests, concurrency=8)
    model = load(folder)
    steps = 0
    for request in requests:
        result = results[request.key]
        expected = router_choices(model, result.token_ids.tolist())
        np.testing.assert_array_equal(result.columns["routed_experts"], expected)
        steps += result.verify_steps
    assert steps < len(requests) * 23


def test_an_update_reaches_a_server_that_drafts(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trained = save_tiny_model(tmp_path_factory.mktemp("trained"), vocab_size=VOCABULARY, seed=1)
    updates = updater(server.weights(), Source(trained))
    assert updates.update(1).verified
    updates.close()
    assert_serves(server, trained, 1)


def test_a_run_whose_servers_draft(tmp_path: Path) -> None:
    config = write_material(tmp_path)
    run = TrainingRun(
        config,
        *("sglang.speculative_algorithm=NGRAM", "sglang.speculative_num_draft_tokens=6"),
        *("rollout.temperature=0.4", "run.steps=3", "evaluation.every=3", "engine.device=cpu"),
        *("checkpoint.verify_export=false", "rollout.router_replay=true"),
    )
    with run:
        run.finish()
    summary = summary_of(run.directory)
    assert summary["weight_updates"] == summary["weight_updates_verified"] == 4
    records = [record for record in records_of(run.directory) if names.ACCEPTED_LENGTH in record]
    assert len(records) == 3
    lengths = [record[names.ACCEPTED_LENGTH] for record in records]
    gaps = [record[names.GAP_ON_POLICY] for record in records]
    print("tokens for each verification", lengths, "mean |pi - mu|", gaps)
    assert min(lengths) > 1
    assert max(gaps) < BY_METRIC[names.GAP_ON_POLICY].upper("float32") / 10
