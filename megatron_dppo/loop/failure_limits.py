"""The numbers of server failures after which a run ends."""

from __future__ import annotations

import logging

from megatron_dppo.fleet.membership import EngineUnavailableError

log = logging.getLogger(__name__)

MAX_LOSSES = 5
"""Largest number of consecutive losses of the whole fleet, without a response or an update in between. One more loss
ends the run.

The supervisor also bounds the restarts of the servers that it starts (``engine.max_restarts``). Servers that are
attached by URL have only this limit.
"""


class FailureLimits:
    """Counts consecutive losses of the fleet, and consecutive updates that all servers refused for one reason."""

    def __init__(self) -> None:
        self._losses = 0
        self._refusal = ""
        self._refusals = 0

    def count_loss(self, reason: str) -> None:
        """Count a loss of the whole fleet. Raises EngineUnavailableError past ``MAX_LOSSES``."""
        self._losses += 1
        log.warning("engine lost: %s", reason)
        if self._losses > MAX_LOSSES:
            raise EngineUnavailableError(
                f"the engine was lost {self._losses} times in a row; the last time: {reason}"
            )

    def count_refusal(self, reason: str, attempts: int) -> None:
        """Count a refusal. Raises EngineUnavailableError at the ``attempts``-th refusal in a row for one reason."""
        if reason != self._refusal:
            self._refusals = 0
        self._refusals += 1
        self._refusal = reason
        if self._refusals >= attempts:
            raise EngineUnavailableError(f"{reason}; another attempt would end alike")

    def forget_losses(self) -> None:
        """Count losses from 0 again: a response arrived, or other weights were committed."""
        self._losses = 0

    def forget_refusals(self) -> None:
        """Count refusals from 0 again: an update was committed."""
        self._refusal = ""
        self._refusals = 0
