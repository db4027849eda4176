"""For tests of weight updates: a real SGLang server on a CPU, a source of weights, and log-probabilities of both."""

from __future__ import annotations

import functools
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_dppo.config.schema import TrainConfig, WeightSyncConfig
from megatron_dppo.engine.client import EngineClient, HttpClient
from megatron_dppo.engine.process import EngineProcess
from megatron_dppo.engine.protocol import GenerationRequest
from megatron_dppo.fleet.generation import GenerationLimits, Results, generate_many
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.quantization import Rounding
from megatron_dppo.model.shard_plan import Message, Slice
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.weights.canary import Tolerance, compare_canary
from megatron_dppo.weights.distributed import DistributedStrategy
from megatron_dppo.weights.engine_weights import EngineWeights
from megatron_dppo.weights.one_rank import OneRankWeights
from megatron_dppo.weights.server.shards import WHOLE, slices_in
from megatron_dppo.weights.shards import Sent, Shards, ShardStrategy
from megatron_dppo.weights.shared_memory import TensorStrategy
from megatron_dppo.weights.transaction import WeightUpdater
from tests.integration.shared_launcher import server_of
from tests.patience import UNBOUNDED_S, wait_healthy

KEY, ADMIN_KEY = "user-key", "admin-key"
PROMPT = [19, 13, 20, 31, 45, 61, 7]
TIMEOUT_S = 60.0
READS = 12
"""Tensors that are read for the first messages: a message has at most MESSAGE_BYTES."""
MESSAGE_BYTES = 50_000
Weights = dict[str, Tensor]
E = TypeVar("E", bound=EngineWeights)
RUNNER = AsyncRunner()
"""Runs the calls to engines for all tests. Its thread ends with the process."""


@dataclass
class RunningServer:
    """A running server and the checkpoint that it started from."""

    process: EngineProcess
    folder: Path
    dtype: str = "float32"
    quantization: str | None = None

    def weights(self, kind: type[E] = EngineWeights) -> E:  # type: ignore[assignment]
        opening = engine_weights(self.process.url, self.folder, kind, self.dtype, self.quantization)
        return RUNNER.run(opening)

    def version(self) -> str:
        return RUNNER.run(self.weights().version())

    def request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        request = urllib.request.Request(self.process.url + path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", f"Bearer {KEY}")
        return request

    def post(self, path: str, body: dict[str, Any], timeout: float = 120) -> dict[str, Any]:
        with urllib.request.urlopen(self.request(path, body), timeout=timeout) as answer:
            return json.loads(answer.read())


async def engine_weights(
    url: str,
    folder: str | Path,
    kind: type[E] = EngineWeights,  # type: ignore[assignment]
    dtype: str = "float32",
    quantization: str | None = None,
) -> E:
    return await kind.connect(
        HttpClient(url, KEY, ADMIN_KEY),
        load_model_shape(folder),
        dtype,
        quantization=quantization,
        timeout_s=TIMEOUT_S,
    )


def policy_config(folder: str | Path, **parallel: Any) -> TrainConfig:
    """Return the configuration of a trainer of ``folder`` in this layout."""
    return run_config(Path(folder), parallel=parallel)


def run_config(folder: Path, **sections: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "run": {"directory": str(folder / "run"), "steps": 1},
            "model": {"hf_checkpoint": str(folder), "dtype": "float32"},
            "data": {"train": "unused.jsonl"},
            "rollout": {"prompts_per_step": 1, "group_size": 2, "max_response_tokens": 512},
            "training": {"prompts_per_mini_batch": 1, "micro_batch_tokens": 1024},
            "optimizer": {"lr": 1e-5},
            "engine": {"device": "cpu", "start_timeout_s": UNBOUNDED_S},
            **sections,
        }
    )


def serve(
    folder: Path,
    *,
    lora: dict[str, Any] | None = None,
    quantization: str | None = None,
    atomic_updates: bool = False,
    **sglang: Any,
) -> RunningServer:
    dtype = "bfloat16" if quantization else "float32"
    model = {"hf_checkpoint": str(folder), "dtype": dtype}
    engine = {
        "device": "cpu",
        "start_timeout_s": UNBOUNDED_S,
        "quantization": quantization,
        "atomic_updates": atomic_updates,
    }
    config = run_config(folder, sglang=sglang, lora=lora or {}, model=model, engine=engine)
    process = server_of(config, folder / "engine.log", KEY, ADMIN_KEY)
    process.start()
    wait_healthy(process)
    return RunningServer(process, folder, dtype, quantization)


class WatchedValues(dict[ParameterKey, Tensor]):
    """Values that call ``between`` when ``reads`` of them have been read."""

    def __init__(
        self, values: Mapping[ParameterKey, Tensor], between: Callable[[], None], reads: int
    ) -> None:
        super().__init__(values)
        self._between = between
        self._reads_until = reads

    def __getitem__(self, key: ParameterKey) -> Tensor:
        self._reads_until -= 1
        if self._reads_until == 0:
            self._between()
        return super().__getitem__(key)


class Source(OneRankWeights):
    """Weights of one trainer rank: those of ``folder``, or other ``weights`` of its model.

    ``between`` runs in the midst of an update, when ``reads`` tensors have been read. Without other weights, the model
    in transformers computes the trainer's log-probabilities.
    """

    def __init__(
        self,
        folder: Path,
        between: Callable[[], None] | None = None,
        weights: Weights | None = None,
        reads: int = READS,
    ) -> None:
        self.weights = read(folder) if weights is None else weights
        super().__init__(load_model_shape(folder), self.weights)
        self.between = between
        self.model = folder if weights is None else None
        self._reads = reads

    def values(self) -> Mapping[ParameterKey, Tensor]:
        values = super().values()
        if self.between is not None:
            return WatchedValues(values, self.between, self._reads)
        return values

    def score(
        self, prompts: Sequence[Sequence[int]], *, rounding: Rounding | None = None
    ) -> list[list[float]]:
        assert self.model is not None
        assert rounding is None
        return [reference_log_probs(self.model, list(prompt)) for prompt in prompts]


