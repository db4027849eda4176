"""Teachers on real SGLang servers: what they return for given tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_dppo.engine.client import HttpClient
from megatron_dppo.engine.process import EngineProcess
from megatron_dppo.engine.token_scores import ScoredTokens
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.network import free_port
from tests.integration.kept_fleet import config_of
from tests.integration.shared_launcher import shared_runtime
from tests.patience import wait_healthy
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

KEY = "5c0ffee5-teacher"
SEQUENCES = [
    tuple(np.random.default_rng(i).integers(3, 512, size=n).tolist())
    for i, n in enumerate((9, 40, 150))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("teacher") / "model", "qwen3", seed=5)


@pytest.fixture(scope="module")
def reference(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    # Chunks of 32 tokens: a long sequence is scored in several steps.
    config = config_of(model.parent / "run", model).model_copy(
        update={"sglang": {"chunked_prefill_size": 32}}
    )
    process = EngineProcess(
        config,
        RunSpec.of_checked(config).servers,
        port=free_port(),
        log_path=model.parent / "server.log",
        seed=1,
        api_key=KEY,
        admin_api_key=KEY,
        runtime=shared_runtime(),
    )
    process.start()
    wait_healthy(process)
    yield process.url
    process.kill()


def log_probs_of(reference: PreTrainedModel, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return log p(each token | all tokens before position t), fp64 [S - 1, vocabulary]."""
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0, :-1].double()
    return torch.log_softmax(logits, dim=-1)


@pytest.mark.parametrize("start", [1, 5])
@pytest.mark.parametrize("tokens", SEQUENCES, ids=len)
def test_scores_are_the_models_own_log_probabilities(
    url: str, reference: PreTrainedModel, tokens: tuple[int, ...], start: int
) -> None:
    scored = ScoredTokens(tokens, start, top_k=7, vocabulary=512)

    async def ask() -> bytes:
        async with HttpClient(url, KEY) as client:
            return await client.request("POST", "/generate", scored.body())

    with AsyncRunner() as runner:
        # The second answer comes from a server with these tokens in its prefix cache.
        answers = [scored.read(runner.run(ask()), url) for _ in range(2)]
    expected = log_probs_of(reference, tokens)[start - 1 :]
    of_tokens = expected.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]
    best = expected.topk(7, dim=-1)
    for columns in answers:
        np.testing.assert_allclose(columns["teacher_log_probs"], of_tokens, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(columns["teacher_topk_ids"], best.indices)
        np.testing.assert_allclose(
            columns["teacher_topk_log_probs"], best.values, atol=1e-5, rtol=0
        )
