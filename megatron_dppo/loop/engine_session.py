"""The engine as a run sees it: generation and weight updates that survive the server's death.

Every public method is collective over all trainer ranks. When the server is lost, the ranks agree on
it, wait for the next incarnation that the supervisor publishes, restore the current weights there,
verified, and ask only for what is still missing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from types import TracebackType
from typing import Self

import torch

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.loop.endpoint import (
    Endpoint,
    EngineUnavailableError,
    report_lost,
    wait_for_endpoint,
)
from megatron_dppo.loop.stopping import RunStoppedError
from megatron_dppo.metrics.progress import progress
from megatron_dppo.rollout.async_runner import AsyncRunner
from megatron_dppo.rollout.check_engine import check_engine
from megatron_dppo.rollout.client import EngineClient
from megatron_dppo.rollout.engine_weights import EngineWeights
from megatron_dppo.rollout.errors import (
    EngineLostError,
    GenerationInterruptedError,
    StopRequestedError,
)
from megatron_dppo.rollout.generation import (
    GenerationJob,
    GenerationLimits,
    GenerationProgress,
    Results,
    generate_many,
)
from megatron_dppo.rollout.requests import GenerationResult
from megatron_dppo.trainer.distributed import all_gather_json, broadcast_json
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.types import Rollout
from megatron_dppo.weight_sync.base import UpdateReport, WeightUpdateError
from megatron_dppo.weight_sync.distributed import DistributedTransport
from megatron_dppo.weight_sync.update import WeightUpdater

log = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Losses of the engine in a row, without a response or an update in between, before a run gives up.

The supervisor bounds the restarts of its own server (``engine.max_restarts``); this bounds the patience
with one that is attached by URL.
"""
_REDRAW_SECONDS = 0.2


class _Outcome(IntEnum):
    """How a rank's share of a generation ended; the worst of all ranks counts."""

    DONE = 0
    LOST = 1
    STOPPED = 2


@dataclass
class Generation:
    """A job that runs in the background: ``done`` holds what earlier attempts finished."""

    job: GenerationJob
    description: str
    done: dict[Hashable, GenerationResult] = field(default_factory=dict)
    running: Future[Results] | None = None
    latest: GenerationProgress | None = None

    @property
    def total(self) -> int:
        """Responses that the job asks for."""
        return len(self.job.problems) * self.job.group_size

    def report(self, progress: GenerationProgress) -> None:
        """Keep the newest progress, for whoever looks."""
        self.latest = progress


