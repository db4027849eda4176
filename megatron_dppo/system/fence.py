"""What keeps a start of a run that was succeeded from changing anything that is its successor's.

A process reads ``lease.json`` before it publishes something. A rename follows within milliseconds: a
process that is stopped exactly in between still makes it, so names of unfinished folders differ between
starts, and records are numbered.
"""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.system.lease_files import LeaseError, LeaseFiles

NONCE_VARIABLE = "MEGATRON_DPPO_LEASE"
"""Names the nonce of the run's lease in the environment of the trainer's ranks."""


class FencedError(RuntimeError):
    """This start of the run no longer holds its folder; the message names the one that does."""


class Fence:
    """Tells whether the lease on ``folder`` is still the one with ``nonce``."""

    def __init__(self, folder: str | Path, nonce: str) -> None:
        self._files = LeaseFiles(folder)
        self.nonce = nonce

    def check(self) -> None:
        """Raise FencedError unless this start holds the folder."""
        try:
            holder = self._files.holder()
        except (LeaseError, OSError) as error:
            raise FencedError(f"this start can't tell whether it holds the run: {error}") from error
        if holder is None:
            raise FencedError(f"{self._files.path} is gone, so this start no longer holds the run")
        if holder.nonce != self.nonce:
            raise FencedError(
                f"another start of this run took over: {holder.describe()}; this one stops here"
            )
