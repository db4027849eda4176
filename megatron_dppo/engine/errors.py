"""Errors between a run and its engine, one class for each reaction of the caller."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from megatron_dppo.system.errors import RunError

if TYPE_CHECKING:
    from megatron_dppo.data.trajectory import Trajectory


UNBOUNDED = 1 << 30
"""Attempts at what may succeed the next time."""
_FINAL_STATUS = (401, 403, 404, 405, 422)
"""No key, no such path, another protocol. A 400 of SGLang may be a broken connection, too."""


class EngineError(RunError):
    """Base of every error of this package.

    ``attempts``: after so many failures in a row with one message, another attempt would end alike.
    """

    attempts = UNBOUNDED


class EngineStartError(EngineError):
    """The server did not come up; the message holds the end of its log."""


class PortHeldError(EngineStartError):
    """Somebody else has the port of a server: nothing is wrong with the server itself."""


class EngineLostError(EngineError):
    """The server, or the last of several, died, hung or answered 5xx: restart it, restore its weights, ask again."""


class ServerLostError(EngineError):
    """One server of several was lost, or the router: ask the others again, at once."""


class StaleWeightsError(EngineError):
    """A server answered with other weights than those that were committed: it must not be used."""


class EngineRequestError(EngineError):
    """The server refused the request (HTTP 4xx), with its reason. Asking again will not help.

    ``status``: the HTTP status code.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.attempts = 1 if status in _FINAL_STATUS else 2


class AbortedError(EngineError):
    """The server ended this one request early (an abort, a pause in mode ``abort``); ask again."""


class EngineAnswerError(EngineError, ValueError):
    """An answer contradicts its request, which is named, or itself: it must not be trained on."""

    attempts = 2


class EngineMismatchError(EngineError, ValueError):
    """The engine, or the installed SGLang, is not the release, model or type the run expects."""

    attempts = 1


class StopRequestedError(EngineError):
    """The caller's ``stop`` said so: what was in flight has been aborted."""


class GenerationInterruptedError(EngineError):
    """The engine was lost half-way through a batch.

    ``completed``: every finished response by key; they are valid and must not be asked for again.
    """

    def __init__(self, completed: dict[Hashable, Trajectory], reason: str) -> None:
        super().__init__(f"{reason} ({len(completed)} responses were finished)")
        self.completed = completed
        self.reason = reason
