"""Check the log-probabilities that a server reports for its samples against those of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_dppo.diagnostics.gpu_check import (
    Bench,
    CheckRow,
    at_most,
    logits_of_transformers,
    part,
    tiny_model,
)
from megatron_dppo.diagnostics.gpu_check.runs import (
    SERVER_RESPONSE_TOKENS,
    StartedServer,
    require_engine,
    running_server,
)
from megatron_dppo.engine.client import EngineClient
from megatron_dppo.engine.protocol import GenerationRequest, SamplingParams
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.weights.canary import canary_prompts

if TYPE_CHECKING:
    from megatron_dppo.data.trajectory import Trajectory
    from megatron_dppo.metrics.row import Dtype

PROMPTS = 8
MARGIN = 1e-3
"""The server may be off by twice the error of transformers in bfloat16, plus this number of nats."""


@part("eight responses of a server: log-probabilities against transformers'", 300.0)
def generation(bench: Bench) -> Iterator[CheckRow]:
    """Sample eight responses in bfloat16, and score their tokens by transformers in bfloat16 and in float32.

    The server may be twice as far from float32 as transformers in bfloat16 is: both round, and both may choose other
    experts for a token.
    """
    require_engine()
    model = tiny_model(bench.folder / "model")
    with running_server(bench, model, "bfloat16") as server:
        responses = sampled(server)
    tokens = sum(response.sampled for response in responses)
    expected = PROMPTS * SERVER_RESPONSE_TOKENS
    yield CheckRow("sampled tokens", str(tokens), str(expected), tokens == expected)
    by_server = []
    for response in responses:
        by_server.append(torch.tensor(response.columns["rollout_log_probs"]))
    device = bench.device
    exact = scores(model, "float32", device, responses)
    rounded = scores(model, "bfloat16", device, responses)
    bound = mean_difference(rounded, exact)
    yield CheckRow("transformers, bfloat16, against float32", f"{bound:.2g} nats")
    difference = mean_difference(by_server, rounded)
    yield CheckRow("the server against transformers, bfloat16", f"{difference:.2g} nats")
    label = "the server, bfloat16, against transformers, float32"
    yield at_most(label, mean_difference(by_server, exact), 2 * bound + MARGIN, " nats")


def sampled(server: StartedServer) -> list[Trajectory]:
    """Return a response to each of eight prompts, without an early end."""
    sampling = SamplingParams(SERVER_RESPONSE_TOKENS, ignore_eos=True)
    requests = []
    for number, prompt in enumerate(canary_prompts(server.shape.vocab_size, PROMPTS)):
        requests.append(GenerationRequest(number, prompt, sampling))
    with AsyncRunner() as runner:
        client = EngineClient(server.process.url, server.key, server.key)
        responses = runner.run(client.generate(requests, "gpu-check"))
        runner.run(client.close())
    return responses


def scores(
    model: Path, dtype: Dtype, device: str, responses: Sequence[Trajectory]
) -> list[torch.Tensor]:
    """Return, by response, transformers' log p(token | tokens before it) of the sampled tokens, float32 [R], nats."""
    log_probs: list[torch.Tensor] = []
    sequences = [response.token_ids.tolist() for response in responses]
    logits_of_responses = logits_of_transformers(model, sequences, dtype, device)
    for response, logits in zip(responses, logits_of_responses, strict=True):
        next_ids = torch.as_tensor(response.token_ids[1:], dtype=torch.long, device=device)
        chosen = logits[:-1].log_softmax(-1).gather(1, next_ids[:, None])[:, 0]
        log_probs.append(chosen[-response.sampled :].cpu())
    return log_probs


def mean_difference(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """Return the mean absolute difference over all tokens of all responses."""
    return float((torch.cat(list(left)) - torch.cat(list(right))).abs().mean())