class EngineSession:
    """``connect`` first; a context manager that leaves the engine in peace.

    ``version`` is the weight version that the engine has committed; None before the first update.
    """

    def __init__(self, config: TrainConfig, trainer: Trainer, stop: Callable[[], bool]) -> None:
        self._config = config
        self._trainer = trainer
        self._stop = stop
        self._runner = AsyncRunner()
        self._client: EngineClient | None = None
        self._endpoint: Endpoint | None = None
        self._updater = WeightUpdater(trainer, None, config.weight_sync, first_failure)
        self._failures = 0
        self.version: int | None = None
        self.updates = 0
        self.verified_updates = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._updater.close()
        if self._client is not None:
            self._runner.run(self._client.close())
        self._runner.close()

    def connect(self) -> None:
        """Wait for the engine and attach to it. Raises RunStoppedError, EngineUnavailableError."""
        self._connect()

    # --- weights

    def update_weights(self, version: int) -> UpdateReport:
        """Bring the trainer's weights to the engine as ``version``; returns when they are committed.

        Raises RunStoppedError, EngineUnavailableError.
        """
        while True:
            try:
                report = self._updater.update(version)
            except WeightUpdateError as error:
                self._count_failure(str(error))
                self._connect()
                continue
            # A push that only restores the same version is no progress: the loss may come again.
            if version != self.version:
                self._failures = 0
            self.version = version
            self.updates += 1
            self.verified_updates += report.verified
            return report

    # --- generation

    def generate(self, job: GenerationJob, description: str) -> list[Rollout]:
        """All responses of ``job``, this rank's own (an empty job on ranks that lead no replica).

        Raises RunStoppedError on every rank when a clean stop was asked for meanwhile.
        """
        return self.finish(self.start(job, description))

    def start(self, job: GenerationJob, description: str) -> Generation:
        """Ask for the responses of ``job`` and return at once; they come while this rank does other work.

        Until ``finish``, weights must not be updated: an update waits for running requests. Not collective.
        """
        generation = Generation(job, description)
        self._resume(generation)
        return generation

    def finish(self, generation: Generation) -> list[Rollout]:
        """As ``generate``, of what ``start`` began; shows progress while it waits."""
        while True:
            before = len(generation.done)
            outcome, reason = self._await(generation)
            answers = all_gather_json([int(outcome), reason, len(generation.done) > before])
            worst = max(_Outcome(answer[0]) for answer in answers)
            if worst is _Outcome.STOPPED:
                raise RunStoppedError("stopped while generating")
            if worst is _Outcome.DONE:
                self._failures = 0
                return generation.job.rollouts(generation.done)
            if any(answer[2] for answer in answers):
                self._failures = 0
            self._count_failure(next(a[1] for a in answers if a[0] == _Outcome.LOST))
            self._restore()
            self._resume(generation)

    def _resume(self, generation: Generation) -> None:
        """Have what is still missing generated in the background."""
        requests = generation.job.requests(generation.done)
        generation.latest = None
        if not requests:
            generation.running = None
            return
        assert self._client is not None
        generation.running = self._runner.submit(
            generate_many(
                self._client,
                requests,
                GenerationLimits.of(self._config.rollout),
                on_progress=generation.report,
                stop=self._stop,
            )
        )

    def _await(self, generation: Generation) -> tuple[_Outcome, str]:
        running, done = generation.running, generation.done
        if running is None:
            return (_Outcome.STOPPED if self._stop() else _Outcome.DONE), ""
        already = len(done)
        with progress(generation.description, generation.total) as bar:
            while not wait([running], _REDRAW_SECONDS).done:
                if (now := generation.latest) is not None:
                    speed = f"{now.tokens_per_second:.0f} tokens/s"
                    bar.update(completed=already + now.done, note=speed)
        try:
            done |= running.result()
        except GenerationInterruptedError as interruption:
            done |= interruption.completed
            return _Outcome.LOST, str(interruption)
        except StopRequestedError:
            return _Outcome.STOPPED, ""
        return _Outcome.DONE, ""

    # --- connection

    def _restore(self) -> None:
        """A healthy engine with the weights of the version that the run is at."""
        version = self.version
        self._connect()
        if version is not None:
            self.update_weights(version)
            log.info("engine restored at weight version %d", version)

    def _count_failure(self, reason: str) -> None:
        self._failures += 1
        log.warning("engine lost: %s", reason)
        if self._failures > MAX_FAILURES:
            raise EngineUnavailableError(
                f"the engine was lost {self._failures} times in a row; the last time: {reason}"
            )

    def _connect(self) -> None:
        """Wait for the published endpoint and attach to it; its weights count as unknown."""
        self._endpoint = endpoint = self._agree_on_endpoint()
        if self._client is not None:
            self._runner.run(self._client.close())
        self._client = EngineClient(endpoint.url, endpoint.api_key, endpoint.admin_api_key)
        transport, error = None, None
        if self._trainer.topology.rank == 0:
            try:
                transport = self._transport(endpoint)
            except EngineLostError as lost:
                error = str(lost)
        if (reason := first_failure(error)) is not None:
            self._count_failure(reason)
            self._connect()
            return
        self._updater.attach(transport)

    def _transport(self, endpoint: Endpoint) -> DistributedTransport:
        config = self._config
        if config.engine.url is not None:
            assert self._client is not None
            self._runner.run(check_engine(config, self._client))
        weights = EngineWeights(
            endpoint.url,
            self._trainer.shape,
            config.model.dtype,
            api_key=endpoint.api_key,
            admin_api_key=endpoint.admin_api_key,
            timeout_s=config.weight_sync.timeout_s,
        )
        return DistributedTransport(weights, timeout_s=config.weight_sync.timeout_s)

    def _agree_on_endpoint(self) -> Endpoint:
        found = self._wait() if self._trainer.topology.rank == 0 else None
        shared = broadcast_json(asdict(found) if found else None, src=0)
        if shared is None:
            raise RunStoppedError("stopped while waiting for the engine")
        return Endpoint(**shared)

    def _wait(self) -> Endpoint | None:
        engine = self._config.engine
        self._report_if_hung()
        attached = engine.url and Endpoint(
            engine.url,
            0,
            os.environ.get("MEGATRON_DPPO_API_KEY"),
            os.environ.get("MEGATRON_DPPO_ADMIN_API_KEY"),
        )
        with progress("waiting for the engine"):
            return wait_for_endpoint(
                self._config.run.directory,
                self._is_healthy,
                attached=attached or None,
                timeout_s=engine.start_timeout_s,
                stop=self._stop,
            )

    def _report_if_hung(self) -> None:
        """Have the supervisor replace the engine that was lost, unless it still answers."""
        if self._endpoint is None or self._config.engine.url is not None:
            return
        if not self._is_healthy(self._endpoint):
            report_lost(self._config.run.directory, self._endpoint)

    def _is_healthy(self, endpoint: Endpoint) -> bool:
        async def ask() -> bool:
            async with EngineClient(endpoint.url, endpoint.api_key) as client:
                if self._config.engine.url is not None:
                    return await client.answers(timeout_s=5.0)
                return await client.health(timeout_s=5.0)

        return self._runner.run(ask())


def first_failure(error: str | None) -> str | None:
    """The first rank's failure, on every rank; None where none failed. Collective."""
    if not torch.distributed.is_initialized():
        return error
    return next((e for e in all_gather_json(error) if e is not None), None)
