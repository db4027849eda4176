"""Supervision of a run from its start to its end: its servers, their HTTP router, and its ranks.

No process is left behind. A dead server is started again. After the death of a rank, all ranks are started again, while
the servers keep running. The run ends on an error that the user can put right, and if another start has taken over the
run. A requested stop (Ctrl-C, a signal, a time limit) makes the ranks end their step and save a checkpoint; a second
request ends everything at once. When no server has a restart left, the ranks save a checkpoint too, and then the run
fails.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from megatron_dppo.fleet.supervision import EngineGivenUpError, RestartBudget, SupervisedFleet
from megatron_dppo.launch.stops import Stop, StopRequests, terminal_stops
from megatron_dppo.logging import FAILED, REFUSED, failure_mark
from megatron_dppo.system import processes


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended with an error. ``rank`` is None if it is unknown; ``failed_at`` is in epoch seconds."""

    rank: int | None
    code: int
    output: Path
    failed_at: float

    def report(self) -> str:
        subject = "the ranks' step"
        if self.rank is not None:
            subject = f"rank {self.rank}"
        return (
            f"{subject} {processes.describe_exit(self.code)}; the end of {self.output}:\n"
            f"{processes.quote(processes.tail(self.output))}"
        )

    @property
    def is_refusal(self) -> bool:
        """Whether the rank ended by an error that the user can put right, and that a restart would repeat."""
        return self.code == REFUSED

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended the rank."""
        return self.code < 0 or self.code > _SIGNALLED

    @property
    def stopped_early(self) -> bool:
        """Whether SIGTERM, the request to stop, killed the rank, because the rank did not handle the signal yet."""
        return self.code in (-signal.SIGTERM, 128 + signal.SIGTERM)


class Ranks(Protocol):
    """All ranks of a run, on any hosts."""

    def start(self, number: int = 1) -> None:
        """Start every rank, for the ``number``-th time in this run; call from the main thread."""

    def ended(self) -> bool:
        """Whether all ranks have ended without an error."""

    def failures(self, grace_s: float) -> list[RankFailure]:
        """Return the ranks that ended with an error, the likely cause first; an empty list while no rank has failed.

        After the first failure, wait ``grace_s`` seconds for ranks that fail because of it.
        """

    def ask_to_stop(self) -> None:
        """Ask each rank to end its step and save a checkpoint."""

    def clear(self) -> None:
        """Kill ranks and their descendants, so that ``start`` may follow; returns when they have ended."""

    def kill(self) -> None:
        """Kill ranks and their descendants, and all that a further start could use; returns when they have ended."""


def keep_previous(path: Path) -> None:
    """Rename the output of an earlier start, and remove its failure mark."""
    failure_mark(path).unlink(missing_ok=True)
    if path.exists():
        path.replace(path.with_suffix(".previous.out"))


def failed_at(path: Path) -> float:
    """Return when the rank with this output file failed, in epoch seconds.

    The rank itself writes the time. For a rank that was killed, return the time of its last output; 0 without output.
    """
    try:
        return float(failure_mark(path).read_text())
    except (OSError, ValueError):
        pass
    if path.exists():
        return path.stat().st_mtime
    return 0.0


log = logging.getLogger(__name__)

_SIGNALLED = 128
"""A shell and srun report this number plus the signal's number for a process that a signal ended."""
_POLL_S = 0.05
_REAP_EVERY_S = 10.0
_FAILURE_GRACE_S = 2.0


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        code: exit code: 0 at the run's end, the stop's code after a requested stop, 1 for a failure.
        ending: ``succeeded`` if another start has taken over the run; ``refused`` if nothing was started.
        detail: text of a failure for the user, or the reason of a stop in one word.
    """

    code: int
    ending: Literal["ended", "stopped", "failed", "succeeded", "refused"]
    detail: str = ""


def _not_lost() -> str | None:
    return None


def _no_obstacle() -> str | None:
    return None


@dataclass(eq=False)
class RankRestarts:
    """The restarts of a run's ranks. Servers, router, lease and keys stay as they are.

    An error of a rank (not its death by a signal) would probably repeat if the run has made no progress since the ranks
    started. After the first start of the ranks, one such error ends the run. After a later start, the second such error
    in a row ends the run.

    Attributes:
        budget: limits number and pace of restarts.
        begin: called with the number of a start before its ranks start; fences off the ranks of earlier starts.
        progress: returns a number that grows as the run trains.
        obstacle: returns the reason why ranks can't start again on their hosts; None without an obstacle.
    """

    budget: RestartBudget
    begin: Callable[[int], None]
    progress: Callable[[], int]
    obstacle: Callable[[], str | None] = _no_obstacle
    number: int = field(default=1, init=False)
    _last_progress: int = field(default=0, init=False)
    _fruitless_errors: int = field(default=0, init=False)
    """Number of errors in a row without progress between them."""

    def begin_first(self) -> None:
        self._last_progress = self.progress()
        self.begin(self.number)

    def pause_after(self, failure: RankFailure) -> float | None:
        """Use up one restart and return the seconds to wait before it; None if ``failure`` ends the run."""
        if failure.is_refusal:
            return None
        progress = self.progress()
        has_progressed = progress > self._last_progress
        self._last_progress = max(progress, self._last_progress)
        if has_progressed or failure.is_killed:
            self._fruitless_errors = 0
        else:
            self._fruitless_errors += 1
        allowed_errors = 0 if self.number == 1 else 1
        if self._fruitless_errors > allowed_errors:
            return None
        obstacle = self.obstacle()
        if obstacle is not None:
            log.error("the ranks can't start again: %s", obstacle)
            return None
        return self.budget.take()

    def begin_next(self) -> None:
        self.number += 1
        self.begin(self.number)

    @property
    def is_used_up(self) -> bool:
        """Whether all restarts of the window were taken; False if the configuration allows none."""
        limit = self.budget.limit
        return limit > 0 and self.budget.taken >= limit


@dataclass(eq=False)
class Supervisor:
    """Runs servers and ranks until they end. It handles the process's signals, and ends all descendants of the process.

    Attributes:
        ranks: the ranks.
        fleet: the servers; None for a run without servers.
        lease_loss: returns a sentence about the loss of the run's lease (``Lease.loss``); None while the run holds it.
        restarts: restarts of the ranks; None if the death of a rank ends the run.
        stops: requested stops; by default Ctrl-C, SIGTERM and SIGHUP.
    """

    ranks: Ranks
    fleet: SupervisedFleet | None
    lease_loss: Callable[[], str | None] = _not_lost
    stops: StopRequests = field(default_factory=terminal_stops)
    restarts: RankRestarts | None = None
    _restart_due: float | None = field(default=None, init=False)
    """Time of the ranks' next start, by the monotonic clock; None while ranks run."""
    _handled_stops: list[Stop] = field(default_factory=list, init=False)
    _fleet_error: str = field(default="", init=False)
    """Text of the error that no server is left; empty while there are servers."""
    _reaper: processes.OrphanReaper = field(
        default_factory=lambda: processes.OrphanReaper(_REAP_EVERY_S), init=False
    )

    def run(self) -> Outcome:
        # Processes that ranks and servers leave behind become children of this process. It kills them at the end.
        processes.adopt_orphans()
        outcome = Outcome(FAILED, "failed", "the supervisor failed")
        with self.stops.listening():
            try:
                if self.fleet is not None:
                    self.fleet.start()
                if self.restarts is not None:
                    self.restarts.begin_first()
                self.ranks.start()
                outcome = self._watch()
            finally:
                # After a failure, or a second stop, the responses in flight are not needed.
                self._end(at_once=outcome.code == FAILED or len(self._handled_stops) > 1)
        return outcome

    def _watch(self) -> Outcome:
        while True:
            # Check the lease before the failures: after a loss of the lease, the fence makes the ranks fail.
            loss = self.lease_loss()
            if loss is not None:
                log.error("%s", loss)
                return Outcome(FAILED, "succeeded", loss)
            if self._restart_due is not None:
                if self._is_stopping:
                    log.info("no rank runs; the run resumes from its last checkpoint")
                    return self._stop_outcome()
                if time.monotonic() >= self._restart_due:
                    self._start_again()
            elif failures := self.ranks.failures(_FAILURE_GRACE_S):
                outcome = self._on_failure(failures)
                if outcome is not None:
                    return outcome
            elif self.ranks.ended():
                if self._is_stopping:
                    return self._stop_outcome()
                return Outcome(0, "ended")
            ends_at_once = self._handle_next_stop()
            if ends_at_once:
                log.warning("ending at once; the run resumes from its last checkpoint")
                return self._stop_outcome()
            if self.fleet is not None and self._is_stopping:
                self.fleet.free_devices()
            elif self.fleet is not None:
                self._check(self.fleet)
            self._reaper.poll()
            time.sleep(_POLL_S)

    @property
    def _is_stopping(self) -> bool:
        return bool(self._handled_stops or self._fleet_error)

    def _check(self, fleet: SupervisedFleet) -> None:
        try:
            fleet.check()
        except EngineGivenUpError as error:
            self._fleet_error = str(error)
            log.error("%s", error)
            log.info("no server is left: the trainer ends its step and saves a checkpoint")
            self.ranks.ask_to_stop()

    def _handle_next_stop(self) -> bool:
        """Handle the next requested stop, if there is one; return whether it ends the run at once."""
        requested_stops = self.stops.requested()
        if len(requested_stops) == len(self._handled_stops):
            return False
        stop = requested_stops[len(self._handled_stops)]
        was_stopping = self._is_stopping
        self._handled_stops.append(stop)
        if was_stopping:
            return stop.insists
        hint = f" ({stop.why})"
        if stop.insists:
            hint = "; again to end at once"
        log.info("stopping: the trainer ends its step and saves a checkpoint%s", hint)
        self.ranks.ask_to_stop()
        return False

    def _stop_outcome(self) -> Outcome:
        if self._fleet_error:
            return Outcome(FAILED, "failed", self._fleet_error)
        first_stop = self._handled_stops[0]
        # A later stop that insists gives the reason. It also gives the exit code if the first stop's code is 0.
        decisive_stop = first_stop
        if self._handled_stops[-1].insists:
            decisive_stop = self._handled_stops[-1]
        return Outcome(first_stop.code or decisive_stop.code, "stopped", decisive_stop.why)

    def _on_failure(self, failures: list[RankFailure]) -> Outcome | None:
        """End the remaining ranks; return the run's end, or None if the ranks start again."""
        if self._is_stopping and all(failure.stopped_early for failure in failures):
            log.info("stopped before the training began; there was nothing to save")
            return self._stop_outcome()
        likely_cause, *later_failures = failures
        # Killing the ranks completes the files that the report quotes.
        self.ranks.clear()
        report = likely_cause.report()
        log.error("%s", report)
        if later_failures:
            numbers = ", ".join(str(failure.rank) for failure in later_failures)
            noun = "rank" if len(later_failures) == 1 else "ranks"
            log.error("after it, %s %s failed too: see %s", noun, numbers, later_failures[0].output)
        pause_s = None
        if self.restarts is not None and not self._is_stopping:
            pause_s = self.restarts.pause_after(likely_cause)
        if self.restarts is None or pause_s is None:
            return Outcome(FAILED, "failed", self._final_report(report, likely_cause))
        processes.kill_orphans()
        budget = self.restarts.budget
        log.warning(
            "the ranks start again in %.1f s, restart %d of %d; the servers keep running",
            pause_s,
            budget.taken,
            budget.limit,
        )
        self._restart_due = time.monotonic() + pause_s
        return None

    def _final_report(self, report: str, failure: RankFailure) -> str:
        """Return the text of a failure that ends the run; add and log a line if all restarts are used up."""
        restarts = self.restarts
        if restarts is None or failure.is_refusal or not restarts.is_used_up:
            return report
        budget = restarts.budget
        given_up = (
            f"giving up after {budget.limit} restarts of the ranks within {budget.window_s:.0f} s "
            "(run.max_restarts, run.restart_window_s)"
        )
        log.error("%s", given_up)
        return f"{report}\n{given_up}"

    def _start_again(self) -> None:
        assert self.restarts is not None
        self._restart_due = None
        self.restarts.begin_next()
        self.ranks.start(self.restarts.number)

    def _end(self, *, at_once: bool) -> None:
        self.ranks.kill()
        if self.fleet is not None:
            self.fleet.stop(at_once=at_once)
        remaining_processes = processes.kill_descendants()
        if remaining_processes:
            log.error("processes %s do not end; the kernel holds them", remaining_processes)
