"""Servers of a fleet as a client sees them, and calls that can be broken off."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron_dppo.engine.answer_parsing.here import AnswerParser
from megatron_dppo.engine.client import EngineClient
from megatron_dppo.engine.errors import ServerLostError
from megatron_dppo.fleet.folder import Keys, Server

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """A server, what it asks of its clients, and who must have signed its certificate (None: whom the
    system trusts). ``first_answer_s``: as EngineClient's."""

    server: Server
    keys: Keys
    ca_file: str | None = None
    first_answer_s: float = 0.0


@dataclass(eq=False)
class ActiveServer:
    """A member that generates, and the calls that it has.

    ``suspended``: why it gets no more calls; empty while it gets them.
    """

    member: Member
    client: EngineClient
    in_flight: int = 0
    suspended: str = ""
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    watch: asyncio.Task[None] | None = None


async def breakable(call: Coroutine[Any, Any, T], calls: set[asyncio.Task[Any]]) -> T:
    """The result of ``call``; ServerLostError when somebody cancels its task, which is in ``calls``
    meanwhile."""
    task = asyncio.create_task(call)
    calls.add(task)
    try:
        await asyncio.wait([task])
        if task.cancelled():
            raise ServerLostError("broken off: its server, or the router, was lost")
        return task.result()
    finally:
        task.cancel()
        calls.discard(task)


def client_of(member: Member, parser: AnswerParser | None = None) -> EngineClient:
    """A client of one server; ``close`` it. ``parser``: of its answers; None: this process."""
    client = EngineClient(member.server.url, member.keys.api, member.keys.admin, member.ca_file)
    client.first_answer_s = member.first_answer_s
    if parser is not None:
        client.parser = parser
    return client
