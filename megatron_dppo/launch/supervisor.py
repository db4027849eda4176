"""One machine's run: its servers and the trainer's ranks, from start to end, and nothing left behind.

A rank's error ends the run. A dead server is started again. One Ctrl-C (or SIGTERM, or SIGHUP) asks
the ranks to stop cleanly with SIGTERM, a second one ends everything at once. When the servers are given
up, the ranks, which are in order, are asked to stop cleanly too: the run fails after a checkpoint.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megatron_dppo.fleet.supervision import EngineGivenUpError, SupervisedFleet
from megatron_dppo.launch.ranks import RankFailure, RankGroup
from megatron_dppo.system.processes import adopt_orphans, kill_descendants

log = logging.getLogger(__name__)

FAILED = 1
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.05
_FAILURE_GRACE_S = 2.0


class Supervisor:
    """Runs servers (or none) and ranks until they end. Owns the process's signals and all of its
    descendants."""

    def __init__(self, ranks: RankGroup, fleet: SupervisedFleet | None) -> None:
        self._ranks = ranks
        self._fleet = fleet
        self._received: list[int] = []
        self._handled = 0
        self._given_up = False

    def run(self) -> int:
        """The run's exit code: 0 at its end, 128 + signal after a stop that was asked for, 1 for a
        failure."""
        adopt_orphans()
        code = FAILED
        with self._signals():
            try:
                if self._fleet is not None:
                    self._fleet.start()
                self._ranks.start()
                code = self._watch()
            finally:
                self._end(at_once=code == FAILED or self._handled > 1)
        return code

    def _watch(self) -> int:
        while True:
            failures = self._ranks.failures(_FAILURE_GRACE_S)
            if failures:
                return self._on_failure(failures)
            if None not in self._ranks.codes():
                return self._stop_code()
            if len(self._received) > self._handled:
                self._handled += 1
                if self._handled > 1 or self._given_up:
                    log.warning("ending at once; the run resumes from its last checkpoint")
                    return self._stop_code()
                self._ask_to_stop("stopping", "again to end at once")
            if self._fleet is not None and not (self._handled or self._given_up):
                self._check(self._fleet)
            time.sleep(_POLL_S)

    def _check(self, fleet: SupervisedFleet) -> None:
        try:
            fleet.check()
        except EngineGivenUpError as error:
            log.error("%s", error)
            self._given_up = True
            self._ask_to_stop("no server is left", "Ctrl-C to end at once")

    def _ask_to_stop(self, why: str, hint: str) -> None:
        log.info("%s: the trainer ends its step and saves a checkpoint; %s", why, hint)
        self._ranks.signal(signal.SIGTERM)

    def _stop_code(self) -> int:
        """1 where the servers were given up; 128 + the first stop signal, as shells report it; 0 when
        none came."""
        if self._given_up:
            return FAILED
        return 128 + self._received[0] if self._received else 0

    def _on_failure(self, failures: list[RankFailure]) -> int:
        if (self._handled or self._given_up) and all(
            failure.code == -signal.SIGTERM for failure in failures
        ):
            log.info("stopped before the training began; there was nothing to save")
            return self._stop_code()
        first, *others = failures
        self._ranks.kill()  # completes the files that the report quotes
        log.error("%s", first.report())
        for other in others:
            log.error("after it, rank %d failed too: see %s", other.rank, other.output)
        return FAILED

    def _end(self, *, at_once: bool) -> None:
        self._ranks.kill()
        if self._fleet is not None:
            self._fleet.stop(at_once=at_once)
        left = kill_descendants()
        if left:
            log.error("processes %s do not end; the kernel holds them", left)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        handlers = {number: self._note for number in _STOP_SIGNALS}
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
