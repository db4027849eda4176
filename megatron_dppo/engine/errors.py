"""Errors between a run and its engine, one class for each reaction of the caller."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from megatron_dppo.system.errors import RunError

if TYPE_CHECKING:
    from megatron_dppo.data.trajectory import Trajectory


UNBOUNDED = 1 << 30
"""Value of ``EngineError.attempts`` for a failure after which a retry may always succeed."""
_FINAL_STATUS = (401, 403, 404, 405, 422)
"""Statuses of a wrong key, path or protocol: a retry is pointless. 400 is left out, because SGLang may also answer a
lost connection with 400."""


class EngineError(RunError):
    """Base of every error of this package.

    ``attempts``: number of failures in a row with the same message after which a retry is pointless.
    """

    attempts = UNBOUNDED


class EngineStartError(EngineError):
    """The server did not start; the message has the end of its log."""


class PortHeldError(EngineStartError):
    """Another process holds the port of a server; the server itself is not at fault."""


class EngineLostError(EngineError):
    """The only server, or the last server, died, hung or answered 5xx: restart it, restore its weights and repeat."""


class ServerLostError(EngineError):
    """One of several servers, or the router, was lost: repeat the request at once on the other servers."""


class StaleWeightsError(EngineError):
    """A server answered with weights that were not committed: the server must not be used."""


class EngineRequestError(EngineError):
    """The server refused the request (HTTP 4xx), with its reason. A repeated request would be refused too.

    ``status``: the HTTP status code.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.attempts = 1 if status in _FINAL_STATUS else 2


class AbortedError(EngineError):
    """The server ended a single request early (an abort, a pause in mode ``abort``): repeat the request."""


class EngineAnswerError(EngineError, ValueError):
    """An answer contradicts itself or its request: it must not be trained on. The message names the contradiction."""

    attempts = 2


class EngineMismatchError(EngineError, ValueError):
    """The engine, or the installed SGLang, is not of the release, model or type that the run expects."""

    attempts = 1


class StopRequestedError(EngineError):
    """The caller's ``stop`` requested a stop; the requests in flight were aborted."""


class GenerationInterruptedError(EngineError):
    """The engine was lost half-way through a batch.

    ``completed``: every finished response by key. These responses are valid and must not be requested again.
    """

    def __init__(self, completed: dict[Hashable, Trajectory], reason: str) -> None:
        super().__init__(f"{reason} ({len(completed)} responses were finished)")
        self.completed = completed
        self.reason = reason
