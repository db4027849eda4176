"""The HTTP server of a run's server registry (FleetRecord): each question is one POST."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web
from pydantic import validate_call

from megatron_dppo.fleet.endpoint import FENCED, PATH, START_HEADER
from megatron_dppo.fleet.record import FleetRecord, Json
from megatron_dppo.system.http_server import READ_S, HttpServer

log = logging.getLogger(__name__)

_LONGEST_BODY = 1 << 20
"""Bytes."""


class RegistryServer(HttpServer):
    """Answers questions about ``record``.

    A client with ``key`` may ask all questions. A client with ``command_key`` may ask the questions of commands.
    """

    def __init__(self, record: FleetRecord, key: str, command_key: str, host: str) -> None:
        self._record = record
        self._admin_header = f"Bearer {key}".encode()
        self._command_header = f"Bearer {command_key}".encode()
        application = web.Application(client_max_size=_LONGEST_BODY)
        application.router.add_post(PATH + "{name:.*}", self._respond)
        super().__init__(application, host)

    async def _respond(self, request: web.Request) -> web.Response:
        status, content = await self._answer(request)
        # Log only failures, because clients ask every second.
        if status != 200:
            log.info("fleet endpoint, asked by %s: %s: %s", request.remote, request.path, status)
        return web.Response(
            status=status, body=json.dumps(content, default=asdict), content_type="application/json"
        )

    async def _answer(self, request: web.Request) -> tuple[int, Json]:
        header = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        name = request.match_info["name"]
        # Compare in constant time, so that the time does not reveal the correct part of a guess.
        is_admin = hmac.compare_digest(header, self._admin_header)
        is_command = hmac.compare_digest(header, self._command_header)
        if not (is_admin or (is_command and name in _COMMAND_QUESTIONS)):
            return 401, {"error": "the admin key is missing or wrong"}
        start = request.headers.get(START_HEADER)
        newest_start = self._record.ranks_start
        if start is not None and newest_start is not None and start != str(newest_start):
            fault = (
                f"a rank of start {start} asks, expected a rank of start {newest_start}: the ranks of this run "
                "were started again"
            )
            return FENCED, {"error": fault}
        question = _QUESTIONS.get(name)
        try:
            arguments = await _arguments_of(request)
            if question is None:
                raise ValueError(f"{request.path}: no such question")
            # Do not block the event loop: the registry writes files.
            return 200, {"answer": await asyncio.to_thread(question, self._record, **arguments)}
        except (ValueError, TypeError, RecursionError) as error:
            return 400, {"error": str(error)}
        except TimeoutError:
            return 408, {"error": f"the body did not arrive within {READ_S:g} s"}
        except OSError as error:
            return 500, {"error": str(error)}


async def _arguments_of(request: web.Request) -> Json:
    """Read the arguments. Raises ValueError, RecursionError, and TimeoutError."""
    length = request.content_length
    if length is None or length > _LONGEST_BODY:
        raise ValueError(f"Content-Length: got {length}, expected at most {_LONGEST_BODY}")
    async with asyncio.timeout(READ_S):
        arguments = json.loads(await request.read())
    if not isinstance(arguments, dict):
        raise ValueError("expected a JSON object")
    return arguments


_METHODS: tuple[Callable[..., Any], ...] = (
    FleetRecord.servers,
    FleetRecord.teachers,
    FleetRecord.router,
    FleetRecord.status,
    FleetRecord.publish_status,
    FleetRecord.attach,
    FleetRecord.detach,
    FleetRecord.sync_configured,
    FleetRecord.report_lost,
    FleetRecord.allow_starts,
    FleetRecord.starting,
)
_QUESTIONS = {method.__name__: validate_call(method) for method in _METHODS}
"""Questions that the admin key opens: methods of the registry, whose arguments are checked against their types."""
_COMMAND_QUESTIONS = {"servers", "teachers", "router", "status", "attach", "detach"}
"""Questions that the key of commands opens."""
