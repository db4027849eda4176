"""An engine and a trainer's weights in this process, for tests of the transaction of a weight update.

The engine holds real tensors and places real messages of ``weight_sync.strategy: tensor``, without a server.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import EngineRequestError
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.quantization import Rounding
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.tensor_hash import tiled_hash
from megatron_dppo.weights.checksums import EngineTensors
from megatron_dppo.weights.engine_weights import EngineWeights
from megatron_dppo.weights.engines import OpenEngine
from megatron_dppo.weights.one_rank import OneRankWeights
from megatron_dppo.weights.server.direct_loading import TensorPlaces
from megatron_dppo.weights.server.shards import SharedMessage
from megatron_dppo.weights.shared_bytes import SharedBytes
from megatron_dppo.weights.transaction import Agree, WeightUpdater, no_fence
from tests.constant_scores import ConstantScores
from tests.unit.test_engine_checksums import model_shape, weights

A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"
SCORE = -2.0
SHAPE = model_shape()
WEIGHTS = weights(SHAPE)
BYTES = sum(tensor.nbytes for tensor in WEIGHTS.values())
TABLE = EngineTensors(SHAPE, EngineLayout(), "cpu")
TENSORS = list(TABLE.sizes[0])
"""Names of the engine's tensors."""
NORM = "model.norm.weight"


class Source(OneRankWeights):
    """The weights of a trainer of one rank. The trainer's log-probabilities are all SCORE."""

    def __init__(self, *, fails: bool = False, rank: int = 0) -> None:
        super().__init__(SHAPE, WEIGHTS)
        self.rank = rank
        self.fails = fails

    def values(self) -> Mapping[ParameterKey, Tensor]:
        if self.fails:
            raise RuntimeError("gather failed")
        return super().values()

    def train(self) -> None:
        """Change one element of two tensors."""
        for key, tensor in list(self._values.items())[:2]:
            self._values[key] = tensor.clone()
            self._values[key].view(-1)[5] += 1

    def score(
        self, prompts: Sequence[Sequence[int]], *, rounding: Rounding | None = None
    ) -> list[list[float]]:
        return [[SCORE] * (len(prompt) - 1) for prompt in prompts]


class Engine(ConstantScores):
    """An engine without a server. It records its calls, and the call named ``failing`` raises ``error``.

    ``sent``: bytes of each message that it received. ``altered``: wrong checksums, by tensor.
    """

    device, ranks, layout = "cpu", 1, (EngineLayout(), "cpu")
    places_directly = True
    tensors = TABLE
    _dtype = torch.float32

    def __init__(self, url: str = A) -> None:
        self.url = url
        self.failing: str | None = None
        self.error: Exception = EngineRequestError(400, "refused")
        self.idle = self.alive = True
        self.keeps_whole = False
        self.calls: list[str] = []
        self.sent: list[int] = []
        self.altered: dict[str, str] = {}
        self.on_end: Callable[[], None] | None = None
        self.score_value = SCORE
        self.decode_value = SCORE
        self.closed = False
        self.label = "0"
        self.held = {name: torch.full((n,), 7.0) for name, n in self.tensors.sizes[0].items()}
        self._places = TensorPlaces(self.tensors, 0, self.held)
        self._places.fill_padding()
        self._kept: list[Callable[[], None]] = []

    async def close(self) -> None:
        self.closed = True

    def step(self, name: str) -> None:
        self.calls.append(name)
        if name == self.failing:
            raise self.error

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Hold ``weights``, as after a start from their checkpoint."""
        self._places.load(weights.items())

    async def is_answering(self, timeout_s: float) -> bool:
        return self.alive

    async def is_scheduling(self, timeout_s: float) -> bool:
        return self.alive

    async def pause_when_idle(self, timeout_s: float) -> bool:
        self.step("idle")
        return self.idle

    async def pause(self) -> None:
        self.step("pause")

    async def resume(self) -> None:
        self.step("resume")

    async def flush(self) -> None:
        self.step("flush")

    async def set_version(self, label: str) -> None:
        self.step(label)
        self.label = label

    async def version(self) -> str:
        return self.label

    async def close_group(self, name: str) -> None:
        self.step("close_group")

    async def begin(self) -> None:
        self._kept.clear()
        self.step("begin")

    async def receive_shared(self, by_rank: Sequence[Sequence[SharedBytes]]) -> None:
        self.step("load")
        (messages,) = by_rank
        for text, data in messages:
            self.sent.append(data.numel())
            self._kept += SharedMessage(text, data).receive(
                self._places.placements, keeps_whole=self.keeps_whole
            )

    async def end(self) -> None:
        self.step("end")
        for load in self._kept:
            load()
        self._kept.clear()
        if self.on_end is not None:
            self.on_end()

    async def checksums(self) -> list[dict[str, str]]:
        self.step("checksums")
        return [{n: tiled_hash(tensor) for n, tensor in self.held.items()} | self.altered]

    async def score(
        self, prompts: Sequence[Sequence[int]], adapter: str | None = None
    ) -> list[list[float]]:
        self.step("score")
        return await super().score(prompts, adapter)


@functools.cache
def runner() -> AsyncRunner:
    """Runs the calls to engines for all tests; its thread ends with the process."""
    return AsyncRunner()


def opener(engines: Mapping[str, Engine | Exception]) -> OpenEngine:
    """Return a function that opens the engine at a URL, or raises the exception that ``engines`` has instead."""

    async def open_engine(url: str) -> EngineWeights:
        if isinstance(found := engines[url], Exception):
            raise found
        return found

    return open_engine


def alone(error: str | None) -> str | None:
    """Agree on an error without other ranks."""
    return error


def updater(
    *receivers: Engine,
    source: Source | None = None,
    agree: Agree = alone,
    message_bytes: int | None = None,
    fence: Callable[[], None] = no_fence,
    leave_devices: Callable[[], None] | None = None,
    **config: Any,
) -> WeightUpdater:
    """Return an updater that is attached to the engines. ``message_bytes``: largest size of a message."""
    by_url = {engine.url: engine for engine in receivers}
    settings = WeightSyncConfig(**{"strategy": "tensor", **config})
    if message_bytes is not None:
        settings = settings.model_copy(update={"bucket_mib": message_bytes / 2**20})
    updates = WeightUpdater(
        source or Source(),
        settings,
        agree,
        opener(by_url),
        runner(),
        fence,
        leave_devices=leave_devices,
    )
    if receivers:
        updates.attach(list(by_url))
    return updates
