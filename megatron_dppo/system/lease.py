"""The right to write in a run's folder: one start at a time has it, on whatever host it runs.

A holder renews a counter in the background. A start that finds a holder takes the lease over where the
holder gave it back, where its process is gone (both on one machine), where Slurm has restarted its job,
or where its counter stands still for ``PATIENCE_S`` of the newcomer's own clock; else it is refused.
Of starts that race for one lease exactly one gets it. A holder that was only stopped for a while, and
goes on after it was succeeded, is held off by the fence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_dppo.system.fence import Fence, FencedError
from megatron_dppo.system.lease_files import Beat, Holder, LeaseError, LeaseFiles

log = logging.getLogger(__name__)

RENEW_S = 3.0
PATIENCE_S = 30.0
"""A holder on another machine whose counter stands still for so long has ended."""
_POLL_S = 0.5

Announce = Callable[[str], None]


class Lease:
    """A lease on ``folder`` from ``take`` to ``release``; a context manager does both.

    Args:
        folder: of the run; must exist.
        announce: called with one line before a wait for another machine's holder.
        patience_s: how long that wait is.
        renew_s: time between two renewals.
    """

    def __init__(
        self,
        folder: str | Path,
        announce: Announce = log.info,
        *,
        patience_s: float = PATIENCE_S,
        renew_s: float = RENEW_S,
    ) -> None:
        self._files = LeaseFiles(folder)
        self._announce = announce
        self._patience_s = patience_s
        self._renew_s = renew_s
        self._holder = Holder.of_this_process()
        self._count = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.fence = Fence(folder, self._holder.nonce)
        self.taken_over: str | None = None
        """Who succeeded this start while it ran, in a sentence; None while nobody has."""

    @property
    def heartbeat(self) -> Path:
        """The file that is renewed while this start holds the lease."""
        return self._files.beat_of(self._holder)

    def take(self) -> None:
        """Become the holder. Raises LeaseError where another start is, or where the files can't be used."""
        try:
            self._take()
        except OSError as error:
            raise LeaseError(
                f"{error.filename}: {error.strerror}, expected a file or folder of its lease"
            ) from error

    def _take(self) -> None:
        files, own = self._files, self._holder
        while True:
            holder = files.holder()
            last = files.last_claim(holder)
            if last is not None and not self._has_ended(last):
                raise LeaseError(
                    f"in use by the run of {last.describe()}; end that one ({last.how_to_end()})"
                )
            if not files.claim(last, own):
                continue  # another start was faster: look whether it lives
            # The claim may be one that its winner has removed since, after it became the holder.
            if files.holder() == holder:
                break
            files.give_up_claim(last)
        files.install(own)
        self._thread.start()

    def release(self) -> None:
        """Give the lease back: the next start need not wait."""
        self._ended.set()
        self._thread.join()
        if self.taken_over is None:
            self._beat(Beat(self._count + 1, ended=True))

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _has_ended(self, holder: Holder) -> bool:
        beat = self._files.beat(holder)
        if (beat is not None and beat.ended) or holder.is_earlier_attempt(of=self._holder):
            return True
        if holder.is_neighbour(self._holder):
            return not holder.runs()
        return self._stands_still(holder, beat)

    def _stands_still(self, holder: Holder, seen: Beat | None) -> bool:
        """Watch a counter on this machine's clock alone; the last look is after the time is up."""
        self._announce(
            f"{self._files.path} is held by {holder.describe()}, which can't be asked from here: "
            f"taking it over if its heartbeat ({seen.count if seen else 'none yet'}) does not change "
            f"for {self._patience_s:.0f} s"
        )
        deadline = time.monotonic() + self._patience_s
        while True:
            late = time.monotonic() >= deadline
            beat = self._files.beat(holder)
            if beat != seen:
                return beat is not None and beat.ended
            if late:
                return True
            time.sleep(min(_POLL_S, self._patience_s / 10))

    def _renew(self) -> None:
        while not self._ended.wait(self._renew_s):
            try:
                self.fence.check()
            except FencedError as error:
                self.taken_over = str(error)
                return
            self._count += 1
            self._beat(Beat(self._count))

    def _beat(self, beat: Beat) -> None:
        try:
            self._files.write_beat(self._holder, beat)
        except OSError as error:
            log.warning("%s can't be renewed: %s", self._files.path, error)
