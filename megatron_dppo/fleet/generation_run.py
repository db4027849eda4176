"""A generation job that goes on while the rank does other work, over as many attempts as it takes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from enum import IntEnum

from megatron_dppo.engine.errors import GenerationInterruptedError, StopRequestedError
from megatron_dppo.engine.requests import GenerationResult
from megatron_dppo.fleet.generation import (
    GenerationClient,
    GenerationJob,
    GenerationLimits,
    GenerationProgress,
    Results,
    generate_many,
)
from megatron_dppo.metrics.progress import progress
from megatron_dppo.system.async_runner import AsyncRunner

_REDRAW_SECONDS = 0.2


class Outcome(IntEnum):
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
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """From the start to the last response, also where nobody waited for it; recoveries included."""
        return 0.0 if self.ended is None else self.ended - self.started

    @property
    def total(self) -> int:
        """Responses that the job asks for."""
        return len(self.job.problems) * self.job.group_size

    def resume(
        self,
        runner: AsyncRunner,
        client: GenerationClient,
        limits: GenerationLimits,
        stop: Callable[[], bool],
    ) -> None:
        """Have what is still missing generated in the background."""
        requests = self.job.requests(self.done)
        self.latest = None
        if not requests:
            self.running = None
            return
        work = generate_many(client, requests, limits, on_progress=self._report, stop=stop)
        self.running = runner.submit(self._timed(work))

    def wait(self, stop: Callable[[], bool]) -> tuple[Outcome, str]:
        """Until this attempt ends, with a progress bar; how it ended, and why where it was lost."""
        if self.running is None:
            return (Outcome.STOPPED if stop() else Outcome.DONE), ""
        already = len(self.done)
        with progress(self.description, self.total) as bar:
            while not wait([self.running], _REDRAW_SECONDS).done:
                if (now := self.latest) is not None:
                    speed = f"{now.tokens_per_second:.0f} tokens/s"
                    bar.update(completed=already + now.done, note=speed)
        try:
            self.done |= self.running.result()
        except GenerationInterruptedError as interruption:
            self.done |= interruption.completed
            return Outcome.LOST, str(interruption)
        except StopRequestedError:
            return Outcome.STOPPED, ""
        return Outcome.DONE, ""

    def _report(self, now: GenerationProgress) -> None:
        self.latest = now

    async def _timed(self, work: Awaitable[Results]) -> Results:
        """``work``, with the moment kept at which it ended."""
        try:
            return await work
        finally:
            self.ended = time.monotonic()
