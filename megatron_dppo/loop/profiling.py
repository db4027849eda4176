"""Traces of single steps, for whoever wants to know where the time and the memory go."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_dppo.config.schema import ProfileConfig
from megatron_dppo.trainer import platform

log = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"


class StepProfiler:
    """Writes ``<run directory>/profile/step<N>-rank<R>.json.gz`` for the steps and ranks of ``config``,
    and with ``memory`` on a GPU ``.memory.pickle`` beside it."""

    def __init__(self, config: ProfileConfig, directory: str | Path, rank: int) -> None:
        self._memory = config.memory
        self._steps = frozenset(config.steps) if rank in config.ranks else frozenset[int]()
        self._folder = Path(directory) / PROFILE_FOLDER
        self._rank = rank

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Trace the block if ``step`` is asked for. A trace that can't be written is a warning."""
        if step not in self._steps:
            yield
            return
        trace = self._folder / f"step{step}-rank{self._rank}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("profile: no trace of step %d: %s", step, error)
            yield
            return
        history = platform.gpu_memory_history(trace.with_suffix("").with_suffix(".memory.pickle"))
        with torch.profiler.profile(
            activities=platform.profiled_activities(), profile_memory=self._memory
        ) as profiler:
            if self._memory:
                with history:
                    yield
            else:
                yield
        self._write(profiler, trace, step)

    def _write(self, profiler: torch.profiler.profile, trace: Path, step: int) -> None:
        try:
            profiler.export_chrome_trace(str(trace))
        except (OSError, RuntimeError) as error:
            log.warning("profile: no trace of step %d: %s", step, error)
        else:
            log.info("profile: step %d of rank %d is in %s", step, self._rank, trace)