Altered = Callable[[Slice, Tensor], Tensor]
"""Returns what takes the place of a slice, from the slice and its values."""


@contextmanager
def altered_on_the_way(alter: Altered) -> Iterator[None]:
    """Alter each slice of a whole message after the message was packed, and hashed, with the right values."""

    def send_altered_by(strategy: ShardStrategy, send: Any, batch: Sequence[Sent]) -> None:
        altered_batch: list[Sent] = []
        for message, right_data, changed in batch:
            data = strategy.allocate(right_data.numel(), right_data.device).copy_(right_data)
            if changed == WHOLE:
                alter_slices(strategy.shards, message, data, alter)
            altered_batch.append(Sent(message, data, changed))
        send(strategy, altered_batch)

    with pytest.MonkeyPatch.context() as patch:
        for kind in (DistributedStrategy, TensorStrategy):
            patch.setattr(kind, "send", functools.partialmethod(send_altered_by, kind.send))
        yield


@contextmanager
def altered_by_the_sender(alter: Altered) -> Iterator[None]:
    """Alter each slice of a message before the message is hashed and sent."""
    pack = Shards.pack

    def pack_altered(shards: Shards, batch: Sequence[Message], *arguments: Any) -> list[Tensor]:
        packed = pack(shards, batch, *arguments)
        for message, data in zip(batch, packed, strict=True):
            alter_slices(shards, message, data, alter)
        return packed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shards, "pack", pack_altered)
        yield


def alter_slices(shards: Shards, message: Message, data: Tensor, alter: Altered) -> None:
    for part, values in slices_in(message, data, shards.dtype_of):
        values.copy_(alter(part, values.clone()))


def with_small_messages(config: WeightSyncConfig) -> WeightSyncConfig:
    """Return the configuration with smaller messages, or buckets, than a file can ask for."""
    return config.model_copy(update={"bucket_mib": MESSAGE_BYTES / 2**20})


def updater(
    engine: EngineWeights | Sequence[EngineWeights],
    source: Any,
    timeout_s: float = TIMEOUT_S,
    **config: Any,
) -> WeightUpdater:
    """Return an updater of one engine or several. It has a canary if the source has a model."""
    engines = [engine] if isinstance(engine, EngineWeights) else list(engine)
    by_url = {engine.url: engine for engine in engines}
    canary = {"canary_every": int(source.model is not None)}
    settings = with_small_messages(WeightSyncConfig(timeout_s=timeout_s, **{**canary, **config}))

    async def open_engine(url: str) -> EngineWeights:
        return by_url[url]

    updates = WeightUpdater(source, settings, lambda error: error, open_engine, RUNNER)
    updates.attach(list(by_url))
    return updates


def read(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


def reference_log_probs(folder: Path, tokens: list[int]) -> list[float]:
    """Return log p(token | tokens before) of ``tokens[1:]``, computed by transformers in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    log_probs = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])
    return log_probs[:, 0].tolist()


def adapter_log_probs(server: RunningServer, adapter: str, tokens: list[int]) -> list[float]:
    """Return log p(token | tokens before) of ``tokens[1:]``, computed by the server with the adapters of this name."""
    return RUNNER.run(server.weights().score([tokens], adapter))[0]


def engine_log_probs(server: RunningServer) -> tuple[list[int], list[float], str]:
    """Return the prompt with its greedy continuation, the log-prob of every token except the first, and the version."""
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    answer = server.post("/generate", {**body, "return_logprob": True, "logprob_start_len": 0})
    info = answer["meta_info"]
    entries = info["input_token_logprobs"][1:] + info["output_token_logprobs"]
    return PROMPT + answer["output_ids"], [e[0] for e in entries], info["weight_version"]


def assert_serves(server: RunningServer, folder: Path, version: int) -> None:
    tokens, log_probs, label = engine_log_probs(server)
    assert label == str(version)
    report = compare_canary(
        [reference_log_probs(folder, tokens)], [log_probs], Tolerance(1e-5, 1e-5)
    )
    assert report.tokens == len(PROMPT) - 1 + 12


class Generation(threading.Thread):
    """A thread with one streamed request. ``begun`` is set at the first token; ``info`` is the last ``meta_info``.

    ``more``: further fields of the request's body.
    """

    def __init__(self, server: RunningServer, tokens: int, **more: Any) -> None:
        super().__init__(daemon=True)
        sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True, **more}
        self._request = server.request("/generate", body)
        self.begun = threading.Event()
        self.info: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    self.info = json.loads(line[6:])["meta_info"]
                    self.begun.set()

    def versions(self) -> list[str]:
        self.join(120)
        assert self.info["finish_reason"]["type"] == "length"
        return [span["version"] for span in self.info["weight_versions"]]


def generated(
    server: RunningServer, requests: Sequence[GenerationRequest], concurrency: int = 16
) -> Results:
    """Return the responses of ``server`` to all ``requests``."""

    async def generate() -> Results:
        client = EngineClient(server.process.url, KEY, ADMIN_KEY)
        try:
            return await generate_many(client, list(requests), GenerationLimits(concurrency))
        finally:
            await client.close()

    return RUNNER.run(generate())


def router_choices(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """Return the two experts that transformers' routers choose for each token except the last, by layer."""
    with torch.no_grad():
        routers = model(torch.tensor([list(token_ids)]), output_router_logits=True).router_logits
    return torch.stack([r[:-1].topk(2).indices for r in routers], dim=1).numpy()
