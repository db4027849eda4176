"""Profile training steps of one rank with torch.profiler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from megatron_dppo.config.schema import ProfileConfig
from megatron_dppo.trainer import platform

log = logging.getLogger(__name__)


PROFILE_FOLDER = "profile"


class StepProfiler:
    """Writes ``<run directory>/profile/step<N>-rank<R>.json.gz`` for the steps and ranks of ``config``.

    With ``memory``, on a GPU, it also writes a ``.memory.pickle`` beside the trace.
    """

    def __init__(self, config: ProfileConfig, directory: str | Path, rank: int) -> None:
        self._profiles_memory = config.memory
        self._steps: frozenset[int] = frozenset()
        if rank in config.ranks:
            self._steps = frozenset(config.steps)
        self._folder = Path(directory) / PROFILE_FOLDER
        self._rank = rank

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Trace the block if ``config`` names ``step``. Log a warning if the trace cannot be written."""
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
        # The trace's name ends in two suffixes, .json.gz.
        trace_stem = trace.with_suffix("").with_suffix("")
        history = platform.gpu_memory_history(trace_stem.with_suffix(".memory.pickle"))
        with (
            torch.profiler.profile(
                activities=platform.profiled_activities(), profile_memory=self._profiles_memory
            ) as profiler,
            history if self._profiles_memory else nullcontext(),
        ):
            yield
        self._write(profiler, trace, step)

    def _write(self, profiler: torch.profiler.profile, trace: Path, step: int) -> None:
        try:
            profiler.export_chrome_trace(str(trace))
        except (OSError, RuntimeError) as error:
            log.warning("profile: no trace of step %d: %s", step, error)
        else:
            log.info("profile: step %d of rank %d is in %s", step, self._rank, trace)
